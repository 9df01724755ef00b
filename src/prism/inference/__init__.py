"""Inference: back ends, the choice of a plan, and the planners of an executor."""
