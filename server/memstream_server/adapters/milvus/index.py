"""The vector index on Milvus: `open_lite` for the embedded one, `connect_milvus` for a server or Zilliz by URI.

How it keeps the port's contract
- pymilvus blocks, so it runs in threads of its own: one for writes, which makes them one at a time, a few for reads.
- A Lite child that ends is started again, with growing pauses, until `close`. Meanwhile calls raise
  IndexUnavailable at once. If it comes back empty, the next call of any kind raises IndexLost, once.
- Each start of a child is a generation. Writes belong to the generation they began in: the first write or flush
  after a restart raises IndexUnavailable if there were writes since the last flush, so that a flush can never
  acknowledge what an earlier child took and lost.
- After a failed write or flush the child is killed, not stopped: an orderly stop flushes, and after a failed
  flush the next one deletes the log of the failed.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Protocol, TypeVar
from urllib.parse import urlsplit

import numpy as np
import numpy.typing as npt

from memstream_server.adapters.milvus.collection import CollectionMissing, MilvusCollection, Timeouts, TooLate
from memstream_server.adapters.milvus.lite import LiteProcess, remove_files
from memstream_server.adapters.milvus.naming import collection_name
from memstream_server.core.printable import number_text
from memstream_server.core.values import Vector
from memstream_server.ports.index import IndexLost, IndexUnavailable, Point
from memstream_server.ports.journal.spaces import Space

logger = logging.getLogger(__name__)

T = TypeVar("T")

READ_THREADS = 4
PAUSE_MIN_S = 0.1
PAUSE_MAX_S = 30.0
STEADY_S = 60.0
"""A child that lived this long is started again without a pause."""


class Running(Protocol):
    """A Milvus that can be connected to."""

    uri: str
    token: str
    supervised: bool
    """Whether it is ours to kill and to start again."""

    async def ended(self) -> str:
        """Wait for its end; why, for people. Never returns for one that is not ours."""
        ...

    async def kill(self) -> None: ...

    async def stop(self) -> None: ...


Start = Callable[[Sequence[str]], Awaitable[Running]]
"""Bring up a Milvus that is about to serve the collections of these names. Raises IndexUnavailable."""


class Remote:
    """A Milvus server run by somebody else. gRPC's channel reconnects by itself."""

    supervised = False

    def __init__(self, uri: str, token: str) -> None:
        self.uri = uri
        self.token = token

    async def ended(self) -> str:
        """Never."""
        await asyncio.Event().wait()
        return ""

    async def kill(self) -> None:
        """Not ours."""

    async def stop(self) -> None:
        """Not ours."""


@dataclass(frozen=True, slots=True, eq=False)
class Session:
    """One connection to one start of Milvus."""

    running: Running
    collections: dict[str, MilvusCollection]
    """By the name of their space, in the order in which they were opened."""
    generation: int
    begun_s: float
    """On the event loop's clock."""

    def of(self, model: str) -> MilvusCollection:
        """The collection of that space; the first when the name is empty. Raises IndexUnavailable."""
        if model and model not in self.collections:
            raise IndexUnavailable(f"the index of {model} is not open")
        return self.collections[model] if model else next(iter(self.collections.values()))


class MilvusIndex:
    """ports.index.VectorIndex on Milvus. See the module's rules."""

    def __init__(
        self,
        start: Start,
        *,
        name: str,
        prefix: str,
        timeouts: Timeouts,
        consistency: str,
        remove_files: Callable[[], None] | None = None,
    ) -> None:
        self._start = start
        self._remove_files = remove_files
        """Removes all that an embedded Milvus that has ended left behind; None for a server."""
        self._prefix = prefix
        self._timeouts = timeouts
        self._consistency = consistency
        self._description = name
        self._spaces: dict[str, Space] = {}
        self._session: Session | None = None
        self._why_not = "the index is not open"
        self._generation = 0
        self._unflushed: int | None = None
        """Generation of the writes since the last flush; None when there are none."""
        self._lost = False
        self._supervisor: asyncio.Task[None] | None = None
        self._writer = ThreadPoolExecutor(1, thread_name_prefix="milvus-write")
        self._readers = ThreadPoolExecutor(READ_THREADS, thread_name_prefix="milvus-read")

    @property
    def description(self) -> str:
        """Engine and version once it was reached, until then where it is to be."""
        return self._description

    @property
    def keeps_deleted(self) -> bool:
        """Lite marks rows as deleted; a server compacts by itself."""
        return self._remove_files is not None

    async def open(self, space: Space, beside: Space | None = None) -> bool:
        """See the port. Also after a failed open, or for another space: what was open is closed first."""
        await self._leave()
        self._spaces = {each.model: each for each in (space, beside) if each is not None}
        session, empty = await self._begin()
        self._lost = False
        self._supervisor = asyncio.create_task(self._supervise(session), name="milvus supervisor")
        return empty

    async def add(self, space: Space) -> bool:
        session = self._current()
        if space.model in session.collections:
            return False
        collection, empty = await self._connected(session.running, space)
        if self._session is not session:  # another start, which does not have it
            await asyncio.get_running_loop().run_in_executor(self._readers, collection.close)
            raise IndexUnavailable(self._why_not)
        session.collections[space.model] = collection
        self._spaces[space.model] = space
        return empty

    async def remove(self, space: Space) -> None:
        session = self._current()
        collection = session.collections.get(space.model)
        if collection is not None and len(session.collections) == 1:
            raise IndexUnavailable(f"the index of {space.model} is the only one")
        if collection is None:
            collection, _ = await self._connected(session.running, space)
        session.collections.pop(space.model, None)  # from here on nobody finds it missing and makes it anew
        self._spaces.pop(space.model, None)
        loop = asyncio.get_running_loop()
        try:
            await loop.run_in_executor(self._writer, collection.drop)
        finally:
            await loop.run_in_executor(self._readers, collection.close)

    async def close(self) -> None:
        """Stop what was started. The index cannot be opened again."""
        await self._leave()
        self._writer.shutdown(wait=False, cancel_futures=True)
        self._readers.shutdown(wait=False, cancel_futures=True)

    async def drop(self) -> None:
        """See the port. Of Lite the whole directory goes, once its process has ended."""
        if self._remove_files is None:
            for model in list(self._spaces):
                await self._write(lambda collection: collection.drop(), model)
            await self._leave()
        else:
            await self._leave(in_order=False)  # nothing it holds is to be kept
            await asyncio.to_thread(self._remove_files)
        self._unflushed = None

    async def healthy(self) -> bool:
        """Whether Milvus answers within the probe's timeout."""
        if self._lost or self._session is None:
            return False
        try:
            await self._read(lambda collection: collection.probe(), self._timeouts.probe_s)
        except IndexUnavailable:
            return False
        return True

    async def upsert(self, points: Sequence[Point], model: str = "") -> None:
        """See the port. Raises ValueError for a vector of another dimension or an unusable id."""
        await self._write(lambda collection: collection.upsert(points), model)

    async def delete(self, memory: str, fragments: Sequence[str], model: str = "") -> None:
        await self._write(lambda collection: collection.delete(memory, fragments), model)

    async def flush(self) -> None:
        for model in list(self._spaces) or [""]:
            await self._write(lambda collection: collection.flush(), model)
        self._unflushed = None

    async def search(
        self, memory: str, vector: Vector, limit: int, model: str = "", timeout_s: float | None = None
    ) -> tuple[list[str], npt.NDArray[np.float32]]:
        """See the port. At most 16,384 are returned."""
        if limit <= 0:
            return [], np.empty(0, np.float32)
        most_s = self._timeouts.search_s if timeout_s is None else min(timeout_s, self._timeouts.search_s)
        return await self._read(lambda collection: collection.search(memory, vector, limit, most_s), most_s, model)

    async def count(self, memory: str, model: str = "") -> int:
        return await self._read(lambda collection: collection.count(memory), self._timeouts.search_s, model)

    async def ids(self, memory: str, model: str = "") -> list[str]:
        """See the port. Ids are ordered as they are stored, percent-encoded; for ULIDs that is their own order."""
        found: list[str] = []
        more = True
        while more:
            ask = partial(MilvusCollection.ids, memory=memory, after=found[-1] if found else "")
            page, more = await self._read(ask, self._timeouts.search_s, model)
            found += page
        return found

    async def _read(self, work: Callable[[MilvusCollection], T], timeout_s: float, model: str = "") -> T:
        session = self._current()
        collection = session.of(model)
        call = asyncio.get_running_loop().run_in_executor(self._readers, work, collection)
        try:
            # The call's own timeout begins when a thread takes it: this one counts the wait for a thread too.
            async with asyncio.timeout(timeout_s):
                return await call
        except (TimeoutError, TooLate):  # whichever of the two is noticed first
            raise IndexUnavailable(f"Milvus gave no answer within {number_text(timeout_s)} s") from None
        except CollectionMissing as error:
            raise await self._make_anew(session, collection) from error

    async def _write(self, work: Callable[[MilvusCollection], None], model: str = "") -> None:
        try:
            session = self._current()
        except IndexUnavailable:
            self._unflushed = None  # that writes since the last flush may be lost is said with it, once
            raise
        collection = session.of(model)
        if self._unflushed not in (None, session.generation):
            self._unflushed = None
            raise IndexUnavailable("Milvus Lite was started again: what was written since the last flush may be lost")
        self._unflushed = session.generation
        try:
            await asyncio.get_running_loop().run_in_executor(self._writer, work, collection)
        except CollectionMissing as error:
            self._unflushed = None
            raise await self._make_anew(session, collection) from error
        except IndexUnavailable as error:
            self._unflushed = None
            if session.running.supervised:
                self._abandon(session, f"Milvus Lite is being started again after: {error}")
                await session.running.kill()
            raise

    def _current(self) -> Session:
        """The session to use now. Raises IndexLost once after a loss, IndexUnavailable where there is none."""
        if self._session is None:
            raise IndexUnavailable(self._why_not)
        if self._lost:
            self._lost = False
            self._unflushed = None
            raise IndexLost("the vector index came back empty and must be filled again from the journal")
        return self._session

    def _abandon(self, session: Session, why: str) -> None:
        if self._session is session:
            self._session = None
            self._why_not = why

    async def _make_anew(self, session: Session, collection: MilvusCollection) -> IndexUnavailable:
        """Make the missing collection; what to raise: of several callers that found it missing one gets IndexLost."""
        if collection not in session.collections.values():
            return IndexUnavailable("the collection was dropped: its space is no longer used")
        made = await asyncio.get_running_loop().run_in_executor(self._writer, collection.make)
        kind = IndexLost if made and not self._lost else IndexUnavailable
        return kind("the collection was gone from Milvus and was made anew")

    async def _begin(self) -> tuple[Session, bool]:
        """Start and connect; the session, and whether a collection is empty and must be filled."""
        running = await self._start([collection_name(space, self._prefix) for space in self._spaces.values()])
        collections: dict[str, MilvusCollection] = {}
        to_fill = False
        try:
            for space in list(self._spaces.values()):
                collections[space.model], empty = await self._connected(running, space)
                to_fill = to_fill or empty
        except BaseException:
            await running.kill()
            for collection in collections.values():
                await asyncio.get_running_loop().run_in_executor(self._readers, collection.close)
            raise
        self._generation += 1
        self._description = next(iter(collections.values())).description
        self._session = Session(running, collections, self._generation, asyncio.get_running_loop().time())
        return self._session, to_fill

    async def _connected(self, running: Running, space: Space) -> tuple[MilvusCollection, bool]:
        """The collection of a space, and whether it must be filled."""
        name = collection_name(space, self._prefix)
        connecting = partial(connect, running, name, space, self._timeouts, self._consistency)
        return await asyncio.get_running_loop().run_in_executor(self._writer, connecting)

    async def _supervise(self, session: Session) -> None:
        """Start Milvus again whenever it ends."""
        pause_s = PAUSE_MIN_S
        while True:
            why = await session.running.ended()
            self._abandon(session, why)
            logger.warning("%s; starting it again", why)
            await self._close_connection(session)
            if asyncio.get_running_loop().time() - session.begun_s > STEADY_S:
                pause_s = PAUSE_MIN_S
            while self._session is None:
                await asyncio.sleep(pause_s)
                pause_s = min(pause_s * 2, PAUSE_MAX_S)
                try:
                    session, empty = await self._begin()
                except Exception as error:  # whatever it is: no process or file to be had is no reason to end for ever
                    self._why_not = str(error)
                    logger.warning("the vector index is not available: %s", error)
                else:
                    self._lost = self._lost or empty

    async def _leave(self, in_order: bool = True) -> None:
        if self._supervisor is not None:
            self._supervisor.cancel()
            # Not `await`: whoever waits here may be cancelled, too.
            await asyncio.wait({self._supervisor})
            self._supervisor = None
        session, self._session, self._why_not = self._session, None, "the index is not open"
        if session is not None:
            await self._close_connection(session)
            await (session.running.stop() if in_order else session.running.kill())

    async def _close_connection(self, session: Session) -> None:
        for collection in session.collections.values():
            await asyncio.get_running_loop().run_in_executor(self._readers, collection.close)


def connect(
    running: Running, name: str, space: Space, timeouts: Timeouts, consistency: str
) -> tuple[MilvusCollection, bool]:
    """Blocking: connect and make ready; the collection, and whether it is empty: made now, or before a crash that
    came before it was filled."""
    collection = MilvusCollection.connect(running.uri, running.token, name, space, timeouts, consistency)
    try:
        return collection, collection.make() or collection.empty()
    except BaseException:
        collection.close()
        raise


async def open_lite(
    data_dir: Path,
    *,
    timeouts: Timeouts | None = None,
    start_timeout_s: float = 60.0,
    lock_timeout_s: float = 20.0,
    stop_timeout_s: float = 15.0,
) -> MilvusIndex:
    """An index on Milvus Lite in `data_dir`/milvus, which `open` starts as a child process.

    The data directory is made, for this user alone, if it is not there. lock_timeout_s is how long a start waits
    for a predecessor that is still dying to let go of the directory's lock; it is part of start_timeout_s.
    """
    await asyncio.to_thread(data_dir.mkdir, mode=0o700, parents=True, exist_ok=True)

    async def start(collections: Sequence[str]) -> Running:
        return await LiteProcess.start(
            data_dir,
            collections,
            start_timeout_s=start_timeout_s,
            lock_timeout_s=lock_timeout_s,
            stop_timeout_s=stop_timeout_s,
        )

    return MilvusIndex(
        start,
        name="milvus-lite",
        prefix="memstream",
        timeouts=timeouts or Timeouts(),
        consistency="Strong",
        remove_files=partial(remove_files, data_dir),
    )


def connect_milvus(
    uri: str,
    token: str = "",
    *,
    prefix: str = "memstream",
    timeouts: Timeouts | None = None,
    consistency: str = "Bounded",
) -> MilvusIndex:
    """An index on a Milvus server or Zilliz; `open` connects. `prefix` begins the collections' names.

    `consistency` is that of searches: Bounded lags a few seconds behind writes and answers in 7 ms, where Strong
    takes 400.

    Raises ValueError for a URI that is no http, https, tcp or unix one: pymilvus would run Lite in process for it.
    """
    parts = urlsplit(uri)
    if parts.scheme not in ("http", "https", "tcp", "unix") or uri.endswith(".db"):
        raise ValueError(f"not the URI of a Milvus server: {uri!r}")

    async def start(_collections: Sequence[str]) -> Running:
        return Remote(uri, token)

    name = f"milvus at {parts.hostname or parts.path}"  # never the user and password a URI may carry
    return MilvusIndex(start, name=name, prefix=prefix, timeouts=timeouts or Timeouts(), consistency=consistency)
