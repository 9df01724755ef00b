"""Episodes played with fixed seeds, in a pool of processes, and the metrics of docs/reference/metrics.md."""
