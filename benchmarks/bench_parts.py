"""The server's CPU for an observation and a recall, compared with the CPU of their parts alone, in one run.

    python benchmarks/bench_parts.py [--full | --tiny] [--rounds N] [--json FILE]

A part is a step that no such server can leave out, done by bare code: the same messages through a bare gRPC server, the
same rows committed with the same pragmas, and the server's own embedder, analyzer, tier rule, search legs and message
builder, called without a server. Lone observations and recalls go one at a time through open streams, the flood through
one stream at full speed, until *stored*. Figures are CPU of the server's process, the echo's process or this one;
clients are not counted. The server writes nothing to the index meanwhile. Every round measures the whole and all parts.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import sqlite3
import tempfile
import time
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

import grpc.aio
from bare import BothLegs, Floats, Messages, time_scan
from claims import Claim, at_most, make_claim, run_standalone
from echo import Ask, EchoServer
from recalls import LIMIT, RecallClient, Texts
from report import Report, Size
from served import BenchServer
from texts import SentenceSource

import memstream
from memstream.codec import observation_to_wire, query_to_wire
from memstream.observe import BATCH_MAX
from memstream.v1 import stream_service_pb2 as pb
from memstream.v1.stream_service_pb2_grpc import StreamServiceStub
from memstream_server.adapters.journal.database.sqlite import writer_engine
from memstream_server.adapters.models.analyzer import SnowballAnalyzer
from memstream_server.adapters.models.hashing import MODEL, HashingEmbedder
from memstream_server.core.policy import Policy
from memstream_server.core.rendering import text_prefix
from memstream_server.core.tiers import Newcomer, observe
from memstream_server.core.values import Fragment, MemoryKind, State

COUNT = {Size.TINY: 8, Size.SHORT: 200, Size.FULL: 500}
"""Lone observations and recalls in a round."""
FLOOD = {Size.TINY: 256, Size.SHORT: 8_192, Size.FULL: 32_768}
ROUNDS = {Size.TINY: 1, Size.SHORT: 7, Size.FULL: 11}
MEMORIES, EACH = 8, 100
"""Memories that are asked, and their fragments."""
GROUP = 512
"""Rows of a flood in one commit."""
WARM_UP = 50
"""Observations before those that count: short-term is full, so each moves another one on."""
HELD = 10
"""Fragments of short-term, by default."""
FLUSH_S = 3_600
"""The write-behind waits longer than the benchmark takes."""
WHOLE = "server µs"
LONE, FLOODED, RECALL = "lone observation", "flooded observation", f"recall of {EACH} fragments"
AIMS = {LONE: 2.0, FLOODED: 1.4, RECALL: 2.0}
SUM = "sum of the parts"

Send = Callable[[memstream.ObserveStream, Sequence[memstream.Observation]], Awaitable[None]]


def measure_here(work: Callable[[], object]) -> float:
    """CPU seconds of this process for `work`."""
    began = time.process_time()
    work()
    return time.process_time() - began


class Observations:
    """Observations with what their parts need: messages, texts, fragments."""

    def __init__(self, observations: Sequence[memstream.Observation], group: int) -> None:
        wire = [observation_to_wire(one) for one in observations]
        self.messages = [
            pb.ObserveRequest(batch=pb.ObservationBatch(first_sequence=at + 1, observations=wire[at : at + group]))
            for at in range(0, len(wire), group)
        ]
        self.fragments = [
            Fragment(f"{number:026}", str(one.body), speaker=one.speaker, session=one.session, position=number)
            for number, one in enumerate(observations)
        ]
        self._group = group
        self._analyzer, self._embedder = SnowballAnalyzer(), HashingEmbedder()
        self._state = State(MemoryKind.HYBRID, b"seed")
        self.analyze()  # a server analyses a new word once

    def embed(self) -> None:
        """The vectors of each indexed text and of each content alone, a batch per call."""
        for at in range(0, len(self.fragments), self._group):
            some = self.fragments[at : at + self._group]
            self._embedder.vectors([text_prefix(one) + one.content for one in some] + [one.content for one in some])

    def analyze(self) -> None:
        """The terms of each."""
        for one in self.fragments:
            self._analyzer.terms(one.content, prefix=text_prefix(one))

    def decide(self, vectors: Floats) -> None:
        """One decision after the other, each with the vector of its content."""
        policy = Policy()
        for one, vector in zip(self.fragments, vectors, strict=True):
            self._state = observe(self._state, Newcomer(one, vector), policy, MODEL.similarity_min).state

    def measure(self) -> dict[str, float]:
        """CPU seconds of each part that needs no other process and no disk."""
        vectors = self._embedder.vectors([one.content for one in self.fragments])
        return {
            "embedding": measure_here(self.embed),
            "terms": measure_here(self.analyze),
            "decision": measure_here(lambda: self.decide(vectors)),
        }


class Commits:
    """Commits the rows of a served memory again, into a new database with the server's tables, indexes and pragmas.

    One observation: its receipt, fragment, vector, anchor and event, the levels of memory and producer, and what moves
    an older fragment to long-term: its anchor is deleted, its row changes, and the outbox gets a row.
    """

    def __init__(self, served: Path, memory: str, count: int, file: Path) -> None:
        self._engine = writer_engine(file)
        self._connection = self._engine.connect()
        self._driver: Any = self._connection.connection.dbapi_connection
        with contextlib.closing(sqlite3.connect(served)) as source:
            for (text,) in source.execute("SELECT sql FROM sqlite_master WHERE sql NOT LIKE '%sqlite_sequence%'"):
                self._driver.execute(text)
            record = source.execute("SELECT * FROM memories WHERE name = ?", (memory,)).fetchone()
            keys = f"key BETWEEN {record[0] << 32} AND {(record[0] + 1 << 32) - 1}"
            read = (source.execute(f"SELECT * FROM {name} WHERE {keys}") for name in ("fragments", "vectors", "events"))
            fragments, vectors, events = (list(rows)[-count:] for rows in read)
        self._fragments, self._vectors, self._event = fragments, vectors, events[-1]
        self._driver.execute(f"INSERT INTO memories VALUES ({', '.join('?' * len(record))})", (1, *record[1:]))
        self._driver.execute("INSERT INTO producers VALUES (1, 'bench', 1, 0, 0)")
        self._written = 0

    def commit(self, group: int) -> None:
        """Commit all rows, `group` per transaction."""
        for at in range(0, len(self._fragments), group):
            some = slice(at, at + group)
            self._commit_some(self._fragments[some], self._vectors[some])

    def _commit_some(self, fragments: list[tuple[Any, ...]], vectors: list[tuple[Any, ...]]) -> None:
        run, first, last = self._driver.executemany, self._written + 1, self._written + len(fragments)
        numbered = list(zip(range(first, last + 1), fragments, vectors, strict=True))
        moved = [(f"{number - HELD:026}",) for number, _, _ in numbered if number > HELD]
        self._driver.execute("BEGIN IMMEDIATE")
        run("UPDATE memories SET revision = ?, next_position = ? WHERE number = 1", [(last, last)])
        run("UPDATE producers SET received = ?, stored = ? WHERE memory = 1", [(last, last)])
        run(
            "INSERT INTO receipts VALUES (1, 'bench', ?, ?, ?, NULL, NULL)", [(last, first, bytes(16 * len(fragments)))]
        )
        rows = [(number, 1, f"{number:026}", *one[3:]) for number, one, _ in numbered]
        run(f"INSERT INTO fragments VALUES ({', '.join('?' * len(rows[0]))})", rows)
        run("INSERT INTO vectors VALUES (?, ?, ?)", [(number, *one[1:]) for number, _, one in numbered])
        anchors = [(f"{number:026}", one[2], one[1]) for number, _, one in numbered]
        run("INSERT INTO anchors VALUES (1, ?, ?, x'90', ?, NULL, NULL)", anchors)
        run("DELETE FROM anchors WHERE memory = 1 AND id = ?", moved)
        run("UPDATE fragments SET tier = 'long_term', payload = payload WHERE id = ? AND memory = 1", moved)
        run("INSERT INTO outbox (memory, fragment, deleted) VALUES ('memory', ?, 0)", moved)
        run("INSERT INTO events VALUES (?, ?, ?)", [(last, *self._event[1:])])
        self._driver.execute("COMMIT")
        self._written = last

    def close(self) -> None:
        """Close the database."""
        self._connection.close()
        self._engine.dispose()


class RecallParts:
    """What a recall of one memory cannot leave out, called without a server."""

    def __init__(self, texts: Texts, answer: memstream.Answer) -> None:
        self._embedder = HashingEmbedder()
        self._matrices, self._legs = texts.vectors(), [BothLegs(each) for each in texts.sentences]
        self._messages = Messages(answer)

    def measure(self, questions: Sequence[tuple[int, str]]) -> dict[str, float]:
        """CPU seconds of each part for all questions."""
        vectors = [self._embedder.vectors([text])[0] for _, text in questions]
        asked = list(zip(questions, vectors, strict=True))
        return {
            "embedding": measure_here(lambda: [self._embedder.vectors([text]) for _, text in questions]),
            "dense leg": measure_here(lambda: [time_scan(self._matrices[at], one, LIMIT) for (at, _), one in asked]),
            "word legs": measure_here(lambda: [self._legs[at].time_query(text) for at, text in questions]),
            "messages": measure_here(lambda: [self._messages.build() for _ in questions]),
        }


def add_round(report: Report, what: str, whole_s: float, parts_s: dict[str, float], count: int) -> None:
    """Add the whole, each part and the sum of the parts."""
    report.add_round(what, **{WHOLE: whole_s / count * 1e6})
    for part, seconds in parts_s.items():
        report.add_round(f"{what}: {part}", **{WHOLE: seconds / count * 1e6})
    report.add_round(f"{what}: {SUM}", **{WHOLE: sum(parts_s.values()) / count * 1e6})


async def measure_echo(echo: EchoServer, ask: Ask, count: int) -> float:
    """CPU seconds of the echo for `count` exchanges, one after the other."""
    await ask()
    before = echo.cpu_s()
    for _ in range(count):
        await ask()
    return echo.cpu_s() - before


async def capture_answer(address: str, memory: str, question: str) -> pb.RecallResponse:
    """The message with which the server answers a question: all of its answer, `done` included."""
    opening = pb.RecallOpen(namespace="parts", memory=memory, done_in_recollections=True)
    async with grpc.aio.insecure_channel(address) as channel:
        call = StreamServiceStub(channel).Recall()
        await call.write(pb.RecallRequest(open=opening))
        await call.read()
        await call.write(pb.RecallRequest(query=query_to_wire("1", question)))
        answer: pb.RecallResponse = await call.read()
        call.cancel()
        return answer


class Bench:
    """A served store with memories `agent-0`, `agent-1`, ... of EACH fragments, a bare echo, and the client of both."""

    def __init__(self, scratch: Path, server: BenchServer, echo: EchoServer, client: memstream.Client) -> None:
        self._scratch, self._server, self._echo, self._client = scratch, server, echo, client
        self._numbers = itertools.count()

    async def fill(self) -> None:
        """Create the memories, and read an answer of one of them for the parts of a recall."""
        material = [SentenceSource(number).make_observations(EACH) for number in range(MEMORIES)]
        for number, some in enumerate(material):
            await (await self._client.create_memory(f"parts/agent-{number}")).observe_batch(some)
        self._texts = Texts([[str(one.body) for one in each] for each in material])
        question = self._texts.draw_question(0)
        answer = await self._client.memory("parts/agent-0").recall_once(question)
        self._query = pb.RecallRequest(query=query_to_wire("1", question))
        self._parts = RecallParts(self._texts, answer)
        self._answer = await capture_answer(self._server.address, "agent-0", question)

    async def measure_lone(self, report: Report, count: int) -> None:
        """Observations one at a time, each *stored* before the next, then their parts."""

        async def send(stream: memstream.ObserveStream, given: Sequence[memstream.Observation]) -> None:
            for one in given:
                await (await stream.send(one))

        await self._measure_observations(report, LONE, count, 1, send)

    async def measure_flood(self, report: Report, count: int) -> None:
        """Observations at full speed until the last is *stored*, then their parts."""

        async def send(stream: memstream.ObserveStream, given: Sequence[memstream.Observation]) -> None:
            for one in given:
                await stream.send(one)
            await stream.flush()

        await self._measure_observations(report, FLOODED, count, BATCH_MAX, send)

    async def _measure_observations(self, report: Report, what: str, count: int, group: int, send: Send) -> None:
        name = f"observed-{next(self._numbers)}"
        given = SentenceSource().make_observations(WARM_UP + count)
        memory = await self._client.create_memory(f"parts/{name}")
        async with memory.observe("parts") as stream:
            for one in given[:WARM_UP]:
                await stream.send(one)
            await stream.flush()
            before = self._server.cpu_used()
            await send(stream, given[WARM_UP:])
            whole_s = self._server.cpu_used().since(before).server
        alone = Observations(given[WARM_UP:], group)
        parts_s = {"echo": await self._echo_observations(alone.messages)} | alone.measure()
        commits = Commits(self._server.data_dir / "journal.db", name, count, self._scratch / f"{name}.db")
        parts_s["commit"] = measure_here(lambda: commits.commit(1 if group == 1 else GROUP))
        commits.close()
        add_round(report, what, whole_s, parts_s, count)

    async def _echo_observations(self, messages: Sequence[pb.ObserveRequest]) -> float:
        if len(messages[0].batch.observations) == 1:
            async with self._echo.open_echoing(messages[0]) as ask:
                return await measure_echo(self._echo, ask, len(messages))
        before = self._echo.cpu_s()
        await self._echo.time_observe([messages])
        return self._echo.cpu_s() - before

    async def measure_recall(self, report: Report, count: int) -> None:
        """Recalls one at a time with the defaults, then their parts."""
        questions = self._texts.draw_questions(count)
        async with RecallClient(self._server, self._client, "parts/agent") as recalling:
            await recalling.ask([(place, self._texts.draw_question(place)) for place in range(MEMORIES)])
            before = self._server.cpu_used()
            await recalling.ask(questions)
            whole_s = self._server.cpu_used().since(before).server
        async with self._echo.open_answering(self._query, self._answer) as ask:
            parts_s = {"echo": await measure_echo(self._echo, ask, count)}
        add_round(report, RECALL, whole_s, parts_s | self._parts.measure(questions), count)


async def measure_rounds(report: Report, size: Size, rounds: int) -> None:
    """All rounds; the first of a server is not counted."""
    with tempfile.TemporaryDirectory() as directory, contextlib.ExitStack() as stack:
        scratch = Path(directory)
        echo = stack.enter_context(EchoServer(scratch, probed=False))
        server = stack.enter_context(BenchServer(scratch / "data", probed=False, index_flush_interval_s=FLUSH_S))
        async with memstream.connect(server.address) as client:
            bench = Bench(scratch, server, echo, client)
            await bench.fill()
            for into in (Report((WHOLE,)), *[report] * rounds):
                await bench.measure_lone(into, COUNT[size])
                await bench.measure_flood(into, FLOOD[size])
                await bench.measure_recall(into, COUNT[size])


def run_benchmark(size: Size, rounds: int | None = None) -> Report:
    """Measure all rounds."""
    report = Report((WHOLE,))
    asyncio.run(measure_rounds(report, size, rounds or ROUNDS[size]))
    return report


def make_claims(report: Report) -> list[Claim]:
    """The whole of each compared with the sum of its parts."""
    return [
        make_claim(report, f"server CPU, {what}", what, WHOLE, f"{what}: {SUM}", at_most(aim))
        for what, aim in AIMS.items()
    ]


if __name__ == "__main__":
    run_standalone(__doc__, run_benchmark, make_claims)
