"""`memstream hook` as hosts run it, with its helper and a real server."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

import memstream
from memstream.hooks import WITHIN_S, socket_path
from memstream.hooks.events import read_last_turn
from memstream.hooks.redact import redact
from memstream.projects import project_name
from tests.cli.commands import COMMAND, environment
from tests.support.processes import paused
from tests.support.server import ServerProcess, free_address

DEADLINE_S = 60.0


def wait_until(seen: Callable[[], bool]) -> None:
    """Polls for an event of another process."""
    end = time.monotonic() + DEADLINE_S
    while not seen():
        assert time.monotonic() < end
        time.sleep(0.02)


@dataclass(frozen=True)
class Host:
    """A host whose hooks use a memory; its helper is ended with the test."""

    name: str
    memory: str
    target: str
    runtime: Path
    project: Path
    within_s: float

    def hook(self, event: str, given: object = None, *options: str, raw: bytes | None = None) -> dict[str, Any]:
        """Runs a hook, which must exit with 0; the JSON that it prints, or nothing."""
        sent = raw if raw is not None else json.dumps(given).encode()
        done = subprocess.run(
            [*self.words(event), "--within", str(self.within_s), *options],
            input=sent,
            capture_output=True,
            env=self.variables(),
            cwd=self.project,
            timeout=120,
        )
        assert (done.returncode, done.stderr) == (0, b"")
        answer: dict[str, Any] = json.loads(done.stdout) if done.stdout else {}
        return answer

    def words(self, event: str) -> list[str]:
        """The command of a hook."""
        return [*COMMAND, "hook", event, "--host", self.name, "--memory", self.memory, "--target", self.target]

    def variables(self) -> dict[str, str]:
        return environment() | {"XDG_RUNTIME_DIR": str(self.runtime)}

    def said(self, session: str, **more: object) -> dict[str, object]:
        """What the host says about an event."""
        if self.name == "cursor":
            return {"conversation_id": session, "workspace_roots": [str(self.project)], **more}
        return {"session_id": session, "cwd": str(self.project), **more}

    def text(self, answer: dict[str, Any]) -> str:
        """The context in an answer, where the host looks for it."""
        if self.name == "cursor":
            return str(answer.get("additional_context", ""))
        return str(answer.get("hookSpecificOutput", {}).get("additionalContext", ""))

    def helper_pids(self) -> list[int]:
        return [int(lock.read_text()) for lock in (self.runtime / "memstream").glob("*.lock") if lock.read_text()]


@contextmanager
def hosting(name: str, target: str, tmp_path: Path, within_s: float = DEADLINE_S) -> Iterator[Host]:
    """A host. `within_s`: of its hooks, by default enough for a busy machine."""
    project = tmp_path / "app"
    project.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="hooks-", dir="/tmp") as runtime:  # a socket's path must be short
        host = Host(name, f"hooks-{uuid.uuid4().hex[:8]}/{{project}}", target, Path(runtime), project, within_s)
        yield from _ended(host)


def _ended(host: Host) -> Iterator[Host]:
    runtime = host.runtime
    try:
        yield host
    finally:
        wait_until(lambda: not list(runtime.glob("memstream/*.sock")) or bool(host.helper_pids()))
        for pid in host.helper_pids():
            os.kill(pid, signal.SIGTERM)
        wait_until(lambda: not list(runtime.glob("memstream/*.sock")))


def warm(host: Host) -> None:
    """Starts the helper, and waits until it answers with context."""
    host.hook("session-start", host.said("first"))
    wait_until(lambda: bool(list(host.runtime.glob("memstream/*.sock"))))


async def contents(host: Host) -> list[tuple[str, str, str]]:
    async with memstream.connect(host.target) as client:
        path = host.memory.replace("{project}", project_name(host.project))
        try:
            return [(one.speaker, one.session, one.content) async for one in client.memory(path).list_fragments()]
        except memstream.MemoryNotFound:
            return []


async def stored(host: Host, count: int) -> list[tuple[str, str, str]]:
    """The fragments, once there are so many."""
    found = await contents(host)
    while len(found) < count:
        found = await contents(host)
    return found


@pytest.mark.parametrize("name", ["claude-code", "codex", "vscode", "cursor", "gemini-cli"])
async def test_turns_are_observed_and_later_sessions_know_them(
    name: str, server: ServerProcess, tmp_path: Path
) -> None:
    with hosting(name, server.address, tmp_path) as host:
        reply = {"cursor": "text", "gemini-cli": "prompt_response"}.get(name, "last_assistant_message")
        # No helper runs yet: it gets the events with its start.
        assert host.hook("prompt", host.said("monday", prompt="We deploy on Tuesdays")) == {}
        wait_until(lambda: bool(list(host.runtime.glob("memstream/*.sock"))))
        for _ in range(2):  # a host may end a turn twice
            given = host.said("monday", prompt="We deploy on Tuesdays", **{reply: "Noted: Tuesdays."})
            assert host.hook("stop", given) == {}
        assert await stored(host, 2) == [
            ("user", "monday", "We deploy on Tuesdays"),
            ("assistant", "monday", "Noted: Tuesdays."),
        ]
        texts: list[str] = []

        def known() -> bool:
            texts.append(host.text(host.hook("session-start", host.said("tuesday"))))
            return bool(texts[-1])

        wait_until(known)
        assert "We deploy on Tuesdays" in texts[-1]
        assert texts[-1].startswith("<memstream kind=")
        asked = host.said("tuesday", prompt="When do we deploy?")
        answers = [host.text(host.hook("prompt", asked)) for _ in range(3)]
        assert [("We deploy on Tuesdays" in text) for text in answers].count(True) <= 1, "nothing is shown twice"


async def test_own_block_and_secrets_are_not_stored(server: ServerProcess, tmp_path: Path) -> None:
    with hosting("claude-code", server.address, tmp_path) as host:
        warm(host)
        block = '<memstream kind="memory">\n[1] old fact\n</memstream>\n'
        given = host.said("s", prompt=f"{block}Use the key ghp_{'a1B2' * 10} here", last_assistant_message="Done.")
        host.hook("stop", given)
        assert [content for _, _, content in await stored(host, 2)] == [
            "Use the key [secret: GitHub token] here",
            "Done.",
        ]
        host.hook("stop", {**given, "session_id": "t", "prompt": f"The key is ghp_{'z9Y8' * 10}"}, "--keep-secrets")
        assert f"ghp_{'z9Y8' * 10}" in (await stored(host, 3))[2][2]


def test_hooks_fail_open(server: ServerProcess, tmp_path: Path) -> None:
    with hosting("claude-code", free_address(), tmp_path, WITHIN_S) as host:  # no server
        warm(host)
        for event in ("session-start", "prompt", "stop"):
            assert host.hook(event, host.said("s", prompt="hello", last_assistant_message="hi")) == {}
            for raw in (b"", b"{", b"[]", b"null", b'{"prompt": 7, "session_id": {}}', b"\xff", b"[" * 10_000):
                assert host.hook(event, raw=raw) == {}
            assert host.hook(event, host.said("s"), "--no-such-option", "x") == {}
    with hosting("claude-code", server.address, tmp_path, WITHIN_S) as host:  # a server that does not answer
        warm(host)
        with paused(server.pid):
            assert host.hook("prompt", host.said("s", prompt="hello")) == {}
        host.runtime.joinpath("memstream").chmod(0o777)  # another user could be the helper
        assert host.hook("prompt", host.said("s", prompt="hello")) == {}
        host.runtime.joinpath("memstream").chmod(0o700)


def test_a_hook_ends_at_its_deadline_and_loses_no_turn(server: ServerProcess, tmp_path: Path) -> None:
    with hosting("claude-code", server.address, tmp_path) as host:
        warm(host)
        turn = json.dumps(host.said("s", prompt="We deploy late", last_assistant_message="Noted.")).encode()
        with subprocess.Popen(
            host.words("stop"), stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=host.variables(), cwd=host.project
        ) as process:
            assert process.stdin is not None
            assert process.stdout is not None
            # The host says nothing yet, for which a hook without a deadline would wait.
            assert process.wait(DEADLINE_S) == 0
            assert process.stdout.read() == b"", "nobody holds the streams of the host"
            process.stdin.write(turn)
            process.stdin.close()
            assert [text for _, _, text in asyncio.run(stored(host, 2))] == ["We deploy late", "Noted."]


def test_hook_imports_no_package_of_others() -> None:
    """A host waits for the process: each import counts."""
    told = "import sys; import memstream_server.__main__, memstream.hooks; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", told], capture_output=True, text=True, check=True, timeout=120)
    loaded = {name.partition(".")[0] for name in done.stdout.split()}
    assert not loaded & {"click", "grpc", "numpy", "google", "pydantic", "mcp", "asyncio", "subprocess", "argparse"}


def test_helper_is_of_one_server_and_its_credentials(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    monkeypatch.delenv("MEMSTREAM_TOKEN", raising=False)
    one = socket_path({"target": "a:1"})
    assert one == socket_path({"target": "a:1", "memory": "x/y"})
    assert one not in (socket_path({"target": "b:1"}), socket_path({"target": "a:1", "local": "/data"}))
    monkeypatch.setenv("MEMSTREAM_TOKEN", "other")
    assert one != socket_path({"target": "a:1"})


TRANSCRIPTS = {
    "claude": [
        {"type": "user", "message": {"role": "user", "content": "old"}},
        {"type": "user", "message": {"role": "user", "content": [{"type": "text", "text": "Why?"}]}},
        {"type": "assistant", "message": {"role": "assistant", "content": [{"type": "text", "text": "I look."}]}},
        {"type": "user", "message": {"role": "user", "content": [{"type": "tool_result", "content": "data"}]}},
        {"type": "user", "isMeta": True, "message": {"role": "user", "content": "caveat"}},
        {"type": "assistant", "message": {"role": "assistant", "content": [{"type": "tool_use"}]}},
        {"type": "assistant", "message": {"role": "assistant", "content": [{"type": "text", "text": "Because."}]}},
    ],
    "codex": [
        {"type": "response_item", "payload": {"role": "user", "content": [{"type": "input_text", "text": "Why?"}]}},
        {"type": "event_msg", "payload": {"type": "token_count"}},
        {
            "type": "response_item",
            "payload": {"role": "assistant", "content": [{"type": "output_text", "text": "I look.\nBecause."}]},
        },
    ],
    "vscode": [
        {"type": "user.message", "data": {"content": "Why?"}},
        {"type": "assistant.message", "data": {"content": "I look.\nBecause."}},
    ],
}


@pytest.mark.parametrize("name", TRANSCRIPTS)
def test_turns_are_read_from_transcripts(name: str, tmp_path: Path) -> None:
    file = tmp_path / "transcript.jsonl"
    lines = [json.dumps(entry) for entry in TRANSCRIPTS[name]]
    file.write_text("\n".join(["x" * 2_000_000, *lines, "not JSON"]))
    assert read_last_turn(file) == ("Why?", "I look.\nBecause.")
    assert read_last_turn(tmp_path / "absent") == ("", "")


SECRETS = [
    *("AKIAIOSFODNN7EXAMPLE", f"ghp_{'a1B2' * 9}", f"github_pat_{'a1B2' * 6}", f"glpat-{'a1B2' * 5}"),
    *(f"sk-proj-{'a1B2' * 8}", f"sk-ant-api03-{'a1_-' * 8}", f"sk_live_{'a1B2' * 6}", f"xoxb-{'1234567890-' * 3}abc"),
    *(f"AIza{'a1B2-' * 7}", f"npm_{'a1B2' * 9}", f"hf_{'a1B2' * 9}", f"msk_{'a1B2' * 8}"),
    "eyJhbGciOiJFUzI1NiJ9.eyJzdWIiOiJqb3kifQ.c2lnbmF0dXJl",
    "-----BEGIN RSA PRIVATE KEY-----\nMIIEow\nabc\n-----END RSA PRIVATE KEY-----",
    "-----BEGIN OPENSSH PRIVATE KEY-----\nb3BlbnNzaC1rZXk",
]
ASSIGNED = [
    *("password=Hx82kQz9!", 'DB_PASSWORD: "tr0ub4dor&3"', "api_key = 9f8e7d6c5b4a", "token: a8Kx02mmQ1"),
    *('{"client_secret": "c0ffee-42-bean"}', "export AWS_SECRET_ACCESS_KEY=wJalrXUtnFEMI/K7MDENG/bPxRfiCYEXAMPLEKEY"),
    *("the password is Hx82kQz9!", "Authorization: Bearer 0123456789abcdef0", "postgres://joy:s3cr3t@db/x"),
]
PLAIN = [
    *("The password policy is strict", "password = os.environ['X']", "token: $TOKEN", "my password: ********"),
    *("password=<your password>", "api_key: changeme", "The token is expired", "see https://example.org/a:b@c"),
    *("AKIA is a prefix of keys", "sk-learn is a package", "commit 9f8e7d6c5b4a3f2e1d0c", "secret: nothing"),
    "bearer of bad news tomorrow",
]


def test_secrets_are_replaced_by_their_kind() -> None:
    for secret in SECRETS:
        hidden = redact(f"before {secret} after")
        assert hidden.startswith("before [secret: "), secret
        assert not set(secret.split()) & set(hidden.split()) - {"RSA", "PRIVATE"}, hidden
    for text in ASSIGNED:
        assert "[secret: " in redact(text), text
        assert not {"Hx82kQz9!", "tr0ub4dor&3", "9f8e7d6c5b4a", "a8Kx02mmQ1", "s3cr3t"} & set(
            redact(text).replace('"', " ").replace("=", " ").replace("@", " ").replace(":", " ").split()
        )
    for text in PLAIN:
        assert redact(text) == text
    for long in ("password=" * 8_000, "eyJ" * 20_000, "-----BEGIN PRIVATE KEY-----" * 500, "a.b-c_" * 10_000 + "="):
        redact(long)  # in time that is linear in the text
