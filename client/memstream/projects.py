"""The project of a directory as a part of a memory's name: `code/{project}`.

A project is the git repository of a directory, or the directory itself where there is none. Its name is the directory's
last part, in the characters that names allow, and 8 hexadecimal digits of a hash of its whole path. So two projects of
one name have different memories, all work trees of a repository have one, and nothing in a directory's name or in the
repository's files leads to another project's memory. A project that is moved has a new name.

It imports the standard library alone: hooks use it.
"""

from __future__ import annotations

import hashlib
import re
from pathlib import Path
from urllib.parse import unquote, urlsplit

PLACEHOLDER = "{project}"
NAME_CHARS_MAX = 64
_OTHER = re.compile(r"[^A-Za-z0-9._-]+")
_GIT_FILE_BYTES_MAX = 4_096


def fill_project(path: str, directory: Path) -> str:
    """The memory's path with the project of `directory` in place of `{project}`."""
    return path.replace(PLACEHOLDER, project_name(directory)) if PLACEHOLDER in path else path


def project_name(directory: Path) -> str:
    """The name of the project that `directory` belongs to, for instance `memstream-1f0c3a5e`."""
    root = _find_root(directory.resolve())
    readable = _OTHER.sub("-", root.name).strip("-._")[:NAME_CHARS_MAX] or "project"
    return f"{readable}-{hashlib.sha256(bytes(root)).hexdigest()[:8]}"


def directory_of(uri: str) -> Path | None:
    """The directory that a `file:` URI names, as MCP hosts give their roots; None for another URI."""
    parts = urlsplit(uri)
    if parts.scheme != "file" or parts.netloc not in ("", "localhost") or not parts.path.startswith("/"):
        return None
    return Path(unquote(parts.path))


def _find_root(directory: Path) -> Path:
    for each in (directory, *directory.parents):
        git = each / ".git"
        if git.is_dir():
            return each
        if git.is_file():
            return _main_tree(git) or each
    return directory


def _main_tree(git: Path) -> Path | None:
    """The main work tree of the linked one whose `.git` file this is, if that is one of git's: it names this file."""
    try:
        with git.open(encoding="utf-8", errors="replace") as file:
            told = file.read(_GIT_FILE_BYTES_MAX)
        linked = (git.parent / told.removeprefix("gitdir:").strip()).resolve()
        back = (linked / "gitdir").read_text("utf-8").strip()
    except (OSError, ValueError):
        return None
    if linked.parent.name != "worktrees" or linked.parent.parent.name != ".git" or Path(back).resolve() != git:
        return None
    return linked.parent.parent.parent
