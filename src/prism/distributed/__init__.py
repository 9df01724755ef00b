"""Several processes, one policy: broadcast, gather, barrier, and random numbers by row of the global batch."""
