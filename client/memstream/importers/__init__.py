"""Importers of other programs' chats and memories, which write through the SDK like any client (docs/importing.md).

shapes: the table of shapes, what each is recognised by, and its reader.
sending: counts, checks and sends the records of a source; the result and its report.
records: records, options and report.
sources: files, archives and directories as bounded streams.

Readers:
assistants: ChatGPT, Claude, Letta.
messengers: Slack, Telegram, WhatsApp.
memories: the MCP memory server, mem0, LangGraph, Chroma.
milvus: Milvus.
markdown: notes in Markdown.
"""

from memstream.importers.records import InvalidSource, Options, Record, Report
from memstream.importers.sending import Importer, Result, Target
from memstream.importers.shapes import SHAPES, Shape, choose_shape
from memstream.importers.sources import Source

__all__ = [
    "SHAPES",
    "Importer",
    "InvalidSource",
    "Options",
    "Record",
    "Report",
    "Result",
    "Shape",
    "Source",
    "Target",
    "choose_shape",
]
