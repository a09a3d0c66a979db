"""The error of a start."""


class StartError(Exception):
    """The server cannot start; the text says what to do."""


class StartStopped(Exception):
    """A signal came before the server served."""
