"""The options of deploy/envoy/ do what they are set for, in a real Envoy before scripted servers.

Envoy's defaults are minutes: a test shortens a time, or shows what happens without the option.
"""

from __future__ import annotations

import asyncio
import importlib
import shutil
import socket
import ssl
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any, cast

import grpc
import grpc.aio
import pytest
import yaml

from tests.rpc.test_grpc_options import Generic
from tests.support.certificates import Authority
from tests.support.listeners import close_listener
from tests.support.raw_http2 import ACK, GOAWAY, PING, PREFACE, SETTINGS, frame, raw
from tests.support.waiting import until
from tests.toolchains import deploying
from tests.toolchains.environments import ROOT
from tests.toolchains.envoy import Envoy
from tests.toolchains.programs import Absent

pytestmark = pytest.mark.toolchain

PATIENCE_S = 60.0
LOCALHOST = (("grpc.ssl_target_name_override", "localhost"),)
METHOD = "/any.Service/Method"
Configuration = dict[str, Any]


def without_health(configuration: Configuration) -> None:
    """The scripted servers have no health service."""
    del cluster_of(configuration)["health_checks"]


def cluster_of(configuration: Configuration) -> Any:
    return configuration["static_resources"]["clusters"][0]


def manager_of(configuration: Configuration) -> Any:
    return configuration["static_resources"]["listeners"][0]["filter_chains"][0]["filters"][0]["typed_config"]


def route_of(configuration: Configuration) -> Any:
    return manager_of(configuration)["route_config"]["virtual_hosts"][0]["routes"][0]["route"]


@pytest.fixture(scope="module")
def program() -> Path:
    try:
        return deploying.find_envoy()
    except Absent as absent:
        pytest.skip(str(absent))


@contextmanager
def closed_ports(count: int) -> Iterator[list[str]]:
    """Addresses at which nobody listens, and nobody else can."""
    held = [socket.socket() for _ in range(count)]
    try:
        for one in held:
            one.bind(("127.0.0.1", 0))
        yield [f"127.0.0.1:{one.getsockname()[1]}" for one in held]
    finally:
        for one in held:
            one.close()


@asynccontextmanager
async def upstream(answer: Callable[[bytes, Any], Any]) -> AsyncIterator[str]:
    """A gRPC server without limits that answers every unary call by one function; yields its address."""
    plain = grpc.aio.server(options=[("grpc.so_reuseport", 0), ("grpc.http2.max_ping_strikes", 0)])
    plain.add_generic_rpc_handlers((Generic(answer),))
    port = plain.add_insecure_port("127.0.0.1:0")
    await plain.start()
    try:
        yield f"127.0.0.1:{port}"
    finally:
        await plain.stop(0)


@asynccontextmanager
async def running(
    program: Path, folder: Path, servers: list[str], *changes: Callable[[Configuration], None]
) -> AsyncIterator[Envoy]:
    def change(configuration: Configuration) -> None:
        for one in (without_health, *changes):
            one(configuration)

    with Envoy(program, folder, servers, change=change) as envoy:

        async def has_servers() -> bool:
            return (await asyncio.to_thread(envoy.read_counters)).get("membership_total") == len(servers)

        await until(has_servers)
        yield envoy


async def echo(request: bytes, _context: Any) -> bytes:
    return request


async def call(channel: grpc.aio.Channel, memory: str = "a/b") -> grpc.StatusCode:
    """The status of one call for a memory."""
    method = channel.unary_unary(METHOD)
    try:
        await method(b"", metadata=(("memstream-memory", memory),), timeout=PATIENCE_S)
    except grpc.aio.AioRpcError as error:
        return error.code()
    return grpc.StatusCode.OK


async def call_many(envoy: Envoy, count: int = 40) -> set[grpc.StatusCode]:
    """The statuses of calls at once for as many memories."""
    async with grpc.aio.insecure_channel(envoy.address) as channel:
        return set(await asyncio.gather(*(call(channel, f"a/m{number}") for number in range(count))))


async def test_a_call_is_tried_again_three_times(program: Path, tmp_path: Path) -> None:
    with closed_ports(1) as away:
        async with running(program, tmp_path, away) as envoy:
            assert await call_many(envoy, 1) == {grpc.StatusCode.UNAVAILABLE}
            assert (await asyncio.to_thread(envoy.read_counters))["upstream_rq_retry"] == 3


def without_retries(configuration: Configuration) -> None:
    del route_of(configuration)["retry_policy"]


def without_other_hosts(configuration: Configuration) -> None:
    policy = route_of(configuration)["retry_policy"]
    del policy["retry_host_predicate"], policy["host_selection_retry_max_attempts"]


def with_default_bounds(configuration: Configuration) -> None:
    del cluster_of(configuration)["circuit_breakers"]


@pytest.mark.parametrize("left_out", [None, without_retries, without_other_hosts, with_default_bounds])
async def test_calls_pass_by_servers_that_are_away(
    program: Path, tmp_path: Path, left_out: Callable[[Configuration], None] | None
) -> None:
    """One of three servers is away, and no health check has seen it yet; without one of the options calls fail."""
    changes = [] if left_out is None else [left_out]
    async with upstream(echo) as address, upstream(echo) as other:
        with closed_ports(1) as away:
            async with running(program, tmp_path, [*away, address, other], *changes) as envoy:
                seen = await call_many(envoy)
    assert seen == {grpc.StatusCode.OK} if left_out is None else grpc.StatusCode.UNAVAILABLE in seen


async def test_a_quiet_call_outlasts_the_times_of_the_listener(program: Path, tmp_path: Path) -> None:
    """The route's times replace the listener's, here one of half a second, and Envoy's default of 15 s for a call."""

    def quick(configuration: Configuration) -> None:
        manager_of(configuration)["stream_idle_timeout"] = "0.5s"

    async def be_quiet(request: bytes, _context: Any) -> bytes:
        await asyncio.sleep(16)  # the time itself is under test
        return request

    async with upstream(be_quiet) as address, running(program, tmp_path, [address], quick) as envoy:
        assert await call_many(envoy, 1) == {grpc.StatusCode.OK}


@pytest.mark.parametrize("name", ["timeout", "idle_timeout"])
async def test_without_its_times_a_quiet_call_ends(program: Path, tmp_path: Path, name: str) -> None:
    def bounded(configuration: Configuration) -> None:
        manager_of(configuration)["stream_idle_timeout"] = "0.5s" if name == "idle_timeout" else "0s"
        del route_of(configuration)[name]

    never = asyncio.Event()

    async def be_quiet(request: bytes, _context: Any) -> bytes:
        await never.wait()
        return request

    async with upstream(be_quiet) as address, running(program, tmp_path, [address], bounded) as envoy:
        assert grpc.StatusCode.OK not in await call_many(envoy, 1)
        never.set()


async def count_pings(envoy: Envoy) -> int:
    """How many pings a client gets that answers none, until its connection ends."""
    async with raw(envoy.address) as connection, asyncio.timeout(PATIENCE_S):
        await connection.send(PREFACE + frame(SETTINGS))
        return len([kind async for kind, flags, _, _ in connection.frames() if kind == PING and not flags & ACK])


async def test_a_client_that_answers_no_ping_is_cut_off(program: Path, tmp_path: Path) -> None:
    def quick(configuration: Configuration) -> None:
        keepalive = manager_of(configuration)["http2_protocol_options"]["connection_keepalive"]
        assert set(keepalive) == {"interval", "timeout"}
        keepalive |= {"interval": "0.3s", "timeout": "0.3s"}

    async with upstream(echo) as address, running(program, tmp_path, [address], quick) as envoy:
        assert await count_pings(envoy) > 0  # and then the connection has ended


async def test_a_server_that_answers_no_ping_is_left(program: Path, tmp_path: Path) -> None:
    """Its connection ends after four seconds, and the call with it."""
    silent = await asyncio.start_server(_answer_settings, "127.0.0.1", 0)
    host, port = silent.sockets[0].getsockname()
    async with running(program, tmp_path, [f"{host}:{port}"]) as envoy:
        assert await call_many(envoy, 1) == {grpc.StatusCode.UNAVAILABLE}
    await close_listener(silent)


async def _answer_settings(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    writer.write(frame(SETTINGS) + frame(SETTINGS, ACK))
    while await reader.read(65_536):
        pass
    writer.close()


async def test_a_server_that_accepts_no_connection_is_passed_by(program: Path, tmp_path: Path) -> None:
    """Its backlog is full: without an answer, `connect_timeout` ends the attempt."""
    with full_backlog() as silent:
        async with upstream(echo) as address, running(program, tmp_path, [silent, address]) as envoy:
            assert await call_many(envoy) == {grpc.StatusCode.OK}
            counters = await asyncio.to_thread(envoy.read_counters)
    assert counters["upstream_cx_connect_timeout"] > 0


async def test_an_idle_time_ends_connections_without_calls(program: Path, tmp_path: Path) -> None:
    """The file turns both times off; here they are short."""

    def quick(configuration: Configuration) -> None:
        (upstream_options,) = cluster_of(configuration)["typed_extension_protocol_options"].values()
        for options in (manager_of(configuration), upstream_options):
            assert options["common_http_protocol_options"] == {"idle_timeout": "0s"}
            options["common_http_protocol_options"]["idle_timeout"] = "0.3s"

    async with upstream(echo) as address, running(program, tmp_path, [address], quick) as envoy:
        assert await call_many(envoy, 1) == {grpc.StatusCode.OK}

        async def has_left_the_server() -> bool:
            return (await asyncio.to_thread(envoy.read_counters))["upstream_cx_idle_timeout"] > 0

        await until(has_left_the_server)
        async with raw(envoy.address) as connection, asyncio.timeout(PATIENCE_S):
            await connection.send(PREFACE + frame(SETTINGS))
            assert [kind async for kind, _, _, _ in connection.frames() if kind == GOAWAY]


@pytest.mark.parametrize("most", [1, None])
async def test_calls_at_once_are_bounded(program: Path, tmp_path: Path, most: int | None) -> None:
    """With the file's bound both calls pass; with a bound of one the second is refused while the first runs."""
    arrived, ended = 0, asyncio.Event()

    async def hold(request: bytes, _context: Any) -> bytes:
        nonlocal arrived
        arrived += 1
        if arrived == 2:
            ended.set()
        await ended.wait()
        return request

    def bound(configuration: Configuration) -> None:
        cluster_of(configuration)["circuit_breakers"]["thresholds"][0]["max_requests"] = most or 100_000

    async with (
        upstream(hold) as address,
        running(program, tmp_path, [address], bound) as envoy,
        grpc.aio.insecure_channel(envoy.address) as channel,
    ):
        calls = [asyncio.ensure_future(call(channel)) for _ in range(2)]
        first, others = await asyncio.wait(calls, return_when=asyncio.FIRST_COMPLETED)
        ended.set()
        statuses = sorted(one.result().name for one in first) + sorted([(await one).name for one in others])
    assert statuses == (["OK", "OK"] if most is None else ["UNAVAILABLE", "OK"])


@pytest.mark.parametrize("most", [1, None])
async def test_calls_that_wait_for_a_connection_are_bounded(program: Path, tmp_path: Path, most: int | None) -> None:
    def bound(configuration: Configuration) -> None:
        assert cluster_of(configuration)["circuit_breakers"]["thresholds"][0]["max_pending_requests"] == 10_000
        cluster_of(configuration)["circuit_breakers"]["thresholds"][0]["max_pending_requests"] = most or 10_000

    with full_backlog() as address:
        async with running(program, tmp_path, [address], bound) as envoy:
            assert await call_many(envoy, 8) == {grpc.StatusCode.UNAVAILABLE}
            counters = await asyncio.to_thread(envoy.read_counters)
    assert (counters["upstream_rq_pending_overflow"] > 0) == (most is not None)


@contextmanager
def full_backlog() -> Iterator[str]:
    """The address of a server that accepts no connection."""
    with socket.socket() as full, socket.socket() as first, socket.socket() as second:
        full.bind(("127.0.0.1", 0))
        full.listen(0)
        for one in (first, second):
            one.setblocking(False)
            one.connect_ex(full.getsockname())
        yield f"127.0.0.1:{full.getsockname()[1]}"


@pytest.mark.parametrize("name", ["memstream", "other"])
async def test_envoy_trusts_servers_by_their_name(program: Path, tmp_path: Path, name: str) -> None:
    """It names the server that it wants, and leaves one whose certificate has another name."""
    authority = Authority(tmp_path / "tls")
    for own, file in zip(authority.issue("envoy"), ("tls.crt", "tls.key"), strict=True):
        shutil.copy(own, tmp_path / "tls" / file)
    shutil.copy(authority.ca, tmp_path / "tls/ca.crt")
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH, cafile=str(authority.ca))
    context.verify_mode = ssl.CERT_REQUIRED
    context.load_cert_chain(*authority.issue(name, dns=(name,)))
    context.set_alpn_protocols(["h2"])
    wanted: list[str | None] = []
    protocols: list[str | None] = []
    context.sni_callback = lambda _, sni, __: wanted.append(sni)

    async def take(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        protocols.append(writer.get_extra_info("ssl_object").selected_alpn_protocol())
        await _answer_settings(reader, writer)

    silent = await asyncio.start_server(take, "127.0.0.1", 0, ssl=context)
    address = f"127.0.0.1:{silent.sockets[0].getsockname()[1]}"
    certificate, key = authority.issue("joy")
    client = grpc.ssl_channel_credentials(authority.ca.read_bytes(), key.read_bytes(), certificate.read_bytes())
    with Envoy(program, tmp_path, [address], tmp_path / "tls", change=without_health) as envoy:

        async def has_connected() -> bool:
            async with grpc.aio.secure_channel(envoy.address, client, LOCALHOST) as channel:
                await call(channel)
            counters = await asyncio.to_thread(envoy.read_counters)
            return bool(wanted) and (bool(protocols) or counters["ssl.fail_verify_san"] > 0)

        await until(has_connected)
    await close_listener(silent)
    assert set(wanted) == {"memstream"}
    assert set(protocols) == ({"h2"} if name == "memstream" else set())


async def test_only_grpc_over_http2_passes(program: Path, tmp_path: Path) -> None:
    async with upstream(echo) as address, running(program, tmp_path, [address]) as envoy:
        host, _, port = envoy.address.rpartition(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        writer.write(b"POST /any.Service/Method HTTP/1.1\r\nhost: a\r\ncontent-type: application/grpc\r\n\r\n")
        async with asyncio.timeout(PATIENCE_S):
            assert b"HTTP/1.1 200" not in await reader.read()
        writer.close()
        counters = await asyncio.to_thread(envoy.read_counters)
        assert counters.get("upstream_rq_total", 0) == 0


async def test_the_clients_request_id_reaches_the_server(program: Path, tmp_path: Path) -> None:
    seen: list[str] = []

    async def note(request: bytes, context: Any) -> bytes:
        seen.append(dict(cast("Any", context.invocation_metadata()))["x-request-id"])
        return request

    async with upstream(note) as address, running(program, tmp_path, [address]) as envoy:
        channel = grpc.aio.insecure_channel(envoy.address)
        await channel.unary_unary(METHOD)(b"", metadata=(("x-request-id", "mine"),))
        await channel.close()
    assert seen == ["mine"]


HERE, MESH = "tests.toolchains.test_envoy_options", "tests.toolchains.test_mesh"
SELECTED = (MESH, "test_calls_for_a_memory_go_to_one_server")
PAUSED = (MESH, "test_streams_resume_and_the_ledger_stays_exact")
AWAY = (HERE, "test_calls_pass_by_servers_that_are_away")
CLIENT_PINGS = (HERE, "test_a_client_that_answers_no_ping_is_cut_off")
SERVER_PINGS = (HERE, "test_a_server_that_answers_no_ping_is_left")
IDLE = (HERE, "test_an_idle_time_ends_connections_without_calls")
QUIET = (HERE, "test_a_quiet_call_outlasts_the_times_of_the_listener")
EFFECTS = {
    "listener.codec_type": (HERE, "test_only_grpc_over_http2_passes"),
    "listener.http2_protocol_options.connection_keepalive.interval": CLIENT_PINGS,
    "listener.http2_protocol_options.connection_keepalive.timeout": CLIENT_PINGS,
    "listener.preserve_external_request_id": (HERE, "test_the_clients_request_id_reaches_the_server"),
    "route.timeout": (HERE, "test_a_quiet_call_outlasts_the_times_of_the_listener"),
    "route.idle_timeout": (HERE, "test_a_quiet_call_outlasts_the_times_of_the_listener"),
    "route.retry_policy.retry_on": AWAY,
    "route.retry_policy.num_retries": (HERE, "test_a_call_is_tried_again_three_times"),
    "route.retry_policy.retry_host_predicate.name": AWAY,
    "route.retry_policy.host_selection_retry_max_attempts": AWAY,
    "route.hash_policy.header.header_name": SELECTED,
    "listener.common_http_protocol_options.idle_timeout": IDLE,
    "cluster.common_http_protocol_options.idle_timeout": IDLE,
    "cluster.circuit_breakers.thresholds.max_requests": (HERE, "test_calls_at_once_are_bounded"),
    "cluster.circuit_breakers.thresholds.max_pending_requests": (
        HERE,
        "test_calls_that_wait_for_a_connection_are_bounded",
    ),
    "cluster.lb_policy": SELECTED,
    "cluster.connect_timeout": (HERE, "test_a_server_that_accepts_no_connection_is_passed_by"),
    "cluster.http2_protocol_options.connection_keepalive.interval": SERVER_PINGS,
    "cluster.http2_protocol_options.connection_keepalive.timeout": SERVER_PINGS,
    "cluster.circuit_breakers.thresholds.max_retries": AWAY,
    "cluster.health_checks.timeout": PAUSED,
    "cluster.health_checks.interval": PAUSED,
    "cluster.health_checks.no_traffic_interval": PAUSED,
    "cluster.health_checks.unhealthy_threshold": PAUSED,
    "cluster.health_checks.healthy_threshold": PAUSED,
    "cluster.health_checks.grpc_health_check.service_name": PAUSED,
}
"""The options of envoy.yaml, and the test of the effect of each."""


BROWSERS = "tests.toolchains.test_browsers"
INVALID = (BROWSERS, "test_envoy_rejects_invalid_json_calls")
PAGE = (BROWSERS, "test_a_page_of_an_allowed_origin_may_call_and_read_errors")
LARGE = (BROWSERS, "test_large_calls_pass_and_oversized_ones_are_rejected")
NAMED = (HERE, "test_envoy_trusts_servers_by_their_name")
CALLER = (MESH, "test_mutual_tls_through_envoy_identifies_the_caller")
EFFECTS_ELSEWHERE = {
    "browsers.yaml": {
        "strip_any_host_port": (BROWSERS, "test_the_documented_curl_commands_work"),
        "auto_mapping": (BROWSERS, "test_the_documented_curl_commands_work"),
        "services": (BROWSERS, "test_the_documented_curl_commands_work"),
        "proto_descriptor": (BROWSERS, "test_the_documented_curl_commands_work"),
        "match_incoming_request_route": (BROWSERS, "test_a_page_of_another_origin_may_not_call"),
        "convert_grpc_status": (BROWSERS, "test_an_error_response_has_its_reason"),
        "max_request_body_size": LARGE,
        "max_response_body_size": LARGE,
        "print_options.stream_newline_delimited": (BROWSERS, "test_a_watch_sends_each_event_as_a_line_at_once"),
        "reject_unknown_method": INVALID,
        "reject_unknown_query_parameters": INVALID,
        "json_format.code": INVALID,
        "json_format.message": INVALID,
        "comparison.op": INVALID,
        "comparison.value.default_value": INVALID,
        "routes.direct_response.body.inline_string": INVALID,
        "routes.direct_response.status": INVALID,
        "virtual_hosts.domains": INVALID,
        "request_timeout": (BROWSERS, "test_a_request_that_does_not_arrive_ends"),
        "use_remote_address": (BROWSERS, "test_a_client_cannot_name_its_own_address"),
        "allow_headers": PAGE,
        "allow_methods": PAGE,
        "allow_origin_string_match.exact": PAGE,
        "expose_headers": PAGE,
        "max_age": PAGE,
        "forward_not_matching_preflights": (BROWSERS, "test_a_page_of_another_origin_may_not_call"),
        "routes.route.timeout": QUIET,
        "routes.route.idle_timeout": QUIET,
        "retry_policy.num_retries": (HERE, "test_a_call_is_tried_again_three_times"),
        "retry_policy.retry_on": AWAY,
        "clusters.connect_timeout": (HERE, "test_a_server_that_accepts_no_connection_is_passed_by"),
        "common_http_protocol_options.idle_timeout": IDLE,
        "connection_keepalive.interval": SERVER_PINGS,
        "connection_keepalive.timeout": SERVER_PINGS,
    },
    "mtls.yaml": {
        "require_client_certificate": CALLER,
        "tls_certificates.certificate_chain.filename": CALLER,
        "tls_certificates.private_key.filename": CALLER,
        "validation_context.trusted_ca.filename": CALLER,
        "forward_client_cert_details": CALLER,
        "set_current_client_cert_details.uri": CALLER,
        "filter_chain.transport_socket.typed_config.common_tls_context.alpn_protocols": CALLER,
        "cluster.transport_socket.typed_config.common_tls_context.alpn_protocols": NAMED,
        "sni": NAMED,
        "match_typed_subject_alt_names.matcher.exact": NAMED,
        "match_typed_subject_alt_names.san_type": NAMED,
    },
}
"""By the end of an option's name. An option that envoy.yaml has too is tested there."""
NO_OPTIONS = ("name", "stat_prefix", "cluster", "address", "port_value", "type", "runtime_key", "cluster_name")
"""Names and places; `routes.match` says what is routed, and the direct answers show it."""


def list_options(value: Any, name: str) -> Iterator[str]:
    """The names of the values below."""
    if isinstance(value, dict):
        for key, below in value.items():
            if key != "@type":
                yield from list_options(below, f"{name}.{key}")
    elif isinstance(value, list):
        for below in value:
            yield from list_options(below, name)
    else:
        yield name


def test_each_option_of_envoy_has_a_test_of_its_effect() -> None:
    configuration = yaml.safe_load((ROOT / "deploy/envoy/envoy.yaml").read_text("utf-8"))
    listener, route, cluster = manager_of(configuration), route_of(configuration), cluster_of(configuration)
    for part in (listener.pop("route_config"), listener.pop("http_filters")):  # what is served, and where
        assert part
    del listener["stat_prefix"], route["cluster"], cluster["load_assignment"], cluster["name"], cluster["type"]
    (protocol,) = cluster.pop("typed_extension_protocol_options").values()
    cluster |= protocol.pop("explicit_http_config") | protocol
    named = {"listener": listener, "route": route, "cluster": cluster}
    del route["retry_policy"]["retry_host_predicate"][0]["typed_config"]
    found = {name for part, values in named.items() for name in list_options(values, part)}
    assert found == set(EFFECTS)
    for module, test in EFFECTS.values():
        assert callable(getattr(importlib.import_module(module), test, None)), f"{module} has no {test}"


@pytest.mark.parametrize("file", sorted(EFFECTS_ELSEWHERE))
def test_each_option_of_the_other_files_has_a_test(file: str) -> None:
    configuration = yaml.safe_load((ROOT / "deploy/envoy" / file).read_text("utf-8"))
    effects, used = EFFECTS_ELSEWHERE[file], set()
    for name in set(list_options(configuration.get("static_resources", configuration), "")):
        if name.endswith(tuple(f".{one}" for one in NO_OPTIONS)) or ".routes.match." in name:
            continue
        known = {end for end in effects if name.endswith(f".{end}")}
        assert known, f"{file}: {name} has no test"
        used |= known
    assert used == set(effects)
    for module, test in effects.values():
        assert callable(getattr(importlib.import_module(module), test, None)), f"{module} has no {test}"
