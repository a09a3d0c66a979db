"""`memstream doctor` names each kind of damage and changes nothing; a server on it fails to start, or repairs it."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import sqlite3
import subprocess
import sys
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

import memstream
from memstream_server.adapters.journal.database import sqlite
from memstream_server.adapters.journal.verify.sqlite_wal import read_wal
from memstream_server.app.errors import StartError
from memstream_server.app.running import run_server
from memstream_server.diagnosis import run_checks
from memstream_server.ports.journal.errors import JournalError
from memstream_server.settings import load
from tests.cli.commands import COMMAND, call, environment, run
from tests.diagnosis.conftest import changed, entries, looked
from tests.server.conftest import MakeServer, started
from tests.server.listing import contents, indexed
from tests.support.processes import run_process
from tests.support.recorded_endpoint import RecordedEndpoint
from tests.support.server import ServerProcess
from tests.support.waiting import until

PAGE = 4_096


def found(answer: dict[str, Any], level: str) -> dict[str, dict[str, str]]:
    """The findings of a level by subject."""
    return {one["subject"]: one for one in answer["findings"] if one["level"] == level}


def served(data_dir: Path) -> subprocess.CompletedProcess[str]:
    """The process of a server whose start must fail."""
    return run("serve", "--data", str(data_dir), "--listen", "127.0.0.1:0")


async def start_error(data_dir: Path) -> str:
    """The error of a start in this process; `memstream serve` prints it."""
    settings = load(None, {"data_dir": data_dir, "listen": "127.0.0.1:0", "http_listen": ""})
    with pytest.raises((StartError, JournalError)) as raised:
        async with run_server(settings):
            pytest.fail("the server serves")
    return str(raised.value)


def overwritten(file: Path, offset: int, length: int) -> None:
    with file.open("r+b") as opened:
        opened.seek(offset)
        opened.write(b"\xa5" * length)


def page_of(data_dir: Path, name: str, leaf: bool) -> int:
    """The offset of a page of a table or index: its root, or a leaf."""
    with closing(sqlite3.connect(data_dir / "journal.db")) as connection:
        root = connection.execute("SELECT rootpage FROM sqlite_master WHERE name = ?", (name,)).fetchone()[0]
    offset = (root - 1) * PAGE
    data = (data_dir / "journal.db").read_bytes()
    while leaf and data[offset] in (2, 5):  # an inner page: its header has its right-most child
        offset = (int.from_bytes(data[offset + 8 : offset + 12]) - 1) * PAGE
    return offset


def test_sound_directory_has_no_problems(data_dir: Path) -> None:
    code, answer = looked("doctor", data_dir, "--online")
    assert (code, answer["ok"], found(answer, "problem")) == (0, True, {})
    fine = found(answer, "ok")
    looked_at = {
        "packages",
        "open files",
        "format",
        "lock",
        "pages",
        "version",
        "memories",
        "conversations",
        "operations",
    }
    assert looked_at | {"embedding", "index", "disk"} <= set(fine)
    assert "no problems" in call("doctor", "--data", str(data_dir)).stdout


PAGES: dict[str, tuple[str, Callable[[Path], object]]] = {
    "header": ("header is damaged", lambda data: overwritten(data / "journal.db", 0, 100)),
    "schema": ("journal.db", lambda data: overwritten(data / "journal.db", 100, 3_000)),
    "root of a table": (
        "fragments",
        lambda data: overwritten(data / "journal.db", page_of(data, "fragments", False), PAGE),
    ),
    "leaf of a table": ("vectors", lambda data: overwritten(data / "journal.db", page_of(data, "vectors", True), PAGE)),
    "leaf of an index": (
        "fragments",
        lambda data: overwritten(data / "journal.db", page_of(data, "fragments_id", True) + 50, 900),
    ),
    "cut off": ("was cut off", lambda data: os.truncate(data / "journal.db", 20 * PAGE)),
    "garbage": ("header is damaged", lambda data: (data / "journal.db").write_bytes(b"garbage" * 9_000)),
}


@pytest.mark.parametrize("name", PAGES)
def test_doctor_names_torn_pages(data_dir: Path, name: str) -> None:
    text, damage = PAGES[name]
    damage(data_dir)
    code, answer = looked("doctor", data_dir)
    assert code == 1
    problem = found(answer, "problem")["pages"]
    assert text in problem["text"]
    assert "memstream restore" in problem["advice"]
    assert ".recover" in problem["advice"]


FILES: dict[str, tuple[str, str, Callable[[Path], object]]] = {
    "header": ("pages", "memstream doctor", PAGES["header"][1]),
    "root of a table": ("pages", "memstream doctor", PAGES["root of a table"][1]),
    "cut off": ("pages", "memstream doctor", PAGES["cut off"][1]),
    "no format": ("format", "memstream doctor", lambda data: (data / "format").unlink()),
    "another format": ("format", "memstream doctor", lambda data: (data / "format").write_text("")),
    "a newer format": ("format", "newer memstream", lambda data: (data / "format").write_text("format 9\n")),
    "newer tables": (
        "version",
        "newer memstream",
        lambda data: changed(data, "UPDATE alembic_version SET version_num = '9999'"),
    ),
    "an unfinished restore": (
        "format",
        "memstream restore",
        lambda data: (data / "journal.db.restoring").write_bytes(b""),
    ),
    "no journal, an index": ("format", "memstream doctor", lambda data: (data / "journal.db").unlink()),
    "a garbled log": (
        "write-ahead log",
        "memstream doctor",
        lambda data: (data / "journal.db-wal").write_bytes(os.urandom(99_999)),
    ),
}


@pytest.mark.parametrize("name", FILES)
async def test_damage_is_a_problem_and_stops_the_server(data_dir: Path, name: str) -> None:
    subject, advice, damage = FILES[name]
    damage(data_dir)
    code, answer = await asyncio.to_thread(looked, "doctor", data_dir)
    assert (code, subject in found(answer, "problem")) == (1, True), answer
    before = {name: entry for name, entry in entries(data_dir).items() if name.startswith(("journal", "format"))}
    assert advice in await start_error(data_dir)
    if name == "header":
        ended = await asyncio.to_thread(served, data_dir)
        assert (ended.returncode, advice in ended.stderr) == (1, True), ended.stderr
        assert "Traceback" not in ended.stderr
    after = {name: entry[2] for name, entry in entries(data_dir).items() if name.startswith(("journal", "format"))}
    assert {name: entry[2] for name, entry in before.items()} == {name: after[name] for name in before if name in after}


INDEX: dict[str, tuple[str, Callable[[Path], object]]] = {
    "missing": ("missing", lambda data: shutil.rmtree(data / "milvus")),
    "a file": (
        "it is empty",
        lambda data: (shutil.rmtree(data / "milvus"), (data / "milvus").write_text("x")),
    ),
    "without its schema": (
        "damaged",
        lambda data: [file.unlink() for file in (data / "milvus").rglob("schema.json")],
    ),
    "of another space": (
        "another embedding space",
        lambda data: (
            [one.rename(one.with_name("memstream_other")) for one in (data / "milvus/collections").iterdir()]
        ),
    ),
}


@pytest.mark.with_index
@pytest.mark.parametrize("name", INDEX)
async def test_damaged_index_is_a_note_and_gets_refilled(make_server: MakeServer, data_dir: Path, name: str) -> None:
    text, damage = INDEX[name]
    damage(data_dir)
    code, answer = await asyncio.to_thread(looked, "doctor", data_dir)
    assert (code, found(answer, "problem")) == (0, {})
    assert text in found(answer, "note")["index"]["text"]
    assert "fills it again" in found(answer, "note")["index"]["advice"]
    server = await started(make_server(dense_bytes_max=0))
    async with memstream.connect(server.address) as client:
        memory = client.memory("lived/keyed")
        assert (await memory.recall_once("tea with milk", limit=1))[0].fragment.content
        await until(lambda: indexed(client, memory))


def test_model_mismatch_and_low_space_are_problems(data_dir: Path) -> None:
    more_than_there_is = shutil.disk_usage(data_dir).total + 1
    settings = data_dir.parent / "settings.toml"
    settings.write_text(f'embedding = "openai"\ndisk_free_min_bytes = {more_than_there_is}\n')
    code, answer = looked("doctor", data_dir, "--config", str(settings))
    problems = found(answer, "problem")
    assert (code, set(problems)) == (1, {"disk", "embedding"})
    assert "MODEL_MISMATCH" in problems["embedding"]["text"]
    assert "text-embedding-3-small" in problems["embedding"]["text"]
    code, answer = looked("doctor", data_dir.parent / "nowhere")
    assert (code, set(found(answer, "problem"))) == (1, {"directory"})


def test_low_hard_limit_of_open_files_is_a_note(data_dir: Path) -> None:
    """Named as the server would have it: it raises its soft limit to the hard one, and keeps some for its data."""
    command = [*COMMAND, "doctor", "--data", str(data_dir), "--json"]
    limited = ["bash", "-c", 'ulimit -Sn 256; ulimit -Hn 1024; exec "$@"', "bash", *command]
    done = subprocess.run(limited, capture_output=True, text=True, check=False, env=environment())
    assert done.returncode == 0, done.stderr
    note = found(json.loads(done.stdout), "note")["open files"]
    assert note["text"].startswith("at most 1024 (hard limit): 256 for data and models, 384 connections of a port")
    assert "LimitNOFILE" in note["advice"]


def test_online_notes_unreachable_endpoints(data_dir: Path) -> None:
    settings = data_dir.parent / "settings.toml"
    settings.write_text('milvus_uri = "http://127.0.0.1:9"\nllm_model = "m"\nllm_base_url = "http://127.0.0.1:9/v1"\n')
    code, answer = looked("doctor", data_dir, "--config", str(settings), "--online")
    assert (code, set(found(answer, "note")) >= {"Milvus", "LLM endpoint"}) == (0, True)


async def test_online_shows_endpoint_answers(data_dir: Path) -> None:
    async with RecordedEndpoint("azure") as azure, RecordedEndpoint("openai") as openai:
        embedding = azure.settings("next_embedding_") | {"next_embedding": "openai", "next_embedding_model": "m"}
        llm = openai.settings("llm_") | {"llm_model": "gpt", "llm_api_key": "sk-wrong-0123456789", "llm_retries": "0"}
        settings = data_dir.parent / "settings.toml"
        settings.write_text("".join(f"{name} = {json.dumps(value)}\n" for name, value in (embedding | llm).items()))
        given = ("doctor", data_dir, "--config", str(settings), "--online")
        code, answer = await asyncio.to_thread(looked, *given)
        assert code == 0
        assert found(answer, "ok")["next embedding endpoint"]["text"] == "m answers with vectors of 8 dimensions"
        text = found(answer, "note")["LLM endpoint"]["text"]
        assert f"{openai.address}/v1/chat/completions answered HTTP 401 (invalid_api_key)" in text
        assert "Incorrect API key provided: ***" in text
        assert "sk-wrong" not in json.dumps(answer)


def test_foreign_directory_is_a_problem(data_dir: Path) -> None:
    """Root may read everything, so as root this runs as the user `nobody`."""
    settings = load(None, {"data_dir": data_dir})
    data_dir.chmod(0)
    was = os.geteuid()
    if was == 0:
        os.seteuid(65_534)
    try:
        findings = list(run_checks(settings, online=False))
    finally:
        os.seteuid(was)
        data_dir.chmod(0o700)
    (problem,) = [one for one in findings if one.level == "problem"]
    assert (problem.subject, "cannot be read" in problem.text) == ("directory", True)
    assert "the server's user" in problem.advice


# ---- a running server, and a killed one


async def test_doctor_works_while_server_runs(make_server: MakeServer, data_dir: Path) -> None:
    server = await started(make_server())
    code, answer = await asyncio.to_thread(_looked_beside, "doctor", data_dir)
    assert (code, found(answer, "problem")) == (0, {})
    assert f"pid {server.pid} on" in found(answer, "note")["lock"]["text"]
    code, answer = await asyncio.to_thread(_looked_beside, "verify", data_dir)
    assert (code, answer["ok"]) == (0, True)
    async with memstream.connect(server.address) as client:
        await client.memory("lived/keyed").observe_batch(["still writing"])


def _looked_beside(command: str, data_dir: Path) -> tuple[int, dict[str, Any]]:
    ended = call(command, "--data", str(data_dir), "--json")
    return ended.returncode, json.loads(ended.stdout)


@pytest.fixture
async def killed(make_server: MakeServer, tmp_path: Path) -> tuple[ServerProcess, list[str]]:
    """A server that was killed with a long write-ahead log, and its acknowledged writes in order."""
    server = await started(make_server())
    said = [f"said {number}" for number in range(60)]
    async with memstream.connect(server.address) as client:
        memory = await client.create_memory("log/joy", kind=memstream.MemoryKind.LONG_TERM)
        for number, text in enumerate(said, 1):
            await memory.observe_batch([text], producer="joy", first_sequence=number)
    server.kill()
    return server, said


async def _kept(server: ServerProcess) -> list[str]:
    await started(server)
    async with memstream.connect(server.address) as client:
        return await contents(client.memory("log/joy"))


async def test_log_of_killed_server_is_read_unchanged(killed: tuple[ServerProcess, list[str]]) -> None:
    server, said = killed
    assert read_wal(sqlite.wal_path(server.data_dir / "journal.db")).committed > 0
    (server.data_dir / "journal.db-shm").unlink()
    code, answer = await asyncio.to_thread(looked, "verify", server.data_dir)
    assert (code, answer["checked"]["receipts"]) == (0, 60)
    code, answer = await asyncio.to_thread(looked, "doctor", server.data_dir)
    assert (code, "all whole" in found(answer, "note")["write-ahead log"]["text"]) == (0, True)
    assert await _kept(server) == said


async def test_torn_tail_after_last_commit_is_a_note(killed: tuple[ServerProcess, list[str]]) -> None:
    """A commit that a power failure interrupted: some of its frames, the last one cut in half."""
    server, said = killed
    log = sqlite.wal_path(server.data_dir / "journal.db")
    frame = 24 + PAGE
    whole = log.read_bytes()
    last = 32 + (len(whole) - 32) // frame * frame
    begun = bytearray(whole[last - frame : last])
    begun[4:8] = bytes(4)  # not a commit frame
    log.write_bytes(whole[:last] + begun + begun[: frame // 2])
    code, answer = await asyncio.to_thread(looked, "doctor", server.data_dir)
    assert (code, "nothing in it was acknowledged" in found(answer, "note")["write-ahead log"]["text"]) == (0, True)
    assert await _kept(server) == said


async def test_log_damage_before_commits_stops_the_start(killed: tuple[ServerProcess, list[str]]) -> None:
    """SQLite would silently drop the commits after the damage."""
    server, said = killed
    log = sqlite.wal_path(server.data_dir / "journal.db")
    overwritten(log, log.stat().st_size // 2, 100)
    code, answer = await asyncio.to_thread(looked, "doctor", server.data_dir)
    problem = found(answer, "problem")["write-ahead log"]
    assert (code, "commits behind it would be lost" in problem["text"]) == (1, True)
    ended = await asyncio.to_thread(served, server.data_dir)
    assert (ended.returncode, "memstream doctor" in ended.stderr) == (1, True)
    with closing(sqlite3.connect(server.data_dir / "journal.db")) as connection:  # the doctor's advice
        connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    kept = await _kept(server)
    assert kept == said[: len(kept)]
    assert 0 < len(kept) < len(said)


HOLDING = """
import fcntl, sys, time
held = open(sys.argv[2] + "/LOCK", "rb")
fcntl.flock(held, fcntl.LOCK_EX)
print("held", flush=True)
time.sleep(600)
"""


def test_orphaned_index_process_is_named(data_dir: Path) -> None:
    """A stand-in for Milvus Lite, which dies with its server: the doctor finds it by Lite's lock and arguments."""
    command = [sys.executable, "-c", HOLDING, "--directory", str(data_dir / "milvus")]
    with run_process(command) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "held\n"
        code, answer = looked("doctor", data_dir)
    assert (code, f"(pid {holder.pid})" in found(answer, "note")["index"]["text"]) == (0, True), answer
