"""Blocks of a memory: small named texts with versions, edited and watched."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable, Mapping
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import Any

import grpc.aio

from memstream.argument_types import Count, Position, Several
from memstream.arguments import check_methods
from memstream.channel import Link, MemoryPath, iterate_pages, new_request_id
from memstream.codec import scope_to_wire
from memstream.filter_codec import filter_to_wire
from memstream.following import Following
from memstream.v1 import block_service_pb2 as pb
from memstream.values import Filter, MetadataValue, Scope
from memstream.wiretypes import (
    duration_to_wire,
    encoding,
    metadata_from_wire,
    metadata_value_to_wire,
    optional_timestamp_from_wire,
)


@dataclass(frozen=True, slots=True)
class StandingAnswer:
    """How a block keeps itself: the server recalls a question after commits, and writes the block from what it finds.

    `limit` and `min_relevance` are None if the policy decides.
    """

    question: str
    instructions: str
    limit: int | None
    min_relevance: float | None
    filtered: bool
    """Whether a filter says which memories may be found."""
    min_interval: timedelta
    citations: tuple[tuple[str, ...], ...]
    """For each line of the text, the ids of the fragments that it follows from."""
    model: str
    """The LLM that wrote the text; empty: the text is what was found."""
    revision: int
    """The revision of the memory up to which the text is known to hold; 0: not written yet. From get and list alone."""
    problem: str
    """Why the text is not up to date; empty: nothing is wrong. From get and list alone."""
    scopes: tuple[str, ...] = ()
    """Paths of the memories that are asked; empty: the block's own."""
    cited_memories: tuple[tuple[str, ...], ...] = ()
    """With scopes: the path of the memory of each cited fragment, in the order of `citations`."""
    revisions: Mapping[str, int] = field(default_factory=dict[str, int])
    """With scopes, in place of `revision`: of each memory that there was, by path."""


@dataclass(frozen=True, slots=True)
class BlockInfo:
    """A version of a block, without its text. `tokens` and `max_tokens` count bytes / 4; a `max_tokens` of 0 is no
    bound."""

    name: str
    etag: str
    version: int
    tokens: int
    max_tokens: int
    metadata: Mapping[str, MetadataValue]
    create_time: datetime | None
    """Of the block."""
    update_time: datetime | None
    """Of this version."""
    principal: str
    """Who wrote it; empty without authentication."""
    hidden_characters: tuple[str, ...]
    standing: StandingAnswer | None
    """Set if the block keeps itself."""


@dataclass(frozen=True, slots=True)
class Block(BlockInfo):
    """A version of a block."""

    text: str


@dataclass(frozen=True, slots=True)
class BlockChange:
    """What a watch found: the present block, or None if it is gone."""

    name: str
    block: Block | None


class BlockWatch(Following[BlockChange, pb.WatchBlocksResponse]):
    """The blocks that are there, then each change, across reconnections. A reader that is slower than the changes gets
    the latest version of each block alone.

    `known` has the version of each block returned so far, and `memory_uid` whose they are: pass both to a later watch
    to resume.
    """

    def __init__(
        self,
        link: Link,
        memory: MemoryPath,
        known: Mapping[str, int],
        memory_uid: str,
        progress_interval: timedelta | None,
    ) -> None:
        super().__init__(link)
        self.known = dict(known)
        self.memory_uid = memory_uid
        self._memory = memory
        with encoding("known"):
            self._request = pb.WatchBlocksRequest(
                namespace=memory.namespace,
                memory=memory.name,
                known=known,
                memory_uid=memory_uid,
                progress_interval=None if progress_interval is None else duration_to_wire(progress_interval),
            )

    def _open_call(self) -> grpc.aio.UnaryStreamCall[Any, pb.WatchBlocksResponse]:
        return self._link.blocks.WatchBlocks(self._request, metadata=self._link.metadata(self._memory))

    def _take_answer(self, answer: pb.WatchBlocksResponse) -> Iterable[BlockChange]:
        self.memory_uid = self._request.memory_uid = answer.memory_uid
        for block in answer.blocks:
            self._request.known[block.name] = block.version
        for name in answer.deleted:
            self._request.known.pop(name, None)
        return [
            *(BlockChange(name, None) for name in answer.deleted),
            *(BlockChange(wire.name, block_from_wire(wire)) for wire in answer.blocks),
        ]

    def _note_returned(self, item: BlockChange) -> None:
        if item.block is None:
            self.known.pop(item.name, None)
        else:
            self.known[item.name] = item.block.version


@check_methods
class Blocks:
    """The blocks of one memory. Methods raise MemoryNotFound, BlockNotFound, and with an etag that is not the present
    one EtagMismatch, whose details have that."""

    def __init__(self, link: Link, path: MemoryPath) -> None:
        self._link = link
        self._path = path

    @property
    def path(self) -> str:
        """`namespace/name` of the memory."""
        return str(self._path)

    async def put(
        self,
        name: str,
        text: str,
        *,
        max_tokens: Count | None = None,
        metadata: Mapping[str, MetadataValue] | None = None,
        etag: str = "",
        absent: bool = False,
    ) -> BlockInfo:
        """Writes a block; creates it if necessary. What is None stays; the same text again makes no version. A block
        that kept itself no longer does.

        max_tokens: refuse texts beyond so many tokens from now on; 0: no bound. absent: the block must not exist.
        """
        with encoding("block"):
            request = self._make_put(name, max_tokens)
            request.text = text
        return await self._put(request, metadata, etag, absent)

    async def keep(
        self,
        name: str,
        question: str,
        *,
        scopes: Several[str | Scope] = (),
        instructions: str = "",
        filter: Filter | None = None,
        limit: Count | None = None,
        min_relevance: float | None = None,
        min_interval: timedelta | None = None,
        max_tokens: Count | None = None,
        metadata: Mapping[str, MetadataValue] | None = None,
        etag: str = "",
        absent: bool = False,
    ) -> BlockInfo:
        """Lets a block keep itself; creates it if necessary. The server recalls the question after commits, and writes
        the block again when what it finds has changed: with an LLM its answer, else the memories, a line for each.

        scopes: the memories that are asked instead of this one, as in `Client.recall_once`, each by its path or as a
        `Scope` with `memory`. instructions: how an LLM is to write. min_interval: between two versions, unless a memory
        that the text was made of is gone or has changed; 10 s if None. The other arguments are those of `put` and
        `recall_once`.
        """
        with encoding("block"):
            request = self._make_put(name, max_tokens)
            asked = pb.StandingQuestion(
                text=question,
                instructions=instructions,
                limit=limit,
                min_relevance=min_relevance,
                scopes=map(scope_to_wire, scopes),
            )
            if filter is not None:
                asked.filter.CopyFrom(filter_to_wire(filter))
            if min_interval is not None:
                asked.min_interval.CopyFrom(duration_to_wire(min_interval))
            request.standing.CopyFrom(asked)
        return await self._put(request, metadata, etag, absent)

    def _make_put(self, name: str, max_tokens: int | None) -> pb.PutBlockRequest:
        return pb.PutBlockRequest(
            namespace=self._path.namespace,
            memory=self._path.name,
            block=name,
            max_tokens=max_tokens,
            request_id=new_request_id(),
        )

    async def _put(
        self, request: pb.PutBlockRequest, metadata: Mapping[str, MetadataValue] | None, etag: str, absent: bool
    ) -> BlockInfo:
        if metadata is not None:
            request.metadata.SetInParent()
            for key, value in metadata.items():
                request.metadata.metadata[key].CopyFrom(metadata_value_to_wire(f"metadata.{key}", value))
        if etag:
            request.etag = etag
        elif absent:
            request.absent = True
        return info_from_wire((await self._link.call(self._link.blocks.PutBlock, request, self._path)).block)

    async def get(self, name: str, *, version: Position = 0) -> Block:
        """Reads a block, or an earlier version of it."""
        request = pb.GetBlockRequest(
            namespace=self._path.namespace, memory=self._path.name, block=name, version=version
        )
        return block_from_wire((await self._link.call(self._link.blocks.GetBlock, request, self._path)).block)

    def versions(self, name: str, *, page_size: Count = 0) -> AsyncIterator[Block]:
        """Iterates over the versions that are kept, the latest first, fetching page by page."""

        async def fetch(token: str) -> tuple[tuple[Block, ...], str]:
            request = pb.ListBlockVersionsRequest(
                namespace=self._path.namespace,
                memory=self._path.name,
                block=name,
                page_size=page_size,
                page_token=token,
            )
            answer = await self._link.call(self._link.blocks.ListBlockVersions, request, self._path)
            return tuple(map(block_from_wire, answer.versions)), answer.next_page_token

        return iterate_pages(fetch)

    async def append(self, name: str, text: str, *, etag: str = "") -> BlockInfo:
        """Adds lines at the end."""
        return await self._edit(name, etag, append=pb.AppendToBlock(text=text))

    async def replace(self, name: str, old: str, new: str, *, etag: str = "") -> BlockInfo:
        """Replaces `old`, which must occur exactly once, by `new`."""
        return await self._edit(name, etag, replace=pb.ReplaceInBlock(old=old, new=new))

    async def insert(self, name: str, line: Count, text: str, *, etag: str = "") -> BlockInfo:
        """Adds lines after line number `line`; 0: before the first."""
        return await self._edit(name, etag, insert=pb.InsertInBlock(line=line, text=text))

    async def delete(self, name: str, *, etag: str = "") -> bool:
        """Deletes a block with all of its versions for good; whether there was one."""
        request = pb.DeleteBlockRequest(
            namespace=self._path.namespace,
            memory=self._path.name,
            block=name,
            etag=etag,
            request_id=new_request_id(),
        )
        return (await self._link.call(self._link.blocks.DeleteBlock, request, self._path)).deleted

    def watch(
        self,
        *,
        known: Mapping[str, int] | None = None,
        memory_uid: str = "",
        progress_interval: timedelta | None = None,
    ) -> BlockWatch:
        """The blocks that differ from the versions `known` by name, then each change. With `known` pass the uid of the
        memory that they are of, which the earlier watch has."""
        return BlockWatch(self._link, self._path, known or {}, memory_uid, progress_interval)

    def list(self, *, page_size: Count = 0) -> AsyncIterator[Block]:
        """Iterates over the blocks by name, fetching page by page."""

        async def fetch(token: str) -> tuple[tuple[Block, ...], str]:
            request = pb.ListBlocksRequest(
                namespace=self._path.namespace, memory=self._path.name, page_size=page_size, page_token=token
            )
            answer = await self._link.call(self._link.blocks.ListBlocks, request, self._path)
            return tuple(map(block_from_wire, answer.blocks)), answer.next_page_token

        return iterate_pages(fetch)

    async def _edit(
        self,
        name: str,
        etag: str,
        *,
        append: pb.AppendToBlock | None = None,
        replace: pb.ReplaceInBlock | None = None,
        insert: pb.InsertInBlock | None = None,
    ) -> BlockInfo:
        request = pb.EditBlockRequest(
            namespace=self._path.namespace,
            memory=self._path.name,
            block=name,
            append=append,
            replace=replace,
            insert=insert,
            etag=etag,
            request_id=new_request_id(),
        )
        return info_from_wire((await self._link.call(self._link.blocks.EditBlock, request, self._path)).block)


def info_from_wire(wire: pb.Block) -> BlockInfo:
    """Converts a block without its text."""
    return BlockInfo(**_read_fields(wire))


def block_from_wire(wire: pb.Block) -> Block:
    """Converts a block."""
    return Block(**_read_fields(wire), text=wire.text)


def _read_fields(wire: pb.Block) -> dict[str, Any]:
    return {
        "name": wire.name,
        "etag": wire.etag,
        "version": wire.version,
        "tokens": wire.tokens,
        "max_tokens": wire.max_tokens,
        "metadata": metadata_from_wire(wire.metadata),
        "create_time": optional_timestamp_from_wire(wire.create_time, wire.HasField("create_time")),
        "update_time": optional_timestamp_from_wire(wire.update_time, wire.HasField("update_time")),
        "principal": wire.principal,
        "hidden_characters": tuple(wire.hidden_characters),
        "standing": _read_standing(wire.standing) if wire.HasField("standing") else None,
    }


def _read_standing(wire: pb.StandingAnswer) -> StandingAnswer:
    asked = wire.question
    return StandingAnswer(
        question=asked.text,
        instructions=asked.instructions,
        limit=asked.limit if asked.HasField("limit") else None,
        min_relevance=asked.min_relevance if asked.HasField("min_relevance") else None,
        filtered=asked.HasField("filter"),
        min_interval=asked.min_interval.ToTimedelta(),
        citations=tuple(tuple(line.fragment_ids) for line in wire.citations),
        model=wire.model,
        revision=wire.revision,
        problem=wire.problem,
        scopes=tuple(scope.memory for scope in asked.scopes),
        cited_memories=tuple(tuple(line.memories) for line in wire.citations) if asked.scopes else (),
        revisions=dict(wire.revisions),
    )
