"""Decoding of older rows."""

from __future__ import annotations

import json

import msgspec
import pytest

from memstream_server.adapters.journal.sql import codec
from memstream_server.core.events import Event, EventType
from memstream_server.core.policy import PROFILES, Profile
from memstream_server.core.values import Fragment
from memstream_server.ports.journal.errors import Unreadable


@pytest.mark.parametrize("profile", Profile)
@pytest.mark.parametrize("field", ["fold", "truth"])
def test_policy_without_newer_field_uses_profile_default(profile: Profile, field: str) -> None:
    written = json.loads(codec.encode_policy(PROFILES[profile]))
    assert codec.decode_policy(json.dumps(written)) == PROFILES[profile]
    del written["recall"][field]
    assert codec.decode_policy(json.dumps(written)) == PROFILES[profile]


def test_fragment_without_newer_fields_decodes() -> None:
    fragment = Fragment(id="a", content="tea", importance=0.9, expire_time_us=9)
    written = msgspec.msgpack.decode(codec.encode_record(fragment)[1:])
    assert not {"own_importance", "superseded_by", "valid_from_us"} & written.keys(), "defaults take space"
    del written["importance"]
    fragment = fragment.but(importance=0.5)
    assert codec.decode_fragment(codec.encode_record(fragment)[:1] + msgspec.msgpack.encode(written), 0, 0) == fragment


@pytest.mark.parametrize("count", [0, 1, 500])
def test_events_decode_as_they_were_written(count: int) -> None:
    events = tuple(
        Event(EventType.OBSERVED, f"01M8CQ231CE7FATP063DPT{place:04d}", importance=0.5) for place in range(count)
    )
    blob = codec.encode_events(events)
    assert codec.decode_events(blob) == events
    assert len(blob) < 40 * max(count, 3), "ids that begin alike take little space"
    if count == 500:
        for damaged in (blob[:-9], b"\x03" + blob[1:], blob[:40] + b"~~~~" + blob[44:]):
            with pytest.raises(Unreadable):
                codec.decode_events(damaged)
