"""Write docs/settings.md, policy.md, api.md, export.schema.json, the table of errors.md, the chart's schema and
rpc/http/openapi.json.

`--check` compares instead of writing.
"""

from __future__ import annotations

import argparse
import json
import sys
from enum import Enum
from pathlib import Path
from typing import Any

from pydantic import SecretStr
from pydantic.fields import FieldInfo

from memstream.status import _BY_REASON
from memstream_server.core.policy import DBGPT, DEFAULT, iterate_tunables
from memstream_server.engine.operations.transfer.lines import build_schema
from memstream_server.rpc.errors import CODES, RULES
from memstream_server.settings import ENV_PREFIX, Settings
from scripts.chart import FILES
from scripts.contract_page import contract_page, reasons
from scripts.openapi import openapi_text

DOCS = Path(__file__).resolve().parent.parent / "docs"

SETTINGS_HEAD = f"""# Settings

Settings apply to a server process; the tunables of one memory are its [policy](policy.md). A flag of `memstream serve`
takes precedence, then the environment (`{ENV_PREFIX}` and the name in capitals, as in `{ENV_PREFIX}LISTEN`), then the
TOML file named by `--config` or `{ENV_PREFIX}CONFIG`, then the default. An unknown name in the file, or a value out
of bounds, stops the start with an error that names it; an unknown variable is a warning.

`make generate` writes this table from `server/memstream_server/settings/`, and a test compares them.

| setting | default | bounds | unit | meaning |
|---|---|---|---|---|
"""

POLICY_HEAD = """# Policy

A policy belongs to one memory: a client sets it when it creates the memory, and changes it with `UpdateMemory`; the
memory stores it whole. [Settings](settings.md) apply to a server process. The profile `default` has the values that
measured best; `dbgpt` behaves as DB-GPT's memories do.

`make generate` writes this table from `server/memstream_server/core/policy.py`, and a test compares them.

| field | `default` | `dbgpt` | bounds | unit | meaning |
|---|---|---|---|---|---|
"""

ERRORS_TABLE = """| reason | code | class | metadata | meaning |
|---|---|---|---|---|
"""


def settings_page() -> str:
    """docs/settings.md: one row per setting."""
    return SETTINGS_HEAD + "".join(_settings_row(name, field) for name, field in Settings.model_fields.items())


def policy_page() -> str:
    """docs/policy.md: one row per tunable, in both profiles."""
    rows = zip(iterate_tunables(DEFAULT), iterate_tunables(DBGPT), strict=True)
    return POLICY_HEAD + "".join(
        _table_row(
            f"`{name}`",
            _format_value(value),
            _format_value(other),
            _format_bounds(meta["low"], meta["high"]),
            meta["unit"],
            meta["meaning"],
        )
        for (name, value, meta), (_, other, _) in rows
    )


def errors_page() -> str:
    """docs/errors.md: the hand-written part, and one row per reason."""
    head = (DOCS / "errors.md").read_text(encoding="utf-8").partition(ERRORS_TABLE)[0]
    return head + ERRORS_TABLE + "".join(_reason_row(*each) for each in reasons())


def export_schema() -> str:
    """The JSON Schema of a line of an export."""
    return json.dumps(build_schema(), indent=2) + "\n"


PAGES = {
    "settings.md": settings_page,
    "policy.md": policy_page,
    "api.md": contract_page,
    "errors.md": errors_page,
    "export.schema.json": export_schema,
}
OPENAPI = DOCS.parent / "server/memstream_server/rpc/http/openapi.json"
GENERATED = {DOCS / name: page for name, page in PAGES.items()} | {OPENAPI: openapi_text} | FILES
"""The text of every generated file, by path."""


def _reason_row(reason: str, comment: str) -> str:
    found = RULES[reason]
    waits = " Comes with RetryInfo." if found.HasField("retry_delay") else ""
    keys = ", ".join([*(f"`{key}`" for key in found.metadata), *(f"`{key}`?" for key in found.optional_metadata)])
    meaning = comment.replace("What to do:", "**Do:**") + waits
    return _table_row(f"`{reason}`", CODES[reason].name, f"`{_BY_REASON[reason].__name__}`", keys, meaning)


def _settings_row(name: str, field: FieldInfo) -> str:
    extra = field.json_schema_extra if isinstance(field.json_schema_extra, dict) else {}
    default = str(extra["default"]) if "default" in extra else _format_value(field.default)
    limits = {type(limit).__name__: limit for limit in field.metadata}
    low, high = getattr(limits.get("Ge"), "ge", None), getattr(limits.get("Le"), "le", None)
    return _table_row(
        f"`{name}`", default, _format_bounds(low, high), str(extra.get("unit", "")), field.description or ""
    )


def _format_value(value: Any) -> str:
    if isinstance(value, SecretStr):
        value = value.get_secret_value()
    if isinstance(value, Enum):
        value = value.value
    if value is None or value == "":
        return "unset" if value is None else "empty"
    if isinstance(value, bool):
        return "on" if value else "off"
    return _format_number(value) if isinstance(value, int | float) else f"`{value}`"


def _format_number(value: float) -> str:
    return f"{int(value):,}" if float(value).is_integer() else f"{value:g}"


def _format_bounds(low: float | None, high: float | None) -> str:
    return "" if low is None or high is None else f"{_format_number(low)} to {_format_number(high)}"


def _table_row(*cells: str) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |\n"


def main() -> int:
    """The exit code: 1 if `--check` finds a page that differs."""
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("--check", action="store_true", help="compare instead of writing")
    if not arguments.parse_args().check:
        for path, text in GENERATED.items():
            path.write_text(text(), encoding="utf-8")
        return 0
    stale = [path for path, text in GENERATED.items() if path.read_text(encoding="utf-8") != text()]
    for path in stale:
        print(f"{path.relative_to(DOCS.parent)} is out of date: run `make generate`", file=sys.stderr)
    return 1 if stale else 0


if __name__ == "__main__":
    sys.exit(main())
