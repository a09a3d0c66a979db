"""Programs of others that tests need."""


class Absent(Exception):
    """There is no such program here; the text says why it could not be had."""
