"""Converts policies by the field names they share with the contract: a new field needs one line in policy.py."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import fields, is_dataclass
from datetime import timedelta
from enum import StrEnum
from typing import Any, TypeVar, cast, get_args, get_type_hints

from google.protobuf.descriptor import EnumDescriptor
from google.protobuf.duration_pb2 import Duration
from google.protobuf.message import Message

from memstream.argument_types import show_value
from memstream.arguments import unknown_argument
from memstream.kinds import kind_of
from memstream.policy import Policy, PolicyLike
from memstream.v1 import memory_pb2
from memstream.wiretypes import duration_from_wire, duration_to_wire, encoding, invalid_field, members_by_number

P = TypeVar("P")
_hints: dict[type[Any], dict[str, Any]] = {}


def policy_to_wire(policy: PolicyLike | None) -> memory_pb2.Policy:
    """Converts the fields that are set; None or an empty policy means the profile's defaults."""
    wire = memory_pb2.Policy()
    for path, value in _iterate_fields(policy or {}, Policy, ""):
        with encoding(f"policy.{path}"):
            _assign_field(wire, path, value)
    return wire


def policy_paths(policy: PolicyLike) -> list[str]:
    """The update mask of the fields that are set, for instance ["policy.recall.alpha"]."""
    return [f"policy.{path}" for path, _ in _iterate_fields(policy, Policy, "")]


def policy_from_wire(wire: memory_pb2.Policy) -> Policy:
    """Converts a complete policy."""
    return _read_policy(wire, Policy)


def _iterate_fields(values: object, kind: type[Any], prefix: str) -> Iterator[tuple[str, Any]]:
    """Yields (path, value) of every field that is set, checked against the dataclass `kind`."""
    hints = _hints_of(kind)
    for name, value in _check_mapping(values, kind, f"policy.{prefix}".removesuffix(".")).items():
        if name not in hints:
            raise unknown_argument(f"policy.{prefix}{name}", name, f"{kind.__name__}()", hints)
        hint = get_args(hints[name])[0]
        if value is None:
            continue
        if is_dataclass(hint):
            yield from _iterate_fields(value, cast("type[Any]", hint), f"{prefix}{name}.")
        else:
            kind_of(timedelta | float if hint is timedelta else hint).check(f"policy.{prefix}{name}", value)
            yield f"{prefix}{name}", value


def _check_mapping(value: object, kind: type[Any], path: str) -> Mapping[str, Any]:
    if isinstance(value, kind):
        return {each.name: getattr(value, each.name) for each in fields(kind)}
    if isinstance(value, Mapping):
        return cast("Mapping[str, Any]", value)
    raise invalid_field(path, f"must be a {kind.__name__} or a mapping of the same shape, not {show_value(value)}")


def _assign_field(wire: Message, path: str, value: object) -> None:
    *parents, leaf = path.split(".")
    for parent in parents:
        wire = getattr(wire, parent)
    if wire.DESCRIPTOR.fields_by_name[leaf].message_type is not None:
        getattr(wire, leaf).CopyFrom(_duration_from_value(value))
    else:
        enum = _enum_descriptor(wire, leaf)
        setattr(wire, leaf, value if enum is None else _enum_number(enum, value))


def _duration_from_value(value: Any) -> Duration:
    return duration_to_wire(value if isinstance(value, timedelta) else timedelta(seconds=float(value)))


def _enum_number(enum: EnumDescriptor, value: object) -> int:
    prefix = enum.values_by_number[0].name.removesuffix("UNSPECIFIED")
    return enum.values_by_name[f"{prefix}{value}".upper()].number


def _enum_descriptor(wire: Message, name: str) -> EnumDescriptor | None:
    # The stubs add the class of the C implementation to the public one; it has the same interface.
    return cast("EnumDescriptor | None", wire.DESCRIPTOR.fields_by_name[name].enum_type)


def _hints_of(kind: type[Any]) -> dict[str, Any]:
    """The types of a dataclass's fields, kept: to evaluate those of a policy takes 0.6 ms."""
    found = _hints.get(kind)
    if found is None:
        found = _hints[kind] = get_type_hints(kind)
    return found


def _read_policy(wire: Message, kind: type[P]) -> P:
    hints = _hints_of(kind)
    names = wire.DESCRIPTOR.fields_by_name
    return kind(**{name: _read_field(wire, name, get_args(hint)[0]) for name, hint in hints.items() if name in names})


def _read_field(wire: Message, name: str, kind: type[Any]) -> object:
    value = getattr(wire, name)
    enum = _enum_descriptor(wire, name)
    if enum is not None:
        return members_by_number(kind, enum).get(value) if issubclass(kind, StrEnum) else value
    if not wire.HasField(name):
        return None
    if isinstance(value, Duration):
        return duration_from_wire(value)
    return _read_policy(value, kind) if isinstance(value, Message) else value
