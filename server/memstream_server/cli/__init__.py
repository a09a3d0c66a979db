"""The `memstream` command: a client of a running server, the server itself, and backup and restore of its data.

Reading order: group (which commands there are, loaded when they are used), failures (exit codes), server (the
connection every command shares), options (flags that several commands have), output (JSON and tables), then a module
a command or two. Behind observe stand records (what a line means), feeds (which producer numbers a file) and tally
(how far it has come).
"""

from memstream_server.cli.group import main

__all__ = ["main"]
