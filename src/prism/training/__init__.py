"""One training loop, its schedule, its logs, and checkpoints that survive a crash."""
