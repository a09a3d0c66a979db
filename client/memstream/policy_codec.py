"""Policies on the wire, by the names they share with the contract: a new field is one line in policy.py."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import fields, is_dataclass
from datetime import timedelta
from enum import StrEnum
from typing import Any, TypeVar, cast, get_args, get_type_hints

from google.protobuf.descriptor import EnumDescriptor
from google.protobuf.duration_pb2 import Duration
from google.protobuf.message import Message

from memstream.policy import Policy, PolicyLike
from memstream.v1 import memory_pb2
from memstream.wiretypes import delta, duration, invalid, members

P = TypeVar("P")


def policy_to_wire(policy: PolicyLike | None) -> memory_pb2.Policy:
    """The fields that are set; None or an empty policy takes every default of the profile."""
    wire = memory_pb2.Policy()
    for path, value in _leaves(_mapping(policy or {}), ""):
        _assign(wire, path, value)
    return wire


def policy_paths(policy: PolicyLike) -> list[str]:
    """An update mask of the fields that are set, for instance ["policy.recall.alpha"]."""
    return [f"policy.{path}" for path, _ in _leaves(_mapping(policy), "")]


def policy_from_wire(wire: memory_pb2.Policy) -> Policy:
    """A complete policy."""
    return _read(wire, Policy)


def _mapping(value: object) -> Mapping[str, Any]:
    if isinstance(value, Mapping):
        return cast("Mapping[str, Any]", value)
    if is_dataclass(value) and not isinstance(value, type):
        return {each.name: getattr(value, each.name) for each in fields(value)}
    raise invalid("policy", f"must be a Policy or a mapping, not {type(value).__name__}")


def _leaves(values: Mapping[str, Any], prefix: str) -> Iterator[tuple[str, Any]]:
    for name, value in values.items():
        nested: object = value
        if isinstance(nested, Mapping) or is_dataclass(nested):
            yield from _leaves(_mapping(cast("object", nested)), f"{prefix}{name}.")
        elif value is not None:
            yield f"{prefix}{name}", value


def _assign(wire: Message, path: str, value: object) -> None:
    *parents, leaf = path.split(".")
    for parent in parents:
        if parent not in wire.DESCRIPTOR.fields_by_name:
            raise invalid(f"policy.{path}", "no such field")
        wire = getattr(wire, parent)
    field = wire.DESCRIPTOR.fields_by_name.get(leaf)
    if field is None:
        raise invalid(f"policy.{path}", "no such field")
    try:
        if field.message_type is not None:
            getattr(wire, leaf).CopyFrom(_duration(value))
        else:
            enum = _enum(wire, leaf)
            setattr(wire, leaf, value if enum is None else _number(enum, value))
    except (AttributeError, TypeError, ValueError) as error:
        raise invalid(f"policy.{path}", str(error)) from error


def _duration(value: object) -> Duration:
    if isinstance(value, timedelta):
        return duration(value)
    if isinstance(value, int | float):
        return duration(timedelta(seconds=value))
    raise TypeError(f"must be a timedelta or seconds, not {type(value).__name__}")


def _number(enum: EnumDescriptor, value: object) -> int:
    prefix = enum.values_by_number[0].name.removesuffix("UNSPECIFIED")
    found = enum.values_by_name.get(f"{prefix}{value}".upper())
    if found is None or found.number == 0:
        known = [each.name.removeprefix(prefix).lower() for each in enum.values if each.number]
        raise ValueError(f"must be one of {', '.join(known)}, not {value!r}")
    return found.number


def _enum(wire: Message, name: str) -> EnumDescriptor | None:
    # The stubs name the C implementation's class beside the public one, which it stands for.
    return cast("EnumDescriptor | None", wire.DESCRIPTOR.fields_by_name[name].enum_type)


def _read(wire: Message, kind: type[P]) -> P:
    hints = get_type_hints(kind)
    names = wire.DESCRIPTOR.fields_by_name
    return kind(**{name: _value(wire, name, get_args(hint)[0]) for name, hint in hints.items() if name in names})


def _value(wire: Message, name: str, kind: type[Any]) -> object:
    value = getattr(wire, name)
    enum = _enum(wire, name)
    if enum is not None:
        return members(kind, enum).get(value) if issubclass(kind, StrEnum) else value
    if not wire.HasField(name):
        return None
    if isinstance(value, Duration):
        return delta(value)
    return _read(value, kind) if isinstance(value, Message) else value
