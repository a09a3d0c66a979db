"""The demo: letters stream in, questions are answered with reasons, the server is killed, and the answers stay the
same.

Run it with `make demo`. It starts a real server on this machine with default settings (no key, no model, no network)
and prints every step. It exits with 1 when anything was lost, duplicated, or answered differently.
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
"""The time of the questions, so that recency and therefore every score are the same on any day."""
MEMORY = "demo/letters"
SECOND = "demo/second-agent"
LIMIT = 10
LETTERS_MIN = 150
CATCH_UP_S = 60.0


@dataclass
class Check:
    """The problems found; empty if all is well."""

    failures: list[str] = field(default_factory=list)

    def expect(self, good: bool, otherwise: str) -> bool:
        """Record `otherwise` unless `good`. Returns `good`."""
        if not good:
            self.failures.append(otherwise)
        return good


@dataclass(frozen=True)
class Question:
    """A question, and the texts of the letters that answer it."""

    text: str
    expected: frozenset[str]


def load_letters(limit: int) -> dict[int, Observation]:
    """The latest `limit` letters by line, in order of time; 0 for all."""
    rows = [json.loads(line) for line in (DATA / "tz.jsonl").read_text("utf-8").splitlines()]
    letters = {
        line: Observation(
            row["text"],
            speaker=row["speaker"],
            session=row["session"],
            observe_time=datetime.fromisoformat(row["time"]),
        )
        for line, row in enumerate(rows, 1)
    }
    return dict(list(letters.items())[-limit:])


def load_questions(letters: Mapping[int, Observation]) -> list[Question]:
    """The questions that these letters can answer."""
    found = []
    for row in json.loads((DATA / "questions.json").read_text("utf-8")):
        lines = [expected["line"] for expected in row["expected"] if expected["line"] in letters]
        if lines:
            found.append(Question(row["question"], frozenset(str(letters[line].body) for line in lines)))
    return found


async def run_demo(limit: int, directory: Path, screen: Screen) -> list[str]:
    """Run all steps. Returns the problems found."""
    by_line, check, server = load_letters(limit), Check(), DemoServer(directory)
    letters, asked = list(by_line.values()), load_questions(by_line)
    try:
        screen.show_title("1  A server starts")
        await start_server(server, screen)
        async with memstream.connect(server.address) as client:
            screen.show_title(
                "2  An agent observes", f"{len(letters):,} letters about clocks, 1988 to 2026, over one stream"
            )
            await ingest_letters(client, letters, screen, check)
            screen.show_title(
                "3  Questions", "asked over one stream at once; ✓ marks a letter known to hold the answer"
            )
            before = await ask_questions(client, asked)
            screen.show_answers([(question.text, question.expected) for question in asked], before)
            screen.show_working_memory(before[0])
            check.expect(all(scores_add_up(answer) for answer in before), "the parts of a score do not sum to it")
        screen.show_title("4  kill -9", "while another agent's observations are in flight")
        acknowledged = await kill_in_flight(server, letters, screen)
        await start_server(server, screen)
        async with memstream.connect(server.address) as client:
            screen.show_title("5  After the restart")
            await continue_stream(client, letters, acknowledged, screen, check)
            after = await ask_questions(client, asked)
            compare_answers(asked, before, after, screen, check)
    finally:
        await asyncio.to_thread(server.stop)
    return check.failures


async def start_server(server: DemoServer, screen: Screen) -> None:
    """Start the server and show its description."""
    seconds = await asyncio.to_thread(server.start)
    async with memstream.connect(server.address) as client:
        screen.show_server(await client.server_info(), server.pid, server.address, seconds)


# ---- step 2: observe


async def ingest_letters(
    client: memstream.Client, letters: Sequence[Observation], screen: Screen, check: Check
) -> None:
    """Stream the letters in while a watch records every step they take."""
    memory = await client.create_memory(MEMORY)
    began = time.monotonic()
    async with memory.watch("beginning") as watch, memory.observe("postman") as stream:
        with screen.show_progress(len(letters)) as show:
            shown = asyncio.create_task(draw_progress(stream, show))
            for letter in letters:
                await stream.send(letter)
            await stream.flush()
            shown.cancel()
            show(stream.received, stream.stored)
        seconds = time.monotonic() - began
        events = await read_events(watch, stream.revision)
    stats = await memory.stats()
    screen.show_ingest(len(letters), seconds, stats)
    screen.show_event_counts(events)
    counted = sum(event.type in (EventType.OBSERVED, EventType.REPEATED, EventType.ECHOED) for event in events)
    check.expect(counted == len(letters), f"{len(letters)} letters were sent, the events account for {counted}")
    await show_example(memory, events, screen)


async def draw_progress(stream: memstream.ObserveStream, show: Callable[[int, int], None]) -> None:
    """Draw the progress of the stream until cancelled."""
    while True:
        show(stream.received, stream.stored)
        await asyncio.sleep(0.05)


async def read_events(watch: memstream.Watch, revision: int) -> list[Event]:
    """The events up to a revision."""
    events: list[Event] = []
    async with asyncio.timeout(CATCH_UP_S):
        async for event in watch:
            events.append(event)
            if event.cursor.revision >= revision:  # the cursor reaches a revision only after its last event
                break
    return events


async def show_example(memory: memstream.Memory, events: Sequence[Event], screen: Screen) -> None:
    """Show one letter's complete path."""
    path = example_path(events)
    if path:
        others = {event.other_id for event in path} - {""}
        letter = await memory.get_fragment(path[0].fragment_id)
        screen.show_path(letter, path, {id_: (await memory.get_fragment(id_)).content for id_ in others})


def example_path(events: Sequence[Event]) -> list[Event]:
    """Every step of a letter that others strengthened until it was promoted; empty if there is none."""
    steps: dict[str, list[Event]] = {}
    gone = {event.fragment_id for event in events if event.type in (EventType.DROPPED, EventType.FILTERED)}
    for event in events:
        steps.setdefault(event.fragment_id, []).append(event)
    for path in steps.values():
        types = [event.type for event in path]
        enhancers = {event.other_id for event in path if event.type is EventType.ENHANCED}
        if (
            EventType.PROMOTED in types
            and EventType.OVERFLOWED not in types
            and len(enhancers) > 1
            and not enhancers & gone
        ):
            return path
    return []


# ---- step 3: questions


async def ask_questions(client: memstream.Client, asked: Sequence[Question]) -> list[Answer]:
    """Ask all questions at once over one stream; answers in the order of the questions."""
    async with client.memory(MEMORY).recall(session="demo") as recall:
        return await asyncio.gather(
            *(recall.query(question.text, limit=LIMIT, explain=True, now=NOW) for question in asked)
        )


def scores_add_up(answer: Answer) -> bool:
    """Whether every score is the sum of its explanation."""
    return all(
        hit.explanation is not None
        and math.isclose(hit.score, math.fsum(part.value * part.weight for part in hit.explanation.parts))
        for hit in answer
    )


# ---- steps 4 and 5: kill and restart


async def kill_in_flight(server: DemoServer, letters: Sequence[Observation], screen: Screen) -> int:
    """Kill the server in the middle of a stream. Returns how many observations it had acknowledged as received."""
    async with memstream.connect(server.address) as client:
        memory = await client.create_memory(SECOND)
        with contextlib.suppress(AgentGoneError):
            async with memory.observe("reader") as stream:
                await send_letters(stream, letters, enough=len(letters) // 3)
                server.kill()
                raise AgentGoneError  # the agent fails with it: no flush, no close
        screen.show_kill(server.pid, stream.expected_sequence - 1, stream.received)
        return stream.received


class AgentGoneError(Exception):
    """Leaves a stream like a crash."""


async def send_letters(stream: memstream.ObserveStream, letters: Sequence[Observation], enough: int) -> None:
    """Send at a moderate rate until `enough` are acknowledged, then some more that are in flight at the kill."""
    for number, letter in enumerate(letters):
        await stream.send(letter)
        if number % 20 == 0:
            await asyncio.sleep(0.02)
        if stream.received >= enough:
            for more in letters[number + 1 : number + 40]:
                await stream.send(more)
            return await asyncio.sleep(0.001)
    return None


async def continue_stream(
    client: memstream.Client, letters: Sequence[Observation], acknowledged: int, screen: Screen, check: Check
) -> None:
    """Restart the second agent, continue where the server says, and check that everything is counted."""
    memory = client.memory(SECOND)
    async with memory.observe("reader") as stream:
        first = stream.expected_sequence
        check.expect(first > acknowledged, f"{acknowledged} were acknowledged, the server has {first - 1}")
        for letter in letters[first - 1 :]:
            await stream.send(letter)
        await stream.flush()
    async with memory.watch("beginning") as watch:
        events = await read_events(watch, stream.revision)
    kept = [fragment.content async for fragment in memory.list_fragments()]
    entered = [event for event in events if event.type is EventType.OBSERVED]
    repeats = [event for event in events if event.type in (EventType.REPEATED, EventType.ECHOED)]
    lost = {str(letter.body) for letter in letters} - set(kept)
    check.expect(not lost, f"{len(lost)} letters are lost")
    check.expect(len(entered) + len(repeats) == len(letters), f"{len(entered)} + {len(repeats)} is not {len(letters)}")
    check.expect(len(kept) == len(entered), f"{len(entered)} entered the memory, it lists {len(kept)}")
    screen.show_continuation(acknowledged, first, len(letters), len(kept), len(repeats), len(lost))


def compare_answers(
    asked: Sequence[Question], before: Sequence[Answer], after: Sequence[Answer], screen: Screen, check: Check
) -> None:
    """Record every question whose answer differs in letters, order or scores."""
    same = []
    for question, one, other in zip(asked, before, after, strict=True):
        equal = [(hit.fragment.id, hit.score) for hit in one] == [(hit.fragment.id, hit.score) for hit in other]
        same.append(check.expect(equal, f"the answer differs from that before the restart: {question.text}"))
    screen.show_comparison([question.text for question in asked], [len(answer) for answer in after], same)


# ---- command line


@contextlib.asynccontextmanager
async def directory_for(kept: Path | None) -> AsyncIterator[Path]:
    """`kept`, or a temporary directory that is removed afterwards."""
    if kept is not None:
        await asyncio.to_thread(kept.mkdir, parents=True)
        yield kept
        return
    made = Path(tempfile.mkdtemp(prefix="memstream-demo-"))
    try:
        yield made
    finally:
        shutil.rmtree(made, ignore_errors=True)


async def run_command(arguments: argparse.Namespace) -> int:
    """Run the demo; returns its exit code."""
    screen, began = Screen(), time.monotonic()
    async with directory_for(arguments.keep) as directory:
        failures = await run_demo(arguments.letters, directory, screen)
    screen.show_end(failures, time.monotonic() - began, arguments.keep)
    return 1 if failures else 0


def main() -> int:
    """Read the command line and run."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--letters", type=int, default=0, help="use only the latest LETTERS (default: all 1,342)")
    parser.add_argument("--keep", type=Path, help="keep the data in KEEP, a new directory")
    arguments = parser.parse_args()
    if arguments.letters and arguments.letters < LETTERS_MIN:
        parser.error(f"--letters must be at least {LETTERS_MIN}, so that some question has its answer among them")
    if arguments.keep and arguments.keep.exists():
        parser.error(f"{arguments.keep} exists; name a new directory")
    return asyncio.run(run_command(arguments))


if __name__ == "__main__":
    sys.exit(main())
