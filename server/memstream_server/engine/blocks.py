"""Blocks for the rpcs and for contexts: small named texts of memories. Maps store errors, and notifies watches.

Blocks need no actor: each write is one transaction that sees the present block, whichever process makes it.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

from memstream_server.core.blocks import Edit, EditRefused, apply_edit, check_size
from memstream_server.core.budget import estimated_tokens
from memstream_server.core.values import Metadata
from memstream_server.engine.background.task import wait_for_news
from memstream_server.engine.errors import (
    QUOTA_RETRY_S,
    BlockNotFound,
    EtagMismatch,
    FieldViolation,
    InvalidField,
    MemoryDeleted,
    MemoryNotFound,
    QuotaExceeded,
    write_error,
)
from memstream_server.engine.quotas import check_bytes
from memstream_server.engine.runtime.call_context import PRINCIPAL, complete_task
from memstream_server.engine.runtime.clock import Clock
from memstream_server.engine.settings import EngineLimits
from memstream_server.ports.blocks import (
    Block,
    BlockContent,
    BlockDiffers,
    BlockName,
    BlocksFull,
    BlockStore,
    Decide,
    MemoryName,
    NoBlock,
    NoMemory,
    SourcesChanged,
    StandingAnswer,
    StandingQuestion,
    StandingState,
    Writing,
)
from memstream_server.ports.conversations import AnswerOf
from memstream_server.ports.journal.errors import JournalError
from memstream_server.ports.journal.port import Journal

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class BlockPut:
    """A text to write; None keeps the present value, which a new block has not: no bound, no metadata."""

    text: str
    max_tokens: int | None = None
    metadata: Metadata | None = None
    standing: StandingQuestion | None = None
    """The block keeps itself, and `text` is empty."""

    def content_after(self, old: Block | None) -> BlockContent:
        """The content of the block that it makes."""
        before = BlockContent("") if old is None else old.content
        most = before.max_tokens if self.max_tokens is None else self.max_tokens
        metadata = before.metadata if self.metadata is None else self.metadata
        if self.standing is None:
            return BlockContent(self.text, most, metadata)
        answer = before.standing or StandingAnswer(self.standing)
        if (answer.question, before.max_tokens) != (self.standing, most):  # what it was made of stays known
            answer = replace(answer, question=self.standing, digest=b"")
        fits = not most or estimated_tokens(before.text) <= most
        text, answer = (before.text, answer) if fits else ("", replace(answer, citations=(), sources=(), memories=()))
        return BlockContent(text, most, metadata, answer)


@dataclass(frozen=True, slots=True)
class BlockChanges:
    """What a watch has to say: blocks that are new or written since, and names of those that are gone."""

    written: tuple[Block, ...]
    deleted: tuple[str, ...]


@dataclass(slots=True, eq=False)
class _Waiter:
    memory: MemoryName
    uid: str
    news: asyncio.Event = field(default_factory=asyncio.Event)


class Blocks:
    """The blocks of all memories. Methods raise MemoryNotFound, BlockNotFound, JournalUnavailable; those that write
    EtagMismatch, InvalidField, QuotaExceeded, StorageIsFull."""

    def __init__(self, store: BlockStore, journal: Journal, clock: Clock, quiet_s: float, limits: EngineLimits) -> None:
        """quiet_s: how often an idle watch reads the store. Writes of other processes wake no watch of this one."""
        self._store = store
        self._journal = journal
        self._clock = clock
        self._quiet_s = quiet_s
        self._limits = limits
        self.on_question: Callable[[], None] | None = None
        """Called when a block begins to keep itself."""
        self._waiting: set[_Waiter] = set()
        self._writing: set[asyncio.Task[Any]] = set()

    async def read_many(self, names: Sequence[BlockName]) -> dict[BlockName, Block]:
        """Those of the blocks that exist, in one snapshot and one read. Names no memory that is missing."""
        return await _map_errors(self._store.read_blocks(names))

    async def get(self, name: BlockName, version: int = 0) -> Block:
        """The present version (0), or an earlier one."""
        return await _map_errors(self._store.get_block(name, version))

    async def list_page(self, memory: MemoryName, after: str, limit: int) -> list[Block]:
        """The present versions, by name."""
        return await _map_errors(self._store.list_blocks(memory, after, limit))

    async def list_versions(self, name: BlockName, before: int | None, limit: int) -> list[Block]:
        """The latest first."""
        return await _map_errors(self._store.list_versions(name, before, limit))

    async def put(self, name: BlockName, given: BlockPut, version: int | None, answer: AnswerOf[Block] = None) -> Block:
        """Write a block. `version`: of the present one; 0: there is none; None: any."""

        def decide(old: Block | None) -> BlockContent:
            _check_version(name, old, version)
            content = given.content_after(old)
            self._check_text(content)
            return content

        block = await self._write(name, decide, answer)
        if given.standing is not None and self.on_question is not None:
            self.on_question()
        return block

    async def edit(self, name: BlockName, edit: Edit, version: int | None, answer: AnswerOf[Block] = None) -> Block:
        """Change the text of a block."""

        def decide(old: Block | None) -> BlockContent:
            _check_version(name, old, version)
            if old is None:
                raise NoBlock(f"there is no block {name}", name)
            if old.content.standing is not None:
                raise EditRefused("edit", "is of a block that keeps itself: change its question, or put a text")
            content = BlockContent(apply_edit(old.content.text, edit), old.content.max_tokens, old.content.metadata)
            self._check_text(content)
            return content

        return await self._write(name, decide, answer)

    async def renew(
        self,
        name: BlockName,
        old: Block,
        content: BlockContent,
        sources: Mapping[str, Mapping[str, str]],
        state: StandingState,
    ) -> Block:
        """Write the text of a block that keeps itself, made of `sources` (contents by id, by uid of their memory), if
        neither the block nor one of them has changed. Raises EtagMismatch."""

        def decide(present: Block | None) -> BlockContent:
            _check_version(name, present, old.version)
            self._check_text(content)
            return content

        await check_bytes(self._journal, self._limits, name.of.namespace)
        limits = self._limits
        writing = Writing(
            self._clock.now_us(), old.principal, limits.memory_blocks_max, limits.block_versions_max, state, sources
        )
        return await self._notify_after(name.of, self._store.write_block(name, decide, writing))

    async def delete(self, name: BlockName, version: int | None, answer: AnswerOf[bool] = None) -> bool:
        """Delete all versions for good; whether there was a block."""
        return await self._notify_after(name.of, self._store.delete_block(name, version, answer))

    async def watch(self, memory: MemoryName, uid: str, known: Mapping[str, int]) -> AsyncGenerator[BlockChanges, None]:
        """How the blocks of the memory with this uid differ from the versions `known` by name: now, and after each
        change.

        It begins with what differs at its start, even if that is nothing. A consumer that is slower than the changes
        gets the latest version of each block alone. Raises MemoryDeleted.
        """
        seen = dict(known)
        waiter, started = _Waiter(memory, uid), False
        self._waiting.add(waiter)
        try:
            while True:
                waiter.news.clear()
                found_uid, present = await _map_errors(self._store.read_versions(memory))
                if found_uid != uid:
                    raise MemoryDeleted(f"memory {memory} was deleted, and another memory has its name")
                changed = [BlockName(memory, name) for name, version in present.items() if seen.get(name) != version]
                found = await self.read_many(changed) if changed else {}
                deleted = tuple(sorted(seen.keys() - present.keys()))
                for name in deleted:
                    del seen[name]
                seen.update({block.name: block.version for block in found.values()})
                if found or deleted or not started:
                    yield BlockChanges(tuple(found.values()), deleted)
                started = True
                await wait_for_news(waiter.news, self._quiet_s)
        except MemoryNotFound as error:
            if isinstance(error, MemoryDeleted):
                raise
            raise MemoryDeleted(f"memory {memory} was deleted") from error
        finally:
            self._waiting.discard(waiter)

    def notify_deleted(self, uid: str) -> None:
        """The memory was deleted: wake its watches."""
        for waiter in self._waiting:
            if waiter.uid == uid:
                waiter.news.set()

    def _check_text(self, content: BlockContent) -> None:
        check_size(content.text, content.max_tokens)
        size = len(content.text.encode())
        if size > self._limits.block_bytes_max:
            raise EditRefused("text", f"would have {size} bytes, at most {self._limits.block_bytes_max} are allowed")

    async def _write(self, name: BlockName, decide: Decide, answer: AnswerOf[Block]) -> Block:
        await check_bytes(self._journal, self._limits, name.of.namespace)
        writing = Writing(
            self._clock.now_us(), PRINCIPAL.get(), self._limits.memory_blocks_max, self._limits.block_versions_max
        )
        return await self._notify_after(name.of, self._store.write_block(name, decide, writing, answer))

    async def _notify_after(self, memory: MemoryName, writing: Awaitable[T]) -> T:
        # The watches are notified even if the caller is cancelled.
        return await complete_task(self._write_and_notify(memory, writing), self._writing)

    async def _write_and_notify(self, memory: MemoryName, writing: Awaitable[T]) -> T:
        written = await _map_errors(writing, self._limits.memory_blocks_max)
        for waiter in self._waiting:
            if waiter.memory == memory:
                waiter.news.set()
        return written


def _check_version(name: BlockName, old: Block | None, version: int | None) -> None:
    present = 0 if old is None else old.version
    if version is not None and version != present:
        raise BlockDiffers(f"the block {name} {'was written since' if present else 'does not exist'}", present)


async def _map_errors(work: Awaitable[T], blocks_max: int = 0) -> T:
    """Raise the store's errors as engine errors."""
    try:
        return await work
    except NoMemory as error:
        raise MemoryNotFound(
            f"{error}; create it first", namespace=error.memory.namespace, memory=error.memory.memory
        ) from error
    except NoBlock as error:
        raise BlockNotFound(str(error), block=error.block.name) from error
    except SourcesChanged as error:
        raise EtagMismatch(f"{error}: read again, then decide", etag="") from error
    except BlockDiffers as error:
        raise EtagMismatch(f"{error}: read again, then decide", etag=error.version) from error
    except EditRefused as error:
        violation = FieldViolation(error.field, error.description)
        raise InvalidField("the block stays as it was", violations=(violation,)) from error
    except BlocksFull as error:
        raise QuotaExceeded(
            f"{error}: delete one", retry_after_s=QUOTA_RETRY_S, quota="memory_blocks_max", limit=blocks_max
        ) from error
    except JournalError as error:  # includes StaleWrite: a concurrent call stored the answer, which the rpc returns
        raise write_error(error) from error
