"""Hosts, origins, headers, bodies and health of the HTTP port."""

from __future__ import annotations

import asyncio
import base64
import gzip
import json
import struct
import time
from pathlib import Path

import httpx2
import pytest
from google.protobuf import json_format
from google.rpc import error_details_pb2

import memstream
from memstream.v1 import fragment_pb2
from memstream_server.rpc.wire.scalars import metadata_of
from tests.server.conftest import QUICK, check_log
from tests.support.local_http import NO_TLS
from tests.support.server import ServerProcess, free_address
from tests.support.waiting import until

INFO = "/memstream.v1.ServerService/GetServerInfo"
RECALL = "/memstream.v1.StreamService/RecallOnce"
CREATE = "/memstream.v1.MemoryService/CreateMemory"
WATCH = "/memstream.v1.StreamService/Watch"
Server = tuple[ServerProcess, str]


def call(address: str, path: str = INFO, body: str | bytes = "{}", **headers: str) -> httpx2.Response:
    given = {"content-type": "application/json"} | {name.replace("_", "-"): value for name, value in headers.items()}
    return httpx2.post(f"http://{address}{path}", content=body, headers=given, timeout=30, verify=NO_TLS)


def test_json_call_answers_with_safe_headers(http_server: Server) -> None:
    answer = call(http_server[1])
    assert answer.status_code == 200
    assert "CAPABILITY_WATCH" in answer.json()["capabilities"]
    assert answer.headers["x-content-type-options"] == "nosniff"
    assert answer.headers["x-frame-options"] == "DENY"
    assert answer.headers["cache-control"] == "no-store"
    assert "access-control-allow-origin" not in answer.headers
    assert call(http_server[1], x_request_id="mine").headers["x-request-id"] == "mine"


@pytest.mark.parametrize("host", ["evil.example", "evil.example:7701", "127.0.0.1.evil.example", "", "["])
def test_foreign_host_is_refused(host: str, http_server: Server) -> None:
    assert call(http_server[1], host=host).status_code in {400, 403}


@pytest.mark.parametrize("role", ["ROLE_BUTLER", "butler", 9, "", -1, {}])
def test_a_role_that_is_none_is_refused_by_name(role: object, http_server: Server) -> None:
    body = {"namespace": "ns", "memory": "roles", "observations": [{"content": "hello", "role": role}]}
    answer = call(http_server[1], "/memstream.v1.StreamService/ObserveBatch", json.dumps(body))
    assert "role" in answer.text.lower(), answer.text
    assert answer.status_code == 400 or answer.json()["rejections"], answer.text


def test_page_of_another_origin_is_refused(http_server: Server) -> None:
    address = http_server[1]
    assert call(address, origin="https://evil.example").status_code == 403
    assert call(address, origin="null").status_code == 403
    assert call(address, origin=f"http://{address}").status_code == 200
    assert call(address, origin=f"https://{address}").status_code == 200, "the page came through a proxy with TLS"
    assert call(address, origin=f"https://{address.rpartition(':')[0]}").status_code == 403


@pytest.mark.parametrize(
    ("body", "problem"),
    [
        ("", "not JSON"),
        ("[]", "not JSON"),
        ("nonsense", "not JSON"),
        ('{"namespac": "a"}', "namespac: is no field of RecallOnceRequest: did you mean namespace?"),
        ('{"namespace": "a",}', "the body is not JSON: line 1, column "),
        ('{"query": {"limit": "many"}}', "query.limit: is 'many', a whole number of 32 bits is wanted"),
        ('{"query": {"limit": 1.5}}', "query.limit: is 1.5, a whole number of 32 bits is wanted"),
        ('{"query": {"explain": "yes"}}', "query.explain: is 'yes', true or false is wanted"),
        ('{"query": {"text": 7}}', "query.text: is 7, a string is wanted"),
        ('{"query": {"truth": "SOME"}}', "query.truth: is 'SOME', one of TRUTH_UNSPECIFIED, TRUTH_CURRENT, "),
        ('{"query": {"now": "yesterday"}}', "query.now: is 'yesterday', a time such as \"2026-05-08T12:00:00Z\" is"),
        ('{"query": {"timeout": 5}}', 'query.timeout: is 5, a duration in seconds such as "10s" is wanted'),
        ('{"query": "tea"}', "query: is 'tea', an object is wanted"),
        ('{"query": {"filter": {"speakers": "Bob"}}}', "query.filter.speakers: is 'Bob', a list is wanted"),
        ('{"query": {"filter": {"speakers": ["Bob", 7]}}}', "query.filter.speakers[1]: is 7, a string is wanted"),
        ('{"query": {"text": "x", "structured": {}}}', "query: has more than one of text, structured"),
        ('{"query": {"minRevision": "x"}}', "query.minRevision: is 'x', a whole number of 64 bits is wanted"),
        (
            '{"query": {"filter": {"metadata": [{"key": "a", "values": [{"intValue": "x"}]}]}}}',
            "values[0]: is 'x', a text, a ",
        ),
        ('{"query": {"limit": 1%s}}' % ("0" * 5_000), "the body is not JSON: a number has too many digits"),
        ("[" * 100_000, "elements"),
        ('{"query":' * 500 + "{}" + "}" * 500, "query.query: is no field of RecallQuery"),
        ('{"namespace": "a", "memory": "b", "query": {"text": "' + "x" * 1_100_000 + '"}}', "bytes"),
        (b'{"namespace": "\xff"}', "not JSON"),
    ],
)
def test_malformed_body_is_explained(body: str | bytes, problem: str, http_server: Server) -> None:
    answer = call(http_server[1], RECALL, body)
    assert answer.status_code == 400
    assert answer.json()["code"] == "invalid_argument"
    assert problem in answer.json()["message"]
    details = {each["type"]: each["debug"] for each in answer.json()["details"]}
    assert details["google.rpc.ErrorInfo"]["reason"] == "INVALID_FIELD"


METADATA = [("x", "x"), (5, 5), (2.5, 2.5), (True, True), ({"stringValue": "x"}, "x"), ({"intValue": "5"}, 5), ("", "")]
NESTED = {"list": [1, [True, None], {"x": 2.5}], "none": None, "map": {}}


@pytest.mark.parametrize(("given", "kept"), METADATA)
def test_metadata_may_be_plain_json(given: object, kept: object, http_server: Server) -> None:
    path = {"namespace": "plain", "memory": f"m{METADATA.index((given, kept))}"}
    address = http_server[1]
    assert call(address, "/memstream.v1.MemoryService/CreateMemory", json.dumps(path)).status_code == 200
    body = path | {"observations": [{"content": "tea", "metadata": {"a": given}}, {"content": "milk"}]}
    answer = call(address, "/memstream.v1.StreamService/ObserveBatch", json.dumps(body))
    assert answer.status_code == 200, answer.text
    query = {"text": "tea", "filter": {"metadata": [{"key": "a", "values": [given]}]}}
    found = call(address, RECALL, json.dumps(path | {"query": query})).json()["recollections"]["recollections"]
    assert [one["fragment"]["content"] for one in found] == ["tea"]
    message = fragment_pb2.Fragment()
    json_format.ParseDict(found[0]["fragment"], message)
    value = message.metadata["a"]
    held = getattr(value, value.WhichOneof("kind"))
    assert (held, type(held)) == (kept, type(kept))


def test_nested_metadata_returns_as_it_was(http_server: Server) -> None:
    path = {"namespace": "plain", "memory": "nested"}
    address = http_server[1]
    assert call(address, "/memstream.v1.MemoryService/CreateMemory", json.dumps(path)).status_code == 200
    body = path | {"observations": [{"content": "tea", "metadata": {"a": NESTED}}]}
    assert call(address, "/memstream.v1.StreamService/ObserveBatch", json.dumps(body)).status_code == 200
    condition = {"key": "a", "path": ["list"], "any": True, "atLeast": 1}
    query = {"text": "tea", "filter": {"metadata": [condition, {"key": "a", "values": [NESTED]}]}}
    found = call(address, RECALL, json.dumps(path | {"query": query})).json()["recollections"]["recollections"]
    message = json_format.ParseDict(found[0]["fragment"], fragment_pb2.Fragment())
    assert metadata_of(message.metadata) == (("a", NESTED),)


@pytest.mark.parametrize(("given", "shown"), [([10**19], "list"), (10**19, "1" + "0" * 19)])
def test_metadata_that_is_no_value_is_refused(given: object, shown: str, http_server: Server) -> None:
    body = {"namespace": "plain", "memory": "m0", "observations": [{"content": "tea", "metadata": {"a": given}}]}
    answer = call(http_server[1], "/memstream.v1.StreamService/ObserveBatch", json.dumps(body))
    assert shown in answer.text
    assert "metadata['a']" in answer.text


def test_invalid_field_is_readable_without_protobuf(http_server: Server) -> None:
    answer = call(http_server[1], RECALL, '{"namespace": "a", "memory": "b", "query": {"limit": -1}}')
    details = {each["type"]: each["debug"] for each in answer.json()["details"]}
    fields = [each["field"] for each in details["google.rpc.BadRequest"]["fieldViolations"]]
    assert "query.limit" in fields
    assert "retry-after" not in answer.headers


def reason_of(answer: httpx2.Response) -> tuple[int, str, str]:
    """Status, code and reason."""
    said = answer.json()
    info = error_details_pb2.ErrorInfo.FromString(base64.b64decode(said["details"][0]["value"] + "=="))
    return answer.status_code, said["code"], info.reason


INVALID = (400, "invalid_argument", "INVALID_FIELD")


def test_body_over_every_limit_is_refused(http_server: Server) -> None:
    """By its declared size, without one, and once it is decompressed: never as 429, at which clients try again."""
    address = http_server[1]
    assert reason_of(call(address, RECALL, b"x" * 20_000_000)) == INVALID
    chunks = (b"x" * 1_000_000 for _ in range(20))
    headers = {"content-type": "application/json"}
    assert reason_of(httpx2.post(f"http://{address}{RECALL}", content=chunks, headers=headers, timeout=30)) == INVALID
    bomb = gzip.compress(b"x" * 20_000_000)
    assert reason_of(call(address, RECALL, bomb, content_encoding="gzip")) == INVALID


@pytest.mark.parametrize(
    ("header", "value", "expected"),
    [
        ("content-encoding", "br", (501, "unimplemented", "CAPABILITY_MISSING")),
        ("content-encoding", "gzip", INVALID),
        ("connect-timeout-ms", "soon", INVALID),
        ("connect-timeout-ms", "-1", INVALID),
        ("connect-timeout-ms", "99999999999", INVALID),
        ("connect-timeout-ms", "0", (504, "deadline_exceeded", "QUERY_TIMEOUT")),
        ("connect-timeout-ms", "000", (504, "deadline_exceeded", "QUERY_TIMEOUT")),
        ("connect-protocol-version", "2", INVALID),
    ],
)
def test_refusal_of_the_library_has_a_reason(
    header: str, value: str, expected: tuple[int, str, str], http_server: Server
) -> None:
    assert reason_of(call(http_server[1], **{header: value})) == expected


@pytest.mark.parametrize("value", ["soon", "0m", "123456789S"])
def test_timeout_of_grpc_web_is_checked_too(value: str, http_server: Server) -> None:
    body = struct.pack(">BI", 0, 0)
    answer = call(http_server[1], INFO, body, content_type="application/grpc-web+proto", grpc_timeout=value)
    trailers = answer.headers | dict(line.split(":", 1) for line in answer.text[5:].split("\r\n") if ":" in line)
    assert trailers["grpc-status"].strip() == ("4" if value == "0m" else "3")
    assert "grpc-status-details-bin" in trailers


@pytest.mark.parametrize(
    ("method", "body"),
    [
        ("MemoryService/CloneMemory", '{"namespace": "a", "newMemory": "b", "new_memory": "c"}'),
        ("MemoryService/CloneMemory", '{"namespace": "a", "namespace": "b"}'),
        ("StreamService/RecallOnce", '{"query": {"minRevision": "1", "min_revision": "2"}}'),
        ("StreamService/ObserveBatch", '{"observations": [{"content": "x"}, {"externalId": "1", "external_id": "2"}]}'),
    ],
)
def test_field_given_twice_is_refused(method: str, body: str, http_server: Server) -> None:
    answer = call(http_server[1], f"/memstream.v1.{method}", body)
    assert reason_of(answer) == INVALID
    assert "twice" in answer.json()["message"]


@pytest.mark.parametrize("method", ["Observe", "Recall"])
def test_client_streams_point_to_grpc(method: str, http_server: Server) -> None:
    body = struct.pack(">BI", 0, 2) + b"{}"
    kind = "application/connect+json"
    answer = call(http_server[1], f"/memstream.v1.StreamService/{method}", body, content_type=kind)
    error = json.loads(answer.content[5:])["error"]
    assert error["code"] == "unimplemented"
    assert "gRPC" in error["message"]


@pytest.mark.parametrize(
    ("name", "value", "status"),
    [
        ("user-agent", b"caf\xe9", 400),
        ("anything-bin", b"!!", 400),
        ("content-type", b"application/grpc", 415),
        ("content-type", b"application/grpc+proto", 415),
    ],
)
def test_header_that_cannot_be_used_is_explained(name: str, value: bytes, status: int, http_server: Server) -> None:
    headers = {b"content-type": b"application/json"} | {name.encode(): value}
    answer = httpx2.post(f"http://{http_server[1]}{INFO}", content="{}", headers=list(headers.items()), timeout=30)
    assert answer.status_code == status
    assert answer.json()["code"] == ("invalid_argument" if status == 400 else "unimplemented")
    assert answer.json()["message"].isprintable()


def test_what_is_no_call_is_an_error_that_says_what_is(http_server: Server) -> None:
    address = http_server[1]
    for answer, status, said in (
        (call(address, "/memstream.v1.StreamService/Nothing"), 404, "/memstream.v1.SERVICE/METHOD"),
        (httpx2.get(f"http://{address}{INFO}", timeout=60), 405, "POST"),
        (call(address, content_type="application/x-www-form-urlencoded"), 415, "application/json"),
        (call(address, "/memstream.v1.StreamService/Observe"), 415, "Observe, Recall and ImportMemories need"),
    ):
        assert answer.status_code == status
        assert answer.json()["code"] == "unimplemented"
        assert said in answer.json()["message"]
    web = call(address, "/memstream.v1.StreamService/Nothing", content_type="application/grpc-web+proto")
    assert (web.status_code, web.content) == (404, b"")


async def test_health_reports_the_whole_server(http_server: Server) -> None:
    async def healthy() -> bool:
        return (await asyncio.to_thread(httpx2.get, f"http://{http_server[1]}/healthz")).status_code == 200

    await until(healthy)


def test_deadline_of_the_caller_is_kept(http_server: Server) -> None:
    call(http_server[1], CREATE, '{"namespace": "http", "memory": "deadline"}')
    waits = '{"namespace": "http", "memory": "deadline", "query": {"text": "x", "minRevision": "99"}}'
    answer = call(http_server[1], RECALL, waits, connect_timeout_ms="600")
    assert answer.json()["code"] == "deadline_exceeded"


async def test_grpc_and_http_share_one_memory(http_server: Server) -> None:
    server, address = http_server
    async with memstream.connect(server.address) as client:
        memory = await client.create_memory("http/shared")
        await memory.observe_batch(["Ann lives in Berlin"])
    body = '{"namespace": "http", "memory": "shared", "query": {"text": "Where does Ann live?", "explain": true}}'
    answer = await asyncio.to_thread(call, address, RECALL, body)
    (found,) = answer.json()["recollections"]["recollections"]
    assert found["fragment"]["content"] == "Ann lives in Berlin"
    assert found["score"] == pytest.approx(sum(part.get("contribution", 0.0) for part in found["explanation"]["parts"]))


async def test_watch_streams_events_as_they_happen(http_server: Server) -> None:
    server, address = http_server
    async with memstream.connect(server.address) as client:
        memory = await client.create_memory("http/watched")
        data = b'{"namespace": "http", "memory": "watched"}'
        body = struct.pack(">BI", 0, len(data)) + data
        headers = {"content-type": "application/connect+json"}
        async with (
            httpx2.AsyncClient(timeout=30) as http,
            http.stream("POST", f"http://{address}{WATCH}", content=body, headers=headers) as answer,
        ):
            messages = _messages(answer)
            await anext(messages)  # the progress mark of the start, or of an interval
            await memory.observe_batch(["hello"])
            seen = [message async for message in _until_event(messages)]
    assert seen[-1]["events"]["events"][0]["type"] == "EVENT_TYPE_OBSERVED"


async def _messages(answer: httpx2.Response):  # type: ignore[no-untyped-def]
    rest = b""
    async for chunk in answer.aiter_bytes():
        rest += chunk
        while len(rest) >= 5 and len(rest) >= (size := 5 + struct.unpack(">I", rest[1:5])[0]):
            frame, rest = rest[5:size], rest[size:]
            yield json.loads(frame)


async def _until_event(messages):  # type: ignore[no-untyped-def]
    async for message in messages:
        yield message
        if "events" in message:
            return


async def test_slow_body_and_silent_connection_are_ended(tmp_path: Path) -> None:
    address = free_address()
    with ServerProcess(tmp_path / "data", http_listen=address, **(QUICK | {"opening_max_s": 0.5})) as server:
        host, _, port = address.rpartition(":")
        silent_reader, silent = await asyncio.open_connection(host, int(port))
        reader, slow = await asyncio.open_connection(host, int(port))
        head = (
            f"POST {INFO} HTTP/1.1\r\nhost: {address}\r\ncontent-type: application/json\r\ncontent-length: 9\r\n\r\n{{"
        )
        slow.write(head.encode())
        async with asyncio.timeout(20):
            assert await silent_reader.read() == b""
            assert b" 499 " in await reader.readline()
        for writer in (silent, slow):
            writer.close()
        assert call(address).status_code == 200
        assert server.stop() == 0
        check_log(server)


async def test_open_watch_ends_when_the_server_stops(tmp_path: Path) -> None:
    address = free_address()
    with ServerProcess(tmp_path / "data", http_listen=address, **(QUICK | {"drain_grace_s": 5})) as server:
        call(address, CREATE, '{"namespace": "http", "memory": "drained"}')
        data = b'{"namespace": "http", "memory": "drained"}'
        body = struct.pack(">BI", 0, len(data)) + data
        headers = {"content-type": "application/connect+json"}
        async with (
            httpx2.AsyncClient(timeout=60) as http,
            http.stream("POST", f"http://{address}{WATCH}", content=body, headers=headers) as answer,
        ):
            stopping = asyncio.create_task(asyncio.to_thread(server.stop))
            messages = [message async for message in _messages(answer)]
            assert await stopping == 0
    assert any("goingAway" in message for message in messages)
    assert messages[-1]["error"]["code"] == "unavailable"


def test_a_port_that_was_set_must_be_free(tmp_path: Path) -> None:
    address = free_address()
    with (
        ServerProcess(tmp_path / "one", http_listen=address, **QUICK),
        pytest.raises(AssertionError, match="cannot listen"),
    ):
        ServerProcess(tmp_path / "two", http_listen=address, **QUICK).start()


async def test_cors_lets_the_named_origin_in_alone(tmp_path: Path) -> None:
    address, ours = free_address(), "https://app.example.org"
    with ServerProcess(tmp_path / "data", http_listen=address, http_cors_origins=ours, **QUICK) as server:
        assert server.is_running()
        asked = {
            "origin": ours,
            "access-control-request-method": "POST",
            "access-control-request-headers": "content-type",
        }
        preflight = httpx2.options(f"http://{address}{INFO}", headers=asked)
        assert preflight.headers["access-control-allow-origin"] == ours
        assert call(address, origin=ours).headers["access-control-allow-origin"] == ours
        assert call(address, origin="https://other.example.org").status_code == 403


async def test_abandoned_call_frees_its_place(tmp_path: Path) -> None:
    address = free_address()
    with ServerProcess(tmp_path / "data", http_listen=address, calls_in_flight_max=1, **QUICK) as server:
        call(address, CREATE, '{"namespace": "http", "memory": "gone"}')
        waits = '{"namespace": "http", "memory": "gone", "query": {"text": "x", "minRevision": "99"}}'
        began_s = time.monotonic()
        with pytest.raises(httpx2.ReadTimeout):
            httpx2.post(
                f"http://{address}{RECALL}", content=waits, headers={"content-type": "application/json"}, timeout=1
            )

        async def free() -> bool:
            return (await asyncio.to_thread(call, address)).status_code == 200

        await until(free)
        assert time.monotonic() > began_s
        assert server.is_running()


@pytest.mark.parametrize(
    ("body", "why"),
    [
        ('"' + "x" * ((4 << 20) - 1) + '"', "at most 4194304 are allowed"),
        ("[" * 200_000 + "]" * 200_000, "nested too deeply"),
        ("{", "messages[1].body"),
    ],
    ids=["4 MiB and a byte", "nested", "cut"],
)
def test_bad_bodies_of_messages_change_nothing(body: str, why: str, http_server: Server) -> None:
    named = {"namespace": "plain", "conversation": "refused"}
    service = "/memstream.v1.ConversationService"
    given = named | {"messages": [{"body": "1"}, {"body": body}]}
    answer = call(http_server[1], f"{service}/AppendMessages", json.dumps(given))
    assert answer.status_code == 400
    assert "messages[1].body" in answer.text
    assert why in answer.text
    listed = call(http_server[1], f"{service}/ListMessages", json.dumps(named))
    assert (listed.status_code, "CONVERSATION_NOT_FOUND" in listed.text) == (404, True)


def test_elements_in_a_body_are_no_elements_of_the_call(http_server: Server) -> None:
    named = {"namespace": "plain", "conversation": "many"}
    service, body = "/memstream.v1.ConversationService", json.dumps([[], '"', "\\"] * 50_000)
    given = json.dumps(named | {"messages": [{"body": body}]})
    assert call(http_server[1], f"{service}/AppendMessages", given).status_code == 200
    listed = call(http_server[1], f"{service}/ListMessages", json.dumps(named)).json()
    assert [one["body"] for one in listed["messages"]] == [body]
