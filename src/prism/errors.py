"""The one exception meant for people: a single line that names the file, the key and the remedy."""


class PrismError(Exception):
    """Something the user can mend. The command line prints it as one line and exits with status 2."""
