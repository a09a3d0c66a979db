"""JSON that is written in parts is protobuf's JSON form."""

from __future__ import annotations

import json

import pytest
from google.protobuf import json_format
from google.protobuf.message import Message

from memstream.v1 import memory_service_pb2 as memories
from memstream.v1 import stream_service_pb2 as streams
from memstream_server.rpc.http.codecs import write_json


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
