"""Converts a memory and its policy.

The fields of a policy have the same names on both sides, except for durations: `echo_window_s` here is `echo_window` (a
google.protobuf.Duration) there. One walk over the tunables therefore handles them all.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Iterator, Mapping
from enum import StrEnum
from functools import lru_cache
from typing import Any, Literal

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.duration_pb2 import Duration
from google.protobuf.json_format import MessageToDict
from google.protobuf.message import Message

from memstream.v1 import memory_pb2 as pb
from memstream.v1.memory_service_pb2 import CreateMemoryRequest, Namespace, PolicyField, StoredBytes
from memstream_server.core import policy as core
from memstream_server.core.policy import AUTO_LANGUAGE, Policy, Profile, ShortTermKind, iterate_tunables, with_value
from memstream_server.core.values import MemoryKind
from memstream_server.engine.requests import Statistics, memory_etag
from memstream_server.ports.journal.records import Labels, MemoryRecord, NamespaceBytes
from memstream_server.rpc.limits import RequestLimits
from memstream_server.rpc.validation import Violations, quote_text
from memstream_server.rpc.wire import scalars
from memstream_server.rpc.wire.fragments import TRUTHS
from memstream_server.rpc.wire.scalars import Enums

KINDS = Enums(pb.MemoryKind, MemoryKind)
_KIND = pb.MemoryKind.DESCRIPTOR
_PROFILES = Enums(pb.Profile, Profile)
_ENUMS: dict[type[StrEnum], Enums[Any]] = {
    Profile: _PROFILES,
    ShortTermKind: Enums(pb.ShortTermKind, ShortTermKind),
    core.SimilarityRule: Enums(pb.SimilarityRule, core.SimilarityRule),
    core.Overflow: Enums(pb.Overflow, core.Overflow),
    core.RankingRule: Enums(pb.RankingRule, core.RankingRule),
    core.Truth: TRUTHS,
}
_RETIRED: Mapping[Literal["margin", "fold"], str] = {
    "margin": "a result that scores more than 0.1 higher keeps its place; leave the field out",
    "fold": "an earlier statement is shown under the later one; to hide it, supersede it, and leave the field out",
}
"""Fields of `conflicts` that have lost their meaning, and what to do instead."""
_LANGUAGES = (
    "arabic armenian basque catalan czech danish dutch dutch_porter english esperanto estonian finnish french german "
    "greek hindi hungarian indonesian irish italian lithuanian nepali norwegian persian polish porter portuguese "
    "romanian russian serbian sesotho spanish swedish tamil turkish yiddish"
)
LANGUAGES = frozenset(_LANGUAGES.split())
"""Snowball's algorithms (a test compares them with the stemmer's)."""


def read_policy(found: Violations, message: pb.Policy, field: str = "policy") -> Policy:
    """A complete policy: fields that are set, and the profile's defaults for the rest."""
    _refuse_retired(found, message, field)
    profile = _PROFILES.read_value(found, f"{field}.profile", message.profile, Profile.DEFAULT)
    policy = core.PROFILES[profile]
    if message == pb.Policy():
        return policy
    given: set[str] = set()
    for name, default, _ in iterate_tunables(policy):
        value = _read_tunable(found, message, name, default, field)
        if value is not None:
            policy = with_value(policy, name, value)
            given.add(name)
    if policy.short_term.kind is ShortTermKind.FIFO and "short_term.capacity" not in given:
        policy = with_value(policy, "short_term.capacity", core.FIFO_CAPACITY)
    return _check_policy(found, policy, field)


def _refuse_retired(found: Violations, message: pb.Policy, field: str, masked: Collection[str] = ()) -> None:
    """Adds the fields that are set, or masked, and no longer have a meaning."""
    for name, hint in _RETIRED.items():
        if name in masked or message.conflicts.HasField(name):
            found.add(f"{field}.conflicts.{name}", f"is no longer used: {hint}")


def change_policy(found: Violations, current: Policy, message: pb.Memory, paths: Iterable[str]) -> Policy | None:
    """`current` with the masked fields of `message.policy`; masked fields that are unset get their defaults. None if
    the mask names no field of the policy.

    A path is "policy", a part of it, or one field; paths that do not begin with "policy" are ignored.
    """
    masked = [path for path in paths if path.split(".")[0] == "policy"]
    if not masked:
        return None
    if "policy" in masked:
        return read_policy(found, message.policy)
    defaults = core.PROFILES[current.profile]
    policy = current
    prefix = "policy.conflicts."
    names = [path.removeprefix(prefix) for path in masked if path.removeprefix(prefix) in _RETIRED]
    _refuse_retired(found, message.policy, "policy", names)
    for path in [path for path in masked if path.removeprefix(prefix) not in names]:
        policy = _apply_mask_path(found, policy, defaults, message.policy, path)
    return _check_policy(found, policy, "policy")


def policy_message(policy: Policy) -> pb.Policy:
    """Sets every field, except those whose unset value means "the embedding model's own"."""
    return pb.Policy.FromString(_encode_policy(policy))


@lru_cache(maxsize=256)  # the walk takes a millisecond, and the memories of a page hardly ever differ
def _encode_policy(policy: Policy) -> bytes:
    message = pb.Policy()
    for name, value, _ in iterate_tunables(policy):
        if value is not None:
            _write_tunable(message, name, value)
    return message.SerializeToString()


def describe_policy(policy: Policy) -> list[PolicyField]:
    """Every field with its meaning, its value and the one that its profile gives."""
    now, defaults = (_flatten(policy_message(each)) for each in (policy, core.PROFILES[policy.profile]))
    described = []
    for name, value, meta in iterate_tunables(policy):
        path = f"policy.{_wire_name(name)}"
        one = PolicyField(
            path=path,
            value=now.get(path, ""),
            default_value=defaults.get(path, ""),
            meaning=meta["meaning"],
            unit=meta["unit"],
            low=meta["low"],
            high=meta["high"],
        )
        if isinstance(value, bool):
            one.choices.extend(("true", "false"))
        elif type(value) in _ENUMS:
            numbers = _ENUMS[type(value)].wire
            one.choices.extend(numbers.Name(number) for number in numbers.values() if number)
        described.append(one)
    return described


def _flatten(message: Message) -> dict[str, str]:
    """The set fields by path, as text of the JSON form."""
    found: dict[str, str] = {}

    def walk(value: Any, path: str) -> None:
        if isinstance(value, dict):
            for name, each in value.items():
                walk(each, f"{path}.{name}")
        else:
            found[path] = json.dumps(value) if isinstance(value, bool | int | float) else str(value)

    walk(MessageToDict(message, preserving_proto_field_name=True), "policy")
    return found


def memory_message(record: MemoryRecord) -> pb.Memory:
    """A memory as clients see it."""
    return pb.Memory(
        namespace=record.namespace,
        name=record.name,
        uid=record.uid,
        kind=KINDS.numbers[record.kind],
        policy=policy_message(record.policy),
        labels=dict(record.labels),
        revision=record.revision,
        create_time=scalars.timestamp_message(record.create_time_us),
        update_time=scalars.timestamp_message(record.update_time_us),
        etag=memory_etag(record),
        fragments=record.fragments,
        change_time=scalars.timestamp_message(record.change_time_us),
    )


def list_differences(request: CreateMemoryRequest, memory: pb.Memory) -> dict[str, str]:
    """Differences between a request and an existing memory: "this, not that" by field."""
    found: dict[str, str] = {}
    if request.kind and request.kind != memory.kind:
        found["kind"] = f"{_value_name(_KIND, memory.kind)}, not {_value_name(_KIND, request.kind)}"
    found.update(_iterate_differences(request.policy, memory.policy, "policy"))
    for key, value in sorted(request.labels.items()):
        if memory.labels.get(key) != value:
            has = repr(memory.labels[key]) if key in memory.labels else "none"
            found[f"labels.{key}"] = f"{has}, not {value!r}"
    return found


def _iterate_differences(given: Message, held: Message, path: str) -> Iterator[tuple[str, str]]:
    """Fields that are set in `given` and differ in `held`."""
    for field, value in given.ListFields():
        name, has = f"{path}.{field.name}", getattr(held, field.name)
        if isinstance(value, Message) and not isinstance(value, Duration):
            yield from _iterate_differences(value, has, name)
        elif value != has:
            yield name, f"{_format_value(field, has)}, not {_format_value(field, value)}"


def _format_value(field: FieldDescriptor, value: object) -> str:
    if isinstance(value, Duration):
        return value.ToJsonString()
    return str(value) if field.enum_type is None else _value_name(field.enum_type, value)


def _value_name(enum: Any, number: object) -> str:
    prefix = enum.values_by_number[0].name.removesuffix("UNSPECIFIED")
    return str(enum.values_by_number[number].name.removeprefix(prefix).lower())


def read_labels(found: Violations, labels: Mapping[str, str], limits: RequestLimits) -> Labels:
    """Sorted pairs."""
    if len(labels) > limits.metadata_entries_max:
        found.add("labels", f"has {len(labels)} entries, at most {limits.metadata_entries_max} are allowed")
        return ()
    for key in labels:
        scalars.metadata_key(found, "labels", key)
    size = sum(len(key.encode()) + len(value.encode()) for key, value in labels.items())
    if size > limits.metadata_bytes_max:
        found.add("labels", f"has {size} bytes, at most {limits.metadata_bytes_max} are allowed")
    return tuple(sorted(labels.items()))


def stats_message(statistics: Statistics) -> pb.MemoryStats:
    """The size of a memory."""
    counts = statistics.counts
    return pb.MemoryStats(
        revision=statistics.revision,
        sensory=counts.sensory,
        short_term=counts.short_term,
        long_term=counts.long_term,
        insights=counts.insights,
        forgotten=counts.forgotten,
        backlog=counts.pending,
        unindexed=counts.unindexed,
        unvectored=counts.unvectored,
        active=statistics.active,
        active_bytes=statistics.active_bytes,
    )


def namespace_message(name: str, memories: int, stored: NamespaceBytes | None, quotas: tuple[int, int]) -> Namespace:
    """A namespace with what it stores; `quotas` are of all bytes and of receipts."""
    counts = stored or NamespaceBytes()
    return Namespace(
        name=name,
        memories=memories,
        stored=StoredBytes(
            total=counts.total,
            fragments=counts.fragments,
            history=counts.history,
            receipts=counts.receipts,
            conversations=counts.conversations,
            requests=counts.requests,
            memories=counts.memories,
        ),
        bytes_max=quotas[0],
        receipts_bytes_max=quotas[1],
    )


def _wire_name(name: str) -> str:
    return name.removesuffix("_s")  # a duration; no other tunable ends with this


def _read_tunable(found: Violations, message: pb.Policy, name: str, default: Any, field: str) -> Any:
    """The value of one tunable in the message; None when it is not set."""
    *parts, last = _wire_name(name).split(".")
    holder: Message = message
    for part in parts:
        holder = getattr(holder, part)
    descriptor = holder.DESCRIPTOR.fields_by_name[last]
    value, path = getattr(holder, last), f"{field}.{_wire_name(name)}"
    if descriptor.type == FieldDescriptor.TYPE_ENUM:
        return _ENUMS[type(default)].read_value(found, path, value, default) if value else None
    if not holder.HasField(last):
        return None
    return _whole_seconds(found, path, value) if isinstance(value, Duration) else value


def _whole_seconds(found: Violations, field: str, value: Duration) -> int:
    if value.nanos:
        found.add(field, "must be whole seconds")
    return value.seconds


def _write_tunable(message: pb.Policy, name: str, value: Any) -> None:
    *parts, last = _wire_name(name).split(".")
    holder: Message = message
    for part in parts:
        holder = getattr(holder, part)
    if isinstance(value, StrEnum) and type(value) in _ENUMS:
        setattr(holder, last, _ENUMS[type(value)].numbers[value])
    elif last != name.split(".")[-1]:
        getattr(holder, last).CopyFrom(Duration(seconds=value))
    else:
        setattr(holder, last, value)


def _apply_mask_path(found: Violations, policy: Policy, defaults: Policy, message: pb.Policy, path: str) -> Policy:
    prefix = path.removeprefix("policy.")
    if prefix == "profile":
        found.add("update_mask", 'has "policy.profile": mask "policy" to take another profile')
        return policy
    chosen = [
        (name, default)
        for name, default, _ in iterate_tunables(defaults)
        if _wire_name(name) == prefix or name.startswith(f"{prefix}.")
    ]
    if not chosen:
        found.add("update_mask", f"has {quote_text(path)}: there is no such field")
    for name, default in chosen:
        value = _read_tunable(found, message, name, default, "policy")
        policy = with_value(policy, name, default if value is None else value)
    return policy


def _check_policy(found: Violations, policy: Policy, field: str) -> Policy:
    for violation in core.find_violations(policy):
        found.add(f"{field}.{_wire_name(violation.field)}", violation.description)
    if policy.language not in LANGUAGES | {AUTO_LANGUAGE}:
        known = ", ".join([AUTO_LANGUAGE, *sorted(LANGUAGES)])
        found.add(f"{field}.language", f"is {quote_text(policy.language)}: one of {known}")
    return policy
