"""`memstream connect`: the files of hosts, and that nothing else changes in them."""

from __future__ import annotations

import json
import os
import re
import shlex
import tomllib
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from memstream.errors import InvalidRequest
from memstream.hosts import HOSTS, Connection, Scope, jsonc, plan_connection, plan_removal
from memstream.hosts.files import write
from tests.cli.commands import call
from tests.cli.transcripts import load
from tests.support.pages import ROOT

COMMENTED = """\
// servers of this project
{
  "servers": {
    /* the old one */
    "a": { "command": "x", "args": [] }, // keep

    "b": {}, // and this
  },
  "mcpServers": {"c": {"command": "y"}}, "mcp": {"d": {}}, "hooks": { "Stop": [ {"hooks": []}, ] },
  "inputs": [] // last
}
"""
TEXTS = {
    "absent": None,
    "empty object": "{}",
    "spread": "{\n\n}\n",
    "commented": COMMENTED,
    "tabs and CRLF": '{\r\n\t"mcpServers": {\r\n\t\t"a": {"command": "x"}\r\n\t},\r\n\t"z": [1, 2]\r\n}\r\n',
    "mark, one line, no newline": '\ufeff{"numStartups": 3, "mcpServers": {}, "projects": {"/x": {"a": "é\\u00e9"}}}',
}
TOML = {
    "absent": None,
    "empty": "",
    "tables": '# mine\nmodel = "o3"   # odd  spacing\n\n[mcp_servers.docs]\ncommand = "docs"\n'
    '[[hooks.Stop]]\n[[hooks.Stop.hooks]]\ntype = "command"\ncommand = "beep"\n',
    "no newline": 'model = "o3"',
    "CRLF": 'model = "o3"\r\n[features]\r\nweb = true\r\n',
}
EVENTS = {
    "claude-code": {"session-start": "SessionStart", "prompt": "UserPromptSubmit", "stop": "Stop"},
    "cursor": {"session-start": "sessionStart", "prompt": "beforeSubmitPrompt", "stop": "afterAgentResponse"},
    "gemini-cli": {"session-start": "SessionStart", "prompt": "BeforeAgent", "stop": "AfterAgent"},
    "opencode": {},
}
"""Each host's name of an event, as it documents it; Codex and VS Code have those of Claude Code."""
CASES = [(host, name) for host in HOSTS for name in (TOML if host == "codex" else TEXTS)]


@pytest.fixture(autouse=True)
def _state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    for name in ("CODEX_HOME", "GEMINI_CLI_HOME", "XDG_CONFIG_HOME"):
        monkeypatch.delenv(name, raising=False)


def connection(host: str, scope: Scope | None = None) -> Connection:
    """A connection to a local server."""
    chosen: Scope = scope or ("project" if host == "vscode" else "user")
    return Connection(host, chosen, ["/opt/my tools/memstream"], "code/{project}", ["--local", "/data dir"])


def tree(root: Path) -> dict[str, bytes | None]:
    """Every directory (None) and file below, with its bytes."""
    return {str(one.relative_to(root)): None if one.is_dir() else one.read_bytes() for one in root.rglob("*")}


def connect(what: Connection, root: Path) -> None:
    for change in plan_connection(what, root / "home", root / "project"):
        write(change)


def disconnect(what: Connection, root: Path) -> tuple[str, ...]:
    changes = plan_removal(what, root / "home", root / "project")
    for change in changes:
        write(change)
    return tuple(name for change in changes for name in change.kept)


def files_of(what: Connection, root: Path) -> list[Path]:
    return [change.file for change in plan_connection(what, root / "home", root / "project")]


def prepared(what: Connection, root: Path, text: str | None) -> list[Path]:
    """The host's files with that text."""
    for name in ("home", "project"):
        (root / name).mkdir()
    files = files_of(what, root)
    for file in files if text is not None else ():
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes((text or "").encode())
    return files


@pytest.mark.parametrize(("host", "name"), CASES)
def test_connection_is_removed_byte_for_byte(host: str, name: str, tmp_path: Path) -> None:
    root = tmp_path / "root"
    root.mkdir()
    prepared(connection(host), root, (TOML if host == "codex" else TEXTS)[name])
    before = tree(root)
    connect(connection(host), root)
    connected = tree(root)
    assert connected != before
    connect(connection(host), root)
    assert tree(root) == connected, "a second time changes nothing"
    assert disconnect(connection(host), root) == ()
    assert tree(root) == before
    assert not list((tmp_path / "state").rglob("*.json"))


def test_hosts_find_what_they_document(tmp_path: Path) -> None:
    for host in HOSTS:
        root = tmp_path / host
        root.mkdir()
        what = connection(host)
        prepared(what, root, TOML["tables"] if host == "codex" else TEXTS["commented"])
        connect(what, root)
        tools, *hooks = [read(file) for file in files_of(what, root)]
        servers = tools[{"codex": "mcp_servers", "vscode": "servers", "opencode": "mcp"}.get(host, "mcpServers")]
        entry = servers["memstream"]
        words = entry["command"] if host == "opencode" else [entry["command"], *entry["args"]]
        assert words == what.tool_words()
        assert len(servers) >= 2, "the others stay"
        told = (hooks[0] if hooks else tools)["hooks"]
        for ours, name in EVENTS.get(host, EVENTS["claude-code"]).items():
            found = told[name][-1]
            command = found["command"] if host in ("cursor", "vscode") else found["hooks"][0]["command"]
            words = shlex.split(command)
            assert words[:3] == ["/opt/my tools/memstream", "hook", ours]
            assert words[3:] == ["--host", host, "--memory", "code/{project}", "--local", "/data dir"]


def read(file: Path) -> Mapping[str, Any]:
    text = file.read_text("utf-8")
    value: Mapping[str, Any] = tomllib.loads(text) if file.suffix == ".toml" else jsonc.parse(text).value
    return value


def test_later_changes_of_others_stay(tmp_path: Path) -> None:
    what = connection("claude-code")
    tools, settings = prepared(what, tmp_path, TEXTS["commented"])
    connect(what, tmp_path)
    changed = tools.read_text().replace('"inputs": []', '"inputs": ["mine"]')
    tools.write_text(changed)
    settings.write_text(settings.read_text().replace("/* the old one */", "/* the older one */"))
    assert disconnect(what, tmp_path) == ()
    assert tools.read_text() == COMMENTED.replace('"inputs": []', '"inputs": ["mine"]')
    left = jsonc.parse(settings.read_text()).value
    assert left == jsonc.parse(COMMENTED).value, "events that were made are gone, the one before stays"
    for comment in ("/* the older one */", "// keep", "// and this", "// last"):
        assert comment in settings.read_text()

    connect(what, tmp_path)
    tools.write_text(tools.read_text().replace("code/{project}", "code/other"))
    assert disconnect(what, tmp_path) == ("mcpServers.memstream",), "an entry that somebody changed stays"
    assert "code/other" in tools.read_text()


def test_hooks_that_somebody_changed_stay_and_are_named(tmp_path: Path) -> None:
    what = connection("gemini-cli")
    (file,) = prepared(what, tmp_path, "{}\n")
    connect(what, tmp_path)
    changed = file.read_text().replace("hook prompt", "hook prompt --within 2")
    file.write_text(changed)
    assert disconnect(what, tmp_path) == ("hooks.BeforeAgent",)
    assert list(jsonc.parse(file.read_text()).value["hooks"]) == ["BeforeAgent"]
    assert "--within 2" in file.read_text()


def test_opencode_has_no_reason_to_change_its_file(tmp_path: Path) -> None:
    """It adds `$schema` to a file without it, which then could not be removed as it was."""
    what = connection("opencode")
    (file,) = prepared(what, tmp_path, None)
    connect(what, tmp_path)
    assert read(file)["$schema"] == "https://opencode.ai/config.json"
    disconnect(what, tmp_path)
    assert not file.exists()
    file.parent.mkdir(parents=True)
    file.write_text('{"$schema": "./mine.json"}')
    connect(what, tmp_path)
    assert read(file)["$schema"] == "./mine.json"
    disconnect(what, tmp_path)
    assert file.read_text() == '{"$schema": "./mine.json"}'


def test_removal_without_a_record_knows_its_command(tmp_path: Path) -> None:
    for host in HOSTS:
        root = tmp_path / host
        root.mkdir()
        what = connection(host, "project")
        files = prepared(what, root, TOML["tables"] if host == "codex" else TEXTS["commented"])
        before = [read(file) for file in files]
        connect(what, root)
        for record in (tmp_path / "state").rglob("*.json"):
            record.unlink()
        disconnect(replace(what, memory="another/memory"), root)
        for file, was in zip(files, before, strict=True):
            found = read(file)
            unknown = dict.fromkeys(("hooks", "version", "$schema"))
            assert {**found, **unknown} == {**was, **unknown}
            assert "memstream" not in file.read_text()


def test_files_that_cannot_be_changed_are_refused(tmp_path: Path) -> None:
    broken = [
        "{",
        '{"a": }',
        "[]",
        "",
        '{"mcpServers": []}',
        '{"a": 1} {}',
        '{"mcpServers": {"memstream": {"mine": 1}}}',
    ]
    for number, text in enumerate(broken):
        for place in (0, 1):
            root = tmp_path / f"{number}-{place}"
            root.mkdir()
            what = connection("claude-code")
            files = prepared(what, root, "{}\n")
            files[place].write_text(text if place == 0 or number < 4 else '{"hooks": {"Stop": 7}}')
            before = tree(root)
            with pytest.raises(InvalidRequest, match="nothing is changed"):
                connect(what, root)
            assert tree(root) == before, "neither file"
    for number, text in enumerate(
        ("a = ", "mcp_servers = 3\n", '[mcp_servers.memstream]\ncommand = "x"\n', "[hooks]\nStop = []\n")
    ):
        root = tmp_path / f"toml-{number}"
        root.mkdir()
        (file,) = prepared(connection("codex"), root, text)
        with pytest.raises(InvalidRequest, match="nothing is changed"):
            connect(connection("codex"), root)
        assert file.read_text() == text
    binary = tmp_path / "binary"
    binary.mkdir()
    (file,) = prepared(connection("codex"), binary, "a = 1\n")
    file.write_bytes(b"\xff\xfe")
    with pytest.raises(InvalidRequest, match="UTF-8"):
        connect(connection("codex"), binary)


def test_links_modes_and_concurrent_writers_are_respected(tmp_path: Path) -> None:
    what = connection("codex")
    (file,) = prepared(what, tmp_path, TOML["tables"])
    real = tmp_path / "dotfiles.toml"
    os.replace(file, real)
    file.symlink_to(real)
    real.chmod(0o640)
    connect(what, tmp_path)
    assert file.is_symlink()
    assert real.stat().st_mode & 0o777 == 0o640
    assert "memstream" in real.read_text()
    (change,) = plan_removal(what, tmp_path / "home", tmp_path / "project")
    real.write_text(real.read_text() + "\n[other]\n")
    with pytest.raises(InvalidRequest, match="changed meanwhile"):
        write(change)
    disconnect(what, tmp_path)
    assert real.read_text() == f"{TOML['tables']}\n[other]\n"


def test_command_shows_writes_and_removes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    shown = call("connect", "claude-code", "--show", "--target", "127.0.0.1:7700")
    assert shown.returncode == 0
    assert '+    "memstream": {' in shown.stdout
    assert list(tmp_path.iterdir()) == []
    wrote = call("connect", "claude-code", "--target", "127.0.0.1:7700", "--no-hooks")
    assert wrote.stdout == shown.stdout[: len(wrote.stdout)]
    entry = json.loads((tmp_path / ".claude.json").read_text())["mcpServers"]["memstream"]
    assert entry["args"][-5:] == ["mcp", "--target", "127.0.0.1:7700", "--memory", "code/{project}"]
    assert call("connect", "claude-code", "--remove").returncode == 0
    assert [one.name for one in tmp_path.iterdir()] == ["state"]
    assert call("connect", "vscode", "--scope", "user").returncode == 2
    assert call("connect", "codex", "--name", "a.b").returncode == 2
    assert call("connect", "emacs").returncode == 2


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=8,
)


@given(
    st.dictionaries(st.sampled_from(["a", "hooks", "é"]), JSON, max_size=3),
    st.sampled_from([None, 1, 2, "\t"]),
    st.sampled_from(["", "// c\n", "/* { */"]),
    st.booleans(),
)
def test_insertions_can_be_undone_in_any_text(value: dict[str, Any], indent: Any, comment: str, item: bool) -> None:
    text = comment + json.dumps(value, indent=indent, ensure_ascii=False) + comment.rstrip("\n")
    path = ("hooks", "Stop")
    try:
        steps = jsonc.insert(text, path, {"x": [1]}, item=item)
    except jsonc.Malformed:
        assert "hooks" in value
        return
    made = text
    for place, piece in steps:
        made = made[:place] + piece + made[place:]
    found = jsonc.parse(made).value
    assert {key: one for key, one in found.items() if key != "hooks"} == {
        key: one for key, one in value.items() if key != "hooks"
    }
    assert ({"x": [1]} in found["hooks"]["Stop"]) if item else found["hooks"]["Stop"] == {"x": [1]}
    for place, piece in reversed(steps):
        assert made[place : place + len(piece)] == piece
        made = made[:place] + made[place + len(piece) :]
    assert made == text


@pytest.mark.parametrize("name", HOSTS)
def test_the_page_names_what_is_tested_and_written(name: str, tmp_path: Path) -> None:
    transcript = load(name)
    names = {"claude-code": "Claude Code", "cursor": "Cursor", "vscode": "VS Code", "codex": "Codex"}
    names |= {"opencode": "OpenCode", "gemini-cli": "Gemini CLI"}
    page = (ROOT / "docs/connect.md").read_text("utf-8")
    (row,) = re.findall(rf"^\| {names[name]} \| (\S+) \| (it runs|transcript) \| (\d+) \| \d+ \|$", page, re.M)
    changes = plan_connection(connection(name), tmp_path / "home", tmp_path / "project")
    lines = [line for change in changes for line in change.diff() if line.startswith("+") and line[:3] != "+++"]
    how = "it runs" if transcript.source.startswith("recorded") else "transcript"
    assert row == (transcript.version, how, str(len(lines)))
    packages = json.loads((ROOT / "tests/toolchains/with_hosts/package.json").read_text("utf-8"))["dependencies"]
    assert (transcript.version in packages.values()) == (how == "it runs")
