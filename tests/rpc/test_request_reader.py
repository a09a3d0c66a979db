"""Bounds before a message is parsed: its fields are counted, and a caller's bytes wait in order."""

from __future__ import annotations

import asyncio
import random

import pytest
from google.protobuf.message import DecodeError, Message

from memstream.v1 import memory_service_pb2, stream_service_pb2
from memstream.v1.fragment_pb2 import FragmentFilter, MetadataCondition, MetadataValue, Observation
from memstream_server.rpc.request_reader import ByteBudget
from memstream_server.rpc.wire.scan import (
    PART_BYTES,
    PART_FIELDS,
    exceeds_fields,
    may_exceed,
    split_message,
    sub_messages,
)
from tests.support.attack_messages import encode_field, encode_varint

OBSERVE = stream_service_pb2.ObserveBatchRequest.DESCRIPTOR
RECALL = stream_service_pb2.RecallOnceRequest.DESCRIPTOR


def exceeds(data: bytes, fields_max: int, message: Message | None = None) -> bool:
    table = sub_messages(OBSERVE if message is None else message.DESCRIPTOR)
    scan = exceeds_fields(data, table, fields_max)
    while True:
        try:
            next(scan)
        except StopIteration as ended:
            return bool(ended.value)


def fields_of(data: bytes, message: Message | None = None) -> int:
    """The smallest bound that the message does not exceed."""
    low, high = 0, len(data) + 1
    while low < high:
        middle = (low + high) // 2
        low, high = (middle + 1, high) if exceeds(data, middle, message) else (low, middle)
    return low


@pytest.mark.parametrize(
    ("message", "fields"),
    [
        (stream_service_pb2.ObserveBatchRequest(), 0),
        (stream_service_pb2.ObserveBatchRequest(namespace="x" * 300, first_sequence=1 << 40), 2),
        (stream_service_pb2.ObserveBatchRequest(observations=[Observation()] * 3_000), 3_000),
        (stream_service_pb2.ObserveBatchRequest(observations=[Observation(content="x", importance=0.5)] * 7), 21),
        (stream_service_pb2.ObserveBatchRequest(observations=[Observation(embedding=[0.5] * 384)]), 2),
        # the entry, its key, its value, and the field in the value
        (
            stream_service_pb2.ObserveBatchRequest(
                observations=[Observation(metadata={f"k{n}": MetadataValue(string_value="v") for n in range(5)})]
            ),
            1 + 5 * 4,
        ),
        (
            stream_service_pb2.RecallOnceRequest(
                query=stream_service_pb2.RecallQuery(
                    filter=FragmentFilter(metadata=[MetadataCondition(key="k")] * 9, exclude_ids=["", "a"])
                )
            ),
            2 + 18 + 2,
        ),
        (memory_service_pb2.ForgetFragmentsRequest(ids=[""] * 500), 500),
    ],
    ids=lambda value: "" if isinstance(value, Message) else str(value),
)
def test_fields_are_counted_at_every_level(message: Message, fields: int) -> None:
    assert fields_of(message.SerializeToString(), message) == fields


def test_unknown_fields_and_groups_count() -> None:
    unknown = (
        encode_varint(500 << 3)
        + b"\x01"
        + encode_varint(501 << 3 | 1)
        + bytes(8)
        + encode_varint(502 << 3 | 5)
        + bytes(4)
    )
    group = encode_varint(503 << 3 | 3) + encode_varint(503 << 3 | 4)
    assert fields_of(unknown * 10 + group * 10 + encode_field(504, b"\x0a\x00" * 50)) == 30 + 20 + 1


def test_scan_counts_what_protobuf_parses_before_an_error() -> None:
    """Invalid bytes never have fewer fields for the scan than for the parser."""
    random.seed(4)
    whole = stream_service_pb2.ObserveBatchRequest(
        namespace="n", observations=[Observation(content="hello", importance=0.1, session="s")] * 40
    ).SerializeToString()
    for _ in range(2_000):
        data = bytearray(whole)
        for _ in range(random.randint(1, 4)):
            data[random.randrange(len(data))] = random.randrange(256)
        try:
            parsed = stream_service_pb2.ObserveBatchRequest.FromString(bytes(data))
        except DecodeError:
            continue
        held = sum(len(each.ListFields()) for each in parsed.observations) + len(parsed.observations)
        # A repeated occurrence of a field counts again; a field with its default value counts only if it is set
        # explicitly.
        assert fields_of(bytes(data)) >= held


def test_small_messages_need_no_scan() -> None:
    assert not may_exceed(b"\x32\x00" * 100, 100)
    assert may_exceed(b"\x32\x00" * 100 + b"x", 100)


async def test_budget_waits_in_order_and_for_its_own_holder() -> None:
    budget, order = ByteBudget(10), list[int]()

    async def take(number: int, size: int) -> None:
        await budget.take_bytes("a", size)
        order.append(number)

    await budget.take_bytes("a", 8)
    waiting = [asyncio.create_task(take(number, size)) for number, size in enumerate((9, 1, 2))]
    await asyncio.sleep(0)
    await budget.take_bytes("b", 10)  # another holder's budget is unaffected
    assert order == []
    budget.give_back("a", 8)
    await asyncio.sleep(0)
    assert order == [0, 1]
    budget.give_back("a", 9)
    await asyncio.gather(*waiting)
    assert order == [0, 1, 2]
    budget.give_back("a", 3)
    budget.give_back("b", 10)
    assert not budget._accounts


async def test_budget_allows_one_that_is_larger_than_it() -> None:
    budget = ByteBudget(10)
    await budget.take_bytes("a", 1_000)
    second = asyncio.create_task(budget.take_bytes("a", 1))
    await asyncio.sleep(0)
    assert not second.done()
    budget.give_back("a", 1_000)
    await second
    budget.give_back("a", 1)
    assert not budget._accounts


@pytest.mark.parametrize("turn_comes", [False, True])
async def test_cancelled_wait_keeps_nothing(turn_comes: bool) -> None:
    budget = ByteBudget(10)
    await budget.take_bytes("a", 10)
    first, second = (asyncio.create_task(budget.take_bytes("a", 10)) for _ in range(2))
    await asyncio.sleep(0)
    if turn_comes:  # in the same event-loop iteration as the cancellation
        budget.give_back("a", 10)
    first.cancel()
    if not turn_comes:
        await asyncio.sleep(0)
        budget.give_back("a", 10)
    await asyncio.wait_for(second, 60)
    assert first.cancelled() or (await asyncio.gather(first, return_exceptions=True))[0] is not None
    budget.give_back("a", 10)
    assert not budget._accounts


def make_batch() -> stream_service_pb2.ObserveRequest:
    """Half a megabyte, in the field of an embedded message."""
    message = stream_service_pb2.ObserveRequest()
    message.batch.first_sequence = 7
    for number in range(1_024):
        added = message.batch.observations.add(content=f"note {number} " * 40, session="s")
        added.metadata["key"].string_value = "value"
    return message


def merge_parts(kind: type[Message], data: bytes) -> Message | None:
    """The message of the parts; None if one is refused."""
    merged = kind()
    try:
        for part in split_message(data, kind.DESCRIPTOR):
            merged.MergeFromString(part)
    except DecodeError:
        return None
    return merged


def parse_whole(kind: type[Message], data: bytes) -> Message | None:
    """The message; None if it is refused."""
    try:
        return kind.FromString(data)
    except DecodeError:
        return None


def test_parts_of_a_message_are_small_and_merge_into_it() -> None:
    message = make_batch()
    data = message.SerializeToString()
    parts = list(split_message(data, message.DESCRIPTOR))
    assert len(data) > 5 * PART_BYTES
    assert max(map(len, parts)) < 1.1 * PART_BYTES
    assert merge_parts(stream_service_pb2.ObserveRequest, data) == message


def test_empty_sub_messages_are_split_by_their_number() -> None:
    message = stream_service_pb2.ObserveBatchRequest(observations=[Observation()] * (3 * PART_FIELDS))
    data = message.SerializeToString()
    assert len(list(split_message(data, OBSERVE))) == 3
    assert merge_parts(stream_service_pb2.ObserveBatchRequest, data) == message


def test_damaged_messages_mean_the_same_in_parts() -> None:
    random_ = random.Random(1)
    whole = make_batch()
    kinds = (stream_service_pb2.ObserveRequest, whole), (stream_service_pb2.ObserveBatchRequest, None)
    refused = 0
    for _ in range(300):
        kind, message = random_.choice(kinds)
        message = message or stream_service_pb2.ObserveBatchRequest(observations=whole.batch.observations)
        data = bytearray(message.SerializeToString())
        for _ in range(random_.randrange(4)):
            data[random_.randrange(len(data))] = random_.randrange(256)
        sent = bytes(data[: random_.choice((len(data), random_.randrange(len(data))))])
        expected, merged = parse_whole(kind, sent), merge_parts(kind, sent)
        refused += expected is None
        assert (merged is None) == (expected is None)
        if merged is not None and expected is not None:
            assert merged.SerializeToString(deterministic=True) == expected.SerializeToString(deterministic=True)
    assert 0 < refused < 300
