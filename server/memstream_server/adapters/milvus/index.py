"""The vector index on Milvus: `open_lite` for the embedded one, `connect_milvus` for a server or Zilliz by URI.

How it keeps the port's contract
- pymilvus blocks, so it runs in threads: one for writes, one at a time, and a few for reads.
- A Lite child that ends is restarted, with growing pauses, until `close`. Meanwhile calls raise IndexUnavailable
  immediately. If the new child's collection is empty, the next call raises IndexLost, once.
- Each start of a child is a generation, and a write belongs to the generation it began in. The first write or flush
  after a restart raises IndexUnavailable if there were writes since the last flush, so a flush never acknowledges
  writes that an earlier child lost.
- After a failed write or flush the child is killed, not stopped: an orderly stop flushes, and the flush after a failed
  one deletes the log of the failed one.
- A `MilvusSession` is the connection to one start of Milvus, be it a child process or a server, with its open
  collections.
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

from memstream_server.adapters.milvus.collection import CallTimedOut, CollectionMissing, MilvusCollection, Timeouts
from memstream_server.adapters.milvus.lite import LiteProcess, remove_files
from memstream_server.adapters.milvus.naming import collection_name
from memstream_server.core.printable import number_text
from memstream_server.core.values import Vector
from memstream_server.ports.index import IndexLost, IndexUnavailable, Point
from memstream_server.ports.journal.records import Space


class RunningMilvus(Protocol):
    """A Milvus that accepts connections."""

    uri: str
    token: str
    supervised: bool
    """Whether this process started it and may kill and restart it."""

    async def wait_for_end(self) -> str:
        """Wait until it ends; the reason, for display. Never returns for a server."""
        ...

    async def kill(self) -> None: ...

    async def stop(self) -> None: ...


Start = Callable[[Sequence[str]], Awaitable[RunningMilvus]]
"""Start a Milvus that serves the collections of these names. Raises IndexUnavailable."""


class RemoteMilvus:
    """A Milvus server that this process does not manage. gRPC's channel reconnects."""

    supervised = False

    def __init__(self, uri: str, token: str) -> None:
        self.uri = uri
        self.token = token

    async def wait_for_end(self) -> str:
        """Never returns."""
        await asyncio.Event().wait()
        return ""

    async def kill(self) -> None:
        """Does nothing."""

    async def stop(self) -> None:
        """Does nothing."""


@dataclass(frozen=True, slots=True, eq=False)
class MilvusSession:
    """One connection to one start of Milvus."""

    running: RunningMilvus
    collections: dict[str, MilvusCollection]
    """By model of their space, in the order of opening."""
    generation: int
    begun_s: float
    """Time of the start, by the event loop's clock."""

    def get_collection(self, model: str) -> MilvusCollection:
        """The collection of a space; the first opened if `model` is empty. Raises IndexUnavailable."""
        if model and model not in self.collections:
            raise IndexUnavailable(f"the index of {model} is not open")
        return self.collections[model] if model else next(iter(self.collections.values()))


def connect_collection(
    running: RunningMilvus, name: str, space: Space, timeouts: Timeouts, consistency: str
) -> tuple[MilvusCollection, bool]:
    """Connect and make the collection ready; also whether it is empty: new, or not filled before a crash. Blocking."""
    collection = MilvusCollection.connect(running.uri, running.token, name, space, timeouts, consistency)
    try:
        return collection, collection.ensure_ready() or collection.is_empty()
    except BaseException:
        collection.close()
        raise


logger = logging.getLogger(__name__)

T = TypeVar("T")

READ_THREADS = 4
PAUSE_MIN_S = 0.1
PAUSE_MAX_S = 30.0
STEADY_S = 60.0
"""A child that ran this long is restarted without a pause."""


class MilvusIndex:
    """`ports.index.VectorIndex` on Milvus. See the module's rules."""

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
        """Removes all files of an embedded Milvus that has ended; None for a server."""
        self._prefix = prefix
        self._timeouts = timeouts
        self._consistency = consistency
        self._description = name
        self._spaces: dict[str, Space] = {}
        self._session: MilvusSession | None = None
        self._unavailable_reason = "the index is not open"
        self._generation = 0
        self._unflushed: int | None = None
        """Generation of the writes since the last flush; None if there are none."""
        self._lost = False
        self._supervisor: asyncio.Task[None] | None = None
        self._writer = ThreadPoolExecutor(1, thread_name_prefix="milvus-write")
        self._readers = ThreadPoolExecutor(READ_THREADS, thread_name_prefix="milvus-read")

    @property
    def description(self) -> str:
        """Engine and version once connected; before, the address."""
        return self._description

    @property
    def is_idle(self) -> bool:
        return False

    @property
    def keeps_deleted(self) -> bool:
        """True for Lite, which only marks rows as deleted; a server compacts its files itself."""
        return self._remove_files is not None

    async def open(self, space: Space, beside: Space | None = None) -> bool:
        """See the port. May be repeated, after a failure or for another space: it closes what was open first."""
        await self._close_session()
        self._spaces = {each.model: each for each in (space, beside) if each is not None}
        session, empty = await self._start_session()
        self._lost = False
        self._supervisor = asyncio.create_task(self._restart_when_ended(session), name="milvus supervisor")
        return empty

    async def add_space(self, space: Space) -> bool:
        session = self._current_session()
        if space.model in session.collections:
            return False
        collection, empty = await self._open_collection(session.running, space)
        if self._session is not session:  # Milvus restarted meanwhile, without this collection
            await asyncio.get_running_loop().run_in_executor(self._readers, collection.close)
            raise IndexUnavailable(self._unavailable_reason)
        session.collections[space.model] = collection
        self._spaces[space.model] = space
        return empty

    async def remove_space(self, space: Space) -> None:
        session = self._current_session()
        collection = session.collections.get(space.model)
        if collection is not None and len(session.collections) == 1:
            raise IndexUnavailable(f"the index of {space.model} is the only one")
        if collection is None:
            collection, _ = await self._open_collection(session.running, space)
        session.collections.pop(space.model, None)  # so that no caller finds it missing and recreates it
        self._spaces.pop(space.model, None)
        loop = asyncio.get_running_loop()
        try:
            await loop.run_in_executor(self._writer, collection.drop_collection)
        finally:
            await loop.run_in_executor(self._readers, collection.close)

    async def close(self) -> None:
        """Stop everything. The index cannot be opened again."""
        await self._close_session()
        self._writer.shutdown(wait=False, cancel_futures=True)
        self._readers.shutdown(wait=False, cancel_futures=True)

    async def drop_all(self) -> None:
        """See the port. For Lite it removes the whole directory after the process has ended."""
        if self._remove_files is None:
            for model in list(self._spaces):
                await self._run_write(lambda collection: collection.drop_collection(), model)
            await self._close_session()
        else:
            await self._close_session(in_order=False)  # nothing in it is kept
            await asyncio.to_thread(self._remove_files)
        self._unflushed = None

    async def erase_deleted(self) -> bool:
        """See the port. A Lite of another version than child.py knows cannot."""
        if self._remove_files is None:
            return True  # a server compacts its files itself
        done: list[bool] = []
        flushed = self._unflushed is None
        for model in list(self._spaces):
            await self._run_write(lambda collection: done.append(collection.compact_lite()), model)
        if flushed:
            self._unflushed = None
        return all(done)

    async def is_healthy(self) -> bool:
        """Whether Milvus answers within the probe's timeout."""
        if self._lost or self._session is None:
            return False
        try:
            await self._run_read(lambda collection: collection.request_version(), self._timeouts.probe_s)
        except IndexUnavailable:
            return False
        return True

    async def upsert(self, points: Sequence[Point], model: str = "") -> None:
        """See the port. Raises ValueError for a vector of another dimension or an unusable id."""
        await self._run_write(lambda collection: collection.upsert(points), model)

    async def delete(self, memory: str, fragments: Sequence[str], model: str = "") -> None:
        await self._run_write(lambda collection: collection.delete(memory, fragments), model)

    async def flush(self) -> None:
        for model in list(self._spaces) or [""]:
            await self._run_write(lambda collection: collection.flush(), model)
        self._unflushed = None

    async def search(
        self, memory: str, vector: Vector, limit: int, model: str = "", timeout_s: float | None = None
    ) -> tuple[list[str], npt.NDArray[np.float32]]:
        """See the port. Returns at most 16,384."""
        if limit <= 0:
            return [], np.empty(0, np.float32)
        most_s = self._timeouts.search_s if timeout_s is None else min(timeout_s, self._timeouts.search_s)
        return await self._run_read(lambda collection: collection.search(memory, vector, limit, most_s), most_s, model)

    async def count(self, memory: str, model: str = "") -> int:
        return await self._run_read(lambda collection: collection.count_rows(memory), self._timeouts.search_s, model)

    async def list_ids(self, memory: str, model: str = "") -> list[str]:
        """See the port. Ordered by the stored, percent-encoded ids; for ULIDs the order is the same."""
        found: list[str] = []
        more = True
        while more:
            ask = partial(MilvusCollection.list_ids, memory=memory, after=found[-1] if found else "")
            page, more = await self._run_read(ask, self._timeouts.search_s, model)
            found += page
        return found

    async def _run_read(self, work: Callable[[MilvusCollection], T], timeout_s: float, model: str = "") -> T:
        session = self._current_session()
        collection = session.get_collection(model)
        call = asyncio.get_running_loop().run_in_executor(self._readers, work, collection)
        try:
            # The call's own timeout starts in the thread; this one includes the wait for a thread.
            async with asyncio.timeout(timeout_s):
                return await call
        except (TimeoutError, CallTimedOut):  # either may fire first
            raise IndexUnavailable(f"Milvus gave no answer within {number_text(timeout_s)} s") from None
        except CollectionMissing as error:
            raise await self._recreate_collection(session, collection) from error

    async def _run_write(self, work: Callable[[MilvusCollection], None], model: str = "") -> None:
        try:
            session = self._current_session()
        except IndexUnavailable:
            self._unflushed = None  # this error also reports that writes since the last flush may be lost
            raise
        collection = session.get_collection(model)
        if self._unflushed not in (None, session.generation):
            self._unflushed = None
            raise IndexUnavailable("Milvus Lite was restarted: writes since the last flush may be lost")
        self._unflushed = session.generation
        try:
            await asyncio.get_running_loop().run_in_executor(self._writer, work, collection)
        except CollectionMissing as error:
            self._unflushed = None
            raise await self._recreate_collection(session, collection) from error
        except IndexUnavailable as error:
            self._unflushed = None
            if session.running.supervised:
                self._drop_session(session, f"Milvus Lite is being restarted after: {error}")
                await session.running.kill()
            raise

    def _current_session(self) -> MilvusSession:
        """The current session. Raises IndexLost once after a loss, IndexUnavailable if there is no session."""
        if self._session is None:
            raise IndexUnavailable(self._unavailable_reason)
        if self._lost:
            self._lost = False
            self._unflushed = None
            raise IndexLost("the vector index is empty and must be filled again from the journal")
        return self._session

    def _drop_session(self, session: MilvusSession, why: str) -> None:
        if self._session is session:
            self._session = None
            self._unavailable_reason = why

    async def _recreate_collection(self, session: MilvusSession, collection: MilvusCollection) -> IndexUnavailable:
        """Recreate the missing collection; the error to raise: one of several callers gets IndexLost."""
        if collection not in session.collections.values():
            return IndexUnavailable("the collection was dropped: its space is no longer used")
        made = await asyncio.get_running_loop().run_in_executor(self._writer, collection.ensure_ready)
        kind = IndexLost if made and not self._lost else IndexUnavailable
        return kind("the collection was missing in Milvus and was recreated")

    async def _start_session(self) -> tuple[MilvusSession, bool]:
        """Start and connect; the session, and whether a collection is empty and must be filled."""
        running = await self._start([collection_name(space, self._prefix) for space in self._spaces.values()])
        collections: dict[str, MilvusCollection] = {}
        to_fill = False
        try:
            for space in list(self._spaces.values()):
                collections[space.model], empty = await self._open_collection(running, space)
                to_fill = to_fill or empty
        except BaseException:
            await running.kill()
            for collection in collections.values():
                await asyncio.get_running_loop().run_in_executor(self._readers, collection.close)
            raise
        self._generation += 1
        self._description = next(iter(collections.values())).description
        self._session = MilvusSession(running, collections, self._generation, asyncio.get_running_loop().time())
        return self._session, to_fill

    async def _open_collection(self, running: RunningMilvus, space: Space) -> tuple[MilvusCollection, bool]:
        """The collection of a space, and whether it is empty and must be filled."""
        name = collection_name(space, self._prefix)
        connecting = partial(connect_collection, running, name, space, self._timeouts, self._consistency)
        return await asyncio.get_running_loop().run_in_executor(self._writer, connecting)

    async def _restart_when_ended(self, session: MilvusSession) -> None:
        """Restart Milvus whenever it ends."""
        pause_s = PAUSE_MIN_S
        while True:
            why = await session.running.wait_for_end()
            self._drop_session(session, why)
            logger.warning("%s; restarting it", why)
            await self._close_connection(session)
            if asyncio.get_running_loop().time() - session.begun_s > STEADY_S:
                pause_s = PAUSE_MIN_S
            while self._session is None:
                await asyncio.sleep(pause_s)
                pause_s = min(pause_s * 2, PAUSE_MAX_S)
                try:
                    session, empty = await self._start_session()
                except Exception as error:  # a lack of processes or files must not end the supervisor
                    self._unavailable_reason = str(error)
                    logger.warning("the vector index is not available: %s", error)
                else:
                    self._lost = self._lost or empty

    async def _close_session(self, in_order: bool = True) -> None:
        if self._supervisor is not None:
            self._supervisor.cancel()
            # Not `await`: the task that runs this may be cancelled, too.
            await asyncio.wait({self._supervisor})
            self._supervisor = None
        session, self._session, self._unavailable_reason = self._session, None, "the index is not open"
        if session is not None:
            await self._close_connection(session)
            await (session.running.stop() if in_order else session.running.kill())

    async def _close_connection(self, session: MilvusSession) -> None:
        for collection in session.collections.values():
            await asyncio.get_running_loop().run_in_executor(self._readers, collection.close)


async def open_lite(
    data_dir: Path,
    *,
    timeouts: Timeouts | None = None,
    start_timeout_s: float = 60.0,
    lock_timeout_s: float = 20.0,
    stop_timeout_s: float = 15.0,
) -> MilvusIndex:
    """An index on Milvus Lite in `data_dir`/milvus, which `open` starts as a child process.

    Creates the data directory, for this user only, if it is missing. lock_timeout_s: how long a start waits until a
    previous process that is still exiting releases the directory's lock; part of start_timeout_s.
    """
    await asyncio.to_thread(data_dir.mkdir, mode=0o700, parents=True, exist_ok=True)

    async def start_lite(collections: Sequence[str]) -> RunningMilvus:
        return await LiteProcess.start(
            data_dir,
            collections,
            start_timeout_s=start_timeout_s,
            lock_timeout_s=lock_timeout_s,
            stop_timeout_s=stop_timeout_s,
        )

    return MilvusIndex(
        start_lite,
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
    """An index on a Milvus server or Zilliz; `open` connects. `prefix` is the prefix of the collections' names.

    `consistency` is the level of searches: Bounded lags a few seconds behind writes and answers in 7 ms, Strong in 400.

    Raises ValueError unless the scheme is http, https, tcp or unix: pymilvus would run Lite in this process.
    """
    parts = urlsplit(uri)
    if parts.scheme not in ("http", "https", "tcp", "unix") or uri.endswith(".db"):
        raise ValueError(f"not the URI of a Milvus server: {uri!r}")

    async def make_remote(_collections: Sequence[str]) -> RunningMilvus:
        return RemoteMilvus(uri, token)

    name = f"milvus at {parts.hostname or parts.path}"  # without user and password
    return MilvusIndex(make_remote, name=name, prefix=prefix, timeouts=timeouts or Timeouts(), consistency=consistency)
