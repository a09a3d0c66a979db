"""The error of a start."""


class StartError(Exception):
    """The server cannot start; the text says what to do."""
