"""JSON that is written in parts is protobuf's JSON form."""

from __future__ import annotations

import asyncio
import base64
import gzip
import json
import threading
from collections.abc import Iterator, Sequence
from functools import reduce

import pytest
from connectrpc.code import Code
from connectrpc.errors import ConnectError
from google.protobuf import json_format
from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from memstream.v1 import context_service_pb2 as contexts
from memstream.v1 import conversation_service_pb2 as talks
from memstream.v1 import memory_service_pb2 as memories
from memstream.v1 import stream_service_pb2 as streams
from memstream_server.engine.errors import InvalidField
from memstream_server.engine.runtime import turns as turns_module
from memstream_server.engine.runtime.turns import install_turns
from memstream_server.rpc.http import codecs, long_strings
from memstream_server.rpc.http.codecs import Gzip, JsonReader, Reply, write_body, write_json
from memstream_server.rpc.http.long_strings import LongStrings, take_long_strings
from memstream_server.rpc.limits import RequestLimits
from memstream_server.rpc.request_reader import RequestReader
from memstream_server.rpc.wire.scan import split_message
from tests.support.contract import METHODS
from tests.support.seeds import rounds


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
    read = await JsonReader(RequestReader(RequestLimits())).read_json(
        sent, streams.ObserveBatchRequest, path, "a caller"
    )
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


async def test_the_answer_of_a_recall_is_parsed_in_slices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(turns_module, "SLICE_S", 0.0)  # each pause is due
    large = streams.RecallOnceResponse()
    for _ in range(100):
        large.MergeFrom(make_answer())
    data, steps = large.SerializeToString(), list[object]()

    async def count_steps(answer: Message | bytes) -> int:
        steps.clear()
        reply = await asyncio.create_task(write_body(Reply(streams.RecallOnceResponse, answer), True, False))
        assert json.loads(reply.body or b"") == json_format.MessageToDict(large)
        return len(steps)

    turns = install_turns()
    turns.on_turn = steps.append
    parts = len(list(split_message(data, large.DESCRIPTOR)))
    assert parts > 1
    assert await count_steps(data) == await count_steps(large) + parts


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
    reader = JsonReader(RequestReader(RequestLimits()))
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


def take(text: str, **given: int) -> LongStrings:
    return take_long_strings(text.encode("utf-8", "surrogatepass"), given.get("elements_max", 10_000))


@pytest.fixture
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """A string is long from 16 bytes."""
    monkeypatch.setattr(long_strings, "PIECE_BYTES", 16)
    monkeypatch.setattr(long_strings, "SHORT_BYTES", 8)


_characters = st.text(
    st.sampled_from('a"\\\n\té\u2028茶\U0001f600\x7f{}[],:') | st.characters(codec="utf-8"), max_size=90
)
_values = st.recursive(
    _characters | st.integers() | st.booleans() | st.none(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from("abc"), inner, max_size=3),
    max_leaves=8,
)


@pytest.mark.usefixtures("small_pieces")
@settings(max_examples=rounds(400, 60), deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(value=_values, escaped=st.booleans(), indent=st.sampled_from([None, 1]))
def test_long_strings_are_those_of_json(value: object, escaped: bool, indent: int | None) -> None:
    taken = take(json.dumps(value, ensure_ascii=escaped, indent=indent))
    assert taken.restore(taken.load(dict)) == value


@pytest.mark.usefixtures("small_pieces")
@settings(max_examples=rounds(400, 60), deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(value=_values, cut=st.integers(0, 400), put=st.sampled_from(["", '"', "\\", "\n", "\\u12", "}", "é"]))
def test_faults_are_those_of_json(value: object, cut: int, put: str) -> None:
    """At the same place of the text."""
    text = json.dumps({"a": value}, ensure_ascii=False)
    text = text[:cut] + put + text[cut + 1 :]
    found: object
    expected: object
    try:
        expected = json.loads(text)
    except json.JSONDecodeError as error:
        expected = error.lineno, error.colno
    try:
        taken = take(text)
        found = taken.restore(taken.load(dict))
    except json.JSONDecodeError as error:
        found = error.lineno, error.colno
    except InvalidField as error:
        assert "a name in the body has" in str(error)  # noqa: PT017  # a long name is refused before the text is read
        return
    assert found == expected


LONG = '\\u00e9\\"x' * 9_000
EVERYWHERE = {
    "namespace": "a",
    "memory": "b",
    "observations": [
        {"content": "short", "speaker": "S"},
        {"content": "C", "metadata": {"m": "M", "l": ["L", 1], "d": {"deep": "D"}}},
        {"structured": {"observation": "O", "thought": "T"}, "session": "E"},
    ],
}


async def test_long_strings_reach_every_kind_of_field() -> None:
    async def read(text: str, kind: type[Message] = streams.ObserveBatchRequest) -> Message:
        path = "/memstream.v1.StreamService/ObserveBatch"
        return kind.FromString(
            await JsonReader(RequestReader(RequestLimits())).read_json(text.encode(), kind, path, "x")
        )

    text = json.dumps(EVERYWHERE)
    expected = await read(text)
    for mark in ("S", "C", "M", "L", "D", "O", "T", "E"):
        assert f'"{mark}"' in text
        text = text.replace(f'"{mark}"', f'"{LONG}{mark}"')
    found = await read(text)
    assert len(text) > 8 * len(LONG)
    long = json.loads(f'"{LONG}"')
    written = json.dumps(json_format.MessageToDict(found), ensure_ascii=False)
    shortened = json.loads(written.replace(json.dumps(long, ensure_ascii=False)[1:-1], ""))
    assert shortened == json_format.MessageToDict(expected)
    position = base64.b64encode(bytes(range(256)) * 400).decode()
    assert (await read(json.dumps({"after": position}), contexts.ContextRequest)).after == bytes(range(256)) * 400  # type: ignore[attr-defined]
    labels = await read(json.dumps({"labels": {"labels": {"a": "x" * 70_000}}}), talks.UpdateConversationRequest)
    assert labels.labels.labels == {"a": "x" * 70_000}  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"namespace": "a", "observations": [{"content": "x", "role": "r" * 90_000}]}, "observations[0].role"),
        ({"namespace": "a", "observations": [{"content": "x", "observeTime": "0" * 90_000}]}, "observeTime"),
        ({"namespace": "a", "firstSequence": "0" * 90_000}, "firstSequence"),
        ({"namespace": "a", "x" * 90_000: 1}, "a name in the body has 90000 bytes"),
        ({"namespace": "a", "producer": "x" * 90_000 + "\ud83d"}, "half of a surrogate pair"),
        ({"namespace": "a", "y": "x" * 90_000}, "is no field of ObserveBatchRequest"),
        ({"y": reduce(lambda inner, _: {"y": inner}, range(450), "x" * 90_000)}, "is no field"),
    ],
    ids=["enum", "time", "number", "name", "half an emoji", "unknown", "nested"],
)
async def test_long_strings_in_wrong_places_are_named(given: dict[str, object], said: str) -> None:
    path = "/memstream.v1.StreamService/ObserveBatch"
    reading = JsonReader(RequestReader(RequestLimits())).read_json(
        json.dumps(given).encode(), streams.ObserveBatchRequest, path, "x"
    )
    with pytest.raises(ConnectError) as caught:
        await reading
    assert said in str(caught.value)
    assert len(str(caught.value)) < 1_000


def test_no_step_reads_more_than_a_piece(monkeypatch: pytest.MonkeyPatch) -> None:
    text = json.dumps({"escaped": "\n" * 500_000, "plain": ["é" * 500_000, 1]}, ensure_ascii=False)
    read = list[int]()
    loads = json.loads

    def note_size(text: str | bytes, **named: object) -> object:
        read.append(len(text))
        return loads(text, **named)  # type: ignore[arg-type]

    monkeypatch.setattr(json, "loads", note_size)
    taken = take(text)
    assert taken.restore(taken.load(dict)) == {"escaped": "\n" * 500_000, "plain": ["é" * 500_000, 1]}
    assert max(read) <= long_strings.PIECE_BYTES + len('""')
    assert len(read) > 1_000_000 // long_strings.PIECE_BYTES
