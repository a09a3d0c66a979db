"""`memstream export` and `memstream import` against a real server."""

from __future__ import annotations

import json
from pathlib import Path

from tests.cli.commands import call
from tests.support.server import ServerProcess


def test_export_and_import_restore_a_memory(server: ServerProcess, tmp_path: Path) -> None:
    notes = tmp_path / "notes.txt"
    notes.write_text("I keep bees\nthe train leaves at noon\n", encoding="utf-8")
    assert call("observe", "--create", "moving/joy", str(notes), target=server.address).returncode == 0
    file = tmp_path / "joy.jsonl"
    done = call("export", "moving/joy", "-o", str(file), target=server.address)
    assert (done.returncode, done.stdout) == (0, "")
    assert "exported 2 fragments" in done.stderr
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".")] == []
    assert json.loads(file.read_text("utf-8").splitlines()[-1])["fragments"] == 2

    checked = call("import", str(file), "moved", "--validate-only", target=server.address)
    assert (checked.returncode, "can be imported: 2 fragments" in checked.stdout) == (0, True)
    done = call("import", str(file), "moved", "--memory", "sue", "--json", target=server.address)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["state"] == "succeeded"
    listed = call("list", "moved/sue", "--json", target=server.address)
    assert [json.loads(line)["content"] for line in listed.stdout.splitlines()] == [
        "I keep bees",
        "the train leaves at noon",
    ]

    bob = ("import", str(file), "moved", "--memory", "bob", "--request-id", "one")
    done = call(*bob, target=server.address)
    assert done.stdout == f"imported 2 fragments of {file} into moved/bob\n"
    done = call(*bob, target=server.address)
    assert (done.returncode, done.stdout[:21]) == (0, "nothing was imported:")
    done = call("observe", "moving/joy", str(file), target=server.address)
    assert done.returncode == 2
    assert "use memstream import" in done.stderr

    again = call("export", "moving/joy", "-o", str(tmp_path / "again.jsonl"), "--json", target=server.address)
    assert json.loads(again.stdout)["fragments"] == 2

    piped = call("export", "moving/joy", "--vectors", target=server.address)
    types = [json.loads(line)["type"] for line in piped.stdout.splitlines()]
    assert types == ["export", "memory", "fragment", "fragment", "end"]


def test_invalid_export_names_the_line(server: ServerProcess, tmp_path: Path) -> None:
    file = tmp_path / "broken.jsonl"
    file.write_text('{"type": "export", "format": "memstream-export", "version": 9}\n', encoding="utf-8")
    done = call("import", str(file), "broken", target=server.address)
    assert done.returncode == 2
    assert "line 1, version: is 9" in done.stderr


def test_missing_resources_raise_not_found(server: ServerProcess, tmp_path: Path) -> None:
    file = tmp_path / "nothing.jsonl"
    assert call("export", "nobody/nothing", "-o", str(file), target=server.address).returncode == 4
    assert not file.exists()
    assert call("import", str(file), "nobody", target=server.address).returncode == 4
    empty = call("export", "nobody", "-o", str(file), target=server.address)
    assert (empty.returncode, "nobody has no memory and no conversation" in empty.stderr) == (0, True)
