"""The parts of an observation and of a recall, called without memstream's server."""

from __future__ import annotations

import contextlib
import sqlite3
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from bare import BothLegs, Floats, Messages, time_scan
from recalls import LIMIT, Texts

from memstream.answer_codec import answer_from_wire
from memstream.v1 import stream_service_pb2 as pb
from memstream_server.adapters.journal.database.sqlite import writer_engine
from memstream_server.adapters.models.analyzer import SnowballAnalyzer
from memstream_server.adapters.models.hashing import MODEL, HashingEmbedder
from memstream_server.core.policy import Policy
from memstream_server.core.rendering import text_prefix
from memstream_server.core.tiers import Newcomer, observe
from memstream_server.core.values import Fragment, MemoryKind, State

HELD = 10
"""Fragments of short-term, by default."""


def measure_cpu_s(work: Callable[[], object]) -> float:
    """CPU seconds of this process for `work`."""
    began = time.process_time()
    work()
    return time.process_time() - began


class ObservationParts:
    """What an observation needs besides gRPC and the disk: vectors, terms, a decision."""

    def __init__(self) -> None:
        self._analyzer, self._embedder, self._policy = SnowballAnalyzer(), HashingEmbedder(), Policy()
        self._state = State(MemoryKind.HYBRID, b"seed")

    def embed(self, fragments: Sequence[Fragment]) -> Floats:
        """The vectors of the indexed texts and of the contents in one call. Returns those of the contents."""
        texts = [text_prefix(one) + one.content for one in fragments] + [one.content for one in fragments]
        return self._embedder.vectors(texts)[len(fragments) :]

    def analyze(self, fragments: Sequence[Fragment]) -> None:
        """The terms of each."""
        for one in fragments:
            self._analyzer.terms(one.content, prefix=text_prefix(one))

    def decide(self, fragments: Sequence[Fragment], vectors: Floats) -> None:
        """One decision after the other, each with the vector of its content."""
        for one, vector in zip(fragments, vectors, strict=True):
            self._state = observe(self._state, Newcomer(one, vector), self._policy, MODEL.fitted.similarity_min).state

    def _decide_all(self, groups: Sequence[Sequence[Fragment]], vectors: Sequence[Floats]) -> None:
        for some, each in zip(groups, vectors, strict=True):
            self.decide(some, each)

    def take(self, fragments: Sequence[Fragment]) -> None:
        """All three for one batch."""
        vectors = self.embed(fragments)
        self.analyze(fragments)
        self.decide(fragments, vectors)

    def measure(self, fragments: Sequence[Fragment], group: int) -> dict[str, float]:
        """CPU seconds of each for all of them, `group` per call."""
        groups = [fragments[at : at + group] for at in range(0, len(fragments), group)]
        self.analyze(fragments)  # a server analyses a new word once
        vectors = [self.embed(some) for some in groups]
        return {
            "embedding": measure_cpu_s(lambda: [self.embed(some) for some in groups]),
            "terms": measure_cpu_s(lambda: self.analyze(fragments)),
            "decision": measure_cpu_s(lambda: self._decide_all(groups, vectors)),
        }


def make_fragments(batch: pb.ObservationBatch) -> list[Fragment]:
    """The fragments of a batch."""
    return [
        Fragment(f"{number:026}", one.content, speaker=one.speaker, session=one.session, position=number)
        for number, one in enumerate(batch.observations, batch.first_sequence)
    ]


class Commits:
    """Commits the rows of a served memory again, into a new database with the server's tables, indexes and pragmas.

    One observation: its receipt, fragment, vector, anchor and event, the levels of memory and producer, and what moves
    an older fragment to long-term: its anchor is deleted, its row changes, and the outbox gets a row.
    """

    def __init__(self, served: Path, memory: str, count: int, file: Path) -> None:
        self._engine = writer_engine(file)
        self._connection = self._engine.connect()
        driver = self._connection.connection.dbapi_connection
        assert driver is not None, "a new connection is open"
        self._driver: Any = driver
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

    def commit_all(self, group: int) -> None:
        """Commit all rows, `group` per transaction."""
        while self._written < len(self._fragments):
            self.commit_next(group)

    def commit_next(self, count: int) -> None:
        """Commit the next rows, at most `count`, in one transaction. Callable in any thread."""
        some = slice(self._written, self._written + count)
        fragments, vectors = self._fragments[some], self._vectors[some]
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

    def __init__(self, texts: Texts, answer: pb.RecallResponse) -> None:
        self._embedder = HashingEmbedder()
        self._matrices, self._legs = texts.vectors(), [BothLegs(each) for each in texts.sentences]
        self._messages = Messages(answer_from_wire([answer.recollections], answer.recollections.done))

    def answer(self, place: int, text: str) -> pb.RecallResponse:
        """All parts of one recall of the memory at `place`. Returns the captured answer."""
        vector = self._embedder.vectors([text])[0]
        time_scan(self._matrices[place], vector, LIMIT)
        self._legs[place].time_query(text)
        return self._messages.build()[0]

    def measure(self, questions: Sequence[tuple[int, str]]) -> dict[str, float]:
        """CPU seconds of each part for all questions."""
        vectors = [self._embedder.vectors([text])[0] for _, text in questions]
        asked = list(zip(questions, vectors, strict=True))
        return {
            "embedding": measure_cpu_s(lambda: [self._embedder.vectors([text]) for _, text in questions]),
            "dense leg": measure_cpu_s(lambda: [time_scan(self._matrices[at], one, LIMIT) for (at, _), one in asked]),
            "word legs": measure_cpu_s(lambda: [self._legs[at].time_query(text) for at, text in questions]),
            "messages": measure_cpu_s(lambda: [self._messages.build() for _ in questions]),
        }
