"""Phrases of time over the wire: the zone of the query, and the interpretation in the end of its answer."""

from __future__ import annotations

from typing import Any

import grpc
import pytest

from memstream.v1 import fragment_pb2 as fragments
from memstream.v1 import stream_service_pb2 as pb
from memstream_server.core.ranking import FORMULA
from tests.rpc.wire import RecallCall, Wire, refused, unpacked

pytestmark = pytest.mark.usefixtures("real")

NOW = {"seconds": 1_700_049_600}
"""15 November 2023, 12:00 UTC."""
LAST_WEEK = {"text": "fact of last week", "now": NOW, "time_zone": "Europe/Berlin"}
"""In Berlin, the week began an hour before it began in UTC."""


async def ask(wire: Wire, **query: Any) -> tuple[RecallCall, pb.Recollections, Any]:
    """The stream, the first part and the end of an answer, or what failed."""
    item = fragments.Observation(content="fact")
    await wire.streams.ObserveBatch(pb.ObserveBatchRequest(namespace="ns", memory="m", observations=[item]))
    call = await wire.recall(done_in_recollections=True)
    await call.query("q", **query)
    message = await call.next()
    if message.HasField("failed"):
        return call, pb.Recollections(), message.failed
    return call, message.recollections, message.recollections.done


def check_last_week(done: pb.RecallDone) -> None:
    (found,) = done.interpreted
    begin = getattr(found, "from")  # a keyword of Python
    assert (found.phrase, begin.seconds, found.to.seconds) == ("last week", 1_699_225_200, 1_699_830_000)


async def test_interpreted_times_are_in_the_end_of_an_answer(wire: Wire) -> None:
    _, part, done = await ask(wire, **LAST_WEEK, explain=True)
    check_last_week(done)
    explained = part.recollections[0].explanation
    assert [each.name for each in explained.parts][-1] == "time"
    assert explained.formula == FORMULA
    once = pb.RecallOnceRequest(namespace="ns", memory="m", query=pb.RecallQuery(**LAST_WEEK))
    check_last_week((await wire.streams.RecallOnce(once)).done)


async def test_each_change_of_a_standing_query_says_what_it_took(wire: Wire) -> None:
    call, _, first = await ask(wire, **LAST_WEEK, subscribe=True)
    check_last_week(first)
    item = fragments.Observation(content="another fact of last week")
    await wire.streams.ObserveBatch(pb.ObserveBatchRequest(namespace="ns", memory="m", observations=[item]))
    check_last_week((await call.next()).recollections.done)


async def test_open_window_has_no_such_time(wire: Wire) -> None:
    _, _, done = await ask(wire, text="what was before Christmas, and since May?", now=NOW)
    before, since = done.interpreted
    assert (before.phrase, before.HasField("from"), before.HasField("to")) == ("before Christmas", False, True)
    assert (since.phrase, since.HasField("from"), since.HasField("to")) == ("since May", True, False)


@pytest.mark.parametrize("changed", [{"interpret_time": False}, {"text": "fact"}])
async def test_nothing_is_interpreted_without_phrase_or_wish(wire: Wire, changed: dict[str, Any]) -> None:
    _, part, done = await ask(wire, **(LAST_WEEK | changed), explain=True)
    assert not done.interpreted
    assert "time" not in [each.name for each in part.recollections[0].explanation.parts]


UNKNOWN = ["Europe/Berlino", "America", "../../etc/passwd", "/etc/localtime", "+02:00", "zone.tab", "Z" * 300, "\x00"]


@pytest.mark.parametrize("name", UNKNOWN)
async def test_unknown_time_zone_is_named(wire: Wire, name: str) -> None:
    _, _, failed = await ask(wire, text="what was yesterday?", time_zone=name)
    error = unpacked(failed.status)
    assert (error.code, error.reason) == (grpc.StatusCode.INVALID_ARGUMENT, "INVALID_FIELD")
    assert ascii(name)[:20] in error.fields["query.time_zone"]


async def test_unary_recall_refuses_an_unknown_time_zone(wire: Wire) -> None:
    query = pb.RecallQuery(text="what was yesterday?", time_zone="Mars/Olympus")
    error = await refused(wire.streams.RecallOnce(pb.RecallOnceRequest(namespace="ns", memory="m", query=query)))
    assert error.code is grpc.StatusCode.INVALID_ARGUMENT
    assert "'Mars/Olympus'" in error.fields["query.time_zone"]
