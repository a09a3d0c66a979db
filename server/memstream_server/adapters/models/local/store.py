"""The models directory: what is installed in it, the lock of an installation, and removal.

NAME/model.json   the manifest: origin, hashes, time; it is written last, before NAME gets its name
NAME/int8/        a directory for `embedding_model_dir`, with weights of 8 bits; the default
NAME/float32/     the same with the published weights
.NAME.lock        locked during an installation or removal
.NAME.work/       an unfinished installation: the verified files are kept for the next one
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

MANIFEST = "model.json"
FORMAT = 1
"""Version of the layout of an installed model."""
DEFAULT_PRECISION = "int8"
PRECISIONS = (DEFAULT_PRECISION, "float32")


class ModelNotInstalled(ValueError):
    """The models directory has no such model; the text says what to do."""


@dataclass(frozen=True, slots=True)
class InstalledModel:
    """A model in the models directory. `installed` is an ISO 8601 time in UTC."""

    name: str
    directory: Path
    origin: str
    revision: str
    licence: str
    weights_sha256: str
    installed: str
    size_bytes: int

    @property
    def default_dir(self) -> Path:
        """The directory of the default precision, for `embedding_model_dir`."""
        return self.directory / DEFAULT_PRECISION


def list_installed(models_dir: Path) -> Sequence[InstalledModel]:
    """The installed models by name. A directory without a readable manifest is none."""
    if not models_dir.is_dir():
        return ()
    found = (find_installed(models_dir, entry.name) for entry in sorted(models_dir.iterdir()) if entry.is_dir())
    return tuple(one for one in found if one is not None)


def find_installed(models_dir: Path, name: str) -> InstalledModel | None:
    """The installed model of this name; None if there is none, or one of another layout."""
    directory = models_dir / name
    try:
        manifest = json.loads((directory / MANIFEST).read_text(encoding="utf-8"))
        if manifest["format"] != FORMAT or not all((directory / each / "model.onnx").is_file() for each in PRECISIONS):
            return None
        texts = {key: str(manifest[key]) for key in ("origin", "revision", "licence", "weights_sha256", "installed")}
    except (OSError, ValueError, KeyError, TypeError):
        return None
    size = sum(file.stat().st_size for file in directory.rglob("*") if file.is_file())
    return InstalledModel(name=name, directory=directory, size_bytes=size, **texts)


def choose_installed(models_dir: Path, name: str = "") -> Path:
    """The directory of the model NAME, or of NAME/PRECISION; if empty, of the model that was installed first.

    So the installation of a second model changes nothing for a server. Raises ModelNotInstalled.
    """
    found = {one.name: one for one in list_installed(models_dir)}
    if not found:
        raise ModelNotInstalled(
            f"no local model is installed in {models_dir}: run `memstream models install {name or 'NAME'}` "
            "(`memstream models list` shows the names), or set embedding_model_dir"
        )
    wanted, _, precision = name.partition("/")
    if not wanted:
        return installed_first(found.values()).default_dir
    if wanted not in found or precision not in ("", *PRECISIONS):
        raise ModelNotInstalled(
            f"embedding_model names {name}, but {models_dir} has {', '.join(found)}, each with the precisions "
            f"{', '.join(PRECISIONS)}: run `memstream models install {wanted}`, or name another one"
        )
    return found[wanted].directory / (precision or DEFAULT_PRECISION)


def installed_first(models: Iterable[InstalledModel]) -> InstalledModel:
    """The model that `embedding = onnx` uses unless the settings name one."""
    return min(models, key=lambda one: (one.installed, one.name))


def remove_installed(models_dir: Path, name: str) -> int:
    """Remove a model and what an unfinished installation of it left; returns the bytes freed, 0 if there were none."""
    with locked(models_dir, name, lambda: None):
        paths = [models_dir / name, work_dir(models_dir, name)]
        files = [file for path in paths for file in path.rglob("*") if file.is_file()]
        freed = sum(file.stat().st_size for file in files)
        (models_dir / name / MANIFEST).unlink(missing_ok=True)  # first: half a model is none
        for path in paths:
            if path.is_dir():
                shutil.rmtree(path)
        return freed


def work_dir(models_dir: Path, name: str) -> Path:
    """The directory of an unfinished installation."""
    return models_dir / f".{name}.work"


@contextmanager
def locked(models_dir: Path, name: str, waiting: Callable[[], None]) -> Iterator[None]:
    """Hold the lock of a model; calls `waiting` if another process holds it. The system frees it if this one dies."""
    models_dir.mkdir(parents=True, exist_ok=True)
    lock = os.open(models_dir / f".{name}.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            waiting()
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield
    finally:
        os.close(lock)
