"""Losses, gradients and actions of every policy, pinned. Regenerate, and say why in the commit: python -m tests.pins"""
