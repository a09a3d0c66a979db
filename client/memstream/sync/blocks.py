"""The blocking Blocks, BlockWatch.

Written by scripts/sync_sdk.py: change the asynchronous class, then run `make generate`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from datetime import timedelta

import memstream.blocks
from memstream.argument_types import Count, Position, Several
from memstream.arguments import check_methods
from memstream.blocks import Block, BlockChange, BlockInfo
from memstream.sync.bases import Handle, Iterated
from memstream.sync.loop import LOOP
from memstream.values import Filter, MetadataValue, Scope


@check_methods
class Blocks(Handle):
    """See memstream.Blocks."""

    def __init__(self, inner: memstream.blocks.Blocks) -> None:
        super().__init__(inner)
        self._inner = inner

    @property
    def path(self) -> str:
        """`namespace/name` of the memory."""
        return self._inner.path

    def put(
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
        return LOOP.run(self._inner.put(name, text, max_tokens=max_tokens, metadata=metadata, etag=etag, absent=absent))

    def keep(
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
        return LOOP.run(
            self._inner.keep(
                name,
                question,
                scopes=scopes,
                instructions=instructions,
                filter=filter,
                limit=limit,
                min_relevance=min_relevance,
                min_interval=min_interval,
                max_tokens=max_tokens,
                metadata=metadata,
                etag=etag,
                absent=absent,
            )
        )

    def get(self, name: str, *, version: Position = 0) -> Block:
        """Reads a block, or an earlier version of it."""
        return LOOP.run(self._inner.get(name, version=version))

    def versions(self, name: str, *, page_size: Count = 0) -> Iterator[Block]:
        """Iterates over the versions that are kept, the latest first, fetching page by page."""
        return LOOP.iterate_from(lambda: self._inner.versions(name, page_size=page_size))

    def append(self, name: str, text: str, *, etag: str = "") -> BlockInfo:
        """Adds lines at the end."""
        return LOOP.run(self._inner.append(name, text, etag=etag))

    def replace(self, name: str, old: str, new: str, *, etag: str = "") -> BlockInfo:
        """Replaces `old`, which must occur exactly once, by `new`."""
        return LOOP.run(self._inner.replace(name, old, new, etag=etag))

    def insert(self, name: str, line: Count, text: str, *, etag: str = "") -> BlockInfo:
        """Adds lines after line number `line`; 0: before the first."""
        return LOOP.run(self._inner.insert(name, line, text, etag=etag))

    def delete(self, name: str, *, etag: str = "") -> bool:
        """Deletes a block with all of its versions for good; whether there was one."""
        return LOOP.run(self._inner.delete(name, etag=etag))

    def watch(
        self,
        *,
        known: Mapping[str, int] | None = None,
        memory_uid: str = "",
        progress_interval: timedelta | None = None,
    ) -> BlockWatch:
        """The blocks that differ from the versions `known` by name, then each change. With `known` pass the uid of the
        memory that they are of, which the earlier watch has."""
        return BlockWatch(
            LOOP.make(
                lambda: self._inner.watch(known=known, memory_uid=memory_uid, progress_interval=progress_interval)
            )
        )

    def list(self, *, page_size: Count = 0) -> Iterator[Block]:
        """Iterates over the blocks by name, fetching page by page."""
        return LOOP.iterate_from(lambda: self._inner.list(page_size=page_size))


class BlockWatch(Iterated[BlockChange]):
    """See memstream.BlockWatch."""

    def __init__(self, inner: memstream.blocks.BlockWatch) -> None:
        super().__init__(inner)
        self._inner = inner

    @property
    def known(self) -> dict[str, int]:
        """The version of each block returned so far, by name."""
        return self._inner.known

    @property
    def memory_uid(self) -> str:
        """Whose versions they are; empty before the first answer."""
        return self._inner.memory_uid
