"""JSON that is written in parts is protobuf's JSON form."""

from __future__ import annotations

import gzip
import json
import threading
from collections.abc import Iterator, Sequence

import pytest
from connectrpc.code import Code
from connectrpc.errors import ConnectError
from google.protobuf import json_format
from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass

from memstream.v1 import memory_service_pb2 as memories
from memstream.v1 import stream_service_pb2 as streams
from memstream_server.rpc.http import codecs
from memstream_server.rpc.http.codecs import Gzip, JsonReader, Reply, write_body, write_json
from memstream_server.rpc.limits import Limits
from memstream_server.rpc.request_reader import RequestReader
from tests.access.calls import METHODS


def make_answer() -> streams.RecallOnceResponse:
    answer = streams.RecallOnceResponse()
    answer.done.revision, answer.done.timings["score"] = 7, 0.25
    answer.recollections.working_memory_ids.extend(["a", "b"])
    for number in range(40):
        one = answer.recollections.recollections.add(rank=number, score=0.5)
        one.fragment.content, one.fragment.observe_time.seconds = f'"{number}" \u00fc', number
        one.fragment.metadata["key"].int_value = number
        one.explanation.parts.add(name="dense", value=0.1)
    return answer


@pytest.mark.parametrize(
    "message",
    [
        make_answer(),
        streams.RecallOnceResponse(),
        memories.ListFragmentsResponse(next_page_token="x", revision=1),
        memories.ListNamespacesResponse(namespaces=[memories.Namespace(name="n")]),
    ],
    ids=["answer", "empty", "no list", "list"],
)
async def test_parts_are_the_form_of_the_whole(message: Message) -> None:
    expected = json_format.MessageToDict(message)
    written = json.loads(await write_json(message))
    assert written == expected
    assert list(written) == list(expected)


@pytest.mark.parametrize("compressed", [False, True])
async def test_large_json_is_parsed_in_a_thread(compressed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    threads = set[str]()
    parse = json_format.ParseDict

    def note_thread(*given: object, **named: object) -> object:
        threads.add(threading.current_thread().name)
        return parse(*given, **named)

    monkeypatch.setattr(codecs.json_format, "ParseDict", note_thread)
    request = streams.ObserveBatchRequest(namespace="a", memory="b")
    for number in range(500):
        request.observations.add(content=f"note {number}")
    text = json_format.MessageToJson(request).encode()
    path = "/memstream.v1.StreamService/ObserveBatch"
    sent = gzip.compress(text) if compressed else text
    read = await JsonReader(RequestReader(Limits())).read_json(sent, streams.ObserveBatchRequest, path, "a caller")
    assert streams.ObserveBatchRequest.FromString(read) == request
    assert threads
    assert threading.main_thread().name not in threads


@pytest.mark.parametrize("as_json", [False, True])
async def test_large_bodies_are_compressed_before_they_are_sent(as_json: bool) -> None:
    reply = await write_body(Reply(streams.RecallOnceResponse, make_answer()), as_json, compressed=True)
    assert reply.body is not None
    assert reply.body.compressed is None or gzip.decompress(reply.body.compressed) == reply.body
    large = streams.RecallOnceResponse()
    for _ in range(20):
        large.MergeFrom(make_answer())
    reply = await write_body(Reply(streams.RecallOnceResponse, large), as_json, compressed=True)
    assert reply.body is not None
    assert reply.body.compressed is not None
    assert Gzip().compress(reply.body) is reply.body.compressed
    assert gzip.decompress(reply.body.compressed) == reply.body


ODD = (
    "Infinity",
    "-Infinity",
    "NaN",
    "1e400",
    "1e308",
    "-1",
    "1.5",
    str(2**64),
    "true",
    "null",
    '""',
    '"x"',
    "[]",
    "{}",
)


def _nest(path: Sequence[FieldDescriptor], value: str) -> str:
    """JSON of a message whose field at the end of `path` is `value`; of a list one element, of a map one value."""
    for field in reversed(path):
        if field.message_type is not None and field.message_type.GetOptions().map_entry:
            value = f'{{"a": {value}}}'
        elif field.is_repeated:
            value = f"[{value}]"
        value = f'{{"{field.json_name}": {value}}}'
    return value


def _find_paths(kind: Descriptor, depth: int) -> Iterator[list[FieldDescriptor]]:
    for field in kind.fields:
        yield [field]
        inner = field.message_type
        if inner is not None and inner.GetOptions().map_entry:
            inner = inner.fields_by_name["value"].message_type
        if inner is not None and depth:
            yield from ([field, *rest] for rest in _find_paths(inner, depth - 1))


async def test_each_field_reads_or_refuses_each_json_value() -> None:
    reader = JsonReader(RequestReader(Limits()))
    codes = set[Code]()
    for method in METHODS:
        kind = GetMessageClass(method.input_type)
        path = f"/{method.containing_service.full_name}/{method.name}"
        for fields in _find_paths(method.input_type, 1):
            for value in ODD:
                try:
                    await reader.read_json(_nest(fields, value).encode(), kind, path, "a caller")
                except ConnectError as error:
                    codes.add(error.code)
    assert codes == {Code.INVALID_ARGUMENT}
