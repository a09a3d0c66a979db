"""The options of gRPC do what they are set for: gRPC ignores an unknown or ineffective one in silence."""

from __future__ import annotations

import asyncio
import importlib
import re
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, cast

import grpc
import grpc.aio
import pytest

import memstream
from memstream.v1 import server_service_pb2
from memstream.v1 import stream_service_pb2 as pb
from memstream.v1.server_service_pb2_grpc import ServerServiceStub
from memstream.v1.stream_service_pb2_grpc import StreamServiceStub
from memstream_server.engine.runtime.ownership import Ownership
from memstream_server.ports.processes import Owner
from memstream_server.rpc import forwarding, server
from memstream_server.rpc.access.peers import Peers
from memstream_server.rpc.drain import Drain
from memstream_server.rpc.forwarding import Forwarding
from memstream_server.rpc.server import build_server
from tests.rpc.conftest import LIMITS
from tests.rpc.test_forwarding import ASKING, Whereabouts
from tests.support.certificates import Authority
from tests.support.fake_engine import FakeEngine
from tests.support.listeners import close_listener
from tests.support.raw_http2 import (
    ACK,
    DATA,
    END_HEADERS,
    GOAWAY,
    HEADERS,
    PING,
    PREFACE,
    RST_STREAM,
    SETTINGS,
    Raw,
    frame,
    raw,
    request,
)

ROOT = Path(__file__).parents[2]
HELLO = PREFACE + frame(SETTINGS)
PATIENCE_S = 30.0
OBSERVE = "/memstream.v1.StreamService/Observe"
WATCH = "/memstream.v1.StreamService/Watch"
ENHANCE_YOUR_CALM = 11
REFUSED_STREAM = 7
RECEIVE_ALL = ("grpc.max_receive_message_length", -1)

HERE = "tests.rpc.test_grpc_options"
FLOODS = "tests.server.test_floods"
ATTACKS = "tests.access.test_attacks"
RPC, SDK = "server/memstream_server/rpc/server.py", "client/memstream/channel.py"
PEERS, HEALTHCHECK = "server/memstream_server/rpc/access/peers.py", "server/memstream_server/cli/healthcheck.py"
PEER_TLS, CHECK = "tests.toolchains.test_peer_tls", "tests.cli.test_healthcheck"
FORWARDING = "server/memstream_server/rpc/forwarding.py"
COLUMNS = "tests.index.test_milvus_columns"
MILVUS = "server/memstream_server/adapters/milvus"
EFFECTS = {
    (RPC, "so_reuseport"): ("tests.server.test_process", "test_second_server_at_address_exits_with_error"),
    (RPC, "max_receive_message_length"): (FLOODS, "test_oversized_headers_and_messages_fail_alone"),
    (RPC, "max_metadata_size"): (HERE, "test_server_takes_long_metadata_up_to_its_bound"),
    (RPC, "absolute_max_metadata_size"): (HERE, "test_server_takes_long_metadata_up_to_its_bound"),
    (RPC, "keepalive_time_ms"): (HERE, "test_server_closes_a_connection_that_answers_no_ping"),
    (RPC, "http2.ping_timeout_ms"): (HERE, "test_server_closes_a_connection_that_answers_no_ping"),
    (RPC, "keepalive_permit_without_calls"): (HERE, "test_pings_without_a_call_are_allowed"),
    (RPC, "http2.min_ping_interval_without_data_ms"): (HERE, "test_pings_beside_a_quiet_call_are_allowed"),
    (RPC, "http2.max_ping_strikes"): (HERE, "test_some_fast_pings_are_forgiven_and_no_more"),
    (RPC, "server_handshake_timeout_ms"): (FLOODS, "test_connections_without_handshake_are_closed"),
    (RPC, "max_connection_idle_ms"): (FLOODS, "test_idle_connections_are_closed"),
    (RPC, "max_allowed_incoming_connections"): (
        "tests.server.test_connections",
        "test_grpc_port_closes_what_exceeds_its_bound",
    ),
    (RPC, "max_concurrent_streams"): (HERE, "test_streams_over_the_connections_limit_are_refused"),
    (RPC, "server.max_pending_requests"): (ATTACKS, "test_honest_calls_survive_thousands_that_wait"),
    (RPC, "server.max_pending_requests_hard_limit"): (ATTACKS, "test_honest_calls_survive_thousands_that_wait"),
    (RPC, "server_max_unrequested_time_in_server"): (
        "tests.rpc.test_waiting_calls",
        "test_waiting_calls_end_only_at_their_deadline",
    ),
    (RPC, "http2.bdp_probe"): (HERE, "test_window_of_an_unread_call_stays_small"),
    (RPC, "per_message_decompression"): (ATTACKS, "test_hostile_body_is_refused"),
    (RPC, "compression_enabled_algorithms_bitset"): (ATTACKS, "test_deflate_is_refused_by_name"),
    (FORWARDING, "max_receive_message_length"): (HERE, "test_forwarded_answer_may_have_more_than_four_mb"),
    (FORWARDING, "keepalive_time_ms"): (HERE, "test_forwarded_call_ends_when_its_owner_answers_no_ping"),
    (FORWARDING, "http2.ping_timeout_ms"): (HERE, "test_forwarded_call_ends_when_its_owner_answers_no_ping"),
    (FORWARDING, "enable_retries"): (HERE, "test_forwarded_call_is_sent_once"),
    (FORWARDING, "use_local_subchannel_pool"): (
        "tests.rpc.test_forwarding",
        "test_forwarding_opens_further_connections",
    ),
    (SDK, "keepalive_time_ms"): (HERE, "test_sdk_notices_a_server_that_answers_no_ping"),
    (SDK, "http2.ping_timeout_ms"): (HERE, "test_sdk_notices_a_server_that_answers_no_ping"),
    (SDK, "initial_reconnect_backoff_ms"): (HERE, "test_sdk_reconnects_soon_and_goes_on"),
    (SDK, "max_reconnect_backoff_ms"): (HERE, "test_sdk_reconnects_soon_and_goes_on"),
    (SDK, "max_receive_message_length"): (HERE, "test_sdk_takes_answers_up_to_its_bound"),
    (SDK, "enable_retries"): (HERE, "test_sdk_leaves_no_retry_to_grpc"),
    (SDK, "primary_user_agent"): ("tests.access.test_server", "test_status_names_the_latest_clients_of_each_caller"),
    (SDK, "ssl_target_name_override"): (HERE, "test_sdk_checks_the_name_that_it_was_given"),
    (SDK, "use_local_subchannel_pool"): (
        "tests.server.test_many_streams",
        "test_clients_of_a_process_share_no_connection",
    ),
    (PEERS, "ssl_target_name_override"): (PEER_TLS, "test_servers_verify_each_other_by_the_service_name"),
    (HEALTHCHECK, "ssl_target_name_override"): (CHECK, "test_healthcheck_trusts_the_certificate_of_any_name"),
    (f"{MILVUS}/columns.py", "max_receive_message_length"): (COLUMNS, "test_inserter_takes_an_answer_of_many_keys"),
    (f"{MILVUS}/child.py", "max_receive_message_length"): (COLUMNS, "test_lite_takes_one_write_of_many_bytes"),
}
"""Where an option is set, and the test of its effect."""
UNTESTED = {
    (f"{MILVUS}/collection.py", "keepalive_time_ms"),
    ("client/memstream/importers/milvus.py", "keepalive_time_ms"),
}
"""They keep a connection quiet for ten minutes; nothing shorter than that shows it."""


def test_every_option_has_a_test_of_its_effect() -> None:
    found = set()
    for folder in ("server/memstream_server", "client/memstream"):
        for path in sorted((ROOT / folder).rglob("*.py")):
            for name in re.findall(r'"grpc\.([a-z][a-z0-9_.]+)"', path.read_text("utf-8")):
                found.add((str(path.relative_to(ROOT)), name))
    assert found == set(EFFECTS) | UNTESTED
    for module, test in EFFECTS.values():
        assert callable(getattr(importlib.import_module(module), test, None)), f"{module} has no {test}"


@asynccontextmanager
async def serving(**constants: int) -> AsyncIterator[str]:
    """A server in this process, with other values of the constants of `server`; yields its address."""
    engine = cast("Any", FakeEngine())
    with pytest.MonkeyPatch.context() as patch:
        for name, value in constants.items():
            patch.setattr(server, name, value)
        served = build_server(engine, LIMITS, Drain(1.0))
    address = await served.start("127.0.0.1:0")
    try:
        yield address
    finally:
        await served.stop(0.1)


async def next_frame(connection: Raw, kind: int) -> tuple[int, int, bytes]:
    """Flags, stream and payload of the next frame of this kind."""
    async with asyncio.timeout(PATIENCE_S):
        async for seen, flags, stream, payload in connection.frames():
            if seen == kind:
                return flags, stream, payload
    raise AssertionError(f"the connection ended without a frame of kind {kind}")


async def ping_slowly(connection: Raw, count: int, pause_s: float) -> list[int]:
    """The kinds of the frames up to the answer of the last ping, or to the end of the connection."""
    for number in range(1, count + 1):
        await connection.send(frame(PING, payload=number.to_bytes(8)))
        await asyncio.sleep(pause_s)  # the interval itself is under test
    kinds = []
    async with asyncio.timeout(PATIENCE_S):
        async for kind, flags, _, payload in connection.frames():
            kinds.append(kind)
            if kind == PING and flags & ACK and payload == count.to_bytes(8):
                break
    return kinds


async def test_server_takes_long_metadata_up_to_its_bound() -> None:
    async with serving() as address, grpc.aio.insecure_channel(address) as channel:
        ask, wanted = ServerServiceStub(channel).GetServerInfo, server_service_pb2.GetServerInfoRequest()
        for _ in range(20):  # above the lower bound gRPC refuses at random
            await ask(wanted, metadata=(("x-long", "x" * 30_000),))
        with pytest.raises(grpc.aio.AioRpcError) as raised:
            await ask(wanted, metadata=(("x-long", "x" * 70_000),))
    assert raised.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED


async def test_server_closes_a_connection_that_answers_no_ping() -> None:
    async with serving(_KEEPALIVE_MS=200, _PING_TIMEOUT_MS=300) as address, raw(address) as connection:
        await connection.send(HELLO)
        flags, _, _ = await next_frame(connection, PING)
        assert not flags & ACK
        async with asyncio.timeout(PATIENCE_S):
            await connection.wait_for_end()


async def test_pings_without_a_call_are_allowed() -> None:
    async with serving(_PING_INTERVAL_MS=50) as address, raw(address) as connection:
        await connection.send(HELLO)
        assert GOAWAY not in await ping_slowly(connection, 15, 0.08)


async def test_pings_beside_a_quiet_call_are_allowed() -> None:
    """A standing query, a watch or an idle Observe sends nothing for hours; its client pings."""
    async with serving(_PING_INTERVAL_MS=50) as address, raw(address) as connection:
        await connection.send(HELLO, frame(HEADERS, END_HEADERS, 1, request(WATCH)))
        assert GOAWAY not in await ping_slowly(connection, 15, 0.08)


@pytest.mark.parametrize(("pings", "closed"), [(server._PING_STRIKES, False), (3 * server._PING_STRIKES, True)])
async def test_some_fast_pings_are_forgiven_and_no_more(pings: int, closed: bool) -> None:
    async with serving() as address, raw(address) as connection:
        await connection.send(HELLO)
        await next_frame(connection, SETTINGS)
        await connection.send(*(frame(PING, payload=number.to_bytes(8)) for number in range(pings)))
        await connection.send(frame(HEADERS, END_HEADERS, 1, request(WATCH)))
        async with asyncio.timeout(PATIENCE_S):
            async for kind, _, _, payload in connection.frames():
                if kind == GOAWAY:
                    assert int.from_bytes(payload[4:8]) == ENHANCE_YOUR_CALM
                if kind in (GOAWAY, HEADERS):
                    break
        assert (kind == GOAWAY) == closed


async def test_streams_over_the_connections_limit_are_refused() -> None:
    async with serving() as address, raw(address) as connection:
        most = LIMITS.connection_streams_max
        calls = [frame(HEADERS, END_HEADERS, 2 * number + 1, request(WATCH)) for number in range(most + 1)]
        await connection.send(HELLO, frame(SETTINGS, ACK))
        await next_frame(connection, SETTINGS)
        await connection.send(*calls)
        _, stream, payload = await next_frame(connection, RST_STREAM)
        assert (stream, int.from_bytes(payload)) == (2 * most + 1, REFUSED_STREAM)


async def test_window_of_an_unread_call_stays_small() -> None:
    """gRPC's probe of the bandwidth would give a call megabytes before the server has authenticated it."""
    async with serving() as address, raw(address) as connection:
        await connection.send(HELLO, frame(HEADERS, END_HEADERS, 1, request(OBSERVE)))
        _, _, settings = await next_frame(connection, SETTINGS)
        window = {settings[at : at + 2]: int.from_bytes(settings[at + 2 : at + 6]) for at in range(0, len(settings), 6)}
        assert window[b"\0\4"] == 65_535
        # A message of 4 MB begins: what the server lets in of it is what the windows say.
        await connection.send(frame(DATA, 0, 1, b"\0" + (4 << 20).to_bytes(4) + bytes(16_000)))
        await connection.send(frame(PING, payload=bytes(8)))
        probes = 0
        async with asyncio.timeout(PATIENCE_S):
            async for kind, flags, _, _ in connection.frames():
                probes += kind == PING and not flags & ACK
                if kind == PING and flags & ACK:
                    break
        assert probes == 0


@pytest.mark.parametrize(
    ("encoding", "size", "status"),
    [("deflate", 10, b"12"), ("br", 10, b"13"), ("identity", LIMITS.received_bytes_max + 1, b"8")],
)
async def test_core_refuses_without_a_reason(encoding: str, size: int, status: bytes) -> None:
    """As docs/decisions.md says; a gRPC that asks a handler first would let the server add one."""
    async with serving() as address, raw(address) as connection:
        head = bytes([encoding != "identity"]) + size.to_bytes(4)
        call = request("/memstream.v1.ServerService/GetServerInfo", [("grpc-encoding", encoding)])
        await connection.send(HELLO, frame(HEADERS, END_HEADERS, 1, call), frame(DATA, 0, 1, head + b"xxxxxxxxxx"))
        _, _, trailers = await next_frame(connection, HEADERS)
    assert b"grpc-status" + bytes([len(status)]) + status in trailers
    assert b"grpc-status-details-bin" not in trailers


@asynccontextmanager
async def listening(handle: Callable[[Raw], Awaitable[None]]) -> AsyncIterator[str]:
    """A server of hand-written HTTP/2; yields its address."""
    open_now: set[asyncio.StreamWriter] = set()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        open_now.add(writer)
        try:
            await reader.readexactly(len(PREFACE))
            await handle(Raw(reader, writer))
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()

    listener = await asyncio.start_server(serve, "127.0.0.1", 0)
    host, port = listener.sockets[0].getsockname()
    try:
        yield f"{host}:{port}"
    finally:
        await close_listener(listener)
        for writer in open_now:
            writer.close()


async def answer_nothing(connection: Raw) -> None:
    """Settings, and nothing more."""
    await connection.send(frame(SETTINGS), frame(SETTINGS, ACK))
    await connection.wait_for_end()


async def test_sdk_notices_a_server_that_answers_no_ping(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("memstream.channel._PING_TIMEOUT_MS", 300)
    once = memstream.Retry(calls_s=0.0)
    async with (
        listening(answer_nothing) as address,
        asyncio.timeout(PATIENCE_S),
        memstream.connect(address, keepalive_s=0.2, timeout_s=600.0, retry=once) as client,
    ):
        with pytest.raises(memstream.Unavailable, match="ping"):
            await client.server_info()


async def test_sdk_checks_the_name_that_it_was_given(tmp_path: Path) -> None:
    authority = Authority(tmp_path)
    certificate, key = authority.issue("server", dns=("memory.example",), loopback=False)
    credentials = grpc.ssl_server_credentials([(key.read_bytes(), certificate.read_bytes())])
    served = build_server(cast("Any", FakeEngine()), LIMITS, Drain(1.0))
    address = await served.start("127.0.0.1:0", credentials)
    once = memstream.Retry(calls_s=0.0)
    for name, reached in (("memory.example", True), ("another.example", False), (None, False)):
        tls = memstream.Tls.of_files(authority.ca, server_name=name)
        async with memstream.connect(address, tls=tls, retry=once) as client:
            if reached:
                assert (await client.server_info()).version
            else:
                with pytest.raises(memstream.Unavailable):
                    await client.server_info()
    await served.stop(0.1)


async def test_sdk_reconnects_soon_and_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the longest delay the fourteenth attempt comes after half a minute; without the first one later."""
    monkeypatch.setattr("memstream.channel._RECONNECT_MS", (50, 100))
    attempts = 0
    enough = asyncio.Event()

    async def hang_up(_connection: Raw) -> None:
        nonlocal attempts
        attempts += 1
        if attempts == 14:
            enough.set()

    patient = memstream.Retry(calls_s=600.0)
    async with (
        listening(hang_up) as address,
        memstream.connect(address, timeout_s=600.0, retry=patient) as client,
    ):
        call = asyncio.create_task(client.server_info())
        async with asyncio.timeout(20):
            await enough.wait()
        call.cancel()


class Generic(grpc.GenericRpcHandler):
    """Answers every unary call by one function of its bytes."""

    def __init__(self, answer: Callable[[bytes, Any], Awaitable[bytes]]) -> None:
        self._answer = answer

    def service(self, _details: Any) -> Any:
        return grpc.unary_unary_rpc_method_handler(cast("Any", self._answer))


@asynccontextmanager
async def answering(answer: Callable[[bytes, Any], Awaitable[bytes]]) -> AsyncIterator[str]:
    """A gRPC server that answers by one function; yields its address."""
    plain = grpc.aio.server(options=[("grpc.so_reuseport", 0)])
    plain.add_generic_rpc_handlers((Generic(answer),))
    port = plain.add_insecure_port("127.0.0.1:0")
    await plain.start()
    try:
        yield f"127.0.0.1:{port}"
    finally:
        await plain.stop(0.1)


async def test_sdk_takes_answers_up_to_its_bound() -> None:
    large = server_service_pb2.GetServerInfoResponse(version="v" * (6 << 20)).SerializeToString()

    async def answer(_request: bytes, _context: Any) -> bytes:
        return large

    async with answering(answer) as address:
        async with memstream.connect(address) as client:
            assert len((await client.server_info()).version) == 6 << 20
        async with memstream.connect(address, receive_bytes_max=5 << 20) as client:
            with pytest.raises(memstream.MemstreamError, match="larger than max"):
                await client.server_info()


RETRYING = """{"methodConfig": [{"name": [{}], "retryPolicy": {"maxAttempts": 4, "initialBackoff": "0.01s",
"maxBackoff": "0.01s", "backoffMultiplier": 1, "retryableStatusCodes": ["UNAVAILABLE"]}}]}"""


async def test_sdk_leaves_no_retry_to_grpc() -> None:
    """Even if a name service or the caller configures retries: they would use the token of the first attempt."""
    attempts: list[bytes] = []

    async def refuse(request: bytes, context: Any) -> bytes:
        attempts.append(request)
        await context.abort(grpc.StatusCode.UNAVAILABLE, "try again")
        return b""

    once = memstream.Retry(calls_s=0.0)
    async with answering(refuse) as address:
        options = [("grpc.service_config", RETRYING)]
        async with memstream.connect(address, retry=once, options=options) as client:
            with pytest.raises(memstream.Unavailable):
                await client.server_info()
        assert len(attempts) == 1
        async with grpc.aio.insecure_channel(address, options=options) as channel:
            with pytest.raises(grpc.aio.AioRpcError):
                await channel.unary_unary("/any.Service/Method")(b"")
        assert len(attempts) == 1 + 4


@asynccontextmanager
async def forwarding_to(address: str, patch: pytest.MonkeyPatch, **options: int | str) -> AsyncIterator[Any]:
    """The stubs of a server that forwards to `address`, with more options of its channels."""
    given = {f"grpc.{name}": value for name, value in options.items()}
    patch.setattr(forwarding, "_OPTIONS", [*(dict(forwarding._OPTIONS) | given).items()])
    owner = cast("Ownership", Whereabouts(Owner(1, address)))
    passing = Forwarding(owner, Drain(1.0), 0.05, Peers())
    front = build_server(cast("Any", FakeEngine()), LIMITS, Drain(1.0), forwarding=passing)
    async with grpc.aio.insecure_channel(await front.start("127.0.0.1:0"), [RECEIVE_ALL]) as channel:
        yield StreamServiceStub(channel)
    await front.stop(0.1)


async def test_forwarded_answer_may_have_more_than_four_mb(monkeypatch: pytest.MonkeyPatch) -> None:
    large = pb.RecallOnceResponse(done=pb.RecallDone(query_id="q" * (6 << 20))).SerializeToString()

    async def answer(_request: bytes, _context: Any) -> bytes:
        return large

    async with answering(answer) as address, forwarding_to(address, monkeypatch) as stub:
        assert len((await stub.RecallOnce(ASKING, timeout=PATIENCE_S)).done.query_id) == 6 << 20


async def test_forwarded_call_ends_when_its_owner_answers_no_ping(monkeypatch: pytest.MonkeyPatch) -> None:
    """The owner's machine is gone, and nothing closes the connection."""
    quick = {"keepalive_time_ms": 200, "http2.ping_timeout_ms": 300}
    assert {f"grpc.{name}" for name in quick} <= dict(forwarding._OPTIONS).keys()
    async with listening(answer_nothing) as address, forwarding_to(address, monkeypatch, **quick) as stub:
        async with asyncio.timeout(PATIENCE_S):
            with pytest.raises(grpc.aio.AioRpcError) as raised:
                await stub.RecallOnce(ASKING, timeout=600)
    assert raised.value.code() is grpc.StatusCode.UNAVAILABLE


async def test_forwarded_call_is_sent_once(monkeypatch: pytest.MonkeyPatch) -> None:
    attempts: list[bytes] = []

    async def refuse(request: bytes, context: Any) -> bytes:
        attempts.append(request)
        await context.send_initial_metadata((("x-begun", "yes"),))
        await context.abort(grpc.StatusCode.UNAVAILABLE, "try again")
        return b""

    async with answering(refuse) as address, forwarding_to(address, monkeypatch, service_config=RETRYING) as stub:
        with pytest.raises(grpc.aio.AioRpcError):
            await stub.RecallOnce(ASKING, timeout=PATIENCE_S)
    assert len(attempts) == 1
