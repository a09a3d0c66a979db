"""The pure conversion: tables that must agree with the contract, and values that survive the round trip."""

from __future__ import annotations

from typing import Any

import Stemmer
from hypothesis import given
from hypothesis import strategies as st

from memstream.v1 import event_pb2, fragment_pb2, memory_pb2
from memstream_server.core import policy as core
from memstream_server.core.events import Event, EventType, Reason
from memstream_server.core.policy import Policy, iterate_tunables, with_value
from memstream_server.core.values import Fragment, Tier
from memstream_server.engine.errors import EngineError, FieldViolation, QuotaExceeded
from memstream_server.ports.journal.writing import Rejection
from memstream_server.rpc.errors import (
    CODES,
    RETRY_S,
    RULES,
    PageTokenInvalid,
    RoutingMismatch,
    status_of,
    status_of_rejection,
    violation_text,
    violations_in,
)
from memstream_server.rpc.limits import RequestLimits
from memstream_server.rpc.validation import Violations
from memstream_server.rpc.wire import fragments, observations, policies, scalars
from tests.rpc.wire import unpacked
from tests.support.arbitrary import UNICODE
from tests.support.contract import FILES


def test_reasons_with_a_delay_are_transient() -> None:
    assert RETRY_S
    assert all(RULES[reason].transient and delay_s > 0 for reason, delay_s in RETRY_S.items())


def test_every_engine_error_is_a_contract_reason() -> None:
    errors = {EngineError, *EngineError.__subclasses__()}
    assert {RoutingMismatch, PageTokenInvalid, QuotaExceeded} <= errors
    assert {error.reason for error in errors} <= set(CODES)


def test_a_status_stays_small_whatever_it_tells_of() -> None:
    violations = tuple(FieldViolation("f" * 500, "€" * 500) for _ in range(50))
    error = EngineError("€" * 5_000, violations=violations, key="v" * 9_000)
    assert status_of(error).ByteSize() < 6_000


@given(
    st.lists(
        st.tuples(st.sampled_from(["content", "metadata['a']"]), st.text(UNICODE, min_size=1)), min_size=1, max_size=3
    )
)
def test_rejection_violations_survive_as_text(given: list[tuple[str, str]]) -> None:
    violations = [FieldViolation(field, f"is wrong, {text.replace(';', '')}") for field, text in given]
    assert list(violations_in(violation_text(violations))) == violations
    status = unpacked(status_of_rejection(Rejection(1, 3, "INVALID_FIELD", violation_text(violations))))
    assert set(status.fields) == {each.field for each in violations}


def test_every_tunable_has_its_field() -> None:
    message = policies.policy_message(
        with_value(with_value(core.DEFAULT, "short_term.similarity_min", 0.5), "recall.dense_weight", 0.1)
    )
    for name, _, meta in iterate_tunables(core.DEFAULT):
        *parts, last = name.removesuffix("_s").split(".")
        holder: Any = message
        for part in parts:
            holder = getattr(holder, part)
        assert last in holder.DESCRIPTOR.fields_by_name, name
        assert meta["meaning"]


def _policies() -> st.SearchStrategy[Policy]:
    @st.composite
    def build(draw: Any) -> Policy:
        policy = draw(st.sampled_from([core.DEFAULT, core.DBGPT]))
        for name, value, meta in iterate_tunables(policy):
            if draw(st.booleans()) or name == "profile":
                continue
            if isinstance(value, bool):
                policy = with_value(policy, name, draw(st.booleans()))
            elif isinstance(value, int):
                policy = with_value(
                    policy, name, draw(st.integers(int(meta["low"]), min(int(meta["high"]), 2**31 - 1)))
                )
            elif meta.get("low") is not None:
                policy = with_value(policy, name, draw(st.floats(meta["low"], meta["high"])))
            elif isinstance(value, core.ShortTermKind | core.Overflow | core.RankingRule | core.SimilarityRule):
                policy = with_value(policy, name, draw(st.sampled_from(type(value))))
        return policy

    return build()


@given(_policies())
def test_a_policy_survives_the_way_there_and_back(policy: Policy) -> None:
    found = Violations()
    assert policies.read_policy(found, policies.policy_message(policy)) == policy
    assert not found.found


def test_an_empty_policy_is_the_default_one() -> None:
    assert policies.read_policy(Violations(), memory_pb2.Policy()) == core.DEFAULT


def test_the_languages_are_the_stemmers() -> None:
    assert set(Stemmer.algorithms()) == policies.LANGUAGES  # besides "auto"


@given(st.integers(-62_135_596_800_000_000, 253_402_300_799_999_999))
def test_a_time_survives(value_us: int) -> None:
    found = Violations()
    assert scalars.time_us(found, "t", scalars.timestamp_message(value_us)) == value_us
    assert not found.found


async def test_digest_ignores_map_order() -> None:
    one, two = fragment_pb2.Observation(content="x"), fragment_pb2.Observation(content="x")
    for key in "abcdef":
        one.metadata[key].int_value = 1
    for key in "fedcba":
        two.metadata[key].int_value = 1
    limits = RequestLimits()
    items = [(await observations.read_batch([each], "", limits, 4))[0][0] for each in (one, two)]
    assert items[0].digest == items[1].digest
    assert len(items[0].digest) == 16
    two.metadata["a"].int_value = 2
    assert (await observations.read_batch([two], "", limits, 4))[0][0].digest != items[0].digest


def test_every_event_type_has_a_number() -> None:
    lacking = [each for each in EventType if each not in fragments.EVENT_TYPES]
    assert lacking == [EventType.ACCESSED]
    known = {fragments.EVENT_TYPES.numbers[each] for each in EventType if each not in lacking}
    assert known == set(event_pb2.EventType.values()) - {0}


def test_event_has_only_applicable_fields() -> None:
    event = Event(EventType.DROPPED, "f", from_tier=Tier.SENSORY, reason=Reason.CAPACITY, cosine=0.0)
    message = fragments.event_message(event, "u", 7, 0, 1_500_000)
    assert message.reason == event_pb2.EVENT_REASON_CAPACITY
    assert (message.from_tier, message.to_tier) == (fragment_pb2.TIER_SENSORY, fragment_pb2.TIER_UNSPECIFIED)
    assert message.HasField("cosine")
    assert not message.HasField("draw")
    assert (message.time.seconds, message.time.nanos) == (1, 500_000_000)


def test_a_fragments_kinds_of_metadata_stay_apart() -> None:
    fragment = Fragment("id", "text", metadata=(("b", True), ("f", 1.0), ("i", 1), ("s", "1")))
    kinds = {key: value.WhichOneof("kind") for key, value in fragments.fragment_message(fragment).metadata.items()}
    assert kinds == {"b": "bool_value", "f": "double_value", "i": "int_value", "s": "string_value"}
    assert not fragments.fragment_message(fragment).HasField("access_time")
    assert not fragments.fragment_message(fragment).HasField("expire_time")


def test_no_field_takes_the_bytes_accessor_of_a_text_in_java() -> None:
    """Java's getBodyBytes() of a text `body` and getBodyBytes() of a number `body_bytes` would be one method."""
    clashes = [
        f"{message.full_name}.{name}_bytes"
        for file in FILES
        for message in file.message_types_by_name.values()
        for name, field in message.fields_by_name.items()
        if field.type == field.TYPE_STRING and f"{name}_bytes" in message.fields_by_name
    ]
    assert clashes == []
