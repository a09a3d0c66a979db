"""Answers to a request_id: kept for a day, emptied by an erasure."""

from __future__ import annotations

from dataclasses import replace

import pytest

from memstream_server.ports.journal.errors import AnswerExists, StaleWrite
from memstream_server.ports.journal.port import Journal
from memstream_server.ports.journal.records import Answer
from tests.journal.samples import DAY_US, Now, fragment, image, receipt, record, row, transition


class Answering:
    """See suite.py."""

    async def test_answer_is_kept_for_a_day_and_stored_once(self, journal: Journal, now: Now) -> None:
        answer = Answer("comedy\nPut\nr1", b"digest", b"response", now.us)
        await journal.commit(transition(1, answer=answer))
        assert await journal.get_answer(answer.request) == answer
        assert await journal.get_answer("comedy\nPut\nr2") is None
        with pytest.raises(StaleWrite):
            await journal.commit(transition(2, rows=(row(fragment(0)),), answer=replace(answer, digest=b"other")))
        assert (await image(journal)).rows == ()
        now.us += DAY_US + 1
        assert await journal.get_answer(answer.request) is None
        again = replace(answer, time_us=now.us)
        await journal.commit(transition(2, answer=again))
        assert await journal.get_answer(answer.request) == again

    async def test_answered_batch_is_refused_and_leaves_nothing(self, journal: Journal, now: Now) -> None:
        answer = Answer("comedy\nDo\nr1", b"digest", b"response", now.us)
        await journal.receive(replace(receipt(1, 2, 0), producer="", answer=answer))
        repeat = replace(receipt(1, 2, 2), producer="", answer=replace(answer, digest=b"other"))
        with pytest.raises(AnswerExists):
            await journal.receive(repeat)
        at_once = transition(1, receipts=(repeat,), answers=(repeat.answer,), rows=(row(fragment(2)),))
        with pytest.raises(AnswerExists):
            await journal.commit(at_once)
        loaded = await image(journal)
        assert (len(loaded.pending), loaded.rows, loaded.record.revision) == (1, (), 1)
        assert await journal.get_answer(answer.request) == answer
        complete = replace(answer, response=b"stored")
        await journal.commit(transition(1, stored_positions=(0,), answers=(complete,)))
        assert await journal.get_answer(answer.request) == complete

    async def test_create_and_delete_store_answers(self, journal: Journal, now: Now) -> None:
        made, gone = Answer("made", b"d", b"1", now.us), Answer("gone", b"d", b"2", now.us)
        await journal.create_memory(record("u2", "sad"), (), made)
        await journal.delete_memory("u2", gone)
        assert [await journal.get_answer(request) for request in ("made", "gone")] == [made, gone]

    async def test_erasure_empties_answers_and_drops_hashes(self, journal: Journal, now: Now) -> None:
        gone, kept = "01J" + "A" * 23, "01J" + "B" * 23
        answers = [
            Answer(f"{namespace}\nPut\n{name}", b"digest", b"AB" + name.encode() + b"secret", now.us)
            for namespace, name in (("comedy", gone), ("comedy", kept), ("comedy2", gone))
        ]
        for revision, answer in enumerate(answers, 1):
            await journal.commit(transition(revision, answer=answer))
        await journal.open_producer("u1", 1, "q")
        await journal.receive(receipt(1, 3, 0))
        await journal.receive(receipt(4, 3, 3))
        await journal.receive(replace(receipt(1, 1, 6), producer="q"))
        stored = transition(4, stored_positions=(0,), producers=(("p", 3),), erased=(gone,))
        await journal.commit(stored)
        assert await journal.get_answer(answers[0].request) == replace(answers[0], digest=b"", response=b"")
        assert [await journal.get_answer(answer.request) for answer in answers[1:]] == answers[1:]
        assert [number for number, _, _ in await journal.received_hashes("u1", "p", 1, 9)] == [4, 5, 6]
        assert [number for number, _, _ in await journal.received_hashes("u1", "q", 1, 9)] == [1]
