"""Hooks of coding agents: context at session start and at each prompt, and each turn observed at its end.

A host starts `memstream hook EVENT` with JSON on standard input, and waits for it. So the process imports the standard
library alone, and asks a helper that stays: it has the imports, the connection, and what each session was shown. The
helper is started by the first hook; until it answers, hooks add nothing.

Rules
- A hook never fails and never blocks a turn: whatever goes wrong, it exits with 0 and prints nothing. It waits for the
  helper for REPLY_SHARE of its time, and ends within WITHIN_S of the start of its process, which the kernel records. An
  event that the helper does not have by then is handed over by a child, without the streams of the host.
- The helper gets an event before it is started for it, so no turn is lost while it starts.
- Only this user can reach the helper: its socket is in a directory of the user's own.

Modules:
helper: the resident process.
events: what hosts tell hooks and take from them.
redact: secrets by their shape.
"""

from __future__ import annotations

import hashlib
import json
import os
import signal
import socket
import stat
import sys
import time
from pathlib import Path
from typing import Any

EVENTS = ("session-start", "prompt", "stop")
WITHIN_S = 0.3
"""That a host may have to wait for a hook, from the start of its process; the option --within is another limit."""
EXIT_S = 0.03
"""Of it, kept for the end of the process."""
REPLY_SHARE = 2 / 3
"""Of it, that the hook waits for the helper; the rest is the start of its process."""
HAND_OVER_S = 10.0
"""A child of a hook that had no time hands its event to the helper within it."""
INPUT_BYTES_MAX = 4 << 20
ANSWER_BYTES_MAX = 1 << 20
RUNTIME_BYTES_MAX = 70
"""Of XDG_RUNTIME_DIR: the path of a socket has 104 bytes at most on some systems."""
_VALUES = ("--host", "--memory", "--target", "--local", "--budget", "--within")
SERVER_VARIABLES = ("MEMSTREAM_TOKEN", "MEMSTREAM_TLS", "MEMSTREAM_TLS_CA", "MEMSTREAM_TLS_CERT", "MEMSTREAM_TLS_KEY")
"""With which a process reaches the server, besides its address."""


def main(words: list[str]) -> None:
    """Runs `memstream hook WORDS`."""
    debugged = os.environ.get("MEMSTREAM_HOOK_DEBUG")
    if not debugged:
        signal.signal(signal.SIGALRM, _leave)
        signal.setitimer(signal.ITIMER_REAL, max(_within_s(words) - EXIT_S - _age_s(), 1e-6))
    try:
        answer = _run(words)
    except Exception:  # fail open: the turn has no memory
        if debugged:
            raise
        answer = ""
    signal.setitimer(signal.ITIMER_REAL, 0)  # an answer is written whole or not at all
    if answer:
        sys.stdout.write(answer)
    sys.stdout.flush()
    if not debugged:
        os._exit(0)  # without the 10 ms in which an interpreter tidies up


def _within_s(words: list[str]) -> float:
    """The time of the hook; WITHIN_S if the option is absent or wrong, which is reported later."""
    try:
        return float(words[words.index("--within") + 1])
    except (ValueError, IndexError):
        return WITHIN_S


def _age_s() -> float:
    """Seconds since this process was started; 0 where the system does not say it as Linux does."""
    try:
        with open("/proc/self/stat", "rb") as file:
            ticks = int(file.read().rpartition(b")")[2].split()[19])
    except (OSError, ValueError, IndexError):
        return 0.0
    return max(0.0, time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK"))


def _leave(_number: int, _frame: object) -> None:
    """Ends the process at its deadline; a child continues where it was, without the host, until HAND_OVER_S."""
    if os.fork():
        os._exit(0)
    os.setsid()
    nothing = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nothing, 1)
    os.dup2(nothing, 2)
    signal.signal(signal.SIGALRM, lambda *_: os._exit(0))
    signal.setitimer(signal.ITIMER_REAL, HAND_OVER_S)


def _run(words: list[str]) -> str:
    request = _read_request(words)
    given = sys.stdin.buffer.read(INPUT_BYTES_MAX + 1)
    if len(given) > INPUT_BYTES_MAX:
        return ""
    request["input"] = json.loads(given)
    request["directory"] = os.environ.get("CLAUDE_PROJECT_DIR") or os.getcwd()
    path = socket_path(request)
    line = json.dumps(request).encode() + b"\n"
    try:
        answer = _ask(path, line, request["reply_s"])
    except (FileNotFoundError, ConnectionRefusedError):
        _start_helper(path, line)
        return ""
    text: str = json.loads(answer)["output"]
    return text


def _read_request(words: list[str]) -> dict[str, Any]:
    """The event and the options; ValueError if they are none."""
    request: dict[str, Any] = {"event": words[0], "secrets": "--keep-secrets" in words}
    rest = [word for word in words[1:] if word != "--keep-secrets"]
    if words[0] not in EVENTS or len(rest) % 2:
        raise ValueError(words)
    for name, value in zip(rest[::2], rest[1::2], strict=True):
        if name not in _VALUES:
            raise ValueError(name)
        request[name[2:]] = value
    request["reply_s"] = REPLY_SHARE * _within_s(words)
    request.setdefault("target", os.environ.get("MEMSTREAM_TARGET") or "127.0.0.1:7700")
    return request


def socket_path(request: dict[str, Any]) -> Path:
    """The helper's socket: one for each server and its credentials. Raises OSError if the directory is not ours."""
    base = os.environ.get("XDG_RUNTIME_DIR", "")
    short = 0 < len(os.fsencode(base)) <= RUNTIME_BYTES_MAX
    directory = Path(base) / "memstream" if short else Path(f"/tmp/memstream-{os.getuid()}")
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    found = directory.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o077:
        raise PermissionError(f"{directory} is not a directory of this user alone")
    server = [request.get("local") or request["target"], *(os.environ.get(name, "") for name in SERVER_VARIABLES)]
    return directory / f"{hashlib.sha256(json.dumps([sys.executable, *server]).encode()).hexdigest()[:16]}.sock"


def _ask(path: Path, line: bytes, reply_s: float) -> bytes:
    """The helper's answer. Raises OSError."""
    end = time.monotonic() + reply_s
    with socket.socket(socket.AF_UNIX) as helper:
        helper.settimeout(reply_s)
        helper.connect(str(path))
        helper.sendall(line)
        answer = b""
        while not answer.endswith(b"\n"):
            helper.settimeout(max(0.001, end - time.monotonic()))
            part = helper.recv(1 << 16)
            if not part or len(answer) > ANSWER_BYTES_MAX:
                raise ConnectionError("the helper has no answer")
            answer += part
    return answer


def _start_helper(path: Path, line: bytes) -> None:
    """Starts a helper and gives it its first event."""
    import subprocess

    with (path.parent / "helper.log").open("ab") as log:
        process = subprocess.Popen(
            [sys.executable, "-P", "-m", "memstream.hooks.helper", str(path)],
            stdin=subprocess.PIPE,
            stdout=log,
            stderr=log,
            start_new_session=True,
            cwd="/",
        )
    assert process.stdin is not None
    os.set_blocking(process.stdin.fileno(), False)
    pending = memoryview(line)
    import select

    end = time.monotonic() + HAND_OVER_S  # the deadline of the hook comes before
    while pending and time.monotonic() < end:  # a pipe holds 64 KB; the helper reads the rest once it runs
        if select.select([], [process.stdin], [], end - time.monotonic())[1]:
            pending = pending[os.write(process.stdin.fileno(), pending) :]
    process.stdin.close()
