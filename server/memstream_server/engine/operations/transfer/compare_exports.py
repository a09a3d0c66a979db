"""Whether what is there already is what a file holds. Blocking: runs in the journal's reader thread."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import msgspec

from memstream_server.core.policy import RetentionPolicy
from memstream_server.core.retention import is_expired
from memstream_server.engine.operations.transfer.export_memory import fragment_line
from memstream_server.engine.operations.transfer.lines import FragmentLine, MessageLine, PlanLine
from memstream_server.engine.operations.transfer.place_fragments import fragment_of
from memstream_server.engine.operations.transfer.read_lines import lines_from, message_of
from memstream_server.ports.conversations import ConversationScan, Message
from memstream_server.ports.journal.reading import MemoryScan


def same_memory(scan: MemoryScan, path: Path, offset: int, now_us: int) -> str:
    """How a memory differs from the lines of a file; empty when it does not. How often, and when last, a fragment was
    read does not count, nor does what has expired."""
    retention = scan.record.policy.retention
    lines = _unexpired_lines(path, offset, now_us, retention)
    for page in scan.pages():
        for fragment, _ in page:
            if is_expired(fragment, now_us, retention):
                continue
            line = next(lines, None)
            here = fragment_line(fragment, None, scan.anchors.get(fragment.id), False)
            if line is None or line.id != fragment.id:
                return f"it has a fragment {fragment.id} that the import has not there"
            if _still(line) != _still(here):
                return f"its fragment {fragment.id} says something else"
    line = next(lines, None)
    return "" if line is None else f"it lacks the fragment {line.id}"


def _unexpired_lines(path: Path, offset: int, now_us: int, retention: RetentionPolicy) -> Iterator[FragmentLine]:
    """Those of the memory's fragments, up to the next line of another type."""
    for line in lines_from(path, offset):
        if not isinstance(line, FragmentLine):
            return
        if not is_expired(fragment_of(line, ""), now_us, retention):
            yield line


def _still(line: FragmentLine) -> FragmentLine:
    """A line without what reading changes, and what import makes anew."""
    return msgspec.structs.replace(
        line,
        version=0,
        access_time_us=0,
        access_count=0,
        own_vector=False,
        model="",
        vector=None,
        content_vector=None,
    )


def same_conversation(scan: ConversationScan, path: Path, offset: int) -> str:
    """How a conversation differs from the lines of a file; empty also where it went on since."""
    messages = scan.messages()
    plans = {plan.number for plan in scan.plans()}
    for line in lines_from(path, offset):
        if isinstance(line, MessageLine):
            wanted = message_of(line)
            if _next(messages, wanted.number) != wanted:
                return f"it lacks message {line.number}, or has another"
        elif isinstance(line, PlanLine) and line.number not in plans:
            return f"it lacks plan {line.number}"
    return ""


def _next(messages: Iterator[Message], number: int) -> Message | None:
    """The first of that number or above."""
    return next((found for found in messages if found.number >= number), None)
