"""The demo: letters stream in, questions are answered with reasons, the server is killed, and the answers stay.

Run it with `make demo`. It starts a real server on this machine with the defaults (no key, no model, no network) and
tells, step by step, what happens. It exits with 1 when anything was lost, doubled, or answered differently.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import math
import shutil
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path

from demo_screen import Screen
from demo_server import DemoServer

import memstream
from memstream import Answer, Event, EventType, Observation

DATA = Path(__file__).resolve().parent / "data"
NOW = datetime(2026, 6, 1, tzinfo=UTC)
"""The time the questions are asked at, so that recency, and with it every score, is the same on any day."""
MEMORY = "demo/letters"
SECOND = "demo/second-agent"
LIMIT = 10
LETTERS_MIN = 150
CATCH_UP_S = 60.0


@dataclass
class Check:
    """What was found wrong; empty when all is well."""

    failures: list[str] = field(default_factory=list)

    def that(self, good: bool, otherwise: str) -> bool:
        """Notes `otherwise` unless it is `good`."""
        if not good:
            self.failures.append(otherwise)
        return good


@dataclass(frozen=True)
class Question:
    """A question, and the texts of the letters that answer it."""

    text: str
    expected: frozenset[str]


def letters(limit: int) -> dict[int, Observation]:
    """The latest `limit` letters by line, in order of time; 0 for all."""
    rows = [json.loads(line) for line in (DATA / "tz.jsonl").read_text("utf-8").splitlines()]
    told = {
        line: Observation(
            row["text"],
            speaker=row["speaker"],
            session=row["session"],
            observe_time=datetime.fromisoformat(row["time"]),
        )
        for line, row in enumerate(rows, 1)
    }
    return dict(list(told.items())[-limit:])


def questions(told: Mapping[int, Observation]) -> list[Question]:
    """Those that the letters told can answer."""
    found = []
    for row in json.loads((DATA / "questions.json").read_text("utf-8")):
        lines = [expected["line"] for expected in row["expected"] if expected["line"] in told]
        if lines:
            found.append(Question(row["question"], frozenset(str(told[line].body) for line in lines)))
    return found


async def demo(limit: int, directory: Path, screen: Screen) -> list[str]:
    """The whole story; what went wrong in it."""
    by_line, check, server = letters(limit), Check(), DemoServer(directory)
    told, asked = list(by_line.values()), questions(by_line)
    try:
        screen.title("1  A server starts")
        await start(server, screen)
        async with memstream.connect(server.address) as client:
            screen.title("2  An agent observes", f"{len(told):,} letters about clocks, 1988 to 2026, over one stream")
            await ingest(client, told, screen, check)
            screen.title("3  Questions", "asked over one stream at once; ✓ marks a letter known to hold the answer")
            before = await ask(client, asked)
            screen.answers([(question.text, question.expected) for question in asked], before)
            screen.working_memory(before[0])
            check.that(all(sums(answer) for answer in before), "the parts of a score do not sum to it")
        screen.title("4  kill -9", "while another agent's observations are in flight")
        acknowledged = await killed_in_flight(server, told, screen)
        await start(server, screen)
        async with memstream.connect(server.address) as client:
            screen.title("5  After the restart")
            await go_on(client, told, acknowledged, screen, check)
            after = await ask(client, asked)
            compare(asked, before, after, screen, check)
    finally:
        await asyncio.to_thread(server.stop)
    return check.failures


async def start(server: DemoServer, screen: Screen) -> None:
    """A server that serves, and what it says of itself."""
    seconds = await asyncio.to_thread(server.start)
    async with memstream.connect(server.address) as client:
        screen.server(await client.server_info(), server.pid, server.address, seconds)


# ---- 2


async def ingest(client: memstream.Client, told: Sequence[Observation], screen: Screen, check: Check) -> None:
    """Streams the letters in, beside a watch that sees every step they take."""
    memory = await client.create_memory(MEMORY)
    began = time.monotonic()
    async with memory.watch("beginning") as watch, memory.observe("postman") as stream:
        with screen.progress(len(told)) as show:
            shown = asyncio.create_task(show_progress(stream, show))
            for letter in told:
                await stream.send(letter)
            await stream.flush()
            shown.cancel()
            show(stream.received, stream.stored)
        seconds = time.monotonic() - began
        events = await until_revision(watch, stream.revision)
    stats = await memory.stats()
    screen.ingested(len(told), seconds, stats)
    screen.event_counts(events)
    counted = sum(event.type in (EventType.OBSERVED, EventType.REPEATED, EventType.ECHOED) for event in events)
    check.that(counted == len(told), f"{len(told)} letters were sent, the events tell of {counted}")
    await show_example(memory, events, screen)


async def show_progress(stream: memstream.ObserveStream, show: Callable[[int, int], None]) -> None:
    """Draws how far the stream has come until cancelled."""
    while True:
        show(stream.received, stream.stored)
        await asyncio.sleep(0.05)


async def until_revision(watch: memstream.Watch, revision: int) -> list[Event]:
    """The events up to that revision."""
    events: list[Event] = []
    async with asyncio.timeout(CATCH_UP_S):
        async for event in watch:
            events.append(event)
            if event.cursor.revision >= revision:  # after the last event of a revision, not before
                break
    return events


async def show_example(memory: memstream.Memory, events: Sequence[Event], screen: Screen) -> None:
    """One letter's whole way."""
    path = example_path(events)
    if path:
        others = {event.other_id for event in path} - {""}
        letter = await memory.get_fragment(path[0].fragment_id)
        screen.path(letter, path, {id_: (await memory.get_fragment(id_)).content for id_ in others})


def example_path(events: Sequence[Event]) -> list[Event]:
    """Every step of the letter that others strengthened until it was promoted; empty when there is none."""
    steps: dict[str, list[Event]] = {}
    gone = {event.fragment_id for event in events if event.type in (EventType.DROPPED, EventType.FILTERED)}
    for event in events:
        steps.setdefault(event.fragment_id, []).append(event)
    for path in steps.values():
        types = [event.type for event in path]
        told = {event.other_id for event in path if event.type is EventType.ENHANCED}
        if EventType.PROMOTED in types and EventType.OVERFLOWED not in types and len(told) > 1 and not told & gone:
            return path
    return []


# ---- 3


async def ask(client: memstream.Client, asked: Sequence[Question]) -> list[Answer]:
    """All questions at once over one stream; answers in the order of the questions."""
    async with client.memory(MEMORY).recall(session="demo") as recall:
        return await asyncio.gather(
            *(recall.query(question.text, limit=LIMIT, explain=True, now=NOW) for question in asked)
        )


def sums(answer: Answer) -> bool:
    """Whether every score is what its explanation adds up to."""
    return all(
        hit.explanation is not None
        and math.isclose(hit.score, math.fsum(part.value * part.weight for part in hit.explanation.parts))
        for hit in answer
    )


# ---- 4 and 5


async def killed_in_flight(server: DemoServer, told: Sequence[Observation], screen: Screen) -> int:
    """Kills the server in the midst of a stream; how many of its observations it had acknowledged as received."""
    async with memstream.connect(server.address) as client:
        memory = await client.create_memory(SECOND)
        with contextlib.suppress(AgentGoneError):
            async with memory.observe("reader") as stream:
                await talk(stream, told, enough=len(told) // 3)
                server.kill()
                raise AgentGoneError  # the agent goes down with it: nothing is flushed, nothing closed
        screen.killed(server.pid, stream.expected_sequence - 1, stream.received)
        return stream.received


class AgentGoneError(Exception):
    """Leaves a stream as a crash does."""


async def talk(stream: memstream.ObserveStream, told: Sequence[Observation], enough: int) -> None:
    """Sends, not at full speed, until `enough` are acknowledged, and some more, which are in flight at the end."""
    for number, letter in enumerate(told):
        await stream.send(letter)
        if number % 20 == 0:
            await asyncio.sleep(0.02)
        if stream.received >= enough:
            for more in told[number + 1 : number + 40]:
                await stream.send(more)
            return await asyncio.sleep(0.001)
    return None


async def go_on(
    client: memstream.Client, told: Sequence[Observation], acknowledged: int, screen: Screen, check: Check
) -> None:
    """The second agent, started again, continues where the server says, and everything is counted."""
    memory = client.memory(SECOND)
    async with memory.observe("reader") as stream:
        first = stream.expected_sequence
        check.that(first > acknowledged, f"{acknowledged} were acknowledged, the server knows of {first - 1}")
        for letter in told[first - 1 :]:
            await stream.send(letter)
        await stream.flush()
    async with memory.watch("beginning") as watch:
        events = await until_revision(watch, stream.revision)
    kept = [fragment.content async for fragment in memory.list_fragments()]
    entered = [event for event in events if event.type is EventType.OBSERVED]
    repeats = [event for event in events if event.type in (EventType.REPEATED, EventType.ECHOED)]
    lost = {str(letter.body) for letter in told} - set(kept)
    check.that(not lost, f"{len(lost)} letters are lost")
    check.that(len(entered) + len(repeats) == len(told), f"{len(entered)} + {len(repeats)} is not {len(told)}")
    check.that(len(kept) == len(entered), f"{len(entered)} entered the memory, it has {len(kept)}")
    screen.continued(acknowledged, first, len(told), len(kept), len(repeats), len(lost))


def compare(
    asked: Sequence[Question], before: Sequence[Answer], after: Sequence[Answer], screen: Screen, check: Check
) -> None:
    """Notes every question whose answer is not the same letters, in the same order, with the same scores."""
    same = []
    for question, one, other in zip(asked, before, after, strict=True):
        equal = [(hit.fragment.id, hit.score) for hit in one] == [(hit.fragment.id, hit.score) for hit in other]
        same.append(check.that(equal, f"another answer than before the restart: {question.text}"))
    screen.compared([question.text for question in asked], [len(answer) for answer in after], same)


# ---- the command


@contextlib.asynccontextmanager
async def directory_for(kept: Path | None) -> AsyncIterator[Path]:
    """A directory of its own, gone afterwards unless it was named."""
    if kept is not None:
        await asyncio.to_thread(kept.mkdir, parents=True)
        yield kept
        return
    made = Path(tempfile.mkdtemp(prefix="memstream-demo-"))
    try:
        yield made
    finally:
        shutil.rmtree(made, ignore_errors=True)


async def run(arguments: argparse.Namespace) -> int:
    """The demo by its command line; its exit code."""
    screen, began = Screen(), time.monotonic()
    async with directory_for(arguments.keep) as directory:
        failures = await demo(arguments.letters, directory, screen)
    screen.end(failures, time.monotonic() - began, arguments.keep)
    return 1 if failures else 0


def main() -> int:
    """Read the command line and run."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--letters", type=int, default=0, help="only the latest so many (default: all 1,342)")
    parser.add_argument("--keep", type=Path, help="keep the data in this new directory")
    arguments = parser.parse_args()
    if arguments.letters and arguments.letters < LETTERS_MIN:
        parser.error(f"--letters must be {LETTERS_MIN} or more, so that some question has its answer among them")
    if arguments.keep and arguments.keep.exists():
        parser.error(f"{arguments.keep} exists; name a new directory")
    return asyncio.run(run(arguments))


if __name__ == "__main__":
    sys.exit(main())
