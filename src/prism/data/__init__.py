"""Demonstrations: formats on disk, windows, loading. Never imports a policy."""
