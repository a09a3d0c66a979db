"""What a peer's runner is: a process that answers one line of JSON with another, and times the peer's own calls.

Standard library only, and nothing of memstream: it runs in each peer's environment (`python -m benchmarks.peers.NAME`).

    {"do": "open", "memory": "m"}                               {}
    {"do": "add", "memory": "m", "items": [...]}                {"ms": [...]}               one call for all of them
    {"do": "add_each", "memory": "m", "items": [...]}           {"ms": [...]}               a call for each
    {"do": "recall", "memory": "m", "queries": [...], "k": 10}  {"ms": [...], "found": [[line, ...], ...], "errors": []}
    {"do": "lines", "memory": "m"}                              {"lines": [...]}            all it says it holds
    {"do": "processes"}                                         {"pids": [...], "resident_mb": 1.0, "cpu_s": 1.0}
    {"do": "close"}                                             {}

A reply {"error": "..."} says what the peer raised. Vectors come from a table of all texts; for a text that is not in it
(DB-GPT puts numbers in front of its own) the runner asks, in between: {"embed": [texts]} is answered by {"vectors":
[...]}. The time that takes is taken off the call's, as is that of looking vectors up, and so is the CPU.
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
    """An observation. `line`: date, speaker and words, which is what has a vector; `time_s`: of the epoch."""

    line: str
    text: str
    speaker: str
    session: str
    time_s: float


@dataclass(frozen=True)
class Query:
    """A question, and the time it is asked at. `judged`: only the ranking counts, and asking is to change nothing."""

    text: str
    now_s: float
    judged: bool = False


@dataclass(frozen=True)
class Processes:
    """Processes together: resident megabytes, and seconds of CPU since they began."""

    pids: list[int]
    resident_mb: float
    cpu_s: float


class Peer(Protocol):
    """A memory system as the benchmark sees it. What raises is told and counted."""

    async def open(self, memory: str) -> None:
        """Makes a memory, or finds the one an earlier process has made in the same directory. Not timed."""
        ...

    async def add(self, memory: str, items: Sequence[Item]) -> None:
        """The fastest way it has; returns when it says that they are kept."""
        ...

    async def recall(self, memory: str, query: Query, k: int) -> list[str]:
        """At most k of what it holds, best first: the lines, or texts that contain them."""
        ...

    async def lines(self, memory: str) -> list[str]:
        """All it holds."""
        ...

    def processes(self) -> Processes:
        """Those that hold the memory. All are killed in the test."""
        ...

    async def close(self) -> None:
        """Ends in order."""
        ...


class Vectors:
    """Vectors by text, read from the driver's table, so that they cost no memory here."""

    def __init__(self, table: Path, ask: Callable[[list[str]], list[list[float]]]) -> None:
        self.dimension, texts = json.loads(table.with_suffix(".json").read_text("utf-8"))
        self._places = {text: place for place, text in enumerate(texts)}
        self._file = os.open(table, os.O_RDONLY)
        self._ask = ask
        self.seconds = self.cpu_s = 0.0
        """Spent here so far."""

    def of(self, texts: Sequence[str]) -> list[list[float]]:
        """A vector each, of unit length."""
        began, cpu_began = time.perf_counter(), time.thread_time()
        strange = [text for text in texts if text not in self._places]
        asked = dict(zip(strange, self._ask(strange), strict=True)) if strange else {}
        vectors = [asked[text] if text in asked else self._read(self._places[text]) for text in texts]
        self.seconds += time.perf_counter() - began
        self.cpu_s += time.thread_time() - cpu_began
        return vectors

    def one(self, text: str) -> list[float]:
        """The vector of one text."""
        return self.of([text])[0]

    def _read(self, place: int) -> list[float]:
        row = array("f")
        row.frombytes(os.pread(self._file, self.dimension * row.itemsize, place * self.dimension * row.itemsize))
        return row.tolist()


@dataclass(frozen=True)
class Given:
    """What a runner is started with."""

    directory: Path
    """Where it may write; an earlier process's files are there when it is to find them again."""
    vectors: Vectors
    variant: str
    """Which way of using the peer, where there are several."""
    model: str
    """Directory of the model that made the vectors; empty where memstream's hashing did."""


def own_process() -> Processes:
    """Peer.processes of a peer that lives in this process; no megabytes on systems without /proc."""
    try:
        pages = int(Path("/proc/self/statm").read_text("ascii").split()[1])
    except OSError:
        pages = 0
    return Processes([os.getpid()], pages * os.sysconf("SC_PAGE_SIZE") / 1e6, time.process_time())


def main(make: Callable[[Given], Awaitable[Peer]]) -> None:
    """Runs the peer until the driver closes it, or is gone."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--directory", type=Path, required=True)
    parser.add_argument("--vectors", type=Path, required=True)
    parser.add_argument("--variant", default="")
    parser.add_argument("--model", default="")
    given = parser.parse_args()
    replies = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # whatever a package prints is no reply

    def ask(texts: list[str]) -> list[list[float]]:
        _say(replies, {"embed": texts})
        vectors: list[list[float]] = json.loads(sys.stdin.readline())["vectors"]
        return vectors

    vectors = Vectors(given.vectors, ask)
    asyncio.run(_serve(make, Given(given.directory, vectors, given.variant, given.model), replies))


async def _serve(make: Callable[[Given], Awaitable[Peer]], given: Given, replies: TextIO) -> None:
    try:
        peer = await make(given)
    except Exception as error:  # whatever it is, the table is to say it
        _say(replies, {"error": _said(error)})
        return
    _say(replies, {})
    while line := await asyncio.to_thread(sys.stdin.readline):
        request = json.loads(line)
        try:
            reply = await _answer(peer, given.vectors, request)
        except Exception as error:
            reply = {"error": _said(error)}
        _say(replies, reply)
        if request["do"] == "close":
            return


async def _answer(peer: Peer, vectors: Vectors, request: dict[str, Any]) -> dict[str, Any]:
    memory = request.get("memory", "")
    match request["do"]:
        case "open":
            await peer.open(memory)
        case "add":
            items = [Item(**item) for item in request["items"]]
            return {"ms": [await _timed(vectors, partial(peer.add, memory, items))]}
        case "add_each":
            items = [Item(**item) for item in request["items"]]
            return {"ms": [await _timed(vectors, partial(peer.add, memory, [item])) for item in items]}
        case "recall":
            return await _recall(peer, vectors, memory, [Query(**query) for query in request["queries"]], request["k"])
        case "lines":
            return {"lines": await peer.lines(memory)}
        case "processes":
            found = peer.processes()
            return asdict(found) | {"cpu_s": found.cpu_s - vectors.cpu_s}
        case "close":
            await peer.close()
    return {}


async def _recall(peer: Peer, vectors: Vectors, memory: str, queries: list[Query], k: int) -> dict[str, Any]:
    found: list[list[str]] = []
    errors: list[str] = []

    async def ask(query: Query) -> None:
        try:
            found.append(await peer.recall(memory, query, k))
        except Exception as error:  # a peer that raises has found nothing
            found.append([])
            errors.append(_said(error))

    ms = [await _timed(vectors, partial(ask, query)) for query in queries]
    return {"ms": ms, "found": found, "errors": errors}


async def _timed(vectors: Vectors, work: Callable[[], Awaitable[None]]) -> float:
    """Milliseconds, without those spent on vectors."""
    before, began = vectors.seconds, time.perf_counter()
    await work()
    return (time.perf_counter() - began - (vectors.seconds - before)) * 1e3


def _said(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"


def _say(replies: TextIO, reply: dict[str, Any]) -> None:
    replies.write(json.dumps(reply) + "\n")
    replies.flush()
