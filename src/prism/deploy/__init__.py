"""The trained policy at work: the inference runtime, and the server that robots speak to."""
