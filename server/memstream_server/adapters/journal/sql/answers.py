"""Stored answers to request ids: written with the write that they answer, pruned by age."""

from __future__ import annotations

from collections.abc import Sequence

from sqlalchemy import Connection, bindparam, delete, insert, select

from memstream_server.adapters.journal.sql import bulk
from memstream_server.adapters.journal.sql.schema import requests
from memstream_server.ports.journal.errors import Conflict
from memstream_server.ports.journal.records import ANSWER_KEPT_S, Answer

ANSWER_KEPT_US = ANSWER_KEPT_S * 1_000_000
"""How long the stored answer to a request_id is returned to repeats."""
_ANSWERS = bulk.build_insert(requests, ("request",))
_FORGET_ANSWERS = delete(requests).where(requests.c.time_us < bindparam("before"))
_OLD_ANSWERS = (
    select(requests.c.time_us)
    .where(requests.c.time_us < bindparam("before"))
    .order_by(requests.c.time_us)
    .limit(bindparam("limit"))
)
_ANSWERED = select(requests.c.request).where(requests.c.request == bindparam("r"))


def put_answer(connection: Connection, answer: Answer | None) -> None:
    """Store an answer and delete expired ones, by its time. Raises Conflict if the request has an answer."""
    if answer is None:
        return
    connection.execute(_FORGET_ANSWERS, {"before": answer.time_us - ANSWER_KEPT_US})
    if connection.execute(_ANSWERED, {"r": answer.request}).first() is not None:
        raise Conflict("this request was answered meanwhile: serve that answer")
    row = {
        "request": answer.request,
        "digest": answer.digest,
        "time_us": answer.time_us,
        "response": answer.response,
    }
    connection.execute(insert(requests), row)


def put_answers(connection: Connection, answers: Sequence[Answer]) -> None:
    """Replace earlier answers to the same requests. The caller ensures that each request is answered once."""
    rows = [(one.request, one.digest, one.time_us, one.response) for one in answers]
    bulk.write_rows(connection, _ANSWERS, rows)


def prune_answers(connection: Connection, before_us: int, limit: int) -> int:
    """Delete the oldest answers before a time."""
    times = connection.execute(_OLD_ANSWERS, {"before": before_us, "limit": limit}).scalars().all()
    if not times:
        return 0
    return connection.execute(_FORGET_ANSWERS, {"before": times[-1] + 1}).rowcount
