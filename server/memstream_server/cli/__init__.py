"""The `memstream` command: a client of a running server, the server itself, and backup and restore of its data.

Shared by the commands:
group: the table of commands; imports a command's module on first use.
failures: exit codes, and the exceptions that end a command.
server: the connection to a server, and advice for its errors.
options: flags that several commands have.
output: JSON and tables.

Commands:
check: checks answers against expectations.
data: backup and restore, verify (a journal against its event logs), doctor.
dev: runs a server with a sample memory.
healthcheck: probes a server.
keys: manages the file of API keys.
listing: list, sessions, queries; receipts of recalls, and replay of one.
long_work: operations, reindex, purge and erase.
mcp: serves a memory's tools over MCP.
connect: connects agent hosts; hook, which they run.
observe: sends observations from files.
models: installs, lists and removes local embedding models.
recall: answers a query; shows a context.
serve: runs a server.
showing: show, stats and info.
blocks: lists, shows, writes, edits and deletes blocks
conversations: lists, shows, searches and deletes conversations
corrections: conflicts, supersede, history: what corrects a statement, and what it said before.
transfer: export and import.

Helpers of one command:
feeds: the input files of observe, their producers, and what was sent of them.
records: parses a line of observe's input.
"""

from memstream_server.cli.group import main

__all__ = ["main"]
