"""Shared by the recall benchmarks: filled memories, questions about them, and the bare parts of a recall."""

from __future__ import annotations

import asyncio
import contextlib
import random
import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field

from bare import Bm25, BothLegs, Floats, Messages, MilvusLite, time_scan
from claims import CPU
from echo import EchoServer
from probe import Pause
from report import Report, own_cpu_s, percentile
from served import BenchServer
from texts import SentenceSource

import memstream
from memstream.codec import query_to_wire
from memstream.v1 import stream_service_pb2 as pb
from memstream_server.adapters.models.hashing import HashingEmbedder

LIMIT = 10
P50, P99 = "p50 ms", "p99 ms"
COLUMNS = (P50, P99, "max ms", CPU, "server µs")
ASKED_MAX_S = 30.0
"""Longest duration of one series of questions."""
_FEW = ("echo", "numpy scan", "BM25")
_MORE = ("embedding", "both lexical legs", "messages")
"""The unavoidable parts besides echo and scan; one of the two legs is BM25."""
BATCH = 500
FILLING = 16
"""Memories filled concurrently."""


@dataclass
class Texts:
    """Sentences by memory, and questions about them."""

    sentences: list[list[str]]
    chosen: random.Random = field(default_factory=lambda: random.Random(7))
    talk: SentenceSource = field(default_factory=lambda: SentenceSource(2))

    def draw_question(self, place: int) -> str:
        """Four words of a random sentence of that memory."""
        return self.talk.draw_question(self.chosen.choice(self.sentences[place]))

    def draw_questions(self, count: int, places: int = 0) -> list[tuple[int, str]]:
        """(memory, question) pairs for random memories, out of the first `places` if given."""
        drawn = [self.chosen.randrange(places or len(self.sentences)) for _ in range(count)]
        return [(place, self.draw_question(place)) for place in drawn]

    def vectors(self) -> list[Floats]:
        """float32[fragments, dimension] for each memory."""
        embedder = HashingEmbedder()
        return [embedder.vectors(texts) for texts in self.sentences]


async def fill_memories(client: memstream.Client, prefix: str, sizes: Sequence[int]) -> Texts:
    """Create memories `prefix-0`, `prefix-1`, ... of these sizes; returns once the index has all fragments."""
    talk = SentenceSource()
    material = [talk.make_observations(size) for size in sizes]
    room = asyncio.Semaphore(FILLING)

    async def one(place: int) -> memstream.Memory:
        async with room:
            memory = await client.create_memory(f"{prefix}-{place}")
            for start in range(0, sizes[place], BATCH):
                await memory.observe_batch(material[place][start : start + BATCH])
        return memory

    memories = await asyncio.gather(*(one(place) for place in range(len(sizes))))
    await wait_until_indexed(memories[-1])
    return Texts([[str(one.body) for one in each] for each in material])


async def wait_until_indexed(memory: memstream.Memory) -> None:
    """Wait until the index has everything stored so far in any memory: one round of the indexer covers all of it."""
    async with memory.observe("settle", ack_level=memstream.AckLevel.INDEXED) as stream:
        await stream.send("All of it is there.", session="settle")


class RecallClient:
    """Recall streams into memories `prefix-0`, `prefix-1`, ..., opened on first use."""

    def __init__(self, server: BenchServer, client: memstream.Client, prefix: str) -> None:
        self._server = server
        self._client = client
        self._prefix = prefix
        self._streams: dict[int, memstream.RecallStream] = {}
        self._stack = contextlib.AsyncExitStack()

    async def __aenter__(self) -> RecallClient:
        return self

    async def __aexit__(self, *error: object) -> None:
        await self._stack.aclose()

    async def answer(self, place: int, text: str) -> memstream.Answer:
        """One recall with the defaults: ten fragments and the working memory, with reinforcement."""
        stream = self._streams.get(place)
        if stream is None:
            memory = self._client.memory(f"{self._prefix}-{place}")
            stream = self._streams[place] = await self._stack.enter_async_context(memory.recall())
        return await stream.query(text)

    async def ask(
        self, questions: Sequence[tuple[int, str]], pause_s: float = 0.0
    ) -> tuple[list[float], dict[str, float]]:
        """Time questions one at a time: (seconds of each, the server's mean milliseconds per step).

        Pauses after each question do not count. Stops after ASKED_MAX_S: where the machine is too small for a load,
        each question waits behind a backlog.
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

    async def wait_until_indexed(self) -> None:
        """Wait until the server has no background work left."""
        await wait_until_indexed(self._client.memory(f"{self._prefix}-0"))

    async def measure(
        self, report: Report, row: str, questions: Sequence[tuple[int, str]], pause_s: float = 0.0
    ) -> dict[str, float]:
        """Add a row for these questions, with all CPU used meanwhile. Returns the server's mean ms per step."""
        own, before = own_cpu_s(), self._server.cpu_used()
        seconds, steps = await self.ask(questions, pause_s)
        add_times(report, row, seconds, own_cpu_s() - own, self._server.cpu_used().since(before).total)
        return steps

    async def measure_unary(self, report: Report, row: str, questions: Sequence[tuple[int, str]]) -> None:
        """Add a row for questions to memories not asked before: unary calls, because opening a stream activates the
        memory."""
        own, before = own_cpu_s(), self._server.cpu_used()
        seconds = []
        for place, text in questions:
            began = time.perf_counter()
            await self._client.memory(f"{self._prefix}-{place}").recall_once(text)
            seconds.append(time.perf_counter() - began)
        add_times(report, row, seconds, own_cpu_s() - own, self._server.cpu_used().since(before).total)


class BareParts:
    """The unavoidable parts of a recall, measured separately: echo, numpy scan, BM25, and the rest."""

    def __init__(self, echo: EchoServer, texts: Texts, answer: memstream.Answer) -> None:
        self._echo = echo
        self._texts = texts
        self._vectors = texts.vectors()
        self._bm25: dict[int, Bm25] = {}
        self._legs: dict[int, BothLegs] = {}
        self._messages = Messages(answer)
        self._query = pb.RecallRequest(query=query_to_wire("1", texts.draw_question(0)))
        size = sum(len(hit.fragment.content) + 250 for hit in answer)
        size += sum(len(one.content) + 150 for one in answer.working_memory)
        self._answer = pb.RecallResponse(done=pb.RecallDone(query_id="1", degraded="x" * size))

    @property
    def vectors(self) -> list[Floats]:
        """float32[fragments, dimension] for each memory."""
        return self._vectors

    def longest_pause(self) -> Pause:
        """The echo's longest event-loop pause since the last measurement began."""
        return self._echo.longest_pause(self._since)

    async def measure(self, report: Report, row: str, questions: Sequence[tuple[int, str]]) -> None:
        """Add rows: the per-question sums of the few parts, of all unavoidable parts, and each part separately."""
        for place, _ in questions:
            if place not in self._bm25:
                self._bm25[place] = Bm25(self._texts.sentences[place])
                self._legs[place] = BothLegs(self._texts.sentences[place])
        embedder, self._since = HashingEmbedder(), time.monotonic()
        times: dict[str, list[float]] = {part: [] for part in (*_FEW, *_MORE)}
        own, echo_before = own_cpu_s(), self._echo.cpu_s()
        async with self._echo.open_answering(self._query, self._answer) as ask:
            for place, text in questions:
                began = time.perf_counter()
                query = embedder.vectors([text])[0]
                times["embedding"].append(time.perf_counter() - began)
                times["echo"].append(await ask())
                times["numpy scan"].append(time_scan(self._vectors[place], query, LIMIT))
                times["BM25"].append(self._bm25[place].time_search(text, LIMIT))
                times["both lexical legs"].append(self._legs[place].time_query(text))
                times["messages"].append(self._messages.time_round_trip())
        for part, seconds in times.items():
            add_times(report, f"{row}: {part} alone", seconds)
        few = [sum(each) for each in zip(*(times[part] for part in _FEW), strict=True)]
        more = sum(sum(times[part]) for part in _MORE)
        add_times(report, row, few, own_cpu_s() - own - more, self._echo.cpu_s() - echo_before)
        whole = [sum(each) for each in zip(*(times[part] for part in ("echo", "numpy scan", *_MORE)), strict=True)]
        add_times(report, all_parts_row(row), whole)


def all_parts_row(row: str) -> str:
    """Name of the row with all unavoidable parts that belongs to a row of BareParts."""
    return f"all unavoidable parts, {row}"


async def measure_lite(
    report: Report, row: str, lite: MilvusLite, texts: Texts, questions: Sequence[tuple[int, str]]
) -> None:
    """Ask the same questions as searches of a bare Milvus Lite with the same vectors."""
    queries = HashingEmbedder().vectors([text for _, text in questions])

    def search() -> list[float]:
        return [lite.time_search(place, query, LIMIT) for (place, _), query in zip(questions, queries, strict=True)]

    own, before = own_cpu_s(), lite.cpu_s()
    seconds = await asyncio.to_thread(search)
    add_times(report, row, seconds, own_cpu_s() - own, lite.cpu_s() - before)


def add_times(
    report: Report, row: str, seconds: Sequence[float], client_s: float | None = None, server_s: float = 0.0
) -> None:
    """Add one round's times and, if measured, the CPU of this process and of the others."""
    figures = {
        P50: percentile(seconds, 0.5) * 1e3,
        P99: percentile(seconds, 0.99) * 1e3,
        "max ms": max(seconds) * 1e3,
    }
    if client_s is not None:
        figures |= {CPU: (client_s + server_s) / len(seconds) * 1e6, "server µs": server_s / len(seconds) * 1e6}
    report.add_round(row, **figures)
