"""Images: a file per memory that spares its next activation the rows. A cache: losing an image loses only time.

Contract
- `read` returns what was written under an equal key, complete and unchanged, or None. It deletes an image with another
  key, or a damaged one.
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
    """What an image must have been written for. The store adds the version of the software."""

    memory: str
    """The memory's uid."""
    epoch: int
    revision: int
    space: str
    """Name of the embedding space of its vectors."""
    analyzer: int
    """Version of the analyzer of its terms."""


class Images(Protocol):
    """The images of one process."""

    def read(self, key: ImageKey) -> Parts | None:
        """The arrays may be read-only. Blocking; call it in any thread."""
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

    def read(self, key: ImageKey) -> Parts | None:
        """See Images."""
        return None

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
