"""Texts of callers, and keys of callers and providers, are in no log line: not at debug level, not in failures."""

from __future__ import annotations

import contextlib
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

import memstream
from tests.access.conftest import guarded_files
from tests.server.conftest import QUICK, started
from tests.support.fake_openai import FakeOpenAI
from tests.support.journals import only_sqlite
from tests.support.server import ServerProcess
from tests.support.waiting import until

WORD, KEY, BAD_KEY = "canary-word-3b1", "sk-canary-key-77e", "msk_canarybadkey9_c41"
IMPATIENT = memstream.Retry(calls_s=0.3)
SAID = {
    "body": f"{WORD} likes tea",
    "speaker": f"{WORD}-speaker",
    "session": f"{WORD}-session",
    "external_id": f"{WORD}-id",
    "metadata": {f"{WORD}-key": f"{WORD}-value"},
}


class EchoingEndpoint(FakeOpenAI):
    """With `echoes`, it fails in every way in turn, and every reply repeats the request and its key."""

    echoes = False
    _turn = 0

    async def _handle_request(self, request: web.Request, reply: Any) -> web.StreamResponse:
        if not self.echoes:
            return await super()._handle_request(request, reply)
        text = f"{await request.text()} {request.headers.get('authorization')}"
        error = json.dumps({"error": {"message": f"Incorrect API key or input: {text}", "type": "t", "code": "c"}})
        ways = [
            web.Response(status=500, text=error, content_type="application/json"),
            web.Response(status=400, text=error, content_type="application/json"),
            web.Response(status=200, text=text),
            web.Response(status=401, text=error, content_type="application/json"),
            web.Response(status=200, text=json.dumps({"data": [{"embedding": text}], "choices": [{"message": text}]})),
        ]
        self._turn += 1
        return ways[self._turn % len(ways)]


@pytest.fixture
async def endpoint() -> AsyncIterator[EchoingEndpoint]:
    async with EchoingEndpoint(dimension=8) as echoing:
        echoing.complete = lambda body: "not a number"
        yield echoing


async def use_everything(client: memstream.Client, path: str) -> None:
    """Every way in which a caller sends text; failures are expected."""
    memory = client.memory(path)
    for attempt in range(4):
        said: dict[str, Any] = SAID | {"body": f"{WORD} {attempt}"}
        calls: list[Callable[[], Awaitable[object]]] = [
            lambda said=said: memory.observe_batch([memstream.Observation(**said)], timeout_s=1),
            lambda: memory.recall_once(f"who is {WORD}?", filter=memstream.Filter(sessions=[SAID["session"]])),
            lambda: memory.put_fragment(memstream.Observation(**SAID)),
            lambda: memory.get_fragment(external_id=f"{WORD}-other"),
            lambda: client.create_memory("stolen/x", labels={"about": WORD}),
            lambda: client.conversation("a/talk").append(WORD, f"{WORD} speaks"),
            lambda: memory.observe_batch([f"{WORD}\x00\x1b[2J"], session=f"{WORD}\x07", timeout_s=1),
            lambda: memory.reflect(),
        ]
        for call in calls:
            with contextlib.suppress(memstream.MemstreamError):
                await call()


def logged(server: ServerProcess, word: str) -> Callable[[], Awaitable[bool]]:
    async def look() -> bool:
        return word in server.log()

    return look


def check_silent(server: ServerProcess, form: str) -> None:
    text = server.log()
    for secret in (WORD, KEY, BAD_KEY):
        assert secret not in text, text[max(0, text.index(secret) - 1_500) :][:3_000]
    for line in text.splitlines():
        assert line.isprintable(), line
        if form == "json" and line.startswith("{"):
            json.loads(line)


@only_sqlite("its files are damaged")
@pytest.mark.parametrize("form", ["json", "console"])
async def test_nothing_said_is_logged(tmp_path: Path, endpoint: EchoingEndpoint, form: str) -> None:
    keys_file, policy_file, keys = guarded_files(tmp_path / "access")
    model = {"base_url": endpoint.base_url, "model": "m", "api_key": KEY, "retries": 0}
    settings = {f"embedding_{name}": value for name, value in model.items()}
    settings |= {f"llm_{name}": value for name, value in model.items()}
    settings |= {"embedding": "openai", "api_keys_file": str(keys_file), "access_policy_file": str(policy_file)}
    settings |= {"log_level": "debug", "log_format": form, "embedding_timeout_s": 1.0}
    server = ServerProcess(tmp_path / "data").configure(**(QUICK | settings))
    await started(server)
    try:
        async with memstream.connect(server.address, token=keys["alice"], retry=IMPATIENT) as client:
            await client.create_memory("a/joy", labels={"about": WORD})
            await use_everything(client, "a/joy")
            endpoint.echoes = True
            await use_everything(client, "a/joy")
            await until(logged(server, "unavailable"))
            async with memstream.connect(server.address, token=BAD_KEY) as stranger:
                with pytest.raises(memstream.MemstreamError):
                    await stranger.create_memory("a/joy")
            damage(tmp_path / "data" / "journal.db")

            async def journal_failed() -> bool:
                await use_everything(client, "a/joy")
                return "damaged" in server.log()

            await until(journal_failed)  # pages that are in the cache are not read again
    finally:
        server.kill()
    check_silent(server, form)


def damage(journal: Path) -> None:
    """Overwrites every page but the first."""
    data = journal.read_bytes()
    with journal.open("r+b") as file:
        file.seek(4_096)
        file.write(b"\xa5" * (len(data) - 4_096))
    with journal.with_name("journal.db-wal").open("r+b") as file:
        file.truncate(0)
