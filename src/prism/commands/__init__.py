"""One file a command: what it accepts, what it does in a few lines, and the help that teaches it.

No module here imports torch, a simulator or matplotlib at the top: `prism --help` must answer at once.
"""
