"""Checks LangGraph's operations, because LangGraph accepts any value, and a string as a tuple of letters."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from langgraph.store.base import GetOp, ListNamespacesOp, Op, PutOp, SearchOp

from memstream.argument_types import Count, Seconds, show_value
from memstream.errors import InvalidArgument
from memstream.kinds import kind_of
from memstream.langgraph.matching import check_filter


def check_operation(op: Op) -> None:
    """Raises InvalidArgument, which names the invalid argument."""
    if isinstance(op, GetOp):
        _check(namespace=(Sequence[str], op.namespace), key=(str, op.key), refresh_ttl=(bool, op.refresh_ttl))
    elif isinstance(op, PutOp):
        _check(
            namespace=(Sequence[str], op.namespace),
            key=(str, op.key),
            index=(Literal[False] | Sequence[str] | None, op.index),
            ttl=(Seconds | None, op.ttl),
        )
        if op.value is not None and not isinstance(op.value, dict):
            raise InvalidArgument("value", f"must be a dict or None, not {show_value(op.value)}")
    elif isinstance(op, SearchOp):
        _check(
            namespace_prefix=(Sequence[str], op.namespace_prefix),
            limit=(Count, op.limit),
            offset=(Count, op.offset),
            query=(str | None, op.query),
            refresh_ttl=(bool, op.refresh_ttl),
        )
        check_filter(op.filter)
    elif isinstance(op, ListNamespacesOp):
        _check(limit=(Count, op.limit), offset=(Count, op.offset), max_depth=(Count | None, op.max_depth))
        for condition in op.match_conditions or ():
            _check(match_type=(Literal["prefix", "suffix"], condition.match_type), path=(Sequence[str], condition.path))
    else:
        raise InvalidArgument("ops", f"there is no operation {type(op).__name__}")


def _check(**values: tuple[object, object]) -> None:
    for name, (hint, value) in values.items():
        kind_of(hint).check(name, value)
