"""Compares an answer, as protobuf JSON, with the expectation of a case; the runners of all languages do the same.

An object compares only its own fields; null expects an absent field (its default); a list expects the same number of
items in order; `{"min": n}` expects a number of at least n; 64-bit numbers, which are strings, compare as strings.
`${name}` in a string of a case is replaced by a saved value; `{"repeat": text, "times": n}` is a long string.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

_NAME = re.compile(r"\$\{(\w+)\}")


def filled(value: Any, kept: Mapping[str, str]) -> Any:
    """Replaces `${name}` in a value by saved values."""
    if isinstance(value, str):
        return _NAME.sub(lambda found: kept[found[1]], value)
    if isinstance(value, list):
        return [filled(each, kept) for each in value]
    if isinstance(value, dict) and value.keys() == {"repeat", "times"}:
        return str(value["repeat"]) * int(value["times"])
    if isinstance(value, dict):
        return {filled(key, kept): filled(each, kept) for key, each in value.items()}
    return value


def differs(expected: Any, actual: Any, where: str = "answer") -> str:
    """How an answer differs from the expectation; empty if it matches."""
    if isinstance(expected, dict) and expected.keys() == {"min"}:
        return "" if actual is not None and float(actual) >= expected["min"] else f"{where} is {actual!r}"
    if isinstance(expected, dict):
        if not isinstance(actual, dict):
            return f"{where} is {actual!r}"
        found = (differs(each, actual.get(key), f"{where}.{key}") for key, each in expected.items())
        return next((one for one in found if one), "")
    if isinstance(expected, list):
        if len(expected) != len(actual or []):
            return f"{where} has {len(actual or [])} items: {actual!r}"
        pairs = enumerate(zip(expected, actual or [], strict=True))
        found = (differs(one, other, f"{where}[{place}]") for place, (one, other) in pairs)
        return next((one for one in found if one), "")
    return "" if expected == actual else f"{where} is {actual!r}, expected {expected!r}"


def found(actual: Any, path: str) -> str:
    """The value at a dotted path of an answer."""
    for part in path.split("."):
        actual = actual[int(part)] if isinstance(actual, list) else actual[part]
    return str(actual)
