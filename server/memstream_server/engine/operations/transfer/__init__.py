"""Exports and imports memories and conversations as JSON lines (docs/export.md), in bounded memory.

lines: the kinds of lines, with their bounds; docs/export.schema.json is generated from them
export_memory: writes each memory and each conversation at one revision
import_memory: turns checked lines into memories and conversations, as an operation; removes what imports leave
upload: stores and checks the lines of an import as they arrive, and reads them in batches
check_lines: whether lines are an export that can be imported; no I/O
place_fragments: the transition that puts imported fragments into their tiers
"""
