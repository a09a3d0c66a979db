"""Images: a file per memory that spares its next activation the rows. A cache: losing an image loses only time.

Contract
- `read` returns what was written last, complete and unchanged, or None. It deletes a damaged image, and one of another
  space or analyzer. It returns None while a write is announced: the caller would use an image that is about to change.
- The caller compares revision and time with the journal, and calls `drop` for an image that it cannot use.
- After `remove` has returned, no file has a part of the memory's images, also not by a write that was announced before.
- A write that fails is logged and leaves no file.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from memstream_server.core.arrays import Parts

IMAGE_FOLDER = "images"
"""Folder in the data directory; a restore may delete it."""


@dataclass(frozen=True, slots=True)
class ImageKey:
    """What an image was written for. The store adds the version of the software."""

    memory: str
    """The memory's uid."""
    epoch: int
    revision: int
    time_us: int
    """Time of the commit that made the revision: with the revision it names the state, also after another history of
    the memory has replaced the journal's. 0 if the log no longer had it."""
    space: str
    """Name of the embedding space of its vectors."""
    analyzer: int
    """Version of the analyzer of its terms."""


@dataclass(frozen=True, slots=True, eq=False)
class Image:
    """An image as it was read."""

    key: ImageKey
    parts: Parts


class Images(Protocol):
    """The images of one process."""

    def read(self, memory: str, space: str, analyzer: int) -> Image | None:
        """The arrays may be read-only. Blocking; call it in any thread."""
        ...

    def drop(self, memory: str) -> None:
        """Remove the memory's image soon, before any write that is announced later. Call it in any thread."""
        ...

    def has(self, memory: str) -> bool:
        """Whether the memory has an image, or an announced one."""
        ...

    def announce(self, memory: str) -> int:
        """A ticket for a write, which a later `remove` cancels."""
        ...

    async def write(self, ticket: int, key: ImageKey, pack: Callable[[], Parts | None]) -> None:
        """Replace the memory's image by what `pack` returns in another thread; None writes nothing."""
        ...

    async def remove(self, memory: str, durable: bool = False) -> None:
        """Remove the memory's image, and cancel the writes that were announced.

        `durable`: a power failure does not bring it back.
        """
        ...

    async def remove_all(self) -> None:
        """Remove all images."""
        ...


class NoImages:
    """Keeps nothing: for servers that share a journal, and for a bound of 0 bytes."""

    def read(self, memory: str, space: str, analyzer: int) -> Image | None:
        """See Images."""
        return None

    def drop(self, memory: str) -> None:
        """See Images."""

    def has(self, memory: str) -> bool:
        """See Images."""
        return False

    def announce(self, memory: str) -> int:
        """See Images."""
        return 0

    async def write(self, ticket: int, key: ImageKey, pack: Callable[[], Parts | None]) -> None:
        """See Images."""

    async def remove(self, memory: str, durable: bool = False) -> None:
        """See Images."""

    async def remove_all(self) -> None:
        """See Images."""


NO_IMAGES = NoImages()
