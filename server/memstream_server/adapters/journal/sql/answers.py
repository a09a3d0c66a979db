"""Stored answers to request ids: written with the write that they answer, pruned by age."""

from __future__ import annotations

from collections.abc import Sequence

from sqlalchemy import Connection, bindparam, delete, select

from memstream_server.adapters.journal.sql import bulk
from memstream_server.adapters.journal.sql.schema import requests
from memstream_server.ports.journal.errors import AnswerExists
from memstream_server.ports.journal.records import ANSWER_KEPT_S, Answer

ANSWER_KEPT_US = ANSWER_KEPT_S * 1_000_000
"""How long the stored answer to a request_id is returned to repeats."""
_ANSWERS = bulk.build_insert(requests, ("request",))
_NEW = bulk.Bulk(
    _ANSWERS.head,
    _ANSWERS.width,
    f"{_ANSWERS.tail} WHERE requests.time_us < excluded.time_us - {ANSWER_KEPT_US} RETURNING requests.request",
)
_FORGET_ANSWERS = delete(requests).where(requests.c.time_us < bindparam("before"))
_OLD_ANSWERS = (
    select(requests.c.time_us)
    .where(requests.c.time_us < bindparam("before"))
    .order_by(requests.c.time_us)
    .limit(bindparam("limit"))
)


def put_answer(connection: Connection, answer: Answer | None) -> None:
    """As `put_answers`, of at most one."""
    if answer is not None:
        put_answers(connection, [answer])


def put_answers(connection: Connection, answers: Sequence[Answer]) -> None:
    """Store the first answers to different requests, over expired ones. Raises AnswerExists if one has an answer."""
    if len(bulk.write_rows(connection, _NEW, list(map(_make_row, answers)), returns=True)) < len(answers):
        raise AnswerExists("this request has an answer")


def replace_answers(connection: Connection, answers: Sequence[Answer]) -> None:
    """Store answers in place of those to the same requests."""
    bulk.write_rows(connection, _ANSWERS, list(map(_make_row, answers)))


def _make_row(answer: Answer) -> tuple[str, bytes, int, bytes]:
    return answer.request, answer.digest, answer.time_us, answer.response


def prune_answers(connection: Connection, before_us: int, limit: int) -> int:
    """Delete the oldest answers before a time."""
    times = connection.execute(_OLD_ANSWERS, {"before": before_us, "limit": limit}).scalars().all()
    if not times:
        return 0
    return connection.execute(_FORGET_ANSWERS, {"before": times[-1] + 1}).rowcount
