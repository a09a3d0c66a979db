"""Reads a source twice: to count and check it, then to send it. What cannot be read whole is not sent at all.

Rule 1: the producer is named after a digest of all records, and numbers them in order. An import that was interrupted
continues after the last number that the server has; one that was complete sends nothing.
Rule 2: the external id of a record is its place in the source. A later export of the same source adds what is new and
replaces what has changed.
"""

from __future__ import annotations

import asyncio
import hashlib
import re
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Generator, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from itertools import islice

from memstream.client import Client
from memstream.codec import observation_to_wire
from memstream.conversation_values import NewMessage
from memstream.errors import EtagMismatch, InvalidRequest, MemoryNotFound
from memstream.importers.records import (
    UNREADABLE,
    InvalidSource,
    Options,
    Record,
    Report,
    clean_text,
    digest_of,
    fit_name,
)
from memstream.importers.shapes import Shape
from memstream.importers.sources import Source
from memstream.memory import Memory
from memstream.policy import Profile
from memstream.resources import MemoryInfo, ServerInfo
from memstream.values import MemoryKind, Observation, Rejected

PAGE = 256
"""Records that a thread parses at once."""
MESSAGES = 100
"""Messages of one call."""
FEED_BYTES_MAX = 32_768
"""A longer message of a conversation does not reach the memory that it feeds."""
UNFINISHED = "unfinished-import"
"""Label of a new memory until its policy is the wanted one."""
_UNSAFE = re.compile(r"[^A-Za-z0-9._-]")


@dataclass(frozen=True, slots=True)
class Target:
    """Where the records go. `conversations`: "" (observations only), "feed" (conversations that feed the memory) or
    "only" (conversations, and no memory). `kind`, `profile`: of a memory that does not exist."""

    path: str
    conversations: str = ""
    kind: MemoryKind = MemoryKind.HYBRID
    profile: Profile | None = None

    @property
    def namespace(self) -> str:
        """Of the memory and the conversations."""
        return self.path.partition("/")[0]

    @property
    def memory(self) -> str:
        """The memory's name."""
        return self.path.partition("/")[2]


@dataclass(slots=True)
class Result:
    """What an import did. `sent`: records that the server did not have from an earlier run; `rejected`: places and
    reasons."""

    shape: str
    source: str
    target: str
    records: int = 0
    sent: int = 0
    rejected: list[str] = field(default_factory=list[str])
    report: Report = field(default_factory=Report)
    producer: str = ""


class Importer:
    """One import of one source. `progress` is called with what is done, and the records until now."""

    def __init__(
        self,
        source: Source,
        shape: Shape,
        options: Options,
        target: Target,
        progress: Callable[[str, int, int | None], None] = lambda _doing, _done, _total: None,
    ) -> None:
        self._source = source
        self._shape = shape
        self._options = options
        self._target = target
        self._progress = progress
        self._bytes_max = 0

    async def run(self, client: Client, dry_run: bool = False) -> Result:
        """Raises InvalidSource before anything is sent, MemstreamError for the server."""
        info = await client.server_info()
        self._bytes_max = info.limits.content_bytes_max or 65_536
        if self._target.conversations:
            self._bytes_max = min(self._bytes_max, FEED_BYTES_MAX)
        result = Result(self._shape.name, self._source.shown, self._target.path)
        await self._scan(result, info)
        if dry_run or not result.records:
            return result
        if self._target.conversations:
            await self._send_messages(client, result)
        else:
            await self._send_observations(client, result)
        return result

    async def _scan(self, result: Result, info: ServerInfo) -> None:
        """Counts and checks every record; names the producer by them."""
        if self._options.model not in ("", info.embedding.name):
            raise InvalidSource(
                f"the server's model is {info.embedding.name}, so vectors of {self._options.model} cannot be kept: "
                "leave --model out to embed the texts again"
            )
        digest = self._new_digest()
        sessions: set[str] = set()
        async for records in self._pages(result.report):
            for record in records:
                self._check(record, info)
                digest.update(_bytes_of(record))
                result.report.see_time(record.time)
                sessions.add(digest_of(record.session))
            result.records += len(records)
            self._progress("reading", result.records, None)
        result.producer = f"import-{self._shape.name}-{digest.hexdigest()}"
        blocks = result.report.kept["blocks"]
        result.report.keep("messages" if self._shape.chat else "facts", result.records - blocks)
        result.report.kept["sessions"] = len(sessions - {digest_of("")})
        result.report.kept += Counter()  # drops counts of 0

    def _new_digest(self) -> hashlib.blake2b:
        return hashlib.blake2b(f"{self._shape.name}\n{self._target.conversations}".encode(), digest_size=12)

    def _check(self, record: Record, info: ServerInfo) -> None:
        if record.embedding is not None and len(record.embedding) != info.embedding.dimension:
            raise InvalidSource(
                f"{record.place}: its vector has {len(record.embedding)} numbers, {info.embedding.name} has "
                f"{info.embedding.dimension}: leave --model out to embed the texts again"
            )
        try:
            observation_to_wire(_observation_of(record))
        except InvalidRequest as error:
            raise InvalidSource(f"{record.place}: {error.message}") from error

    async def _pages(self, report: Report) -> AsyncGenerator[list[Record]]:
        """Records that fit the server, a page at a time; a thread reads and parses."""
        records = self._fitting(report)
        loop = asyncio.get_running_loop()
        # One thread: a cancelled import closes the reader only when its last page is read.
        with ThreadPoolExecutor(1, "memstream import") as thread:
            try:
                while page := await loop.run_in_executor(thread, lambda: list(islice(records, PAGE))):
                    yield page
            finally:
                thread.submit(records.close)

    def _fitting(self, report: Report) -> Generator[Record]:
        """Records with texts and names of the server's sizes. A longer text becomes several records."""
        for record in self._shape.read(self._source, self._options, report):
            text = clean_text(record.text)
            if text != record.text.strip():
                report.lose("characters that are none (half emoji, NUL)")
            if not text:
                report.skip("has no text", record.place)
                continue
            time = self._options.missing_time if record.time == UNREADABLE else record.time
            if record.time == UNREADABLE and time is None:
                report.skip("has no time that can be read (--time gives one)", record.place)
                continue
            fitting = replace(
                record,
                time=time,
                text=text,
                id=fit_name(record.id, 120),
                session=fit_name(record.session),
                speaker=fit_name(record.speaker),
            )
            parts = [text] if record.block else list(_split(text, self._bytes_max))
            report.keep("long texts in several parts", len(parts) > 1)
            yield fitting if len(parts) == 1 else replace(fitting, text=parts[0])
            yield from (
                replace(fitting, text=part, id=f"{fitting.id}/{number}", embedding=None)
                for number, part in enumerate(parts[1:], 2)
            )

    # Observations.

    async def _send_observations(self, client: Client, result: Result) -> None:
        memory = client.memory(self._target.path)
        found = await self._prepare_memory(client, memory)
        places: dict[int, str] = {}
        checked = self._new_digest()
        number = 0
        async with memory.observe(result.producer) as stream:
            done = stream.expected_sequence - 1
            if done < result.records - result.report.kept["blocks"]:
                _refuse_dropping(found, self._target.path)
            async for records in self._pages(Report()):
                for record in records:
                    checked.update(_bytes_of(record))
                    if record.block:
                        await self._put_block(memory, record, result)
                        continue
                    number += 1
                    if number > done:
                        places[number] = record.place
                        await stream.send(_observation_of(record))
                        result.sent += 1
                _note_rejected(stream.rejected, places, result)
                places = {one: place for one, place in places.items() if one > stream.stored}
                self._progress("sending", number, result.records)
            await stream.flush()
            _note_rejected(stream.rejected, places, result)
        if not result.producer.endswith(checked.hexdigest()):
            raise InvalidSource(f"{self._source.shown} changed during the import: run the command again")
        await self._finish_memory(memory)

    async def _put_block(self, memory: Memory, record: Record, result: Result) -> None:
        """Writes a block that the memory does not have; one that it has may have been edited since."""
        try:
            await memory.blocks.put(_UNSAFE.sub("-", record.block), record.text, absent=True)
            result.sent += 1
        except EtagMismatch:
            return

    async def _prepare_memory(self, client: Client, memory: Memory) -> MemoryInfo:
        """Creates the memory if it is missing. DB-GPT's policy drops what leaves short-term, so a new memory has it
        only when the import is complete."""
        try:
            return await memory.describe()
        except MemoryNotFound:
            drops = self._target.profile is Profile.DBGPT and self._target.kind is MemoryKind.HYBRID
            await client.create_memory(
                self._target.path,
                kind=self._target.kind,
                profile=self._target.profile,
                policy={"short_term": {"overflow": "promote"}} if drops else None,
                labels={UNFINISHED: "dbgpt"} if drops else None,
                exist_ok=True,
            )
            return await memory.describe()

    async def _finish_memory(self, memory: Memory) -> None:
        info = await memory.describe()
        if UNFINISHED in info.labels:
            labels = {key: value for key, value in info.labels.items() if key != UNFINISHED}
            await memory.update(policy={"short_term": {"overflow": "drop"}}, labels=labels)

    # Conversations.

    async def _send_messages(self, client: Client, result: Result) -> None:
        """Appends every message once: its client id is its external id."""
        fed = self._target.memory if self._target.conversations == "feed" else None
        if fed:
            await self._prepare_memory(client, client.memory(self._target.path))
        known: set[str] = set()
        done = 0
        async for records in self._pages(Report()):
            for name, messages in _by_conversation(self._shape.name, records):
                talk = client.conversation(f"{self._target.namespace}/{name}")
                for start in range(0, len(messages), MESSAGES):
                    appended = await talk.append_messages(messages[start : start + MESSAGES])
                    result.sent += appended.count
                if digest_of(name) not in known:
                    known.add(digest_of(name))
                    await talk.update(labels={"source": self._shape.name}, feed_memory=fed)
            done += len(records)
            self._progress("sending", done, result.records)


def _note_rejected(rejected: Sequence[Rejected], places: dict[int, str], result: Result) -> None:
    for one in rejected:
        if one.sequence in places:
            result.rejected.append(f"{places.pop(one.sequence)}: {one.error}")


def _bytes_of(record: Record) -> bytes:
    return f"{record!r}{record.embedding}\n".encode()


def _observation_of(record: Record) -> Observation:
    return Observation(
        record.text,
        speaker=record.speaker,
        role=record.role,
        session=record.session,
        observe_time=record.time,
        importance=record.importance,
        metadata=record.metadata,
        embedding=record.embedding,
        external_id=record.id,
    )


def _by_conversation(shape: str, records: list[Record]) -> Iterator[tuple[str, list[NewMessage]]]:
    """Messages of a page by the name of their conversation, in order."""
    grouped: dict[str, list[NewMessage]] = {}
    for record in records:
        grouped.setdefault(conversation_name(shape, record.session), []).append(
            NewMessage(
                role=record.role.value if record.role else "user",
                name=record.speaker,
                content=record.text,
                client_id=record.id,
                metadata=record.metadata,
                time=record.time,
            )
        )
    yield from grouped.items()


def conversation_name(shape: str, session: str) -> str:
    """The name of a session's conversation: the session, if it has no other characters than names have."""
    plain = _UNSAFE.sub("-", session)[:80]
    return f"{shape}.{plain}" if plain == session else f"{shape}.{plain}.{digest_of(session)}"


def _split(text: str, bytes_max: int) -> Iterator[str]:
    """Parts of a text of at most `bytes_max` bytes of UTF-8, which end at a space if there is one near the end."""
    raw = text.encode()
    while len(raw) > bytes_max:
        part = raw[:bytes_max].decode(errors="ignore")
        space = max(part.rfind(" "), part.rfind("\n"))
        if space > len(part) // 2:
            part = part[: space + 1]
        raw = raw[len(part.encode()) :]
        if part.strip():
            yield part.strip()
    if rest := raw.decode().strip():
        yield rest


def _refuse_dropping(info: MemoryInfo, path: str) -> None:
    """Raises InvalidSource for a memory that would lose most of an import."""
    short_term = info.policy.short_term
    drops = info.kind is MemoryKind.HYBRID and short_term is not None and str(short_term.overflow) == "drop"
    if drops or info.kind in (MemoryKind.SENSORY, MemoryKind.SHORT_TERM, MemoryKind.ENHANCED_SHORT_TERM):
        raise InvalidSource(
            f"{path} drops what leaves its short-term tier, which would be most of the import: set its policy "
            "short_term.overflow to promote, or import into another memory"
        )


__all__ = ["Importer", "Result", "Target", "conversation_name"]
