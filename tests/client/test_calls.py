"""Unary calls, listings, errors and the blocking SDK."""

from __future__ import annotations

import asyncio
import signal
import subprocess
import sys
import textwrap
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import grpc
import pytest

import memstream
import memstream.sync
from memstream.sync.loop import LOOP
from tests.support.scripted_server import ScriptedServer
from tests.support.scripts import until


async def test_create_and_describe(client: memstream.Client, server: ScriptedServer) -> None:
    made = await client.create_memory("ns/m", profile=memstream.Profile.DBGPT, policy={"recall": {"limit": 4}})
    again = await client.create_memory("ns/m", exist_ok=True)
    described = await again.describe()
    assert (made.path, described.path, described.kind) == ("ns/m", "ns/m", memstream.MemoryKind.HYBRID)
    assert described.policy.profile is memstream.Profile.DBGPT
    assert described.policy.recall is not None
    assert described.policy.recall.limit == 4
    with pytest.raises(memstream.MemoryExists):
        await client.create_memory("ns/m")
    assert server.metadata[0]["memstream-memory"] == "ns/m"


async def test_error_names_argument_and_value(client: memstream.Client) -> None:
    with pytest.raises(memstream.MemoryNotFound) as caught:
        await client.get_memory("ns/none")
    assert caught.value.code is grpc.StatusCode.NOT_FOUND
    assert caught.value.details == {"memory": "none"}
    assert isinstance(caught.value.__cause__, grpc.aio.AioRpcError)
    with pytest.raises(memstream.CapabilityMissing):
        await client.memory("ns/m").clear()


@pytest.mark.parametrize("path", ["joy", "a/b/c", "/m", "ns/", "ns/ m", "ns/-m", "ns/m\n"])
async def test_invalid_paths_are_rejected_before_sending(client: memstream.Client, path: str) -> None:
    with pytest.raises(memstream.InvalidRequest) as caught:
        client.memory(path)
    assert caught.value.violations[0].field == "memory"


async def test_listing_fetches_all_pages(memory: memstream.Memory, server: ScriptedServer) -> None:
    async with memory.observe("p") as stream:
        for n in range(7):
            await stream.send(f"line {n}")
    listing = memory.list_fragments(page_size=3)
    assert [fragment.content async for fragment in listing] == [f"line {n}" for n in range(7)]
    assert listing.cursor == memstream.Cursor("01HUID", 9)


async def test_closed_client_raises_stream_closed(server: ScriptedServer) -> None:
    async with memstream.connect(server.target) as client:
        pass
    with pytest.raises(memstream.StreamClosed):
        await client.server_info()


async def test_client_close_ends_a_call(server: ScriptedServer) -> None:
    client = memstream.connect(server.target)
    server.answering.clear()
    recall = await client.memory("ns/m").recall().__aenter__()
    waiting = asyncio.create_task(recall.query("slow"))
    await until(lambda: len(server.queries) == 1)
    await client.close()
    with pytest.raises(memstream.StreamClosed):
        await waiting


async def test_client_close_ends_export_and_import(server: ScriptedServer) -> None:
    client = memstream.connect(server.target)
    server.answering.clear()
    parts = client.export("ns")
    assert (await anext(parts)).lines == b"first\n"
    exporting = asyncio.ensure_future(anext(parts))
    importing = asyncio.create_task(client.import_("ns", chunks(b"line\n")))
    await until(lambda: server.imported == b"line\n")
    await client.close()
    for waiting in (exporting, importing):
        with pytest.raises(memstream.StreamClosed):
            await waiting


async def chunks(*given: bytes) -> AsyncIterator[bytes]:
    for chunk in given:
        yield chunk


@pytest.mark.parametrize(
    ("broken", "raised"),
    [(asyncio.InvalidStateError(), asyncio.InvalidStateError), (grpc.RpcError(), memstream.MemstreamError)],
    ids=["a state", "another service"],
)
async def test_failing_source_ends_the_import(
    client: memstream.Client, broken: Exception, raised: type[Exception]
) -> None:
    async def source() -> AsyncIterator[bytes]:
        yield b"first\n"
        raise broken

    with pytest.raises(raised):
        await asyncio.wait_for(client.import_("ns", source()), 60)


async def test_call_retries_are_limited_by_time(server: ScriptedServer) -> None:
    asked: list[str] = []

    def token() -> str:
        asked.append(f"t{len(asked)}")
        return asked[-1]

    retry = memstream.Retry(delay_min_s=0.001, delay_max_s=0.002)
    async with memstream.connect(server.target, token=token, retry=retry) as client:
        server.calls_cut = 30
        assert (await client.memory("ns/m").recall_once("Bob?"))[0].fragment.content == "Bob?"
    assert len(server.queries) == len(asked) == 31


@pytest.mark.parametrize(
    ("retry", "timeout_s"),
    [(memstream.Retry(calls_s=0), 30.0), (memstream.Retry(delay_min_s=3600, delay_max_s=3600), 0.5)],
    ids=["repeats are off", "its time limit comes first"],
)
async def test_call_fails_at_once_without_retries(
    server: ScriptedServer, retry: memstream.Retry, timeout_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("random.random", lambda: 0.9)
    async with memstream.connect(server.target, retry=retry, timeout_s=timeout_s) as client:
        server.calls_cut = 2
        with pytest.raises(memstream.Unavailable):
            await client.memory("ns/m").recall_once("Bob?")
    assert len(server.queries) == 1


@pytest.fixture
def blocking_server() -> Iterator[ScriptedServer]:
    # On the blocking SDK's loop: grpc.aio supports one per process.
    scripted = ScriptedServer()  # type: ignore[abstract]  # the rpcs it lacks answer UNIMPLEMENTED
    LOOP.run(scripted.start())
    yield scripted
    LOOP.run(scripted.stop())


def test_the_blocking_facade(blocking_server: ScriptedServer) -> None:
    with memstream.sync.connect(blocking_server.target) as client:
        joy = client.create_memory("ns/m")
        with joy.observe("p", session="monday") as stream:
            sent = [stream.send(f"line {n}") for n in range(5)]
            bad = stream.send("reject me")
            stream.flush()
            assert [each.wait().sequence for each in sent] == [1, 2, 3, 4, 5]
            with pytest.raises(memstream.InvalidRequest):
                bad.wait()
            assert stream.rejected_count == 1
        assert [fragment.content for fragment in joy.list_fragments(page_size=2)][:2] == ["line 0", "line 1"]
        assert joy.recall_once("Bob?")[0].fragment.content == "Bob?"
        with joy.recall() as recall:
            futures = [recall.submit(f"query {n}") for n in range(6)]
            assert [future.result()[0].fragment.content for future in futures] == [f"query {n}" for n in range(6)]
            assert len(recall.query("one more", limit=1)) == 1
        blocking_server.add_event(1, 1)
        with joy.watch("beginning") as watch:
            assert next(iter(watch)).cursor.revision == 1
        with pytest.raises(memstream.MemoryNotFound):
            client.get_memory("ns/none")
    assert blocking_server.closed == 1


def test_blocking_client_can_start_with_an_export(blocking_server: ScriptedServer) -> None:
    client = memstream.sync.connect(blocking_server.target)
    assert [part.lines for part in client.export("ns")] == [b"first\n", b"second\n"]
    client.close()


def test_import_source_may_use_the_blocking_sdk(blocking_server: ScriptedServer) -> None:
    with memstream.sync.connect(blocking_server.target) as client:
        client.import_("other", (part.lines for part in client.export("ns")))
    assert blocking_server.imported == b"first\nsecond\n"


def test_import_source_may_block(blocking_server: ScriptedServer) -> None:
    called = threading.Event()

    def lines() -> Iterator[bytes]:
        yield b"first\n"
        assert called.wait(60), "the import holds up everybody else"
        yield b"second\n"

    with memstream.sync.connect(blocking_server.target) as client, ThreadPoolExecutor(1) as pool:
        importing = pool.submit(client.import_, "ns", lines())
        client.create_memory("ns/m")
        called.set()
        importing.result()
    assert blocking_server.imported == b"first\nsecond\n"


def test_exception_of_signal_handler_cancels_the_call(blocking_server: ScriptedServer) -> None:
    def interrupt(*_: object) -> None:
        raise KeyError("a time limit")

    blocking_server.window_observations = 1
    LOOP.run(called(blocking_server.acking.clear))
    before = signal.signal(signal.SIGUSR1, interrupt)
    later = threading.Timer(0.1, signal.pthread_kill, (threading.get_ident(), signal.SIGUSR1))
    try:
        with memstream.sync.connect(blocking_server.target) as client, client.memory("ns/m").observe("p") as stream:
            stream.send("one")
            later.start()
            with pytest.raises(KeyError):
                stream.send("two")
            LOOP.run(called(blocking_server.acking.set))
            stream.send("three")
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert blocking_server.contents() == ["one", "three"]


def test_client_can_be_closed_at_exit() -> None:
    program = """
        import atexit
        import memstream.sync
        client = memstream.sync.connect("127.0.0.1:1")
        atexit.register(lambda: print("closed"))
        atexit.register(client.close)
        print(client.memory("ns/m").path)
    """
    ended = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program)], capture_output=True, text=True, check=True, timeout=120
    )
    assert (ended.stdout, ended.stderr) == ("ns/m\nclosed\n", "")


def test_call_after_the_loop_ended_raises() -> None:
    program = """
        import atexit

        class Held:
            def close(self):
                try:
                    self.client.close()
                except Exception as error:
                    print(type(error).__name__)

            __del__ = close

        held = Held()
        atexit.register(lambda: held.close())  # before the import, so it runs after the SDK's own handler
        import memstream.sync
        held.client = memstream.sync.connect("127.0.0.1:1")
        print(held.client.memory("ns/m").path)
    """
    ended = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program)], capture_output=True, text=True, check=True, timeout=120
    )
    assert (ended.stdout, ended.stderr) == ("ns/m\nStreamClosed\nStreamClosed\n", "")


async def called(what: Callable[[], None]) -> None:
    what()


def test_blocking_stream_abandons_on_exception(blocking_server: ScriptedServer) -> None:
    def leave() -> None:
        with client.memory("ns/m").observe("p") as stream:
            stream.send("one")
            raise KeyError

    with memstream.sync.connect(blocking_server.target) as client, pytest.raises(KeyError):
        leave()
    assert blocking_server.closed == 0
