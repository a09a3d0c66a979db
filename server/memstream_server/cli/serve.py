"""`memstream serve`: runs a server until SIGTERM, with a flag for every field of Settings."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import json
import os
import sys
from collections.abc import Callable
from enum import Enum
from pathlib import Path
from typing import Any

import click
from pydantic import SecretStr
from pydantic.fields import FieldInfo

from memstream_server.cli.failures import Failure, Misuse, describe_os_error
from memstream_server.core.printable import number_text
from memstream_server.settings import Settings, SettingsError, load, unknown_variables

_SHORT = {"data_dir": "--data"}
"""Aliases of flags."""
_UNITS = {"seconds", "bytes", "characters"}
"""Units that --help adds to the description of a setting."""
_OF_THE_CLIENT = {
    *("MEMSTREAM_TARGET", "MEMSTREAM_TOKEN"),
    *("MEMSTREAM_TLS", "MEMSTREAM_TLS_CA", "MEMSTREAM_TLS_CERT", "MEMSTREAM_TLS_KEY"),
}
"""Variables of other commands: not settings, so they cause no warning."""

_GC_THRESHOLDS = (1_000, 3, 700)
"""Garbage collector thresholds: new containers before a young collection, then collections per older generation.
An observation allocates a hundred containers and hardly any cycles, and imported modules are not garbage. A young
collection of 5,000 containers paused the process for 5 ms, of 1,000 for 1 ms; a middle one, after ten of these, for
15 ms. The oldest generation runs as rarely as once per two million containers."""

_HELP = """Run a server until SIGTERM or SIGINT, then let its streams finish and stop.

Set each setting by flag, environment variable (MEMSTREAM_ and the name in capitals) or in the TOML file of --config; a
flag overrides a variable, a variable overrides the file. Pass secrets as variables: other users of the machine can see
flags. docs/settings.md explains each setting.

\b
  memstream serve
  memstream serve --data ./data --listen 127.0.0.1:0 --port-file port
  MEMSTREAM_EMBEDDING_API_KEY=... memstream serve --embedding openai
"""


def setting_options() -> list[click.Option]:
    """One option per setting; None if it was not passed, so that the environment and the file apply."""
    return [_setting_option(name, field) for name, field in Settings.model_fields.items()]


def _setting_option(name: str, field: FieldInfo) -> click.Option:
    extra = field.json_schema_extra if isinstance(field.json_schema_extra, dict) else {}
    unit = str(extra.get("unit", ""))
    help_ = f"{field.description}{f', in {unit}' if unit in _UNITS else ''}.  [default: {_shown_default(field, extra)}]"
    names = [f"--{name.replace('_', '-')}", *([_SHORT[name]] if name in _SHORT else []), name]
    on: dict[str, Any] = {"is_flag": False, "flag_value": "on"} if field.annotation is bool else {}
    return click.Option(names, type=_option_type(field), help=help_, default=None, metavar=_option_metavar(field), **on)


def _option_type(field: FieldInfo) -> click.ParamType[Any] | type:
    kind = field.annotation
    limits = {type(limit).__name__: limit for limit in field.metadata}
    low, high = getattr(limits.get("Ge"), "ge", None), getattr(limits.get("Le"), "le", None)
    if kind is bool:
        return click.BOOL
    if kind is int:
        return click.IntRange(low, high)
    if kind is float:
        return click.FloatRange(low, high)
    if isinstance(kind, type) and issubclass(kind, Enum):
        return click.Choice([str(member.value) for member in kind])
    return click.Path(path_type=Path) if kind in (Path, Path | None) else str


def _option_metavar(field: FieldInfo) -> str | None:
    names: dict[object, str] = {int: "NUMBER", float: "NUMBER", bool: "on|off"}
    return names.get(field.annotation)


def _shown_default(field: FieldInfo, extra: dict[str, Any]) -> str:
    default = field.default.get_secret_value() if isinstance(field.default, SecretStr) else field.default
    if "default" in extra:
        return str(extra["default"])
    if isinstance(default, Enum):
        return str(default.value)
    if isinstance(default, float):
        return number_text(default)
    if isinstance(default, bool):
        return "on" if default else "off"
    return "none" if default in (None, "") else str(default)


def run_server(config: Path | None, as_json: bool, **given: Any) -> None:
    """Serves until a signal. Raises Failure if the server cannot start."""
    try:
        settings = load(config, given)
    except SettingsError as error:
        raise Misuse(str(error)) from error
    for name in unknown_variables(os.environ):
        if name not in _OF_THE_CLIENT:
            click.echo(f"memstream: warning: there is no setting {name}", err=True)
    _serve_settings(settings, _create_announcer(as_json))


def _create_announcer(as_json: bool) -> Callable[[str], None]:
    def announce(line: str) -> None:
        click.echo(json.dumps({"message": line.strip()}, ensure_ascii=False) if as_json else line)

    return announce


def _import_structlog() -> None:
    """Imports structlog without rich, which it would use for tracebacks that no log line shows: 40 ms of CPU."""
    if {"rich", "structlog"} & sys.modules.keys():
        return
    sys.modules["rich"] = None  # type: ignore[assignment]  # an import then raises ModuleNotFoundError
    try:
        import structlog  # noqa: F401 - imported for its own imports
    finally:
        del sys.modules["rich"]


def _serve_settings(settings: Settings, announce: Callable[[str], None]) -> None:
    gc.set_threshold(*_GC_THRESHOLDS)
    gc.disable()  # until it serves (app/process.py): what a start creates lives on
    # Before numpy is imported: its threads slow down small searches.
    for variable in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS"):
        os.environ.setdefault(variable, "1")
    _import_structlog()
    import structlog

    from memstream_server.app.errors import StartError
    from memstream_server.app.process import EventLoop, serve
    from memstream_server.engine.errors import EngineError
    from memstream_server.log_lines import hide_secrets
    from memstream_server.observability import configure_logging, stderr_as_log_lines
    from memstream_server.ports.index import IndexUnavailable
    from memstream_server.ports.journal.errors import JournalError
    from memstream_server.ports.models import ModelError

    secrets = settings.secrets()
    try:
        with contextlib.ExitStack() as stack:
            lines = stack.enter_context(stderr_as_log_lines())
            configure_logging(settings.log_level, settings.log_format, lines, secrets)
            runner = stack.enter_context(asyncio.Runner(loop_factory=EventLoop))
            runner.run(serve(settings, announce=announce))
    except (StartError, JournalError, EngineError, IndexUnavailable, ModelError, OSError) as error:
        structlog.get_logger(__name__).debug("server_failed", exc_info=error)
        what = describe_os_error(error) if isinstance(error, OSError) else str(error)
        raise Failure(hide_secrets(f"the server cannot run: {what}", secrets)) from error
    finally:
        gc.enable()


serve_command = click.Command(
    "serve",
    help=_HELP,
    short_help="Run a server until SIGTERM or SIGINT.",
    callback=run_server,
    params=[
        click.Option(
            ["--config"], type=click.Path(path_type=Path), help="TOML file of settings. Default: $MEMSTREAM_CONFIG."
        ),
        *setting_options(),
        click.Option(["--json", "as_json"], is_flag=True, help="Announce as JSON Lines."),
    ],
)
