"""Converts filters of fragments between Python values and wire messages."""

from __future__ import annotations

from collections.abc import Collection

from memstream.argument_types import Several
from memstream.v1 import fragment_pb2
from memstream.values import Condition, Filter, FragmentKind, Scalar, Tier
from memstream.wiretypes import (
    encoding,
    members_by_number,
    metadata_value_from_wire,
    metadata_value_to_wire,
    optional_timestamp_from_wire,
    optional_timestamp_to_wire,
)

_TIERS = members_by_number(Tier, fragment_pb2.Tier.DESCRIPTOR)
_KINDS = members_by_number(FragmentKind, fragment_pb2.FragmentKind.DESCRIPTOR)
_BOUNDS = ("at_least", "above", "at_most", "below")


def tiers_to_wire(tiers: Several[Tier]) -> list[fragment_pb2.Tier.ValueType]:
    """Tiers."""
    return [fragment_pb2.Tier.Value(f"TIER_{Tier(tier).name}") for tier in tiers]


def filter_to_wire(value: Filter) -> fragment_pb2.FragmentFilter:
    """Converts a filter."""
    with encoding("filter"):
        return fragment_pb2.FragmentFilter(
            sessions=value.sessions,
            speakers=value.speakers,
            kinds=[fragment_pb2.FragmentKind.Value(f"FRAGMENT_KIND_{FragmentKind(kind).name}") for kind in value.kinds],
            tiers=tiers_to_wire(value.tiers),
            observe_time_min=optional_timestamp_to_wire("filter.observe_time_min", value.observe_time_min),
            observe_time_max=optional_timestamp_to_wire("filter.observe_time_max", value.observe_time_max),
            create_time_min=optional_timestamp_to_wire("filter.create_time_min", value.create_time_min),
            create_time_max=optional_timestamp_to_wire("filter.create_time_max", value.create_time_max),
            importance_min=value.importance_min,
            importance_max=value.importance_max,
            metadata=[_condition_to_wire(key, accepted) for key, accepted in value.metadata.items()],
            exclude_ids=value.exclude_ids,
            external_id_prefixes=value.external_id_prefixes,
            expression=value.expression,
            all_of=map(filter_to_wire, value.all_of),
            any_of=map(filter_to_wire, value.any_of),
            none_of=map(filter_to_wire, value.none_of),
        )


def _condition_to_wire(key: str, accepted: Scalar | Several[Scalar] | Condition) -> fragment_pb2.MetadataCondition:
    field = f"filter.metadata.{key}"
    if not isinstance(accepted, Condition):
        values = [accepted] if isinstance(accepted, str) or not isinstance(accepted, Collection) else accepted
        accepted = Condition(values=tuple(values))
    wire = fragment_pb2.MetadataCondition(
        key=key,
        values=[metadata_value_to_wire(field, each) for each in accepted.values],
        path=accepted.path,
        time_min=optional_timestamp_to_wire(f"{field}.time_min", accepted.time_min),
        time_max=optional_timestamp_to_wire(f"{field}.time_max", accepted.time_max),
        prefix=accepted.prefix,
        exists=accepted.exists,
        any=accepted.any,
    )
    for name in _BOUNDS:
        if (bound := getattr(accepted, name)) is not None:
            getattr(wire, name).CopyFrom(metadata_value_to_wire(f"{field}.{name}", bound))
    return wire


def filter_from_wire(wire: fragment_pb2.FragmentFilter) -> Filter:
    """A filter. A second condition on a key becomes one of `all_of`."""
    conditions = [(each.key, _condition_from_wire(each)) for each in wire.metadata]
    first = dict(reversed(conditions))
    others = [Filter(metadata={key: one}) for key, one in conditions if one is not first[key]]
    return Filter(
        sessions=tuple(wire.sessions),
        speakers=tuple(wire.speakers),
        kinds=tuple(_KINDS[number] for number in wire.kinds if number in _KINDS),
        tiers=tuple(_TIERS[number] for number in wire.tiers if number in _TIERS),
        observe_time_min=optional_timestamp_from_wire(wire.observe_time_min, wire.HasField("observe_time_min")),
        observe_time_max=optional_timestamp_from_wire(wire.observe_time_max, wire.HasField("observe_time_max")),
        create_time_min=optional_timestamp_from_wire(wire.create_time_min, wire.HasField("create_time_min")),
        create_time_max=optional_timestamp_from_wire(wire.create_time_max, wire.HasField("create_time_max")),
        importance_min=wire.importance_min if wire.HasField("importance_min") else None,
        importance_max=wire.importance_max if wire.HasField("importance_max") else None,
        metadata={key: _simplify(one) for key, one in first.items()},
        exclude_ids=tuple(wire.exclude_ids),
        external_id_prefixes=tuple(wire.external_id_prefixes),
        expression=wire.expression,
        all_of=(*map(filter_from_wire, wire.all_of), *others),
        any_of=tuple(map(filter_from_wire, wire.any_of)),
        none_of=tuple(map(filter_from_wire, wire.none_of)),
    )


def _condition_from_wire(wire: fragment_pb2.MetadataCondition) -> Condition:
    return Condition(
        values=tuple(map(metadata_value_from_wire, wire.values)),
        path=tuple(wire.path),
        at_least=_bound_from_wire(wire.at_least, wire.HasField("at_least")),
        above=_bound_from_wire(wire.above, wire.HasField("above")),
        at_most=_bound_from_wire(wire.at_most, wire.HasField("at_most")),
        below=_bound_from_wire(wire.below, wire.HasField("below")),
        time_min=optional_timestamp_from_wire(wire.time_min, wire.HasField("time_min")),
        time_max=optional_timestamp_from_wire(wire.time_max, wire.HasField("time_max")),
        prefix=wire.prefix if wire.HasField("prefix") else None,
        exists=wire.exists if wire.HasField("exists") else None,
        any=wire.any,
    )


def _bound_from_wire(wire: fragment_pb2.MetadataValue, given: bool) -> str | int | float | None:
    value = metadata_value_from_wire(wire) if given else None
    return value if isinstance(value, str | int | float) else None


def _simplify(condition: Condition) -> tuple[Scalar, ...] | Condition:
    """The accepted values alone, if there is nothing else."""
    values = tuple([each for each in condition.values if not isinstance(each, list | dict)])
    return values if condition == Condition(values=values) else condition
