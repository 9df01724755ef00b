"""A policy at work: what computes it, which plan it chooses, and who answers an executor."""
