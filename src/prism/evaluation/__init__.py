"""Rollouts with fixed seeds, the metrics of docs/metrics.md, and the page that shows them."""
