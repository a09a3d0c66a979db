"""An export of a memory moves from SQLite to PostgreSQL and back."""

from __future__ import annotations

import pytest

import memstream
from memstream import OperationState
from tests.server.conftest import MakeServer, make_server, restarted, started
from tests.server.test_transfer import (
    QUERIES,
    begun,
    chunks,
    exported,
    imported,
    large,
    lived_in,
    recalled,
    told,
    without,
)
from tests.toolchains.postgres import Cluster

__all__ = ["make_server"]

pytestmark = pytest.mark.toolchain
DIFFERING = ("version", "uid", "revision", "time_us", "sha256", "access_count", "access_time_us")


async def test_from_sqlite_to_postgresql_and_back(make_server: MakeServer, postgres: Cluster) -> None:
    one = await started(make_server("sqlite"))
    two = await started(make_server("postgres", journal_url=postgres.database()))
    async with memstream.connect(one.address) as here, memstream.connect(two.address) as there:
        await lived_in(here, "ns/joy")
        lines = await exported(here, "ns", "joy")
        assert (await imported(there, "ns", lines)).state is OperationState.SUCCEEDED
        for words in QUERIES:
            assert await recalled(there.memory("ns/joy"), words) == await recalled(here.memory("ns/joy"), words)
        again = await exported(there, "ns", "joy", vectors=True)
        assert (await imported(here, "back", again)).state is OperationState.SUCCEEDED
        back = await exported(here, "back", "joy")
        for type_ in ("fragment", "message", "plan"):
            assert without(told(back, type_), *DIFFERING) == without(told(lines, type_), *DIFFERING)
        assert (await imported(there, "ns", lines)).state is OperationState.SUCCEEDED  # changes nothing


async def test_an_import_into_postgresql_survives_a_kill(make_server: MakeServer, postgres: Cluster) -> None:
    server = await started(make_server(journal_url=postgres.database()))
    async with memstream.connect(server.address) as client:
        operation = await client.import_("ns", chunks(large(1_500)))
        await begun(client, operation)
    await restarted(server)
    async with memstream.connect(server.address) as client:
        assert (await client.finished(operation)).state is OperationState.SUCCEEDED
        assert (await client.memory("ns/joy").stats()).long_term == 1_500
