"""Images: a file per memory that spares its next activation the rows. A cache: losing an image loses only time.

Contract
- `read` gives what was written last, complete and unchanged, or None. It deletes an image that is damaged, of another
  space or analyzer, or older than another process's ownership of the memory. It gives None while a write is announced:
  the caller would use an image that is about to change.
- The caller compares revision and time with the journal, and calls `drop` for an image that it cannot use.
- After `remove` has returned, no file has a part of the memory's images, also not by a write that was announced before.
- A write that fails is logged and leaves no file.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
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
    """The epoch at which this process owned the memory. `set_epoch` changes that of a kept image, but not its key."""
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

    def read(self, memory: str, epoch: int, space: str, analyzer: int) -> Future[Image | None] | None:
        """Start to read the image of that epoch, or of the one before, at which this process was the owner too.

        None if the memory has no image. The arrays may be read-only. Call it in any thread.
        """
        ...

    def drop(self, memory: str, epoch: int | None = None) -> None:
        """Remove the memory's image soon, before any write that is announced later; with `epoch` only an image of that
        epoch. Call it in any thread.
        """
        ...

    def list_epochs(self) -> dict[str, int]:
        """The epoch of each memory's image."""
        ...

    def set_epoch(self, memory: str, epoch: int) -> None:
        """This process has taken the memory again, and its image, if there is one, still counts. Does not block."""
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
    """Keeps nothing: for a bound of 0 bytes, and if the folder cannot be used."""

    def read(self, memory: str, epoch: int, space: str, analyzer: int) -> Future[Image | None] | None:
        """See Images."""
        return None

    def drop(self, memory: str, epoch: int | None = None) -> None:
        """See Images."""

    def list_epochs(self) -> dict[str, int]:
        """See Images."""
        return {}

    def set_epoch(self, memory: str, epoch: int) -> None:
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
