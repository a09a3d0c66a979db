"""Why a server does not start."""


class StartError(Exception):
    """The server cannot start; the text says what to do."""
