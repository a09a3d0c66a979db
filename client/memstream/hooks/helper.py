"""The resident helper of hooks: `python -m memstream.hooks.helper SOCKET`, with its first event on standard input.

It answers each event within ANSWER_SHARE of the hook's time, or with nothing. An observation is acknowledged at once
and stored afterwards. The helper ends after IDLE_S without an event, and at SIGTERM. What a session was shown and asked
is kept in RAM, of the last SESSIONS_MAX sessions.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import hashlib
import json
import os
import signal
import socket
import sys
from collections import OrderedDict
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from memstream import errors
from memstream.backoff import Retry
from memstream.channel import Tls
from memstream.client import Client, connect
from memstream.context import Context, PartKind
from memstream.hooks import INPUT_BYTES_MAX
from memstream.hooks.events import Told, read_input, read_last_turn, write_output
from memstream.hooks.redact import redact
from memstream.listed_values import FragmentOrder
from memstream.local_client import local
from memstream.memory import Memory
from memstream.projects import fill_project
from memstream.values import Observation, Role

ANSWER_SHARE = 0.8
"""Of the time that a hook waits, in which its answer is made."""
STORE_S = 30.0
"""An observation is tried for so long."""
IDLE_S = 3_600.0
SESSIONS_MAX = 1_000
BUDGET_TOKENS = 1_500
"""Default budget of the text of one event."""
SHOWN_BUDGETS = 10
"""A session's context may hold so many of them before what it was shown counts as gone from the model's window."""
QUESTION_CHARS_MAX = 1_000
CONTENT_CHARS_MAX = 16_000
LATEST = 10
"""Facts that a session starts with."""
BLOCKS_MAX = 20
_START_QUESTION = "What was decided, what is preferred, and how are things done here?"


@dataclass(slots=True)
class Session:
    """What a session was shown last, and the prompt whose turn has not ended."""

    shown: Context | None = None
    prompt: str = ""


class Helper:
    """Answers the events of one user's hosts for one server."""

    def __init__(self) -> None:
        self.client: asyncio.Future[Client] = asyncio.get_running_loop().create_future()
        self._called = asyncio.Event()
        self._ended = False
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, self._end)
        self._sessions: OrderedDict[str, Session] = OrderedDict()
        self._storing: set[asyncio.Task[None]] = set()

    async def answer(self, request: dict[str, Any]) -> str:
        """The output for the host; empty if there is nothing to add, or no time."""
        self._called.set()
        told = read_input(request["input"])
        path = fill_project(request["memory"], Path(told.directory or request["directory"]))
        session = self._find_session(f"{path}\0{told.session}")
        if request["event"] == "stop":
            self._observe(path, session, told, request)
            return ""
        text = ""
        answer_s = ANSWER_SHARE * request["reply_s"]
        with contextlib.suppress(TimeoutError, errors.MemstreamError):
            async with asyncio.timeout(answer_s):
                client = await asyncio.shield(self.client)
                budget = int(request.get("budget") or BUDGET_TOKENS)
                if request["event"] == "prompt":
                    session.prompt = told.prompt
                    text = await _for_prompt(client, path, session, told.prompt, budget, answer_s)
                else:
                    session.shown = None  # a session that starts, is cleared or compacted has nothing in its window
                    text = await _for_start(client, path, budget, answer_s)
        if request["event"] == "prompt":
            session.prompt = told.prompt
        return write_output(request["event"], request.get("host", ""), text)

    async def wait_until_idle(self) -> None:
        """Returns when there was no event for IDLE_S, or at SIGTERM."""
        with contextlib.suppress(TimeoutError):
            while not self._ended:
                self._called.clear()
                async with asyncio.timeout(IDLE_S):
                    await self._called.wait()

    def _end(self) -> None:
        self._ended = True
        self._called.set()

    async def finish(self) -> None:
        """Waits for the observations that are being stored."""
        if self._storing:
            await asyncio.wait(self._storing)

    def _find_session(self, key: str) -> Session:
        found = self._sessions.pop(key, None) or Session()
        self._sessions[key] = found
        while len(self._sessions) > SESSIONS_MAX:
            self._sessions.popitem(last=False)
        return found

    def _observe(self, path: str, session: Session, told: Told, request: dict[str, Any]) -> None:
        transcript = request["input"].get("transcript_path")
        prompt, reply = told.prompt or session.prompt, told.reply
        session.prompt = ""
        if (
            isinstance(transcript, str)
            and transcript
            and (not reply or (not prompt and request.get("host") != "cursor"))
        ):
            found_prompt, found_reply = read_last_turn(Path(transcript))
            prompt, reply = prompt or found_prompt, reply or found_reply
        said = [(Role.USER, prompt), (Role.ASSISTANT, reply)]
        kept = [(role, text if request.get("secrets") else redact(text)) for role, text in said]
        task = asyncio.create_task(self._store(path, told.session, kept))
        self._storing.add(task)
        task.add_done_callback(self._storing.discard)

    async def _store(self, path: str, session: str, said: list[tuple[Role, str]]) -> None:
        observations = [
            Observation(text[:CONTENT_CHARS_MAX], speaker=role.value, role=role) for role, text in said if text.strip()
        ]
        if not observations:
            return
        # A host may end a turn twice; the second one is the first one again.
        key = hashlib.sha256(json.dumps([path, session, said]).encode()).hexdigest()[:24]
        try:
            async with asyncio.timeout(STORE_S):
                memory = (await asyncio.shield(self.client)).memory(path)
                try:
                    await memory.observe_batch(observations, session=session, request_id=f"hook-{key}")
                except errors.MemoryNotFound:
                    await (await asyncio.shield(self.client)).create_memory(path, exist_ok=True)
                    await memory.observe_batch(observations, session=session, request_id=f"hook-{key}")
        except (TimeoutError, errors.MemstreamError) as error:
            reason = error.reason if isinstance(error, errors.MemstreamError) else "no answer"
            print(f"{datetime.now(UTC):%Y-%m-%dT%H:%M:%S} a turn was not stored: {reason}", flush=True)


async def _for_prompt(client: Client, path: str, session: Session, prompt: str, budget: int, answer_s: float) -> str:
    """What is remembered about the prompt and was not shown in the session."""
    question = prompt[:QUESTION_CHARS_MAX].strip()
    if not question:
        return ""
    made = await client.context(
        [path], question, budget=SHOWN_BUDGETS * budget, after=session.shown, parts_timeout_s=answer_s
    )
    text, tokens = "", 0
    for part in made.parts:
        if part.kind is PartKind.EVIDENCE and part.fresh and part.fragment_ids and tokens + part.tokens <= budget:
            text, tokens = text + part.text, tokens + part.tokens
    session.shown = made if made.tokens < SHOWN_BUDGETS * budget / 2 else None
    return text


async def _for_start(client: Client, path: str, budget: int, answer_s: float) -> str:
    """The blocks, what answers the question of every start, and the latest facts."""
    memory = client.memory(path)
    names = [f"{path}#{block.name}" async for block in memory.blocks.list()][:BLOCKS_MAX]
    made, latest = await asyncio.gather(
        client.context([path], _START_QUESTION, blocks=names, budget=budget, parts_timeout_s=answer_s),
        _latest(memory),
    )
    kinds = (PartKind.BLOCK,) if made.weak else (PartKind.BLOCK, PartKind.EVIDENCE)
    text = "".join(part.text for part in made.parts if part.kind in kinds)
    shown = {citation.fragment_id for citation in made.citations} if not made.weak else set()
    lines = [line for id, line in latest if id not in shown]
    while lines and len("".join(lines).encode()) > 4 * budget - len(text.encode()):
        del lines[0]
    return text + (f'<memstream kind="memory">\nSaid last:\n{"".join(lines)}</memstream>\n' if lines else "")


async def _latest(memory: Memory) -> list[tuple[str, str]]:
    """(id, line) of the latest facts, the last one last. No content can write a mark."""
    found: list[tuple[str, str]] = []
    async for one in memory.list_fragments(order=FragmentOrder.OBSERVE_TIME, descending=True, page_size=LATEST):
        if one.content and not one.superseded_by:
            day = f"{one.observe_time:%Y-%m-%d} " if one.observe_time is not None else ""
            content = " ".join(one.content.split())[:300].replace("<", "&lt;")
            found.insert(0, (one.id, f"- {day}{one.speaker}{': ' if one.speaker else ''}{content}\n"))
        if len(found) == LATEST:
            break
    return found


async def _open_client(request: dict[str, Any], stack: contextlib.AsyncExitStack) -> Client:
    """A client of the server that hooks name, as `memstream` connects to it."""
    if request.get("local"):
        return await stack.enter_async_context(local(request["local"], start_timeout_s=60.0))
    ca, certificate, key = (os.environ.get(f"MEMSTREAM_TLS_{name}") or None for name in ("CA", "CERT", "KEY"))
    wanted = ca or certificate or key or os.environ.get("MEMSTREAM_TLS")
    tls = Tls.of_files(ca, certificate, key) if wanted else None
    token = os.environ.get("MEMSTREAM_TOKEN") or None
    made = connect(request["target"], token=token, tls=tls, retry=Retry(calls_s=STORE_S), client_name="memstream-hook")
    return await stack.enter_async_context(made)


async def _serve(listener: socket.socket, first: dict[str, Any]) -> None:
    async with contextlib.AsyncExitStack() as stack:
        helper = Helper()

        async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            with contextlib.suppress(ConnectionError, ValueError, KeyError, TypeError):
                request = json.loads(await reader.readline())
                writer.write(json.dumps({"output": await helper.answer(request)}).encode() + b"\n")
                await writer.drain()
            writer.close()

        server = await asyncio.start_unix_server(answer, sock=listener, limit=2 * INPUT_BYTES_MAX)
        try:
            with contextlib.suppress(ValueError, KeyError, TypeError):
                await helper.answer(first | {"reply_s": 0.0})  # nobody waits for its answer
            helper.client.set_result(await _open_client(first, stack))
            await helper.wait_until_idle()
        finally:
            server.close()
        await helper.finish()


def main() -> None:
    """Serves the socket that is named, unless another helper does: then hands that one the event."""
    path = Path(sys.argv[1])
    line = sys.stdin.buffer.readline()
    lock = os.open(path.with_suffix(".lock"), os.O_RDWR | os.O_CREAT, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        _hand_over(path, line)
        return
    os.ftruncate(lock, 0)
    os.write(lock, f"{os.getpid()}\n".encode())
    path.unlink(missing_ok=True)  # of a helper that was killed
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))
        listener.listen(64)
        try:
            asyncio.run(_serve(listener, json.loads(line)))
        except errors.MemstreamError as error:
            print(f"no server: {error.reason or type(error).__name__}", flush=True)
        finally:
            path.unlink(missing_ok=True)


def _hand_over(path: Path, line: bytes) -> None:
    with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX) as other:
        other.settimeout(5.0)
        other.connect(str(path))
        other.sendall(line)
        other.recv(1)


if __name__ == "__main__":
    main()
