"""A policy at work: back ends, token cache, server, live page (docs/howto/serving.md)."""
