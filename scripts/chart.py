"""What the Helm chart knows of the server: settings with types and bounds, in the JSON schema of its values; verbs."""

from __future__ import annotations

import json
import types
from collections.abc import Callable
from enum import Enum
from pathlib import Path
from typing import Any, Union, get_args, get_origin

from pydantic import SecretStr
from pydantic.fields import FieldInfo

from memstream_server.rpc.access.caller import Verb
from memstream_server.settings import Settings

CHART = Path(__file__).resolve().parent.parent / "deploy/helm/memstream"
_JSON_TYPES = {bool: "boolean", int: "integer", float: "number", str: "string", Path: "string"}


def settings_names() -> str:
    """settings.json: every setting, and whether it is a secret."""
    known = {name: {"secret": kind_of(field) is SecretStr} for name, field in Settings.model_fields.items()}
    return json.dumps(known, indent=1, sort_keys=True) + "\n"


def values_schema() -> str:
    """values.schema.json with `$defs.settings.properties` generated from the Settings class."""
    schema = json.loads((CHART / "values.schema.json").read_text(encoding="utf-8"))
    schema["$defs"]["settings"]["properties"] = {
        name: _field_schema(field) for name, field in Settings.model_fields.items() if kind_of(field) is not SecretStr
    }
    return json.dumps(schema, indent=2) + "\n"


def verbs() -> str:
    """verbs.json: the verbs of access policies."""
    return json.dumps([verb.value for verb in Verb]) + "\n"


FILES: dict[Path, Callable[[], str]] = {
    CHART / "settings.json": settings_names,
    CHART / "values.schema.json": values_schema,
    CHART / "verbs.json": verbs,
}


def kind_of(field: FieldInfo) -> Any:
    """The type of a field's value, without None."""
    kind = field.annotation
    if get_origin(kind) in (Union, types.UnionType):
        kind = next(each for each in get_args(kind) if each is not type(None))
    return kind


def _field_schema(field: FieldInfo) -> dict[str, Any]:
    kind = kind_of(field)
    if isinstance(kind, type) and issubclass(kind, Enum):
        return {"enum": [str(member.value) for member in kind]}
    if kind not in _JSON_TYPES:
        return {}  # a list or a table, which the server checks
    limits = {type(limit).__name__: limit for limit in field.metadata}
    bounds = {
        "minimum": getattr(limits.get("Ge"), "ge", None),
        "maximum": getattr(limits.get("Le"), "le", None),
    }
    return {"type": _JSON_TYPES[kind]} | {name: bound for name, bound in bounds.items() if bound is not None}
