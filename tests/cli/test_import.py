"""`memstream import` of other programs' chats and memories, into a real server."""

from __future__ import annotations

import base64
import json
import os
import signal
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from memstream import sync
from memstream.errors import MemoryNotFound
from memstream.values import Tier
from memstream_server.adapters.models.hashing import HashingEmbedder
from tests.cli.commands import COMMAND, call, environment
from tests.support.exports import EXPORTS, Export, chatgpt_chat, letta, milvus, written, zipped
from tests.support.seeds import rounds
from tests.support.server import ServerProcess


def imported(server: ServerProcess, *words: str) -> dict[str, Any]:
    done = call("import", *words, "--json", target=server.address)
    assert done.returncode == 0, done.stderr
    result: dict[str, Any] = json.loads(done.stdout)
    return result


@pytest.mark.parametrize("export", EXPORTS, ids=lambda export: export.name)
def test_import_keeps_what_it_says_once(server: ServerProcess, tmp_path: Path, export: Export) -> None:
    path = f"imported/{export.name}"
    words = (str(export.build(tmp_path)), path, *export.options)
    files = sorted(one for one in map(str, tmp_path.rglob("*")) if "notes.db" not in one)  # Lite rewrites its own
    dry = imported(server, *words, "--dry-run")
    with sync.connect(server.address) as client:
        memory = client.memory(path)
        with pytest.raises(MemoryNotFound):
            memory.describe()
        done = imported(server, *words)
        assert (done["shape"], done["report"], dry["sent"]) == (export.name, dry["report"], 0)
        assert export.lost.items() <= done["report"]["lost"].items()
        assert sum(done["report"]["skipped"].values()) == export.skipped
        found = list(memory.list_fragments())
        assert [(one.session, one.speaker, one.role, one.content) for one in found] == export.facts
        if export.first_time:
            assert found[0].observe_time.isoformat()[:19] == export.first_time
        revision = memory.describe().revision
        again = imported(server, *words)
        assert (again["sent"], memory.describe().revision) == (0, revision)
    assert sorted(one for one in map(str, tmp_path.rglob("*")) if "notes.db" not in one) == files


def test_vectors_of_a_collection_are_kept_if_they_fit(server: ServerProcess, tmp_path: Path) -> None:
    folder = str(milvus(tmp_path))
    imported(server, folder, "imported/vectors", "--model", "hashing-1")
    with sync.connect(server.address) as client:
        lines = b"".join(part.lines for part in client.export("imported", "vectors", include_vectors=True))
        found = [line for line in map(json.loads, lines.splitlines()) if line["type"] == "fragment"]
    assert [one["external_id"] for one in found] == ["notes:b1", 'notes:the "second"\\']
    assert [one["metadata"]["topic"] for one in found] == [{"n": 1}, {"n": 1}]
    taken = np.frombuffer(base64.b64decode(found[0]["vector"]), "<f4")
    assert taken == pytest.approx(HashingEmbedder().vectors(["I keep bees"])[0], abs=1e-6)
    for options, said in (
        (("--model", "other-2"), "the server's model is hashing-1, so vectors of other-2 cannot be kept"),
        (("--collection", "gone"), "name one of its collections with --collection: notes"),
        (("--field", "text=vec"), "has no text in vec"),
    ):
        done = call("import", folder, "imported/never", *options, target=server.address)
        assert said in done.stderr


def test_blocks_are_written_once_and_then_left_alone(server: ServerProcess, tmp_path: Path) -> None:
    words = (str(letta(tmp_path)), "imported/blocks")
    imported(server, *words)
    with sync.connect(server.address) as client:
        blocks = client.memory("imported/blocks").blocks
        assert blocks.get("human").text == "Bob keeps bees"
        blocks.put("human", "Bob keeps goats")
        assert imported(server, *words)["sent"] == 0
        assert blocks.get("human").text == "Bob keeps goats"


def test_policy_of_dbgpt_drops_nothing_imported(server: ServerProcess, tmp_path: Path) -> None:
    notes = written(tmp_path / "n.md", "\n\n".join(f"Note number {number} of many" for number in range(30)))
    words = (str(notes), "imported/dbgpt", "--profile", "dbgpt")
    assert imported(server, *words)["sent"] == 30
    with sync.connect(server.address) as client:
        memory = client.memory("imported/dbgpt")
        fragments = list(memory.list_fragments())
        assert len(fragments) == 30
        assert sum(one.tier is Tier.LONG_TERM for one in fragments) == 20
        described = memory.describe()
        assert (str(described.policy.short_term.overflow), dict(described.labels)) == ("drop", {})
        assert imported(server, *words)["sent"] == 0
        other = written(tmp_path / "o.md", "One more")
        refused = call("import", str(other), "imported/dbgpt", target=server.address)
        assert (refused.returncode, "short_term.overflow to promote" in refused.stderr) == (2, True)


def test_later_export_adds_new_and_replaces_changed(server: ServerProcess, tmp_path: Path) -> None:
    file = tmp_path / "conversations.json"
    written(file, json.dumps([chatgpt_chat(1, ["one", "two", "three"])]))
    imported(server, str(file), "imported/later")
    written(file, json.dumps([chatgpt_chat(2, ["new talk"]), chatgpt_chat(1, ["one", "two!", "three", "four"])]))
    imported(server, str(file), "imported/later")
    with sync.connect(server.address) as client:
        contents = [one.content for one in client.memory("imported/later").list_fragments()]
    assert sorted(contents) == sorted(["one", "two!", "three", "new talk", "four"])


@pytest.mark.parametrize("how", ["feed", "only"])
def test_chats_become_conversations(server: ServerProcess, tmp_path: Path, how: str) -> None:
    file = written(tmp_path / "c.json", json.dumps([chatgpt_chat(1, ["one", "two"]), chatgpt_chat(2, ["three"])]))
    namespace = f"talks-{how}"
    words = (str(file), f"{namespace}/joy", "--conversations", how)
    assert imported(server, *words)["sent"] == 3
    assert imported(server, *words)["sent"] == 0
    with sync.connect(server.address) as client:
        talk = client.conversation(f"{namespace}/chatgpt.c1")
        messages = [(one.role, one.content, one.time.timestamp()) for one in talk.messages()]
        assert messages == [("user", "one", 1_683_547_200.0), ("assistant", "two", 1_683_547_260.0)]
        assert (talk.describe().feed_memory, talk.describe().labels["source"]) == (
            ("joy", "chatgpt") if how == "feed" else ("", "chatgpt")
        )
        assert [memory.path for memory in client.list_memories(namespace)] == (
            [f"{namespace}/joy"] if how == "feed" else []
        )


BAD: dict[str, tuple[str | bytes, tuple[str, ...], str]] = {
    "truncated.json": (
        '[{"mapping": {}}, {"mapping": {"a": ',
        ("--from", "chatgpt"),
        "entry 2: is no JSON, or the file",
    ),
    "circle.json": (
        '[{"mapping": {"a": {"parent": "b"}, "b": {"parent": "a"}}, "current_node": "a"}]',
        (),
        "conversation 1: its tree of messages has a circle at a",
    ),
    "latin.txt": (b"[08.05.23, 12:00] Bob: caf\xe9\n", ("--from", "whatsapp"), "latin.txt:1: is not UTF-8"),
    "unclear.txt": ("5/8/23, 12:00 - Bob: hi\n", (), "pass --date-order dmy"),
    "mixed.txt": ("13/1/23, 12:00 - Bob: hi\n1/13/23, 12:00 - Bob: hi\n", (), "mixed.txt:2: 1/13/23 fits no order"),
    "wrong.txt": ("13/1/23, 25:00 - Bob: hi\n", (), "wrong.txt:1: 13/1/23 is no date in the order dmy"),
    "graph.jsonl": ('{"type": "entity", "name": "Bob"}\n{"type": "ent', (), "graph.jsonl:2: is no JSON"),
    "other.bin": (b"\0\1\2", (), "its shape is none of these; --from names one\n  chatgpt: conversations.json"),
    "bomb.zip": (b"", (), "conversations.json: 40,"),
    "half.zip": (b"", (), "is no archive that can be read"),
    "empty.json": ("[]", ("--from", "claude"), ""),
    "gone.json": ("", (), "there is no file"),
}


def write_bad(path: Path, name: str, content: str | bytes) -> Path:
    file = path / name
    if name == "bomb.zip":
        head = '[{"mapping": {}}'
        with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as archive:
            archive.writestr("conversations.json", head + " " * (40 << 20))
    elif name == "half.zip":
        zipped(file, {"conversations.json": "[]", "other.txt": "x" * 1_000})
        whole = file.read_bytes()
        file.write_bytes(whole[:-40] + whole[-22:])
    elif name != "gone.json":
        file.write_bytes(content if isinstance(content, bytes) else content.encode())
    return file


@pytest.mark.parametrize("name", BAD)
def test_bad_source_names_the_place_and_sends_nothing(server: ServerProcess, tmp_path: Path, name: str) -> None:
    content, options, said = BAD[name]
    done = call("import", str(write_bad(tmp_path, name, content)), "bad/joy", *options, target=server.address)
    assert done.returncode == {"empty.json": 0, "gone.json": 4}.get(name, 2), done.stderr
    assert said in done.stderr
    if name == "empty.json":
        assert "nothing to import" in done.stdout
    with sync.connect(server.address) as client:
        assert list(client.list_memories("bad")) == []


def test_odd_records_are_kept_or_counted(server: ServerProcess, tmp_path: Path) -> None:
    chat = chatgpt_chat(1, ["half \ud83d emoji", "x " * 50_000, "\0", "fine"])
    chat["mapping"]["n3"]["message"]["create_time"] = "yesterday"
    chat["mapping"]["n3"]["message"]["author"]["name"] = "n" * 300
    file = written(tmp_path / "conversations.json", "\ufeff" + json.dumps([chat, {"title": "no mapping"}, 7]))
    report = imported(server, str(file), "imported/odd")["report"]
    assert report["kept"]["long texts in several parts"] == 1
    assert sum(report["skipped"].values()) == 4
    assert any("message n3: has no time that can be read" in place for place in report["places"])
    imported(server, str(file), "imported/odd", "--time", "2023-05-09")
    with sync.connect(server.address) as client:
        found = list(client.memory("imported/odd").list_fragments())
    assert [one.content[:12] for one in found] == ["half ? emoji", "x x x x x x ", "x x x x x x ", "fine"]
    assert len(found[3].speaker.encode()) == 128


def test_command_line_says_what_is_missing(server: ServerProcess, tmp_path: Path) -> None:
    file = written(tmp_path / "n.md", "A note")
    for words, said in (
        ((str(file), "demo"), "does not name the memory to import into: give NAMESPACE/MEMORY"),
        ((str(file), "demo/x", "--conversations", "feed"), "markdown has no conversations"),
        ((str(file), "demo/x", "--field", "colour=red"), "attributes are text, id, speaker"),
        ((str(file), "demo/x", "--no-wait"), "apply to exports of memstream only"),
    ):
        done = call("import", *words, target=server.address)
        assert (done.returncode, said in done.stderr) == (2, True), done.stderr
    hint = call("adopt", "x", "y", "z", target=server.address)
    assert (hint.returncode, "import --from milvus" in hint.stderr) == (2, True)


def chats(number: int) -> list[dict[str, Any]]:
    return [chatgpt_chat(one, [f"word {one} {turn} " + "tail " * 20 for turn in range(10)]) for one in range(number)]


def test_killed_import_continues_where_it_stopped(tmp_path: Path) -> None:
    count = rounds(1_000, 200)
    file = written(tmp_path / "conversations.json", json.dumps(chats(count)))
    # A small window keeps the killed process from sending all of it at once.
    with ServerProcess(tmp_path / "data", window_observations=16) as server, sync.connect(server.address) as client:
        memory = client.create_memory("killed/joy")
        words = [*COMMAND, "import", str(file), "killed/joy"]
        with (
            memory.watch() as watch,
            subprocess.Popen(words, env=environment(server.address), stderr=subprocess.DEVNULL) as running,
        ):
            next(iter(watch))
            os.kill(running.pid, signal.SIGKILL)
        done = imported(server, str(file), "killed/joy")
        assert 0 < done["sent"] < count * 10
        contents = [one.content for one in memory.list_fragments()]
        assert len(contents) == len(set(contents)) == count * 10
        assert imported(server, str(file), "killed/joy")["sent"] == 0


MEASURE = """
import resource, runpy, sys
sys.argv = ["memstream", *sys.argv[1:]]
try:
    runpy.run_module("memstream_server", run_name="__main__")
finally:
    print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10, file=sys.stderr)
"""


@pytest.mark.drawn
def test_size_of_a_source_does_not_cost_memory(server: ServerProcess, tmp_path: Path) -> None:
    """The peak for many conversations of 100 KB against that for one, in MB: a dry run, in full size an import."""
    peaks = []
    for count in (1, rounds(1_000, 500)):
        archive = tmp_path / f"{count}.zip"
        with zipfile.ZipFile(archive, "w") as opened, opened.open("conversations.json", "w") as member:
            for number in range(count):
                text = json.dumps(chatgpt_chat(number, [f"{number} " + "words " * 4_000] * 4))
                member.write(("[,"[bool(number)] + text).encode())
            member.write(b"]")
        words = [sys.executable, "-c", MEASURE, "import", str(archive), "big/joy", *["--dry-run"][: count < 1_000]]
        done = subprocess.run(words, env=environment(server.address), capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        assert f"{count * 4:,} messages" in done.stdout
        peaks.append(int(done.stderr.split()[-1]))
    assert peaks[1] < peaks[0] + 40
