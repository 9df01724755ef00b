"""Measurements behind the figures in the README: each module has a config, `run(config) -> dict` and `main(config)`."""
