"""Traces: from a client's span through the server to its use of journal, index and models."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from collections.abc import Iterator
from typing import cast

import grpc
import grpc.aio
import mcp.client
import pytest
from mcp.client.stdio import StdioServerParameters
from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

import memstream
import memstream.sync
from memstream.otel import OPERATIONS, Tracing
from memstream.v1 import stream_service_pb2 as pb
from memstream.v1.memory_service_pb2 import CreateMemoryRequest, GetMemoryRequest
from memstream.v1.memory_service_pb2_grpc import MemoryServiceStub
from memstream.v1.stream_service_pb2_grpc import StreamServiceStub
from tests.cli.commands import COMMAND, environment
from tests.server.conftest import MakeServer, started, stopped
from tests.server.listing import indexed
from tests.support.collector import Collector
from tests.support.fake_openai import FakeOpenAI
from tests.support.waiting import until

pytestmark = pytest.mark.with_index

SECRETS = ("private-memory", "private-namespace", "private words", "private-producer")


@pytest.fixture
def spans() -> Iterator[tuple[TracerProvider, InMemorySpanExporter]]:
    provider, exporter = TracerProvider(resource=Resource.create({"service.name": "test"})), InMemorySpanExporter()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    yield provider, exporter
    provider.shutdown()


async def test_trace_spans_client_journal_index_and_models(
    make_server: MakeServer, spans: tuple[TracerProvider, InMemorySpanExporter]
) -> None:
    provider, exporter = spans
    tracer = provider.get_tracer("a program")
    async with Collector() as collector, FakeOpenAI(dimension=8) as fake:
        server = make_server(
            otlp_endpoint=f"http://{collector.address}",
            embedding="openai",
            embedding_base_url=fake.base_url,
            llm_model="fake-llm",
            llm_retries=0,
            llm_base_url=fake.base_url,
            dense_bytes_max=0,
        )
        await started(server)
        async with memstream.connect(server.address, tracing=Tracing(provider)) as client:
            with tracer.start_as_current_span("talking"):
                memory = await client.create_memory(
                    "private-namespace/private-memory", kind=memstream.MemoryKind.LONG_TERM
                )
                await memory.observe_batch(["private words"])
                with tracer.start_as_current_span("asking"):
                    found = await memory.recall_once("private words", reinforce=False)
                async with memory.observe("private-producer") as stream:
                    await stream.send("private words again")
                async with memory.recall() as recalls:
                    with tracer.start_as_current_span("asking again"):
                        await recalls.query("private words", reinforce=False)
                    with pytest.raises(memstream.DeadlineExceeded):
                        await recalls.query("private words", min_revision=10**6, timeout_s=0.1)
                async with memory.watch(start="beginning") as watch:
                    await anext(aiter(watch))
            await until(lambda: indexed(client, memory))
        assert found.recollections
        assert await stopped(server) == 0  # the server sends pending spans before it ends
    ours = {one.name: one for one in exporter.get_finished_spans()}
    called = collector.find_spans("memstream.v1.StreamService/RecallOnce")[0]
    asked = ours["memstream.v1/RecallOnce"]
    assert (called.trace, called.parent) == (
        asked.context.trace_id.to_bytes(16, "big"),
        asked.context.span_id.to_bytes(8, "big"),
    )
    assert ancestors(asked, exporter)[:2] == ["search_memory", "asking"]
    assert called.attributes["rpc.method"] == "RecallOnce"
    assert called.attributes["rpc.grpc.status_code"] == 0
    below = {one.name: one for one in collector.spans if one.parent == called.id}
    assert {"embedder.embed", "index.search", "journal.get_vectors"} <= below.keys()
    # The memory's own tasks decide a received observation, on behalf of the call.
    batch = collector.find_spans("memstream.v1.StreamService/ObserveBatch")[0]
    for name in ("journal.receive", "embedder.embed", "journal.commit"):
        assert any(collector.list_ancestors(one)[:1] == [batch.name] for one in collector.find_spans(name)), name
    streamed = collector.find_spans("memstream.v1.StreamService/Observe")[0]
    for name in ("Observe", "Recall", "Watch"):
        connection = ours[f"memstream.v1/{name}"]
        assert connection.parent is not None
        assert connection.parent.span_id == ours["talking"].context.span_id, name
        (served,) = collector.find_spans(f"memstream.v1.StreamService/{name}")
        assert served.parent == connection.context.span_id.to_bytes(8, "big"), name
    answered, late = (one for one in exporter.get_finished_spans() if one.name == "memstream.v1/RecallQuery")
    assert ancestors(answered, exporter)[:2] == ["search_memory", "asking again"]
    assert (answered.attributes or {}).get("error.type") is None
    # The server's refusal and the client's own time limit come at the same moment; both are DeadlineExceeded.
    assert (late.attributes or {}).get("error.type") in ("DeadlineExceeded", "RevisionNotReached")
    (query,) = (one for one in collector.spans if one.parent == answered.context.span_id.to_bytes(8, "big"))
    assert {"embedder.embed", "index.search"} <= {one.name for one in collector.spans if one.parent == query.id}
    assert any(collector.list_ancestors(one)[:1] == [streamed.name] for one in collector.find_spans("journal.commit"))
    check_all_spans(collector)


def ancestors(span: ReadableSpan, exporter: InMemorySpanExporter) -> list[str]:
    """Names of a span's ancestors, nearest first."""
    by_id = {one.context.span_id: one for one in exporter.get_finished_spans()}
    names = []
    while span.parent is not None and span.parent.span_id in by_id:
        span = by_id[span.parent.span_id]
        names.append(span.name)
    return names


def check_all_spans(collector: Collector) -> None:
    """Every span has a caller, the service's name and no secret; the LLM's spans have its usage."""
    assert all(one.parent for one in collector.spans if one.name.startswith("journal."))  # used by a call
    assert {one.service for one in collector.spans} == {"memstream"}
    assert collector.find_spans("index.upsert")
    rated = collector.find_spans("scorer.score")[0].attributes
    assert (rated["gen_ai.request.model"], rated["gen_ai.usage.input_tokens"]) == ("fake-llm", 1)
    assert rated["gen_ai.usage.output_tokens"] == 1
    for one in collector.spans:
        assert not any(secret in str(one.span) for secret in SECRETS), one


STORE = {"gen_ai.memory.store.id": "private-namespace/private-memory", "gen_ai.provider.name": "memstream"}


async def test_agent_to_journal_is_one_trace_of_memory(
    make_server: MakeServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An agent with the SDK and with `memstream mcp`; texts only with the standard variable."""
    # The package ends a program that takes longer than 2 s to end, which then has not sent its spans.
    monkeypatch.setattr("mcp.client.stdio.PROCESS_TERMINATION_TIMEOUT", 60.0)
    async with Collector() as collector:
        endpoint = f"http://{collector.address}"
        server = await started(make_server(otlp_endpoint=endpoint))
        provider = TracerProvider(resource=Resource.create({"service.name": "agent"}))
        provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(endpoint=endpoint, insecure=True)))
        tracer = provider.get_tracer("an agent")
        async with memstream.connect(server.address, tracing=Tracing(provider)) as client:
            with tracer.start_as_current_span("invoke_agent joy"):
                await use_memory(client)
                await call_tool(server.address, endpoint)
            monkeypatch.setenv("OTEL_INSTRUMENTATION_GENAI_CAPTURE_MESSAGE_CONTENT", "true")
            with tracer.start_as_current_span("asking with texts"):
                await client.recall_once(["private-namespace/private-memory"], "private words")
        await asyncio.to_thread(provider.shutdown)
        assert await stopped(server) == 0
    check_memory_spans(collector)


async def use_memory(client: memstream.Client) -> None:
    memory = await client.create_memory("private-namespace/private-memory")
    await memory.observe_batch(["private words"], session="monday")
    put = await memory.put_fragment(memstream.Observation("private home", external_id="home"))
    await memory.update_fragment(put.fragment.id, importance=1.0)
    async with memory.observe("private-producer", session="tuesday") as stream:
        await stream.send("more private words")
    await memory.recall_once("private words", limit=2, session="monday")
    async with memory.recall(session="tuesday") as recalls:
        await recalls.query("private words", limit=1)
    talk = "private-namespace/talk"
    await client.context([memory.path], "private words?", conversation=talk, parts_timeout_s=60.0)
    await memory.forget_fragments([put.fragment.id])
    with pytest.raises(memstream.MemoryNotFound):
        await client.memory("private-namespace/other").recall_once("private words")
    await client.create_memory("private-namespace/gone")
    await client.delete_memory("private-namespace/gone")


async def call_tool(address: str, endpoint: str) -> None:
    """Recalls by `memstream mcp`, whose own spans the package mcp makes."""
    named = {"OTEL_EXPORTER_OTLP_ENDPOINT": endpoint, "OTEL_SERVICE_NAME": "memstream-mcp"}
    parameters = StdioServerParameters(
        command=COMMAND[0],
        args=[*COMMAND[1:], "mcp", "--memory", "private-namespace/private-memory"],
        env=environment(address) | named,
    )
    async with mcp.client.Client(parameters, read_timeout_seconds=120) as host:
        assert not (await host.call_tool("recall", {"query": "private words"})).is_error


def check_memory_spans(collector: Collector) -> None:
    (agent,) = collector.find_spans("invoke_agent joy")
    ours = [one for one in collector.spans if one.trace == agent.trace]
    found = [one for one in ours if one.name in set(OPERATIONS.values()) and one.service == "agent"]
    seen = [(one.name, int(one.attributes.get("gen_ai.memory.record.count", 0))) for one in found]
    assert sorted(seen) == sorted(
        [
            *[("create_memory_store", 0)] * 2,
            ("delete_memory_store", 0),
            *[("create_memory", 1)] * 2,
            ("upsert_memory", 1),
            ("update_memory", 1),
            ("delete_memory", 1),
            ("search_memory", 2),
            ("search_memory", 1),
            ("search_memory", 3),
            ("search_memory", 0),
        ]
    )
    for one in found:
        assert one.parent == agent.id
        assert one.attributes["gen_ai.operation.name"] == one.name
    assert sum(STORE.items() <= one.attributes.items() for one in found) == len(found) - 3
    talks = {str(one.attributes.get("gen_ai.conversation.id")) for one in found if one.name == "search_memory"}
    assert talks == {"monday", "tuesday", "private-namespace/talk", "None"}
    (refused,) = (one for one in found if "error.type" in one.attributes)
    assert refused.attributes["error.type"] == "MemoryNotFound"
    by_tool = [one for one in ours if one.name == "search_memory" and one.service == "memstream-mcp"]
    assert [collector.list_ancestors(one)[-1:] for one in by_tool] == [[agent.name]]
    for name, service in (("journal.commit", "agent"), ("memstream.v1.StreamService/RecallOnce", "memstream-mcp")):
        above = [collector.list_ancestors(one) for one in collector.find_spans(name)]
        assert any(path[-1:] == [agent.name] for path in above), (name, service)
    assert not any("private words" in str(one.span) or "private home" in str(one.span) for one in ours)
    (asked,) = collector.find_spans("asking with texts")
    (searched,) = (one for one in collector.spans if one.parent == asked.id)
    assert searched.attributes["gen_ai.memory.query.text"] == "private words"
    records = json.loads(searched.attributes["gen_ai.memory.records"])
    assert {"private words", "more private words"} <= {one["content"] for one in records}
    assert all(one["id"] and one["score"] > 0 for one in records)
    served = {one.name: one.attributes for one in collector.spans if one.service == "memstream"}
    assert served["memstream.v1.StreamService/RecallOnce"]["gen_ai.operation.name"] == "search_memory"


async def test_span_has_final_status_and_client_sampling_decides(
    make_server: MakeServer,
) -> None:
    """The flag of a traceparent decides; a ratio of 0 keeps none of the traces that begin here."""
    async with Collector() as collector:
        server = await started(make_server(otlp_endpoint=f"http://{collector.address}", trace_ratio=0))
        async with grpc.aio.insecure_channel(server.address) as channel:
            get = channel.unary_unary("/memstream.v1.MemoryService/GetMemory")
            request = GetMemoryRequest(namespace="no", memory="such").SerializeToString()
            for header in (f"00-{'1' * 32}-{'2' * 16}-01", f"00-{'3' * 32}-{'4' * 16}-00", None):
                with pytest.raises(grpc.aio.AioRpcError):
                    await get(request, metadata=() if header is None else (("traceparent", header),))
        assert await stopped(server) == 0
    assert {one.trace.hex() for one in collector.spans} == {"1" * 32}
    (called,) = collector.find_spans("memstream.v1.MemoryService/GetMemory")
    assert called.parent.hex() == "2" * 16
    assert called.attributes["rpc.grpc.status_code"] == grpc.StatusCode.NOT_FOUND.value[0]
    assert called.span.status.code == 0  # not an error of the server


async def test_server_span_of_stream_query_is_below_its_caller(
    make_server: MakeServer, spans: tuple[TracerProvider, InMemorySpanExporter]
) -> None:
    provider, exporter = spans
    tracer = provider.get_tracer("a program")
    async with Collector() as collector:
        server = await started(make_server(otlp_endpoint=f"http://{collector.address}"))
        async with memstream.connect(server.address, tracing=Tracing(provider)) as client:
            memory = await client.create_memory("private-namespace/private-memory")
            async with memory.recall() as recalls:
                with tracer.start_as_current_span("asking"):
                    await recalls.query("private words")
                with tracer.start_as_current_span("building"):
                    await recalls.context("private words?")
                with tracer.start_as_current_span("following"):
                    async with recalls.subscribe("private words"):
                        pass
        with tracer.start_as_current_span("blocking"):
            await asyncio.to_thread(ask_blocking, server.address, provider)
        assert await stopped(server) == 0
    served = [
        *collector.find_spans("memstream.v1.StreamService/RecallQuery"),
        *collector.find_spans("memstream.v1.StreamService/ContextQuery"),
    ]
    ours = {one.context.span_id.to_bytes(8, "big"): one for one in exporter.get_finished_spans()}
    names = [[ours[one.parent].name, *ancestors(ours[one.parent], exporter)] for one in served]
    assert sorted(names) == [
        ["following"],
        ["memstream.v1/ContextQuery", "search_memory", "building"],
        ["memstream.v1/RecallQuery", "search_memory", "asking"],
        ["memstream.v1/RecallQuery", "search_memory", "blocking"],
    ]
    streams = {one.id for one in collector.find_spans("memstream.v1.StreamService/Recall")}
    assert {link.span_id for one in served for link in one.span.links} == streams
    statuses = {ours[one.parent].name: one.attributes["rpc.grpc.status_code"] for one in served}
    assert statuses == {
        "following": grpc.StatusCode.CANCELLED.value[0],
        "memstream.v1/ContextQuery": 0,
        "memstream.v1/RecallQuery": 0,
    }


def ask_blocking(address: str, provider: TracerProvider) -> None:
    with (
        memstream.sync.connect(address, tracing=Tracing(provider)) as client,
        client.memory("private-namespace/private-memory").recall() as recalls,
    ):
        recalls.query("private words")


async def test_invalid_traceparent_of_stream_query_is_ignored(make_server: MakeServer) -> None:
    """The query is answered, and its span is below the stream's."""
    valid = f"00-{'5' * 32}-{'6' * 16}-01"
    unkept = valid[:-1] + "0"
    invalid = ["", "no such", valid.upper().replace("5", "A"), valid.replace("5", "0"), f"01{valid[2:]}-{'x' * 200}"]
    async with Collector() as collector:
        server = await started(make_server(otlp_endpoint=f"http://{collector.address}"))
        async with grpc.aio.insecure_channel(server.address) as channel:
            await ask_from_spans(channel, [valid, unkept, *invalid])
        assert await stopped(server) == 0
    (stream,) = collector.find_spans("memstream.v1.StreamService/Recall")
    asked = [
        (one.trace.hex(), one.parent.hex()) for one in collector.find_spans("memstream.v1.StreamService/RecallQuery")
    ]
    below_stream = ("7" * 32, stream.id.hex())
    assert asked == [("5" * 32, "6" * 16), *[below_stream] * len(invalid)]


async def ask_from_spans(channel: grpc.aio.Channel, parents: list[str]) -> None:
    """Asks one query after the other on a stream of trace 77...7, each with another `traceparent`."""
    memory = {"namespace": "ns", "memory": "m"}
    await MemoryServiceStub(channel).CreateMemory(CreateMemoryRequest(**memory))
    call = StreamServiceStub(channel).Recall(metadata=(("traceparent", f"00-{'7' * 32}-{'8' * 16}-01"),))
    await call.write(pb.RecallRequest(open=pb.RecallOpen(**memory, done_in_recollections=True)))
    assert cast("pb.RecallResponse", await call.read()).HasField("opened")
    for number, parent in enumerate(parents):
        query = pb.RecallQuery(query_id=str(number), text="words")
        await call.write(pb.RecallRequest(query=query, traceparent=parent))
        answer = cast("pb.RecallResponse", await call.read())
        assert answer.recollections.HasField("done"), parent
    await call.write(pb.RecallRequest(close=pb.RecallClose()))
    await call.done_writing()
    assert await call.read() is grpc.aio.EOF


def test_tracing_off_needs_no_packages() -> None:
    """The optional packages may be missing."""
    program = (
        "import sys; sys.modules['opentelemetry'] = None\n"
        "import memstream, memstream_server.app.process, memstream_server.rpc.server\n"
        "from memstream_server.app.errors import StartError\n"
        "from memstream_server.app.running import open_tracing\n"
        "from memstream_server.settings import load\n"
        "try: open_tracing(load(flags={'otlp_endpoint': 'http://127.0.0.1:4317'}))\n"
        "except StartError as error: print(error)\n"
        "print(open_tracing(load()))"
    )
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.splitlines()[0].startswith("otlp_endpoint is set: pip install '.[otel]'")
    assert ended.stdout.splitlines()[1] == "None"
