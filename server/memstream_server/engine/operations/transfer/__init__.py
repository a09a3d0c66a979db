"""Exports and imports memories and conversations as JSON lines (docs/export.md), in bounded memory.

transfers: what the rpcs call: the exporter and the importer of a process
lines: the kinds of lines, with their bounds; docs/export.schema.json is generated from them
export_memory: writes each memory and each conversation at one revision
import_memory: turns checked lines into memories and conversations, as an operation; removes what imports leave
upload: stores and checks the lines of an import as they arrive
check_lines: whether lines are an export that can be imported; no I/O
read_lines: reads checked lines in batches, off the event loop
place_fragments: the transition that puts imported fragments into their tiers
disk_space: the transfer directory and the free space that it keeps
"""
