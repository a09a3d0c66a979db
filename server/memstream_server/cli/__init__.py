"""The `memstream` command: a client of a running server, the server itself, and backup and restore of its data.

Shared by the commands:
group: the table of commands; imports a command's module on first use.
failures: exit codes, and the exceptions that end a command.
server: the connection to a server, and advice for its errors.
options: flags that several commands have.
output: JSON and tables.

Commands:
check: checks answers against expectations.
data: backup and restore.
dev: runs a server with a sample memory.
doctor: diagnoses a data directory.
healthcheck: probes a server.
history: the versions of a fragment.
keys: manages the file of API keys.
listed: lists sessions, and open standing queries.
listing: list.
long_work: operations, reindex, purge and erase.
mcp: serves a memory's tools over MCP.
observe: sends observations from files.
models: installs, lists and removes local embedding models.
context: shows what a model would see before a turn.
recall: answers a query.
receipts: lists receipts of recalls, and ranks one again.
serve: runs a server.
showing: show, stats and info.
blocks: lists, shows, writes, edits and deletes blocks
conversations: lists, shows, searches and deletes conversations
conflicts: lists statements that may not be true together, and decides one
supersede: marks fragments as corrected by a newer one, or undoes it.
transfer: export.
importing: import.
verify: checks a journal.

Helpers of one command:
check_file: the file of check.
feeds: the input files of observe and their producers.
records: parses a line of observe's input.
tally: the progress of observe.
"""

from memstream_server.cli.group import main

__all__ = ["main"]
