"""Where blocks are stored: small named texts of a memory, with their versions.

Contract:

- A version is one write to a block. Versions ascend over all blocks of a memory and are never reused, also after a
  block was deleted: a version is an etag.
- A write is one transaction with the memory's present block: of two writers one decides first, the other one sees its
  block. `decide` runs inside the transaction, and may run twice.
- A write that changes nothing makes no version.
- A version that was made of fragments (`StandingAnswer.sources`) is erased by the commit that erases one of them, or
  that deletes their memory, if it is another one; the present one then has no text. No later write brings such a text
  back: it compares its sources in its transaction.
- Blocks end with their memory. A write needs no owner of the memory.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from memstream_server.core.filters import EVERYTHING, Filter
from memstream_server.core.values import Metadata
from memstream_server.ports.conversations import AnswerOf
from memstream_server.ports.journal.errors import JournalError


@dataclass(frozen=True, slots=True, order=True)
class MemoryName:
    """A memory by namespace and name."""

    namespace: str
    memory: str

    def __str__(self) -> str:
        return f"{self.namespace}/{self.memory}"


@dataclass(frozen=True, slots=True, order=True)
class BlockName:
    """A block by its memory and name: agent/joy#persona."""

    of: MemoryName
    name: str

    def __str__(self) -> str:
        return f"{self.of}#{self.name}"


class NoMemory(JournalError):
    """There is no memory of that name."""

    def __init__(self, memory: MemoryName) -> None:
        super().__init__(f"there is no memory {memory}")
        self.memory = memory


class NoBlock(JournalError):
    """The memory has no such block, or no longer that version of it. The text says which."""

    def __init__(self, text: str, block: BlockName) -> None:
        super().__init__(text)
        self.block = block


class BlockDiffers(JournalError):
    """The block is not the one of the precondition. `version`: the present one; 0: there is none."""

    def __init__(self, text: str, version: int) -> None:
        super().__init__(text)
        self.version = version


class BlocksFull(JournalError):
    """The memory has as many blocks as are allowed."""


class SourcesChanged(JournalError):
    """A fragment that the text was made of is gone, or has other words."""


@dataclass(frozen=True, slots=True)
class StandingScope:
    """A memory that a question is asked in."""

    memory: MemoryName
    message: bytes
    """The scope as the client sent it."""


@dataclass(frozen=True, slots=True)
class StandingQuestion:
    """What a block that keeps itself is the answer to. None takes the policy's value."""

    text: str
    instructions: str = ""
    limit: int | None = None
    min_relevance: float | None = None
    min_interval_us: int = 0
    """Between two versions, unless the earlier one has become wrong."""
    filter: Filter = EVERYTHING
    filter_message: bytes = b""
    """The filter as the client sent it."""
    scopes: tuple[StandingScope, ...] = ()
    """What is asked instead of the block's own memory."""


@dataclass(frozen=True, slots=True)
class StandingAnswer:
    """What a version of a block that keeps itself was made of."""

    question: StandingQuestion
    citations: tuple[tuple[str, ...], ...] = ()
    """Ids of fragments, for each line of the text."""
    sources: tuple[str, ...] = ()
    """Ids of all fragments that the text was made of, cited or not."""
    memories: tuple[str, ...] = ()
    """The memory of each source, as "namespace/memory"; empty without scopes."""
    digest: bytes = b""
    """Of what it was made of; empty: not written yet."""
    model: str = ""
    """The LLM that wrote it; empty: none."""


NO_REVISION = 1 << 62
"""No commit of the block's own memory makes it due: its question has scopes."""


@dataclass(frozen=True, slots=True)
class AskedMemory:
    """A memory that a question names."""

    memory: MemoryName
    uid: str = ""
    """Empty: there is none."""
    revision: int = -1
    """At which the text held; -1: not known to hold."""


@dataclass(frozen=True, slots=True)
class StandingState:
    """How far a block that keeps itself is."""

    revision: int = -1
    """Of the block's own memory, at which the text held; -1: not known to hold."""
    rest_us: int = 0
    """No commit makes it due before this time,"""
    look_us: int | None = None
    """and it is due at this time without one."""
    problem: str = ""
    asked: tuple[AskedMemory, ...] = ()
    """The memories of a question with scopes. A memory that is not the one of that uid, or has another revision since,
    makes the block due."""


@dataclass(frozen=True, slots=True)
class DueBlocks:
    """Blocks that keep themselves and whose question is to be recalled."""

    each: tuple[tuple[str, str], ...]
    """(uid of the memory, name of the block)."""
    next_us: int | None
    """When another one will be due, if nothing is committed until then."""


@dataclass(frozen=True, slots=True)
class BlockContent:
    """What a write sets."""

    text: str
    max_tokens: int = 0
    """The text has at most so many tokens; 0: no bound."""
    metadata: Metadata = ()
    standing: StandingAnswer | None = None
    """The block keeps itself."""


@dataclass(frozen=True, slots=True)
class Block:
    """A version of a block."""

    name: str
    version: int
    content: BlockContent
    create_time_us: int
    """Of the block."""
    update_time_us: int
    """Of this version."""
    principal: str = ""
    """Who wrote it; of a standing answer, who asked."""
    state: StandingState | None = None
    """Of a present version that keeps itself, where it is read as one."""


@dataclass(frozen=True, slots=True)
class Writing:
    """Who writes, when, and what a memory may keep."""

    now_us: int
    principal: str
    blocks_max: int
    versions_max: int
    """Of one block, the present one included."""
    state: StandingState | None = None
    """Of a block that keeps itself, after the write; None: it is due."""
    sources: Mapping[str, Mapping[str, str]] | None = None
    """What the text was made of: contents by id, by the uid of their memory. None: of what the present one was."""


Decide = Callable[[Block | None], BlockContent]
"""The new content, from the present block. What it raises ends the write."""


class BlockStore(Protocol):
    """See the module's contract. Methods raise NoMemory, but `read_blocks`."""

    async def read_blocks(self, names: Sequence[BlockName]) -> dict[BlockName, Block]:
        """Those of the blocks that exist, in one snapshot."""
        ...

    async def get_block(self, name: BlockName, version: int = 0) -> Block:
        """The present version, or an earlier one that is kept. Raises NoBlock."""
        ...

    async def list_blocks(self, memory: MemoryName, after: str, limit: int) -> list[Block]:
        """The present versions of blocks with names above `after`, by name."""
        ...

    async def list_versions(self, name: BlockName, before: int | None, limit: int) -> list[Block]:
        """The kept versions below `before`, the latest first."""
        ...

    async def read_versions(self, memory: MemoryName) -> tuple[str, dict[str, int]]:
        """(uid of the memory, present version of each block by name)."""
        ...

    async def write_block(
        self, name: BlockName, decide: Decide, writing: Writing, answer: AnswerOf[Block] = None
    ) -> Block:
        """The present version afterwards. Raises BlocksFull, SourcesChanged, and what `decide` raises."""
        ...

    async def find_due(self, now_us: int, limit: int) -> DueBlocks:
        """Blocks that keep themselves, in memories whose revision has risen since, or at their time; the one that
        was renewed longest ago first."""
        ...

    async def list_standing(self) -> frozenset[str]:
        """Uids of memories with blocks that keep themselves, and of those that are asked."""
        ...

    async def read_asked(self, uid: str, name: str) -> tuple[AskedMemory, ...]:
        """The memories of a block's question with scopes as they are now: a later state with them misses no commit."""
        ...

    async def forget_asked(self) -> None:
        """All blocks whose questions have scopes are due: rights have changed."""
        ...

    async def set_state(self, uid: str, name: str, state: StandingState, version: int | None = None) -> None:
        """How far a block is; nothing if it keeps itself no more, or has a later version. Its revision never falls."""
        ...

    async def add_versions(self, uid: str, versions: Sequence[Block], versions_max: int, last: int = 0) -> None:
        """Add versions in ascending order to a memory that is being imported, without those up to its last version,
        which an earlier run has written. `last`: no later write gets a version up to this. Raises StaleWrite if the
        memory is gone."""
        ...

    async def delete_block(self, name: BlockName, version: int | None, answer: AnswerOf[bool] = None) -> bool:
        """Delete all versions; whether there was one. `version`: what the present one must be. Raises BlockDiffers."""
        ...
