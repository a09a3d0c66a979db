"""The runner side of the comparison: answers JSON lines on standard input and times the peer's own calls.

Standard library only, and nothing of memstream: it runs in each peer's environment (`python -m benchmarks.peers.NAME`).

    {"do": "open", "memory": "m"}                               {}
    {"do": "add", "memory": "m", "items": [...]}                {"ms": [...]}               one call for all of them
    {"do": "add_each", "memory": "m", "items": [...], "batch": 1}   {"ms": [...]}           a call for each batch
    {"do": "recall", "memory": "m", "queries": [...], "k": 10}  {"ms": [...], "found": [[line, ...], ...], "errors": []}
    {"do": "lines", "memory": "m"}                              {"lines": [...]}            all lines that it lists
    {"do": "processes"}                                         {"pids": [...], "resident_mb": 1.0, "cpu_s": 1.0}
    {"do": "close"}                                             {}

A reply {"error": "..."} has the peer's exception. Vectors come from a table of all texts. For a text that is not in the
table (DB-GPT puts numbers in front of its own), the runner sends {"embed": [texts]} before its reply, and the driver
answers {"vectors": [...]}. The time and CPU of this, and of looking vectors up, are subtracted from the call.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import sys
import time
from array import array
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, Protocol, TextIO


@dataclass(frozen=True)
class Item:
    """An observation. `line`: date, speaker and words, the text that has a vector; `time_s`: since the epoch."""

    line: str
    text: str
    speaker: str
    session: str
    time_s: float


@dataclass(frozen=True)
class Query:
    """A question and the time it is asked at. `judged`: only the ranking counts, and the recall must change nothing."""

    text: str
    now_s: float
    judged: bool = False


@dataclass(frozen=True)
class Processes:
    """Totals over processes: resident megabytes, and CPU seconds since they started."""

    pids: list[int]
    resident_mb: float
    cpu_s: float
    proportional_mb: float = 0.0
    """Proportional set size: memory that processes share is divided among them. Zero where it is not measured."""


class Peer(Protocol):
    """A memory system as the benchmark sees it. Exceptions are reported and counted."""

    async def open(self, memory: str) -> None:
        """Create a memory, or find the one that an earlier process created in the same directory. Not timed."""
        ...

    async def add(self, memory: str, items: Sequence[Item]) -> None:
        """Add by the fastest way the peer has; return when it says that the items are kept."""
        ...

    async def recall(self, memory: str, query: Query, k: int) -> list[str]:
        """At most k texts, best first: the lines, or texts that contain them."""
        ...

    async def lines(self, memory: str) -> list[str]:
        """All lines it lists."""
        ...

    def processes(self) -> Processes:
        """The processes that hold the memory. The test kills all of them."""
        ...

    async def close(self) -> None:
        """Shut down in order."""
        ...


class Vectors:
    """Vectors by text, read from the driver's table on disk, so that they use no memory here."""

    def __init__(self, table: Path, ask: Callable[[list[str]], list[list[float]]]) -> None:
        self.dimension, texts = json.loads(table.with_suffix(".json").read_text("utf-8"))
        self._places = {text: place for place, text in enumerate(texts)}
        self._file = os.open(table, os.O_RDONLY)
        self._ask = ask
        self.seconds = self.cpu_s = 0.0
        """Spent here so far."""

    def look_up(self, texts: Sequence[str]) -> list[list[float]]:
        """A unit vector for each text."""
        began, cpu_began = time.perf_counter(), time.thread_time()
        unknown = [text for text in texts if text not in self._places]
        asked = dict(zip(unknown, self._ask(unknown), strict=True)) if unknown else {}
        vectors = [asked[text] if text in asked else self._read(self._places[text]) for text in texts]
        self.seconds += time.perf_counter() - began
        self.cpu_s += time.thread_time() - cpu_began
        return vectors

    def look_up_one(self, text: str) -> list[float]:
        """The vector of one text."""
        return self.look_up([text])[0]

    def _read(self, place: int) -> list[float]:
        row = array("f")
        row.frombytes(os.pread(self._file, self.dimension * row.itemsize, place * self.dimension * row.itemsize))
        return row.tolist()


@dataclass(frozen=True)
class PeerOptions:
    """The options a runner is started with."""

    directory: Path
    """Where it may write; has the files of an earlier process that it is to reopen."""
    vectors: Vectors
    variant: str
    """Which way of using the peer, if there are several."""
    model: str
    """Directory of the model that made the vectors; empty for memstream's hashing."""


def own_process() -> Processes:
    """Peer.processes of a peer inside this process; zero megabytes on systems without /proc."""
    try:
        pages = int(Path("/proc/self/statm").read_text("ascii").split()[1])
    except OSError:
        pages = 0
    return Processes([os.getpid()], pages * os.sysconf("SC_PAGE_SIZE") / 1e6, time.process_time())


def run_peer(make_peer: Callable[[PeerOptions], Awaitable[Peer]]) -> None:
    """Run the peer until the driver closes it or exits."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--directory", type=Path, required=True)
    parser.add_argument("--vectors", type=Path, required=True)
    parser.add_argument("--variant", default="")
    parser.add_argument("--model", default="")
    given = parser.parse_args()
    replies = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # what a package prints must not mix with replies

    def ask(texts: list[str]) -> list[list[float]]:
        _send_reply(replies, {"embed": texts})
        vectors: list[list[float]] = json.loads(sys.stdin.readline())["vectors"]
        return vectors

    vectors = Vectors(given.vectors, ask)
    asyncio.run(_serve_requests(make_peer, PeerOptions(given.directory, vectors, given.variant, given.model), replies))


async def _serve_requests(
    make_peer: Callable[[PeerOptions], Awaitable[Peer]], given: PeerOptions, replies: TextIO
) -> None:
    try:
        peer = await make_peer(given)
    except Exception as error:  # any error goes into the table
        _send_reply(replies, {"error": _describe_error(error)})
        return
    _send_reply(replies, {})
    while line := await asyncio.to_thread(sys.stdin.readline):
        request = json.loads(line)
        try:
            reply = await _answer_request(peer, given.vectors, request)
        except Exception as error:
            reply = {"error": _describe_error(error)}
        _send_reply(replies, reply)
        if request["do"] == "close":
            return
    await peer.close()  # the driver has ended: no server of the peer may stay


async def _answer_request(peer: Peer, vectors: Vectors, request: dict[str, Any]) -> dict[str, Any]:
    memory = request.get("memory", "")
    match request["do"]:
        case "open":
            await peer.open(memory)
        case "add":
            items = [Item(**item) for item in request["items"]]
            return {"ms": [await _time_call(vectors, partial(peer.add, memory, items))]}
        case "add_each":
            items = [Item(**item) for item in request["items"]]
            batches = [items[at : at + request["batch"]] for at in range(0, len(items), request["batch"])]
            return {"ms": [await _time_call(vectors, partial(peer.add, memory, batch)) for batch in batches]}
        case "recall":
            return await _answer_recall(
                peer, vectors, memory, [Query(**query) for query in request["queries"]], request["k"]
            )
        case "lines":
            return {"lines": await peer.lines(memory)}
        case "processes":
            found = peer.processes()
            return asdict(found) | {"cpu_s": found.cpu_s - vectors.cpu_s}
        case "close":
            await peer.close()
    return {}


async def _answer_recall(peer: Peer, vectors: Vectors, memory: str, queries: list[Query], k: int) -> dict[str, Any]:
    found: list[list[str]] = []
    errors: list[str] = []

    async def ask(query: Query) -> None:
        try:
            found.append(await peer.recall(memory, query, k))
        except Exception as error:  # an exception counts as an empty answer
            found.append([])
            errors.append(_describe_error(error))

    ms = [await _time_call(vectors, partial(ask, query)) for query in queries]
    return {"ms": ms, "found": found, "errors": errors}


async def _time_call(vectors: Vectors, work: Callable[[], Awaitable[None]]) -> float:
    """Milliseconds, without the time spent on vectors."""
    before, began = vectors.seconds, time.perf_counter()
    await work()
    return (time.perf_counter() - began - (vectors.seconds - before)) * 1e3


def _describe_error(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"


def _send_reply(replies: TextIO, reply: dict[str, Any]) -> None:
    replies.write(json.dumps(reply) + "\n")
    replies.flush()
