"""`memstream verify` and `memstream doctor` on a PostgreSQL journal: planted damage, and checks only for SQLite."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

import memstream
from memstream_server.adapters.journal.verify.read_only_open import open_database
from memstream_server.adapters.journal.verify.verify import verify_journal
from memstream_server.adapters.models.hashing import computed_spaces
from tests.cli.commands import run
from tests.diagnosis.lived import live
from tests.server.conftest import WITH_INDEX
from tests.support.server import ServerProcess
from tests.toolchains.postgres import Cluster

pytestmark = pytest.mark.toolchain


@pytest.fixture(scope="module")
def lived(tmp_path_factory: pytest.TempPathFactory, postgres: Cluster) -> str:
    """The URL of a database that a server has filled. Read-only."""
    url = postgres.database()
    asyncio.run(live(tmp_path_factory.mktemp("lived") / "data", journal_url=url))
    return url


def run_json(command: str, url: str) -> tuple[int, dict[str, Any]]:
    ended = run(command, "--journal-url", url, "--json")
    assert "Traceback" not in ended.stderr, ended.stderr
    answer: dict[str, Any] = json.loads(ended.stdout)
    return ended.returncode, answer


def copy_database(cluster: Cluster, url: str) -> str:
    return cluster.database(f"TEMPLATE {url.partition('?')[0].rpartition('/')[2]}")


def test_verify_accepts_the_journal_of_a_server(lived: str) -> None:
    code, answer = run_json("verify", lived)
    assert (code, answer["ok"], answer["violations"]) == (0, True, [])
    assert all(answer["checked"][name] > 0 for name in answer["checked"] if name not in ("outbox", "pending"))


def test_the_doctor_skips_checks_that_only_sqlite_has(lived: str) -> None:
    code, answer = run_json("doctor", lived)
    assert (code, answer["ok"]) == (0, True)
    said = {one["subject"]: one for one in answer["findings"]}
    assert {"database", "files", "version", "memories", "conversations", "operations", "embedding"} <= set(said)
    assert not {"pages", "format", "disk", "write-ahead log"} & set(said)
    assert "belong to PostgreSQL and were not checked" in said["files"]["text"]
    assert "pg_amcheck" in said["files"]["advice"]


LAST = "(SELECT max(number) FROM memories)"
ONE = f"(SELECT min(key) FROM fragments WHERE tier = 'long_term' AND memory = {LAST})"
TALK = "(SELECT number FROM conversations WHERE name = 'open')"
DAMAGES: dict[str, tuple[str, str, str]] = {
    "a fragment is gone": ("fragments", "does not exist, its events say", f"DELETE FROM fragments WHERE key = {ONE}"),
    "a column that says otherwise": (
        "columns",
        "column speaker",
        f"UPDATE fragments SET speaker = 'somebody else' WHERE key = {ONE}",
    ),
    "a transition is gone": (
        "revisions",
        "follows",
        "DELETE FROM events WHERE key = (SELECT max(key) - 1 FROM events)",
    ),
    "a short vector": (
        "vectors",
        "the space in force has 384",
        f"UPDATE vectors SET vector = decode(repeat('00', 400), 'hex') WHERE key = {ONE}",
    ),
    "a receipt is gone": (
        "receipts",
        "producer joy",
        "DELETE FROM receipts WHERE producer = 'joy' AND first_sequence = 1",
    ),
    "rows of no memory": (
        "store",
        "which does not exist",
        "INSERT INTO producers (memory, name, epoch, received, stored) VALUES (99, 'stray', 1, 0, 0)",
    ),
    "a message is gone": (
        "messages",
        "has 5 messages, 6 are counted",
        f"DELETE FROM messages WHERE key = ({TALK} << 32) + 4",
    ),
    "plans of no conversation": (
        "store",
        "plans has rows of conversation number",
        "DELETE FROM conversations WHERE name = 'planned'",
    ),
    "an operation that ended at no time": (
        "operations",
        "without an end time",
        "UPDATE operations SET end_time_us = 0",
    ),
}


@pytest.mark.parametrize("name", DAMAGES)
def test_planted_damage_is_found(lived: str, postgres: Cluster, name: str) -> None:
    check, text, statement = DAMAGES[name]
    url = copy_database(postgres, lived)
    postgres.execute(url, statement)
    with open_database(url) as looked_at:
        report = verify_journal(looked_at, lambda done, total: None, computed_spaces())
    assert [one for one in report.violations if one.check == check and text in one.text], report.violations


def test_an_unfinished_operation_is_reported(lived: str, postgres: Cluster) -> None:
    url = copy_database(postgres, lived)
    postgres.execute(url, "UPDATE operations SET state = 'queued', end_time_us = 0, process = 77")
    code, answer = run_json("verify", url)
    ((id_, told),) = answer["unfinished"].items()
    assert (code, told.startswith("purge of lived/keyed, queued, "), told.endswith("which is gone")) == (0, True, True)
    code, answer = run_json("doctor", url)
    (note,) = [one for one in answer["findings"] if one["subject"] == "operations"]
    assert (code, note["level"], note["text"]) == (0, "note", f"{id_} has not ended: {told}")


async def test_verify_and_doctor_run_while_a_server_writes(lived: str, postgres: Cluster, tmp_path: Path) -> None:
    url = copy_database(postgres, lived)
    server = ServerProcess(tmp_path / "data").configure(**WITH_INDEX, journal_url=url)
    await asyncio.to_thread(server.start)
    try:
        async with memstream.connect(server.address) as client:
            memory = await client.create_memory("beside/joy")
            async with memory.observe("joy") as stream:
                for number in range(300):
                    await stream.send(f"said {number}")
                    if number == 100:
                        code, answer = await asyncio.to_thread(run_json, "verify", url)
                        assert (code, answer["violations"]) == (0, [])
            code, answer = await asyncio.to_thread(run_json, "doctor", url)
        (lock,) = [one for one in answer["findings"] if one["subject"] == "lock"]
        assert (code, f"pid {server.pid} " in lock["text"]) == (0, True)
        assert await asyncio.to_thread(server.stop) == 0
    finally:
        server.kill()
    code, answer = await asyncio.to_thread(run_json, "verify", url)
    assert (code, answer["violations"]) == (0, [])


def test_a_missing_or_foreign_database_is_reported(postgres: Cluster) -> None:
    empty = postgres.database()
    code, answer = run_json("doctor", empty)
    (version,) = [one for one in answer["findings"] if one["subject"] == "version"]
    assert (code, version["level"]) == (1, "problem")
    ended = run("verify", "--journal-url", empty)
    assert (ended.returncode, "no memstream journal" in ended.stderr) == (1, True)
    code, answer = run_json("doctor", empty.replace("memstream@", "nobody@"))
    assert (code, answer["findings"][-1]["subject"]) == (1, "database")
