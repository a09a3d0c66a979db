"""Calls of browsers and curl through a real Envoy with deploy/envoy/browsers.yaml: JSON, gRPC-Web, CORS, errors."""

from __future__ import annotations

import json
import shutil
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx2
import pytest
from google.protobuf.descriptor import ServiceDescriptor

from memstream_server.rpc.access import keys
from tests.server.conftest import WITH_INDEX, check_log
from tests.support import pages
from tests.support.contract import SERVICES
from tests.support.server import ServerProcess
from tests.toolchains import deploying, languages
from tests.toolchains.envoy import Envoy, tolerate_pauses
from tests.toolchains.languages import ROOT
from tests.toolchains.programs import Absent

pytestmark = pytest.mark.toolchain

PAGE = ROOT / "docs/browsers.md"
ADDRESS = "127.0.0.1:7780"
ALLOWED, OTHER = "http://localhost:5173", "http://elsewhere.example"
START_S = 60
QUERY = {"text": "What does Bob drink?", "limit": 1}


@contextmanager
def run_envoy(
    server: ServerProcess, folder: Path, change: Callable[[dict[str, Any]], None] = lambda _: None
) -> Iterator[Envoy]:
    """Runs an Envoy in front of the server."""

    def configure(configuration: dict[str, Any]) -> None:
        tolerate_pauses(configuration)
        change(configuration)

    try:
        program = deploying.find_envoy()
    except Absent as absent:
        pytest.skip(str(absent))
    deploying.write_descriptors()
    with Envoy(program, folder, [server.address], configured="browsers.yaml", change=configure) as envoy:
        until = time.monotonic() + START_S
        while envoy.healthy_servers() != {server.address}:
            assert time.monotonic() < until, "Envoy does not see the server as healthy"
            time.sleep(0.05)
        yield envoy


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """A server that does not have the page's memories yet."""
    with ServerProcess(tmp_path_factory.mktemp("served") / "data").configure(**WITH_INDEX) as server:
        yield server
        assert server.stop() == 0
    check_log(server)


@pytest.fixture(scope="module")
def envoy(server: ServerProcess, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Envoy]:
    """One Envoy for all tests."""
    with run_envoy(server, tmp_path_factory.mktemp("browsers")) as envoy:
        yield envoy


@pytest.fixture
def http(envoy: Envoy) -> Iterator[httpx2.Client]:
    with httpx2.Client(base_url=f"http://{envoy.address}/", timeout=60) as client:
        yield client


def post(http: httpx2.Client, method: str, body: Any, **headers: str) -> httpx2.Response:
    return http.post(f"memstream.v1.{method}", json=body, headers={k.replace("_", "-"): v for k, v in headers.items()})


def read_lines(http: httpx2.Client, method: str, body: Any) -> Iterator[dict[str, Any]]:
    """Yields the messages of a stream as they arrive."""
    with http.stream("POST", f"memstream.v1.{method}", json=body) as response:
        assert response.status_code == 200
        for line in response.iter_lines():
            yield json.loads(line)


def create_memory(http: httpx2.Client, name: str) -> dict[str, Any]:
    """Creates a memory that has what Bob drinks; returns the body of calls for it, with a cursor from its beginning."""
    memory = {"namespace": "browsers", "memory": name}
    answer = post(http, "MemoryService/CreateMemory", memory).raise_for_status().json()
    observations = [{"content": "Bob drinks green tea.", "speaker": "Bob"}]
    post(http, "StreamService/ObserveBatch", memory | {"observations": observations}).raise_for_status()
    return memory | {"cursor": {"memoryUid": answer["memory"]["uid"]}}


# ---- the page


def test_the_documented_curl_commands_work(envoy: Envoy) -> None:
    if shutil.which("curl") is None:
        pytest.skip("curl is not installed")
    asked = [block for block in pages.find_blocks(PAGE.read_text("utf-8"), "sh") if ADDRESS in block.code]
    assert len(asked) > 4
    for block in asked:
        code, said = block.code, block.output or ""
        printed = languages.run("bash", "-euc", code.replace(ADDRESS, envoy.address))
        assert pages.printed_so(said, printed), f"{code}prints\n{printed}instead of\n{said}"


def test_the_documented_browser_code_works(envoy: Envoy) -> None:
    """The client for browsers, type-checked, with Node's fetch."""
    try:
        node = languages.node()
    except Absent as absent:
        pytest.skip(str(absent))
    (block,) = pages.find_blocks(PAGE.read_text("utf-8"), "typescript")
    code, said = block.code, block.output or ""
    program = node.built / "page" / "browsers.ts"
    program.parent.mkdir(exist_ok=True)
    program.write_text(code.replace(ADDRESS, envoy.address), "utf-8")
    options = ["--module", "nodenext", "--target", "es2022", "--lib", "es2023,dom", "--strict"]
    languages.run(str(node.bin / "tsc"), *options, "--skipLibCheck", str(program), cwd=node.folder)
    assert languages.run("node", str(program.with_suffix(".js")), cwd=node.folder) == said


BROKEN_OFF = """
import { createClient } from "@connectrpc/connect";
import { createGrpcWebTransport } from "@connectrpc/connect-web";
import { asError } from "@memstream/client/errors";
import { MemoryService } from "@memstream/client/v1/memory_service";
import { StreamService } from "@memstream/client/v1/stream_service";

const transport = createGrpcWebTransport({ baseUrl: `http://${process.argv[2]}` });
const memory = { namespace: "browsers", memory: "broken-off-in-a-browser" };
const memories = createClient(MemoryService, transport);
const { memory: made } = await memories.createMemory(memory);
const watched = createClient(StreamService, transport).watch({ ...memory, cursor: { memoryUid: made.uid } });
const messages = watched[Symbol.asyncIterator]();
console.log((await messages.next()).value.message.case);
await memories.deleteMemory(memory);
try {
  while (!(await messages.next()).done);
  console.log("it ended without an error");
} catch (thrown) {
  console.log(asError(thrown).reasonName, asError(thrown).rawMessage);
}
"""


def test_a_broken_stream_has_its_status_in_a_browser(envoy: Envoy) -> None:
    try:
        node = languages.node()
    except Absent as absent:
        pytest.skip(str(absent))
    program = node.built / "broken-off.mjs"
    program.write_text(BROKEN_OFF, "utf-8")
    begun, ended = languages.run("node", str(program), envoy.address, cwd=node.folder).splitlines()
    assert begun == "events"
    assert ended.startswith("MEMORY_DELETED")
    assert "was deleted" in ended


# ---- JSON


def test_a_watch_sends_each_event_as_a_line_at_once(http: httpx2.Client) -> None:
    memory = create_memory(http, "watched")
    watched = read_lines(http, "StreamService/Watch", memory | {"includeFragments": True})
    assert next(watched)["events"]["events"][0]["type"] == "EVENT_TYPE_MEMORY_CREATED"
    assert next(watched)["events"]["fragments"][0]["content"] == "Bob drinks green tea."
    post(http, "StreamService/ObserveBatch", memory | {"cursor": None, "observations": [{"content": "Later."}]})
    while "events" not in (line := next(watched)):
        pass  # progress
    assert line["events"]["fragments"][0]["content"] == "Later."
    watched.close()  # type: ignore[attr-defined]  # a generator


def test_a_conversation_is_watched_until_it_is_completed(http: httpx2.Client) -> None:
    talk = {"namespace": "browsers", "conversation": "monday"}
    watched = read_lines(http, "ConversationService/WatchMessages", talk | {"progressInterval": "1s"})
    message = {"conversation": "monday", "sender": "bob", "receiver": "joy", "content": "hello"}
    post(http, "ConversationService/AppendMessage", {"namespace": "browsers", "message": message}).raise_for_status()
    post(http, "ConversationService/CompleteConversation", talk).raise_for_status()
    told = [line for line in watched if line]
    assert [one["content"] for line in told for one in line.get("messages", ())] == ["hello"]
    assert told[-1]["completed"]


@pytest.mark.parametrize("service", SERVICES, ids=lambda service: service.name)
def test_json_reaches_every_service(http: httpx2.Client, service: ServiceDescriptor) -> None:
    method = next(one for one in service.methods if not (one.client_streaming or one.server_streaming))
    answered = post(http, f"{service.name}/{method.name}", {})
    assert answered.status_code in (200, 400), answered.text


def test_large_calls_pass_and_oversized_ones_are_rejected(http: httpx2.Client) -> None:
    """Envoy's buffers have 1 MiB by default."""
    memory = create_memory(http, "large") | {"cursor": None}
    texts = [f"{number} " + "word " * 12_000 for number in range(40)]
    post(http, "StreamService/ObserveBatch", memory | {"observations": [{"content": one} for one in texts]})
    query = {"text": "word", "limit": 40}
    found = post(http, "StreamService/RecallOnce", memory | {"query": query}).raise_for_status()
    assert len(found.content) > 1 << 20
    answered = found.json()["recollections"]
    fragments = [*(one["fragment"] for one in answered["recollections"]), *answered.get("workingMemory", ())]
    assert {one["content"] for one in fragments} <= {*texts, "Bob drinks green tea."}
    assert len(fragments) == 41
    refused = post(http, "StreamService/ObserveBatch", memory | {"observations": [{"content": "x" * 17_000_000}]})
    assert refused.status_code in (413, 429)
    assert refused.json()["code"] in (3, 8)


# ---- failures


def details(response: httpx2.Response) -> dict[str, Any]:
    return {one["@type"].rpartition(".")[2]: one for one in response.json()["details"]}


@pytest.mark.parametrize(
    ("query", "status", "reason", "field"),
    [
        (QUERY | {"limit": -1}, 400, "INVALID_FIELD", "query.limit"),
        (QUERY | {"subscribe": True}, 400, "INVALID_FIELD", "query.subscribe"),
        (QUERY | {"minRevision": "99", "timeout": "0.5s"}, 504, "REVISION_NOT_REACHED", ""),
    ],
)
def test_an_error_response_has_its_reason(
    http: httpx2.Client, query: Any, status: int, reason: str, field: str
) -> None:
    memory = create_memory(http, f"refusing-{field or status}") | {"cursor": None}
    refused = post(http, "StreamService/RecallOnce", memory | {"query": query})
    assert refused.status_code == status
    assert details(refused)["ErrorInfo"]["reason"] == reason
    if field:
        assert details(refused)["BadRequest"]["fieldViolations"][0]["field"] == field


def test_a_rejected_stream_has_one_line_with_the_error(http: httpx2.Client) -> None:
    memory = create_memory(http, "refused") | {"cursor": {"memoryUid": "another"}}
    (only,) = read_lines(http, "StreamService/Watch", memory)
    assert (only["code"], only["details"][0]["reason"]) == (11, "CURSOR_VOID")


def test_a_broken_stream_ends(http: httpx2.Client) -> None:
    """It ends without an error, because the response has begun; the next call gets the error."""
    memory = create_memory(http, "broken-off")
    watched = read_lines(http, "StreamService/Watch", memory)
    next(watched)
    post(http, "MemoryService/DeleteMemory", memory | {"cursor": None}).raise_for_status()
    assert all(line.keys() <= {"events", "progress"} for line in watched)
    again = post(http, "StreamService/Watch", memory)
    assert "MEMORY_NOT_FOUND" in again.text


def test_envoy_rejects_invalid_json_calls(http: httpx2.Client) -> None:
    json_type = {"content-type": "application/json"}
    method = "memstream.v1.StreamService/RecallOnce"
    answers = [
        http.post(method, content="{", headers=json_type),
        http.post("memstream.v1.StreamService/Nothing", content="{}", headers=json_type),
        http.get(method),
        http.post(method, content="{}", headers={"content-type": "text/plain"}),
        http.post(method, content="{}", headers=json_type | {"host": "elsewhere.example"}),
        http.post(f"{method}?unknown=1", content="{}", headers=json_type),
    ]
    assert [one.status_code for one in answers] == [400, 404, 404, 415, 421, 400]
    assert [one.json()["code"] for one in answers] == [3, 12, 12, 3, 3, 3]
    assert all(one.json()["message"] for one in answers)


def test_a_missing_server_is_unavailable(tmp_path: Path) -> None:
    with ServerProcess(tmp_path / "data").configure(**WITH_INDEX) as server, run_envoy(server, tmp_path) as envoy:
        server.kill()
        with httpx2.Client(base_url=f"http://{envoy.address}/", timeout=60) as http:
            refused = post(http, "ServerService/GetServerInfo", {})
    assert (refused.status_code, refused.json()["code"]) == (503, 14)


def manager_of(configuration: dict[str, Any]) -> Any:
    return configuration["static_resources"]["listeners"][0]["filter_chains"][0]["filters"][0]["typed_config"]


def test_a_request_that_does_not_arrive_ends(server: ServerProcess, tmp_path: Path) -> None:
    def quick(configuration: dict[str, Any]) -> None:
        assert manager_of(configuration)["request_timeout"] == "60s"
        manager_of(configuration)["request_timeout"] = "0.5s"

    with run_envoy(server, tmp_path, quick) as envoy:
        host, _, port = envoy.address.rpartition(":")
        with socket.create_connection((host, int(port)), timeout=60) as connection:
            head = "POST /memstream.v1.StreamService/RecallOnce HTTP/1.1\r\nhost: localhost\r\ncontent-length: 9\r\n"
            connection.sendall(f"{head}content-type: application/json\r\n\r\n{{".encode())
            assert connection.recv(65_536).startswith(b"HTTP/1.1 408 ")


def test_a_client_cannot_name_its_own_address(server: ServerProcess, tmp_path: Path) -> None:
    """Envoy adds the address that it sees to what the client says; without the option it takes the client's word."""

    def show(configuration: dict[str, Any]) -> None:
        said = [{"header": {"key": "x-seen", "value": "%REQ(X-FORWARDED-FOR)%"}}]
        for host in manager_of(configuration)["route_config"]["virtual_hosts"]:
            host["response_headers_to_add"] = said

    def take_the_word(configuration: dict[str, Any]) -> None:
        show(configuration)
        del manager_of(configuration)["use_remote_address"]

    seen = []
    for number, change in enumerate((show, take_the_word)):
        folder = tmp_path / str(number)
        folder.mkdir()
        with run_envoy(server, folder, change) as envoy, httpx2.Client(base_url=f"http://{envoy.address}/") as http:
            answer = post(http, "ServerService/GetServerInfo", {}, x_forwarded_for="203.0.113.9")
            seen.append(answer.headers["x-seen"])
    assert seen[0].startswith("203.0.113.9,")
    assert seen[1] == "203.0.113.9"


def test_a_token_passes_through(tmp_path: Path) -> None:
    keys_file, policy_file = tmp_path / "keys.json", tmp_path / "policy.toml"
    _, token = keys.create_key(keys_file, "joy")
    policy_file.write_text('[[grant]]\nwho = ["key:joy"]\nnamespaces = ["comedy"]\nverbs = ["write"]\n', "utf-8")
    files = {"api_keys_file": str(keys_file), "access_policy_file": str(policy_file)}
    with (
        ServerProcess(tmp_path / "data").configure(**WITH_INDEX, **files) as server,
        run_envoy(server, tmp_path) as envoy,
        httpx2.Client(base_url=f"http://{envoy.address}/", timeout=60) as http,
    ):
        asked = {"namespace": "comedy", "memory": "joy"}
        nobody = post(http, "MemoryService/CreateMemory", asked)
        joy = post(http, "MemoryService/CreateMemory", asked, authorization=f"Bearer {token}")
        beyond = post(http, "MemoryService/GetMemory", asked, authorization=f"Bearer {token}")
    assert (nobody.status_code, details(nobody)["ErrorInfo"]["reason"]) == (401, "UNAUTHENTICATED")
    assert joy.status_code == 200
    assert (beyond.status_code, details(beyond)["ErrorInfo"]["reason"]) == (403, "PERMISSION_DENIED")


# ---- pages of elsewhere


def preflight(http: httpx2.Client, origin: str) -> httpx2.Response:
    asked = "authorization,content-type,grpc-timeout,x-grpc-web,x-user-agent"
    headers = {"origin": origin, "access-control-request-method": "POST", "access-control-request-headers": asked}
    return http.options("memstream.v1.StreamService/RecallOnce", headers=headers)


def test_a_page_of_an_allowed_origin_may_call_and_read_errors(http: httpx2.Client) -> None:
    answer = preflight(http, ALLOWED)
    assert answer.status_code == 200
    assert answer.headers["access-control-allow-origin"] == ALLOWED
    assert answer.headers["access-control-allow-methods"] == "POST"
    assert answer.headers["access-control-max-age"] == "7200"
    allowed = set(answer.headers["access-control-allow-headers"].split(", "))
    assert set(answer.request.headers["access-control-request-headers"].split(",")) <= allowed
    called = post(http, "StreamService/RecallOnce", {}, origin=ALLOWED)
    assert called.headers["access-control-allow-origin"] == ALLOWED
    assert "grpc-status-details-bin" in called.headers["access-control-expose-headers"]


def test_a_page_of_another_origin_may_not_call(http: httpx2.Client) -> None:
    """Its browser's preflight is not allowed, and requests that need no preflight are rejected."""
    assert "access-control-allow-origin" not in preflight(http, OTHER).headers
    memory = {"namespace": "browsers", "memory": "from-elsewhere"}
    for simple in ("text/plain", "application/x-www-form-urlencoded", "multipart/form-data", ""):
        headers = {"origin": OTHER} | ({"content-type": simple} if simple else {})
        sent = http.post("memstream.v1.MemoryService/CreateMemory", content=json.dumps(memory), headers=headers)
        assert sent.status_code == 415
    assert post(http, "MemoryService/GetMemory", memory).status_code == 404
