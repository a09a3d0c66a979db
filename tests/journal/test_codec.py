"""Decoding of older rows."""

from __future__ import annotations

import json

import msgspec
import pytest

from memstream_server.adapters.journal.sql import codec
from memstream_server.core.policy import PROFILES, Profile
from memstream_server.core.values import Fragment


@pytest.mark.parametrize("profile", Profile)
@pytest.mark.parametrize("field", ["fold", "truth"])
def test_policy_without_newer_field_uses_profile_default(profile: Profile, field: str) -> None:
    written = json.loads(codec.encode_policy(PROFILES[profile]))
    assert codec.decode_policy(json.dumps(written)) == PROFILES[profile]
    del written["recall"][field]
    assert codec.decode_policy(json.dumps(written)) == PROFILES[profile]


def test_fragment_without_newer_fields_decodes() -> None:
    fragment = Fragment(id="a", content="tea", importance=0.9, expire_time_us=9)
    written = msgspec.msgpack.decode(codec.encode_fragment(fragment)[1:])
    assert not {"own_importance", "superseded_by", "valid_from_us"} & written.keys(), "defaults take space"
    del written["importance"]
    fragment = fragment.but(importance=0.5)
    assert (
        codec.decode_fragment(codec.encode_fragment(fragment)[:1] + msgspec.msgpack.encode(written), 0, 0) == fragment
    )
