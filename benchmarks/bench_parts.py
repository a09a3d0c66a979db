"""The server's CPU for an observation and a recall, compared with the CPU of their parts, in one run.

    python benchmarks/bench_parts.py [--full | --tiny] [--rounds N] [--json FILE]

A part is a step that no such server can leave out, done by bare code: the same messages through a bare gRPC server, the
same rows committed with the same pragmas, and the server's own embedder, analyzer, tier rule, search legs and message
builder, called without a server. The same parts are also measured together in one bare server (parts_server.py),
because a part that is called again and again alone has warm caches and no thread to wake.

Lone observations and recalls go one at a time through open streams, the flood through one stream at full speed, until
*stored*. Figures are CPU of the process of the server, of the echo, of the parts, or of this one; clients are not
counted. The server writes nothing to the index meanwhile. Every round measures the whole and all parts.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import tempfile
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

import grpc.aio
from claims import Claim, at_most, make_claim, run_standalone
from echo import Ask, EchoServer
from parts import Commits, ObservationParts, RecallParts, make_fragments, measure_cpu_s
from parts_server import PartsServer
from recalls import RecallClient, Texts
from report import Report, Size
from served import BenchServer
from texts import SentenceSource

import memstream
from memstream.codec import observation_to_wire, query_to_wire
from memstream.observe import BATCH_MAX
from memstream.v1 import stream_service_pb2 as pb
from memstream.v1.stream_service_pb2_grpc import StreamServiceStub

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
FLOOD_AT_ONCE = 16
"""Messages in flight of a flood into the server of the parts."""
FLUSH_S = 3_600
"""The write-behind waits longer than the benchmark takes."""
WHOLE = "server µs"
LONE, FLOODED, RECALL = "lone observation", "flooded observation", f"recall of {EACH} fragments"
AIMS = {LONE: 2.0, FLOODED: 1.4, RECALL: 2.0}
SUM, TOGETHER = "sum of the parts", "all parts in one server"

Send = Callable[[memstream.ObserveStream, Sequence[memstream.Observation]], Awaitable[None]]


def make_batches(observations: Sequence[memstream.Observation], group: int, first: int) -> list[pb.ObserveRequest]:
    """Messages of at most `group` observations; the first has number `first`."""
    wire = [observation_to_wire(one) for one in observations]
    return [
        pb.ObserveRequest(
            batch=pb.ObservationBatch(first_sequence=first + at, observations=wire[at : at + group]),
        )
        for at in range(0, len(wire), group)
    ]


def add_round(
    report: Report, what: str, whole_s: float, parts_s: dict[str, float], together_s: float, count: int
) -> None:
    """Add the whole, each part, the sum of the parts, and all parts in one server."""
    report.add_round(what, **{WHOLE: whole_s / count * 1e6})
    for part, seconds in parts_s.items():
        report.add_round(f"{what}: {part}", **{WHOLE: seconds / count * 1e6})
    report.add_round(f"{what}: {SUM}", **{WHOLE: sum(parts_s.values()) / count * 1e6})
    report.add_round(f"{what}: {TOGETHER}", **{WHOLE: together_s / count * 1e6})


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
        call: Any = StreamServiceStub(channel).Recall()
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
        self._query = pb.RecallRequest(query=query_to_wire("1", question))
        self._answer = await capture_answer(self._server.address, "agent-0", question)
        self._parts = RecallParts(self._texts, self._answer)

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
        warming, messages = make_batches(given[:WARM_UP], group, 1), make_batches(given[WARM_UP:], group, WARM_UP + 1)
        fragments = [one for message in messages for one in make_fragments(message.batch)]
        parts_s = {"echo": await self._echo_observations(messages)} | ObservationParts().measure(fragments, group)
        committed = 1 if group == 1 else GROUP
        served = self._server.data_dir / "journal.db"
        commits = Commits(served, name, count, self._scratch / f"{name}.db")
        parts_s["commit"] = measure_cpu_s(lambda: commits.commit_all(committed))
        commits.close()
        with PartsServer.observing(self._scratch, served, name, len(given), committed) as together:
            together_s = await together.measure(warming, messages, 1 if group == 1 else FLOOD_AT_ONCE)
        add_round(report, what, whole_s, parts_s, together_s, count)

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
        parts_s |= self._parts.measure(questions)
        messages = [pb.RecallRequest(query=query_to_wire(str(place), text)) for place, text in questions]
        with PartsServer.recalling(self._scratch, self._texts, self._answer) as together:
            together_s = await together.measure(messages[:WARM_UP], messages, 1)
        add_round(report, RECALL, whole_s, parts_s, together_s, count)


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
    """The whole of each compared with its parts, alone and in one server."""
    return [
        make_claim(report, f"server CPU, {what}", what, WHOLE, f"{what}: {parts}", at_most(aim))
        for parts in (SUM, TOGETHER)
        for what, aim in AIMS.items()
    ]


if __name__ == "__main__":
    run_standalone(__doc__, run_benchmark, make_claims)
