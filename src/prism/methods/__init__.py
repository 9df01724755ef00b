"""PRISM and what it is compared with: one file a method, on the same encoder, data, normalisation and controller."""
