"""PRISM: single-pass multisensory imitation learning (see README.md for the map from paper to files)."""

from prism.io import allocator

allocator.configure()

__version__ = "0.1.0"
