"""`memstream observe`: sends lines or JSON objects from files or standard input, exactly once, with progress."""

from __future__ import annotations

import asyncio
import contextlib
import sys
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field, replace
from enum import StrEnum

import click
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from memstream.client import Client
from memstream.memory import Memory
from memstream.observe import ObserveStream
from memstream.policy import Profile
from memstream.values import MemoryKind
from memstream_server.cli.failures import Exit, Failure, Missing, Misuse, describe_os_error
from memstream_server.cli.feeds import (
    STDIN,
    FeedContents,
    LinePositions,
    Problem,
    ProducerFeed,
    SentLines,
    load_sent_lines,
    plan_feeds,
    read_records,
    scan_feed,
)
from memstream_server.cli.options import json_option, time_zone_option
from memstream_server.cli.output import open_console, print_json, print_line
from memstream_server.cli.records import Format, MalformedLine
from memstream_server.cli.server import Server, server_options

PROBLEMS_SHOWN = 20
"""Rejected lines that are listed."""
_REFRESH_S = 0.1
PROBLEMS_KEPT = 1_000
"""Malformed lines of a pipe that are kept with their reason; the rest are only counted."""


class ChangedLines(StrEnum):
    """What happens to lines of a file that are not those that were sent before."""

    REFUSE = "refuse"
    SEND = "send"
    SKIP = "skip"


@dataclass(frozen=True, slots=True)
class _Sending:
    """How feeds are sent."""

    form: Format
    time_zone: str
    session: str
    changed: ChangedLines
    quiet: bool
    memory_uid: str = ""
    revision: int = 0
    """Of the memory when the command starts."""


@click.command("observe", short_help="Send observations from files or standard input into a memory.")
@click.argument("memory")
@click.argument("files", nargs=-1)
@click.option(
    "--format",
    "form",
    type=click.Choice([each.value for each in Format]),
    default=Format.AUTO.value,
    show_default=True,
    help="Format of the input.",
)
@click.option("--session", default="", metavar="NAME", help="Session of observations without one.")
@click.option(
    "--producer", metavar="NAME", help="Name that numbers the observations. Default: derived from each file's identity."
)
@click.option(
    "--resume/--no-resume",
    default=None,
    help="Skip what this producer has already sent. Default: yes, except for pipes.",
)
@click.option(
    "--changed",
    type=click.Choice([each.value for each in ChangedLines]),
    default=ChangedLines.REFUSE.value,
    show_default=True,
    help="If lines that were sent before have changed: refuse, send the new ones, or skip them.",
)
@click.option("--create", is_flag=True, help="Create the memory if it does not exist.")
@click.option(
    "--kind",
    type=click.Choice([each.value for each in MemoryKind]),
    help="With --create: the memory's tiers. Default: hybrid.",
)
@click.option(
    "--profile",
    type=click.Choice([each.value for each in Profile]),
    help="With --create: the source of its policy's defaults.",
)
@time_zone_option(of="Time zone of dates, and of times without one, in JSON lines that name none", expose=True)
@server_options
@json_option
def observe_command(
    memory: str,
    files: tuple[str, ...],
    form: str,
    session: str,
    producer: str | None,
    resume: bool | None,
    changed: str,
    create: bool,
    kind: str | None,
    profile: str | None,
    time_zone: str | None,
    server: Server,
    as_json: bool,
) -> None:
    """Send observations into MEMORY (NAMESPACE/NAME), from FILES or standard input (-), one per line.

    A line is plain text, or a JSON object: text (or content, or structured), speaker, role (user,
    assistant, tool, system), session, time, importance (0 to 1), metadata, external_id, embedding, ttl (seconds),
    expire_time, token_count, supersedes (ids or external_ids of what it corrects), valid_from, valid_until, time_zone
    (of this line's times); all but the first are optional.

    The command returns when everything is stored. It lists observations that the server rejects with their lines, and
    sends the rest. After an interruption, or when the file has grown, the same command continues where the last run
    stopped, so repeating it is always safe. A file's identity is host, path and first line; --producer overrides it.

    \b
      memstream observe --create demo/joy notes.txt
      memstream observe demo/joy --session monday chat.jsonl
      tail -f agent.log | memstream observe demo/joy
      echo '{"text": "My name is Bob", "speaker": "user"}' | memstream observe demo/joy
    """
    if (kind or profile) and not create:
        raise click.UsageError("--kind and --profile require --create.")
    sending = _Sending(Format(form), time_zone or "", session, ChangedLines(changed), quiet=as_json)
    tallies = [_create_tally(feed, sending) for feed in _plan_feeds(files, producer, resume)]
    if files in ((), (STDIN,)) and sys.stdin.isatty():
        print_line("reading from the keyboard; end with Ctrl-D", err=True)

    async def observe_feed(client: Client) -> None:
        named = client.memory(memory)
        if create:
            how = Profile(profile) if profile else None
            what = MemoryKind(kind) if kind else None
            await client.create_memory(memory, kind=what, profile=how, exist_ok=True)
        info = await named.describe()  # fails at once for a wrong name; a stream would retry for a while
        for tally in tallies:
            await _send_feed(named, tally, replace(sending, memory_uid=info.uid, revision=info.revision))

    try:
        server.run_with_client(observe_feed)
    except (Failure, KeyboardInterrupt, OSError) as error:
        _print_interrupted(tallies)
        if isinstance(error, OSError):
            raise Failure(describe_os_error(error)) from error
        if isinstance(error, Failure):
            raise
        sys.exit(Exit.INTERRUPTED)
    _print_tallies(memory, tallies, as_json)


def _plan_feeds(files: tuple[str, ...], producer: str | None, resume: bool | None) -> list[ProducerFeed]:
    try:
        return plan_feeds(files, producer, resume)
    except ValueError as error:
        raise click.UsageError(str(error)) from error
    except FileNotFoundError as error:
        raise Missing(f"there is no file {error.filename}") from error
    except OSError as error:
        raise Misuse(describe_os_error(error)) from error


def _create_tally(feed: ProducerFeed, sending: _Sending) -> Tally:
    if not feed.repeatable:
        return Tally(feed, None)
    try:
        found = scan_feed(feed, sending.form, sending.time_zone)
    except OSError as error:
        raise Misuse(describe_os_error(error)) from error
    if found.malformed:
        raise Misuse(_malformed_message(found))
    return Tally(feed, found)


def _malformed_message(found: FeedContents) -> str:
    lines = [str(problem) for problem in found.malformed[:PROBLEMS_SHOWN]]
    more = len(found.malformed) - len(lines)
    tail = [f"and {more:,} more"] if more else []
    head = f"nothing was sent, because {len(found.malformed):,} lines are malformed (is --format right?)"
    return "\n  ".join([head, *lines, *tail])


async def _send_feed(memory: Memory, tally: Tally, sending: _Sending) -> None:
    feed, contents = tally.feed, tally.contents
    compares = feed.resume and contents is not None
    record = load_sent_lines(sending.memory_uid, feed.producer) if compares else None
    if record is not None and record.diverged:
        if sending.revision < record.revision:
            raise Misuse(
                f"{memory.path} is at revision {sending.revision:,}, which is older than what {feed.name} was sent to "
                f"({record.revision:,}): it was restored. Pass --no-resume to send the whole file again"
            )
        await _send_new_lines(memory, tally, record, sending)
        return
    async with memory.observe(feed.producer, session=sending.session) as stream:
        base = stream.expected_sequence - 1
        skip = base if feed.resume else 0
        changed = record is not None and contents is not None and _find_change(tally, record, skip, sending)
        if not changed:
            if record is not None and contents is not None:
                _warn_if_short(feed, len(contents.lines), skip)
                record.save(contents.lines, False, sending.revision)
            tally.remaining = None if contents is None else max(0, len(contents.lines) - skip)
            await _send_records(tally, stream, sending, lambda place: place >= skip)
    if changed and record is not None:
        record.save(record.hashes[:skip], True, sending.revision)
        await _send_new_lines(memory, tally, record, sending)


async def _send_new_lines(memory: Memory, tally: Tally, record: SentLines, sending: _Sending) -> None:
    """Sends the lines that the record lacks, by a producer that is named after the record, and adds them to it."""
    contents = tally.contents
    assert contents is not None
    new = record.find_new(contents.lines)
    last_sent = max(set(range(len(contents.lines))) - set(new), default=-1)
    if new and new[0] < last_sent and sending.changed is not ChangedLines.SEND:
        if sending.changed is ChangedLines.REFUSE:
            raise _change_failure(tally, new[0])
        new = [place for place in new if place > last_sent]
    async with memory.observe(f"{tally.feed.producer[:100]}-{record.digest()}", session=sending.session) as stream:
        chosen = set(new[stream.expected_sequence - 1 :])
        tally.remaining = len(chosen)
        try:
            await _send_records(tally, stream, sending, chosen.__contains__)
        finally:
            received = new[: stream.received]
            sent = [*record.hashes, *(contents.lines[place] for place in received)]
            record.save(sent, True, max(sending.revision, stream.revision))


def _find_change(tally: Tally, record: SentLines, count: int, sending: _Sending) -> bool:
    """Whether changed lines are to be sent. Raises Misuse if there are any and the user has not chosen."""
    assert tally.contents is not None
    place = record.first_difference(tally.contents.lines, count)
    if place is None or sending.changed is ChangedLines.SKIP:
        return False
    if sending.changed is ChangedLines.REFUSE:
        raise _change_failure(tally, place)
    return True


def _change_failure(tally: Tally, place: int) -> Misuse:
    assert tally.contents is not None
    file, line = tally.contents.places.find(place)
    return Misuse(
        f"{file}:{line} is not what was sent before from this file, and nothing was sent: pass --changed send to send "
        "the lines that are new, --changed skip to send only what follows"
    )


async def _send_records(
    tally: Tally, stream: ObserveStream, sending: _Sending, is_wanted: Callable[[int], bool]
) -> None:
    tally.base, tally.stream = stream.expected_sequence - 1, stream
    async with _show_progress(tally, sending.quiet):
        place = 0
        async for file, line, item in read_records(tally.feed, sending.form, sending.time_zone):
            if isinstance(item, MalformedLine):
                tally.note_malformed(Problem(file, line, item.problem))
                continue
            if is_wanted(place):
                tally.places.add(file, line)
                await stream.send(item)
            else:
                tally.skipped += 1
            place += 1
        await stream.close()


def _warn_if_short(feed: ProducerFeed, observations: int, skip: int) -> None:
    if skip > observations:
        print_line(
            f"memstream: warning: producer {feed.producer} has already sent {skip:,} observations, "
            f"{feed.name} holds {observations:,}: none is new. If this is another file, pass a --producer",
            err=True,
        )


@contextlib.asynccontextmanager
async def _show_progress(tally: Tally, quiet: bool) -> AsyncIterator[None]:
    """Shows progress bars (received, stored) on standard error, if that is a terminal."""
    columns = (TextColumn("{task.description:<8}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    out = open_console(stderr=True)
    with Progress(*columns, console=out, disable=quiet or not out.is_terminal) as bars:
        received, stored = (bars.add_task(name, total=tally.remaining) for name in ("received", "stored"))

        def refresh() -> None:
            bars.update(received, completed=tally.received)
            bars.update(stored, completed=tally.stored)

        async def keep_refreshing() -> None:
            while True:
                refresh()
                await asyncio.sleep(_REFRESH_S)

        refreshing = asyncio.create_task(keep_refreshing())
        try:
            yield
        finally:
            refreshing.cancel()
            refresh()


def _print_interrupted(tallies: list[Tally]) -> None:
    """Reports the progress of each feed, and how to continue."""
    for tally in tallies:
        if tally.stream is None:
            continue
        so_far = f"{tally.received:,} received of {len(tally.places):,} sent"
        again = (
            "run the same command again to send the rest" if tally.feed.resume else "the rest of the pipe is not sent"
        )
        print_line(f"memstream: {tally.feed.name}: interrupted, {so_far}; {again}", err=True)


def _print_tallies(memory: str, tallies: list[Tally], as_json: bool) -> None:
    rejected = sum(tally.rejected_count for tally in tallies)
    if as_json:
        feeds = [_tally_figures(tally) for tally in tallies]
        print_json({"memory": memory, "rejected": rejected, "feeds": feeds})
    else:
        for tally in tallies:
            _print_tally(memory, tally)
    if rejected:
        sys.exit(Exit.REJECTED)


def _print_tally(memory: str, tally: Tally) -> None:
    stream = tally.stream
    revision = "" if stream is None else f" (revision {stream.revision:,})"
    refused = tally.rejected_count - tally.malformed_count
    parts = [f"{tally.stored - refused:,} observations stored in {memory}{revision}"]
    if tally.skipped:
        parts.append(f"{tally.skipped:,} skipped (already received)")
    if tally.rejected_count:
        parts.append(f"{tally.rejected_count:,} rejected")
    print_line(f"{tally.feed.name}: {', '.join(parts)}")
    problems = tally.problems()[:PROBLEMS_SHOWN]
    for problem in problems:
        print_line(f"  {problem}", err=True)
    if tally.rejected_count > len(problems):
        print_line(f"  and {tally.rejected_count - len(problems):,} more", err=True)
    if refused and tally.feed.resume:
        print_line("  their numbers cannot be reused: send corrected observations from another file", err=True)


def _tally_figures(tally: Tally) -> dict[str, object]:
    stream = tally.stream
    refused = tally.rejected_count - tally.malformed_count
    return {
        "source": tally.feed.name,
        "producer": tally.feed.producer,
        "skipped": tally.skipped,
        "stored": tally.stored - refused,
        "rejected": tally.rejected_count,
        "revision": 0 if stream is None else stream.revision,
        "problems": tally.problems(),
    }


@dataclass(slots=True)
class Tally:
    """The progress of one feed."""

    feed: ProducerFeed
    contents: FeedContents | None
    """None for a pipe, which cannot be read in advance."""
    remaining: int | None = None
    """Observations that this run sends, if they can be counted."""
    base: int = 0
    """The producer's last number before this run."""
    skipped: int = 0
    stream: ObserveStream | None = None
    places: LinePositions = field(default_factory=LinePositions)
    malformed: list[Problem] = field(default_factory=list)
    malformed_count: int = 0

    @property
    def received(self) -> int:
        """Observations of this run that are durable, or rejected."""
        return 0 if self.stream is None else max(0, self.stream.received - self.base)

    @property
    def stored(self) -> int:
        """Observations of this run that are visible to every recall, or rejected."""
        return 0 if self.stream is None else max(0, self.stream.stored - self.base)

    @property
    def rejected_count(self) -> int:
        """Malformed and rejected lines."""
        return self.malformed_count + (0 if self.stream is None else self.stream.rejected_count)

    def note_malformed(self, problem: Problem) -> None:
        """Records a malformed line of a pipe, which is skipped."""
        self.malformed_count += 1
        if len(self.malformed) < PROBLEMS_KEPT:
            self.malformed.append(problem)

    def problems(self) -> list[Problem]:
        """Malformed and rejected lines in order: the first 1,000 malformed, the last 1,000 rejected."""
        refused = () if self.stream is None else self.stream.rejected
        located = [(self.places.find(each.sequence - self.base - 1), each.error) for each in refused]
        problems = [Problem(file, line, " ".join(str(error).split())) for (file, line), error in located]
        return sorted([*self.malformed, *problems], key=lambda problem: problem.line)
