"""One process with many agents: each has an Observe and a Recall stream, and a turn every four seconds.

    python benchmarks/bench_agents.py [--full | --tiny] [--rounds N] [--json FILE]

A turn is a recall from the agent's own memory, then an observation until *stored*. The turns of the agents are spread
evenly over the four seconds. All agents share one client, which opens connections as their streams need them. The
server's CPU of a turn is user and system time of its process; its inverse is the number of turns of a second and core,
which depends less on other work on the machine than latencies do. A recall that ends at its deadline counts with the
time that it took, and its turn continues; their number is reported. Each round measures all numbers of agents in turn.
"""

from __future__ import annotations

import asyncio
import contextlib
import tempfile
import time
from pathlib import Path

from claims import Claim, at_least, at_most, make_claim, run_standalone
from recalls import P50, P99, Texts, fill_memories
from report import COMPUTING, PAUSE, Report, Size, percentile
from served import BenchServer

import memstream

AGENTS = {Size.TINY: (2, 4), Size.SHORT: (400, 900), Size.FULL: (400, 900)}
EACH = 12
"""Fragments of an agent's memory before its first turn."""
TURN_S = 4.0
SERIES_S = {Size.TINY: 0.5, Size.SHORT: 12.0, Size.FULL: 60.0}
ROUNDS = {Size.TINY: 1, Size.SHORT: 2, Size.FULL: 5}
PREFIX = "agents/a"
DRAWN = 5
"""Questions to each memory."""
RECALL, OBSERVE = "recall", "observation until stored"
TURNS, CORE, SERVER = "turns /s", "turns of a second and core /s", "server µs"
LATE = "recalls past their deadline"


class Agent:
    """One agent's streams and turns."""

    def __init__(self, stream: memstream.ObserveStream, recalls: memstream.RecallStream, questions: list[str]) -> None:
        self._stream = stream
        self._recalls = recalls
        self._questions = questions
        self._turns = 0
        self.late = 0
        """Recalls that ended at their deadline."""

    async def take_turn(self, recalled: list[float], observed: list[float]) -> None:
        """Recall, then observe; adds the seconds of each."""
        start = time.perf_counter()
        try:
            await self._recalls.query(self._questions[self._turns % len(self._questions)])
        except memstream.DeadlineExceeded:
            self.late += 1
        middle = time.perf_counter()
        await (await self._stream.send(f"turn {self._turns}: {self._questions[0]}"))
        recalled.append(middle - start)
        observed.append(time.perf_counter() - middle)
        self._turns += 1


async def open_agents(
    stack: contextlib.AsyncExitStack, client: memstream.Client, texts: Texts, count: int
) -> list[Agent]:
    """The agents of the first `count` memories, with open streams."""
    agents = []
    for place in range(count):
        memory = client.memory(f"{PREFIX}-{place}")
        stream = await stack.enter_async_context(memory.observe("agent"))
        recalls = await stack.enter_async_context(memory.recall())
        agents.append(Agent(stream, recalls, [texts.draw_question(place) for _ in range(DRAWN)]))
    return agents


async def measure_agents(report: Report, server: BenchServer, agents: list[Agent], series_s: float) -> None:
    """Add the rows of these agents, each with a turn every TURN_S."""
    recalled: list[float] = []
    observed: list[float] = []
    for agent in agents:
        await agent.take_turn([], [])  # the memory is in RAM
    late = sum(agent.late for agent in agents)
    before, began, since = server.cpu_used(), time.perf_counter(), time.monotonic()

    async def work(number: int, agent: Agent) -> None:
        due = began + TURN_S * number / len(agents)
        while due < began + series_s:
            await asyncio.sleep(max(0.0, due - time.perf_counter()))
            await agent.take_turn(recalled, observed)
            due += TURN_S

    await asyncio.gather(*(work(number, agent) for number, agent in enumerate(agents)))
    seconds, cpu_s = time.perf_counter() - began, server.cpu_used().since(before).server
    for kind, times in ((RECALL, recalled), (OBSERVE, observed)):
        figures = {P50: percentile(times, 0.5) * 1e3, P99: percentile(times, 0.99) * 1e3}
        report.add_round(row_name(len(agents), kind), **figures)
    turns = len(recalled)
    late = sum(agent.late for agent in agents) - late
    figures = {TURNS: turns / seconds, CORE: turns / cpu_s, SERVER: cpu_s / turns * 1e6, LATE: late}
    report.add_round(row_name(len(agents), "turn"), **figures)
    pause = await asyncio.to_thread(server.longest_pause, since)
    report.add_pause(row_name(len(agents), "turn"), pause)


def row_name(agents: int, kind: str) -> str:
    """The row of one kind of step with that many agents."""
    return f"{kind}, {agents} agents"


async def measure_rounds(report: Report, size: Size, rounds: int) -> None:
    """Fill the memories, and measure all numbers of agents in each round."""
    with tempfile.TemporaryDirectory() as scratch, BenchServer(Path(scratch) / "data", streams_max=8_192) as server:
        async with memstream.connect(server.address) as client:
            texts = await fill_memories(client, PREFIX, [EACH] * max(AGENTS[size]))
            for _ in range(rounds):
                for count in AGENTS[size]:
                    async with contextlib.AsyncExitStack() as stack:
                        agents = await open_agents(stack, client, texts, count)
                        await measure_agents(report, server, agents, SERIES_S[size])


def run_benchmark(size: Size, rounds: int | None = None) -> Report:
    """Measure all rounds."""
    report = Report((P50, P99, TURNS, CORE, SERVER, LATE, PAUSE, COMPUTING))
    asyncio.run(measure_rounds(report, size, rounds or ROUNDS[size]))
    return report


def make_claims(report: Report) -> list[Claim]:
    """Claims about each number of agents: the cost of a turn, and its latencies."""
    claims = []
    for size in (Size.TINY, Size.FULL):
        for agents in AGENTS[size]:
            row = row_name(agents, "turn")
            if not report.round_values(row, CORE):
                continue  # of another size
            claims.append(make_claim(report, f"{row}, of a second and core", row, CORE, row, at_least(300, "/s")))
            claims.append(make_claim(report, f"{row}, {LATE}", row, LATE, row, at_most(0, "recalls")))
            for kind in (RECALL, OBSERVE):
                step = row_name(agents, kind)
                claims.append(make_claim(report, f"{step}, p50", step, P50, step, at_most(20, "ms"), P99))
    return claims


if __name__ == "__main__":
    run_standalone(__doc__, run_benchmark, make_claims)
