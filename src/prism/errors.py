"""The one exception meant for people: a single line that names the file, the key and the remedy."""


class PrismError(Exception):
    """Something the user can mend. The command line prints it as one line and exits with status 2."""


def reason(error: BaseException) -> str:
    """What a library's exception says, on one line of a message."""
    return " ".join((str(error) or type(error).__name__).split())[:120]
