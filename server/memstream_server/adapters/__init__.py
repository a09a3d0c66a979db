"""Implementations of ports/: everything that touches the outside world."""
