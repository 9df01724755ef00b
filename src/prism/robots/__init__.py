"""Robots: their contract, the limits that everything obeys, and the loops that drive and record them."""
