"""What the benchmarks of recall share: memories that are filled, questions to them, and the same from bare parts."""

from __future__ import annotations

import asyncio
import contextlib
import random
import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field

from bare import Bm25, BothLegs, Floats, Messages, MilvusLite, scanned
from claims import CPU
from echo import EchoServer
from probe import Pause
from report import Report, own_cpu_s, percentile
from served import Served
from texts import Talk

import memstream
from memstream.codec import query_to_wire
from memstream.v1 import stream_service_pb2 as pb
from memstream_server.adapters.models.hashing import HashingEmbedder

LIMIT = 10
P50, P99 = "p50 ms", "p99 ms"
COLUMNS = (P50, P99, "max ms", CPU, "server µs")
ASKED_MAX_S = 30.0
"""How long one series of questions takes at most."""
_FEW = ("echo", "numpy scan", "BM25")
_MORE = ("embedding", "both lexical legs", "messages")
"""What is unavoidable beside echo and scan; the legs are two, one of them BM25."""
BATCH = 500
FILLING = 16
"""Memories filled at once."""


@dataclass
class Texts:
    """Sentences by memory, and questions about them."""

    held: list[list[str]]
    chosen: random.Random = field(default_factory=lambda: random.Random(7))
    talk: Talk = field(default_factory=lambda: Talk(2))

    def question(self, place: int) -> str:
        """Four words of something that memory holds."""
        return self.talk.question(self.chosen.choice(self.held[place]))

    def questions(self, count: int, places: int = 0) -> list[tuple[int, str]]:
        """Of memories drawn at random, from the first `places` of them where that is given."""
        drawn = [self.chosen.randrange(places or len(self.held)) for _ in range(count)]
        return [(place, self.question(place)) for place in drawn]

    def vectors(self) -> list[Floats]:
        """float32[fragments, dimension] of each memory."""
        embedder = HashingEmbedder()
        return [embedder.vectors(texts) for texts in self.held]


async def fill(client: memstream.Client, prefix: str, sizes: Sequence[int]) -> Texts:
    """New memories `prefix-0`, `prefix-1`, ... of so many fragments each, all of them in the index when it returns."""
    talk = Talk()
    material = [talk.observations(size) for size in sizes]
    room = asyncio.Semaphore(FILLING)

    async def one(place: int) -> memstream.Memory:
        async with room:
            memory = await client.create_memory(f"{prefix}-{place}")
            for start in range(0, sizes[place], BATCH):
                await memory.observe_batch(material[place][start : start + BATCH])
        return memory

    memories = await asyncio.gather(*(one(place) for place in range(len(sizes))))
    await settle(memories[-1])
    return Texts([[str(one.body) for one in each] for each in material])


async def settle(memory: memstream.Memory) -> None:
    """Wait until the index has everything that is stored by now, in whichever memory: a round takes all of it."""
    async with memory.observe("settle", ack_level=memstream.AckLevel.INDEXED) as stream:
        await stream.send("All of it is there.", session="settle")


class Recalling:
    """Recall streams into memories `prefix-0`, `prefix-1`, ..., opened when they are first asked."""

    def __init__(self, server: Served, client: memstream.Client, prefix: str) -> None:
        self._server = server
        self._client = client
        self._prefix = prefix
        self._streams: dict[int, memstream.RecallStream] = {}
        self._stack = contextlib.AsyncExitStack()

    async def __aenter__(self) -> Recalling:
        return self

    async def __aexit__(self, *error: object) -> None:
        await self._stack.aclose()

    async def answer(self, place: int, text: str) -> memstream.Answer:
        """One question, with the defaults: ten fragments and the working memory, reinforcing."""
        stream = self._streams.get(place)
        if stream is None:
            memory = self._client.memory(f"{self._prefix}-{place}")
            stream = self._streams[place] = await self._stack.enter_async_context(memory.recall())
        return await stream.query(text)

    async def ask(
        self, questions: Sequence[tuple[int, str]], pause_s: float = 0.0
    ) -> tuple[list[float], dict[str, float]]:
        """Seconds of each question, one at a time, and the server's own mean milliseconds of each step.

        With a pause after each, which does not count. Ends after ASKED_MAX_S: where the machine is too small for a
        load, each question waits behind a backlog.
        """
        for place in {place for place, _ in questions} - self._streams.keys():
            await self.answer(place, questions[0][1])
        seconds: list[float] = []
        steps: defaultdict[str, float] = defaultdict(float)
        until = time.monotonic() + ASKED_MAX_S
        for place, text in questions:
            if time.monotonic() > until:
                break
            began = time.perf_counter()
            answer = await self.answer(place, text)
            seconds.append(time.perf_counter() - began)
            for step, spent in answer.timings.items():
                steps[step] += spent * 1e3
            if pause_s:
                await asyncio.sleep(pause_s)
        return seconds, {step: spent / len(seconds) for step, spent in steps.items()}

    async def settle(self) -> None:
        """Wait until the server has nothing left to do but for what it is asked."""
        await settle(self._client.memory(f"{self._prefix}-0"))

    async def measure(
        self, report: Report, row: str, questions: Sequence[tuple[int, str]], pause_s: float = 0.0
    ) -> dict[str, float]:
        """A row of these questions, with all CPU that was used meanwhile; the steps."""
        own, before = own_cpu_s(), self._server.cpu()
        seconds, steps = await self.ask(questions, pause_s)
        enter(report, row, seconds, own_cpu_s() - own, self._server.cpu().since(before).both)
        return steps

    async def measure_once(self, report: Report, row: str, questions: Sequence[tuple[int, str]]) -> None:
        """A row of questions to memories that were not asked before: by a call each, as a stream is opened first."""
        own, before = own_cpu_s(), self._server.cpu()
        seconds = []
        for place, text in questions:
            began = time.perf_counter()
            await self._client.memory(f"{self._prefix}-{place}").recall_once(text)
            seconds.append(time.perf_counter() - began)
        enter(report, row, seconds, own_cpu_s() - own, self._server.cpu().since(before).both)


class Parts:
    """What a recall cannot do without, measured alone: an echo of question and answer, a scan, BM25; and all of it."""

    def __init__(self, echo: EchoServer, texts: Texts, answer: memstream.Answer) -> None:
        self._echo = echo
        self._texts = texts
        self._vectors = texts.vectors()
        self._bm25: dict[int, Bm25] = {}
        self._legs: dict[int, BothLegs] = {}
        self._messages = Messages(answer)
        self._query = pb.RecallRequest(query=query_to_wire("1", texts.question(0)))
        size = sum(len(hit.fragment.content) + 250 for hit in answer)
        size += sum(len(one.content) + 150 for one in answer.working_memory)
        self._answer = pb.RecallResponse(done=pb.RecallDone(query_id="1", degraded="x" * size))

    @property
    def vectors(self) -> list[Floats]:
        """Of every memory."""
        return self._vectors

    def pause(self) -> Pause:
        """The longest of the echo's event loop since the last measurement began."""
        return self._echo.pause(self._since)

    async def measure(self, report: Report, row: str, questions: Sequence[tuple[int, str]]) -> None:
        """Rows of the sums, question by question: of the few parts, of all that is unavoidable; and of each part."""
        for place, _ in questions:
            if place not in self._bm25:
                self._bm25[place] = Bm25(self._texts.held[place])
                self._legs[place] = BothLegs(self._texts.held[place])
        embedder, self._since = HashingEmbedder(), time.monotonic()
        times: dict[str, list[float]] = {part: [] for part in (*_FEW, *_MORE)}
        own, echo_before = own_cpu_s(), self._echo.cpu_s()
        async with self._echo.answering(self._query, self._answer) as ask:
            for place, text in questions:
                began = time.perf_counter()
                query = embedder.vectors([text])[0]
                times["embedding"].append(time.perf_counter() - began)
                times["echo"].append(await ask())
                times["numpy scan"].append(scanned(self._vectors[place], query, LIMIT))
                times["BM25"].append(self._bm25[place].searched(text, LIMIT))
                times["both lexical legs"].append(self._legs[place].asked(text))
                times["messages"].append(self._messages.made_and_read())
        for part, seconds in times.items():
            enter(report, f"{row}: {part} alone", seconds)
        few = [sum(each) for each in zip(*(times[part] for part in _FEW), strict=True)]
        more = sum(sum(times[part]) for part in _MORE)
        enter(report, row, few, own_cpu_s() - own - more, self._echo.cpu_s() - echo_before)
        whole = [sum(each) for each in zip(*(times[part] for part in ("echo", "numpy scan", *_MORE)), strict=True)]
        enter(report, whole_of(row), whole)


def whole_of(row: str) -> str:
    """The row of the sums of all that is unavoidable, beside that row of Parts."""
    return f"all unavoidable parts, {row}"


async def measure_lite(
    report: Report, row: str, lite: MilvusLite, texts: Texts, questions: Sequence[tuple[int, str]]
) -> None:
    """The same questions as searches of a bare Milvus Lite that holds the same vectors."""
    queries = HashingEmbedder().vectors([text for _, text in questions])

    def search() -> list[float]:
        return [lite.searched(place, query, LIMIT) for (place, _), query in zip(questions, queries, strict=True)]

    own, before = own_cpu_s(), lite.cpu_s()
    seconds = await asyncio.to_thread(search)
    enter(report, row, seconds, own_cpu_s() - own, lite.cpu_s() - before)


def enter(
    report: Report, row: str, seconds: Sequence[float], own_s: float | None = None, server_s: float = 0.0
) -> None:
    """A round's times, and the CPU of this process and of the others where it was measured."""
    figures = {
        P50: percentile(seconds, 0.5) * 1e3,
        P99: percentile(seconds, 0.99) * 1e3,
        "max ms": max(seconds) * 1e3,
    }
    if own_s is not None:
        figures |= {CPU: (own_s + server_s) / len(seconds) * 1e6, "server µs": server_s / len(seconds) * 1e6}
    report.add(row, **figures)
