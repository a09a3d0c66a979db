"""Compares existing data with a file of lines. Blocking: runs in the journal's reader thread."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import msgspec

from memstream_server.core.policy import RetentionPolicy
from memstream_server.core.retention import is_expired
from memstream_server.engine.operations.transfer.export_memory import fragment_line
from memstream_server.engine.operations.transfer.lines import BlockLine, FragmentLine, MessageLine, PlanLine
from memstream_server.engine.operations.transfer.place_fragments import fragment_of
from memstream_server.engine.operations.transfer.read_lines import block_of, lines_from, message_of
from memstream_server.ports.conversations import ConversationScan, Message
from memstream_server.ports.journal.reading import MemoryScan


def same_memory(scan: MemoryScan, path: Path, offset: int, now_us: int) -> str:
    """How a memory differs from the lines of a file; empty if it does not. Ignores access statistics and expired
    fragments.
    """
    retention = scan.record.policy.retention
    lines = _unexpired_lines(path, offset, now_us, retention)
    for page in scan.pages():
        for fragment, _ in page:
            if is_expired(fragment, now_us, retention):
                continue
            line = next(lines, None)
            here = fragment_line(fragment, None, scan.anchors.get(fragment.id), False)
            if line is None or line.id != fragment.id:
                return f"it has a fragment {fragment.id} that the import lacks at this position"
            if _strip_volatile(line) != _strip_volatile(here):
                return f"its fragment {fragment.id} has other values"
    line = next(lines, None)
    return _compare_blocks(scan, path, offset) if line is None else f"it lacks the fragment {line.id}"


def _compare_blocks(scan: MemoryScan, path: Path, offset: int) -> str:
    """How the blocks differ; empty also if they were written since."""
    lines = [line for line in lines_from(path, offset) if isinstance(line, BlockLine)]
    here = {block.version: replace(block, principal="") for block in scan.blocks}
    if lines and scan.block_version <= lines[-1].version:
        for line in lines:
            if here.get(line.version) != block_of(line):
                return f"it lacks version {line.version} of the block {line.name}, or that version differs"
    return ""


def _unexpired_lines(path: Path, offset: int, now_us: int, retention: RetentionPolicy) -> Iterator[FragmentLine]:
    """The memory's fragments that have not expired, up to the next line of another type."""
    for line in lines_from(path, offset):
        if not isinstance(line, FragmentLine):
            return
        if not is_expired(fragment_of(line, ""), now_us, retention):
            yield line


def _strip_volatile(line: FragmentLine) -> FragmentLine:
    """The line without values that a read changes or an import makes."""
    return msgspec.structs.replace(
        line,
        version=0,
        access_time_us=0,
        access_count=0,
        own_vector=False,
        model="",
        vector=None,
        content_vector=None,
        conflicts=[],
    )


def same_conversation(scan: ConversationScan, path: Path, offset: int) -> str:
    """How a conversation differs from the lines of a file; empty also if it has been continued since."""
    messages = scan.messages()
    plans = {plan.number for plan in scan.plans()}
    for line in lines_from(path, offset):
        if isinstance(line, MessageLine):
            wanted = message_of(line)
            if _next_message(messages, wanted.number) != wanted:
                return f"it lacks message {line.number}, or that message differs"
        elif isinstance(line, PlanLine) and line.number not in plans:
            return f"it lacks plan {line.number}"
    return ""


def _next_message(messages: Iterator[Message], number: int) -> Message | None:
    """The first message with that number or a higher one."""
    return next((found for found in messages if found.number >= number), None)
