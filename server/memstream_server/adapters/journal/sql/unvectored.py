"""Fragments without a vector in the space in force: their numbers, and the jobs that embed them again.

They are found by the index of the fragments that were written without a vector, so that a store in which nothing is
missing is not scanned. Forgotten fragments do not count.
"""

from __future__ import annotations

from collections.abc import Sequence

from sqlalchemy import BindParameter, Connection, bindparam, exists, func, literal_column, not_, select

from memstream_server.adapters.journal.sql import bulk
from memstream_server.adapters.journal.sql.bulk import fetch_rows, split_ids
from memstream_server.adapters.journal.sql.fragment_reads import VECTORED
from memstream_server.adapters.journal.sql.reads import find_number
from memstream_server.adapters.journal.sql.schema import fragments, jobs, memories
from memstream_server.ports.journal.records import Job

_type: BindParameter[str] = bindparam("type")
# A literal: PostgreSQL uses a partial index only for a condition that it can compare with the index's.
_UNVECTORED = (fragments.c.model == literal_column("''")) & fragments.c.forget_time_us.is_(None) & not_(VECTORED)
_IN_ALL = select(func.count()).select_from(fragments).where(_UNVECTORED)
_IN_ONE = _IN_ALL.where(fragments.c.memory == bindparam("number"))
_BY_MEMORY = (
    select(memories.c.uid, func.count())
    .join(memories, memories.c.number == fragments.c.memory)
    .where(_UNVECTORED)
    .group_by(memories.c.uid)
    .order_by(memories.c.uid)
)
_WITHOUT_JOB = select(memories.c.uid, memories.c.number).where(
    memories.c.uid.in_(bindparam("uids", expanding=True)),
    not_(exists().where(jobs.c.memory == memories.c.number, jobs.c.type == _type)),
)
_JOBS = bulk.build_insert(jobs)
_WAITING = select(func.count()).select_from(jobs).where(jobs.c.type == _type)


def count_all(connection: Connection, model: str | None) -> int:
    return connection.execute(_IN_ALL, {"model": model}).scalar_one()


def count_in_memory(connection: Connection, uid: str, model: str | None) -> int:
    number = find_number(connection, uid)
    return 0 if number is None else connection.execute(_IN_ONE, {"number": number, "model": model}).scalar_one()


def list_memories(connection: Connection, model: str | None) -> list[tuple[str, int]]:
    return [(uid, count) for uid, count in fetch_rows(connection, _BY_MEMORY, {"model": model})]


def enter_jobs(connection: Connection, type_: str, entered: Sequence[Job]) -> None:
    by_uid = {job.memory: job for job in entered}
    for uids in split_ids(list(by_uid)):
        found = fetch_rows(connection, _WITHOUT_JOB, {"uids": uids, "type": type_})
        rows = [
            (job.id, number, type_, job.payload, job.create_time_us, job.attempts)
            for job, number in ((by_uid[uid], number) for uid, number in found)
        ]
        bulk.write_rows(connection, _JOBS, rows)


def count_jobs(connection: Connection, type_: str) -> int:
    return connection.execute(_WAITING, {"type": type_}).scalar_one()
