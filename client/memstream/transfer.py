"""Export and import of memories as JSON Lines (docs/export.md)."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, AsyncIterable, AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

import grpc
import grpc.aio

from memstream.argument_types import quote_text
from memstream.channel import Link, await_answer, memory_path, new_request_id, translate_errors
from memstream.errors import InvalidArgument
from memstream.filter_codec import filter_to_wire
from memstream.kinds import kind_of
from memstream.resource_codec import operation_from_wire
from memstream.resources import Operation
from memstream.v1 import memory_service_pb2 as pb
from memstream.values import Filter

_Import: TypeAlias = grpc.aio.StreamUnaryCall[pb.ImportMemoriesRequest, pb.ImportMemoriesResponse]
LINE_PART_BYTES = 2 << 20
"""A line that is longer is sent in parts."""
PART_BYTES = 256 << 10
"""Approximate size of one message."""

Source: TypeAlias = Path | str | AsyncIterable[bytes]
"""A file, or the bytes of an export in chunks of any size."""


@dataclass(frozen=True, slots=True)
class ExportPart:
    """Whole lines with their line ends; `done` of `total` fragments are exported with this part."""

    lines: bytes
    done: int
    total: int


async def export_parts(
    link: Link, namespace: str, memory: str, include_vectors: bool, chosen: Filter | None
) -> AsyncGenerator[ExportPart, None]:
    """See Client.export."""
    where = memory_path(f"{namespace}/{memory}") if memory else None
    request = pb.ExportMemoriesRequest(
        namespace=namespace,
        memory=memory,
        include_vectors=include_vectors,
        filter=filter_to_wire(chosen) if chosen is not None else None,
    )
    call = link.memories.ExportMemories(request, metadata=link.metadata(where))
    try:
        with translate_errors():
            async for part in call:
                yield ExportPart(part.lines, part.done, part.total)
    finally:
        call.cancel()


async def import_source(
    link: Link, namespace: str, source: Source, memory: str, request_id: str, validate_only: bool
) -> Operation:
    """See Client.import_."""
    opening = pb.ImportOpen(
        namespace=namespace, memory=memory, request_id=request_id or new_request_id(), validate_only=validate_only
    )
    where = memory_path(f"{namespace}/{memory}") if memory else None
    call = link.memories.ImportMemories(metadata=link.metadata(where))
    try:
        with translate_errors():
            await _write_request(call, pb.ImportMemoriesRequest(open=opening))
            async with contextlib.aclosing(read_whole_lines(source)) as parts:
                async for part in parts:
                    if not await _write_request(call, pb.ImportMemoriesRequest(lines=part)):
                        break
            await call.done_writing()
            return operation_from_wire((await await_answer(call)).operation)
    finally:
        call.cancel()


async def _write_request(call: _Import, request: pb.ImportMemoriesRequest) -> bool:
    """Whether the call is still open. If it ended early, its answer has the error; the write only has gRPC's
    INTERNAL."""
    try:
        await call.write(request)
    except (asyncio.InvalidStateError, grpc.RpcError):
        return False
    return True


async def read_whole_lines(source: Source) -> AsyncGenerator[bytes, None]:
    """The bytes of a source, split at line ends, or within a line of LINE_PART_BYTES. Adds a missing last line end."""
    rest = bytearray()
    async for chunk in _read_chunks(source):
        rest += chunk
        end = rest.rfind(b"\n", len(rest) - len(chunk)) + 1
        if end and len(rest) >= PART_BYTES:
            yield bytes(rest[:end])
            del rest[:end]
        elif len(rest) >= LINE_PART_BYTES:
            yield bytes(rest)
            rest.clear()
    if rest:
        yield bytes(rest) if rest.endswith(b"\n") else bytes(rest) + b"\n"


async def _read_chunks(source: Source) -> AsyncIterator[bytes]:
    if not isinstance(source, Path | str):
        async for chunk in source:
            kind_of(bytes).check("source", chunk)
            for start in range(0, len(chunk), PART_BYTES):
                yield chunk[start : start + PART_BYTES]
        return
    try:
        file = await asyncio.to_thread(Path(source).open, "rb")
    except (OSError, ValueError) as error:
        what = getattr(error, "strerror", None) or error
        raise InvalidArgument("source", f"cannot read {quote_text(str(source))}: {what}") from error
    try:
        while chunk := await asyncio.to_thread(file.read, PART_BYTES):
            yield chunk
    finally:
        file.close()
