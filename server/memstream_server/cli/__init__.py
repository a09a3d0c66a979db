"""The `memstream` command: a client of a running server, the server itself, and backup and restore of its data.

Reading order: group (which commands there are, loaded when they are used), failures (exit codes), server (the
connection every command shares), options and filters (flags that several commands have), output (JSON and tables),
then one module a command; observe is four: records (a line's meaning), feeds (a file's producer), tally (how far one came), observe itself.
"""

from memstream_server.cli.group import main

__all__ = ["main"]
