"""Additions to a host's files, and their removal byte for byte.

What was added is recorded below the user's state directory: places, values, and a hash of the file after it. While the
file still has that hash, the places are cut out and it is what it was. If somebody has changed it since, only what
still is as it was added is taken away; everything else stays. Without a record additions are recognised by the command
that they name.
"""

from __future__ import annotations

import contextlib
import difflib
import hashlib
import json
import os
import re
import stat
import tempfile
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from memstream.errors import InvalidRequest
from memstream.hosts import jsonc

_BEGIN, _END = "# >>> memstream connect", "# <<< memstream connect"
_BLOCK = re.compile(rf"(?:\r?\n)?{_BEGIN}\r?\n[\s\S]*?{_END}\r?\n")
"""With the newline before it, which is ours too."""


@dataclass(frozen=True, slots=True)
class Addition:
    """A value at a path of a JSON file: a new member, or with `item` a new item of a list. `default`: only if there is
    no value yet."""

    path: tuple[str, ...]
    value: Any
    item: bool = False
    default: bool = False


@dataclass(frozen=True, slots=True)
class Change:
    """The text of a file before and after; None: there is no file. `kept`: what was changed since, and stays."""

    file: Path
    before: str | None
    after: str | None
    record: dict[str, Any] = field(default_factory=dict)
    kept: tuple[str, ...] = ()
    removal: bool = False

    def diff(self) -> list[str]:
        """The change as lines of a unified diff; none if there is none."""
        old, new = ((text or "").splitlines() for text in (self.before, self.after))
        names = ["/dev/null" if text is None else str(self.file) for text in (self.before, self.after)]
        return list(difflib.unified_diff(old, new, names[0], names[1], lineterm=""))


def add_to_json(file: Path, additions: Sequence[Addition]) -> Change:
    """Additions to a JSON file; it is created if there is none. What is there already stays. Raises InvalidRequest."""
    before = _read(file)
    text = before if before is not None else "{}\n"
    steps: list[tuple[int, int]] = []
    made: list[Addition] = []
    try:
        jsonc.parse(text)
        for one in additions:
            if _has(text, one):
                continue
            for place, piece in jsonc.insert(text, one.path, one.value, item=one.item):
                text = text[:place] + piece + text[place:]
                steps.append((place, len(piece)))
            made.append(one)
        jsonc.parse(text)
    except jsonc.Malformed as error:
        raise _refusal(file, error) from error
    return (
        Change(file, before, text, _record(file, before, text, steps, made)) if made else Change(file, before, before)
    )


def add_to_toml(file: Path, body: str) -> Change:
    """A block of tables at the end of a TOML file; it is created if there is none. Raises InvalidRequest."""
    before = _read(file)
    text = before or ""
    _check_toml(file, text)
    newline = "\r\n" if "\r\n" in text else "\n"
    block = f"{_BEGIN}\n{body.strip()}\n{_END}\n"
    if block.replace("\n", newline) in text:
        return Change(file, before, before)
    if _BEGIN in text:
        raise InvalidRequest(f"{file} has another block of `memstream connect`: remove it first, with --remove")
    block = (f"\n{block}" if text else block).replace("\n", newline)
    _check_toml(file, text + block)
    return Change(file, before, text + block, _record(file, before, text + block, [(len(text), len(block))], []))


def remove(file: Path, ours: Sequence[Addition]) -> Change:
    """Takes away what was added; without a record what `ours` has. Raises InvalidRequest."""
    before = _read(file)
    if before is None:
        return Change(file, None, None, removal=True)
    record = _load_record(file)
    if record and record["after"] == _digest(before):
        after = before
        for place, length in reversed(record["steps"]):
            after = after[:place] + after[place + length :]
        return Change(file, before, None if record["created"] else after, removal=True)
    if file.suffix == ".toml":
        _check_toml(file, before)
        found = _BLOCK.search(before)
        return Change(file, before, before[: found.start()] + before[found.end() :] if found else before, removal=True)
    return _remove_from_json(file, before, record, ours)


def _remove_from_json(file: Path, before: str, record: dict[str, Any], ours: Sequence[Addition]) -> Change:
    text = before
    try:
        recorded = [Addition(tuple(path), value, item) for path, value, item in record.get("additions", ())]
        for one in recorded or [found for each in ours for found in _recognise(text, each)]:
            text = _apply(text, jsonc.cut(text, one.path, one.value, item=one.item))
        for path in sorted(record.get("made", ()), key=len, reverse=True):
            for empty in ("{}", "[]"):
                text = _apply(text, jsonc.cut(text, path, json.loads(empty), item=False))
        jsonc.parse(text)
        kept = [".".join(one.path) for one in recorded if _is_there(text, one)]
    except jsonc.Malformed as error:
        raise _refusal(file, error) from error
    return Change(file, before, text, kept=tuple(kept), removal=True)


def _is_there(text: str, one: Addition) -> bool:
    """Whether somebody's version of an addition is there: a member of its name, or an item with our command."""
    return bool(_recognise(text, one)) if one.item else _find(text, one.path) is not None


def _recognise(text: str, like: Addition) -> list[Addition]:
    """What is at the path and names our command."""
    found = _find(text, like.path)
    if found is None:
        return []
    word = " hook " if like.item else '"mcp"'
    values = found.value if like.item and found.mark == "[" else [found.value]
    told = [(value, json.dumps(value)) for value in values]
    return [Addition(like.path, value, like.item) for value, shown in told if "memstream" in shown and word in shown]


def _apply(text: str, cuts: Sequence[tuple[int, int]]) -> str:
    for start, end in cuts:
        text = text[:start] + text[end:]
    return text


def write(change: Change) -> None:
    """Makes a change, all or nothing. Raises InvalidRequest if the file has changed meanwhile, OSError."""
    if change.before == change.after and not change.removal:
        return
    target = change.file.resolve()  # a link stays one
    if _read(target) != change.before:
        raise InvalidRequest(f"{change.file} has changed meanwhile: try again")
    record = _record_file(change.file)
    if change.record:
        missing = [str(each) for each in target.parents if not each.exists()]
        directories = missing or change.record["directories"]
        _write_atomically(record, json.dumps(change.record | {"directories": directories}, indent=1))
    if change.after is None:
        target.unlink(missing_ok=True)
    elif change.after != change.before:
        _write_atomically(target, change.after)
    if change.removal:
        for directory in _load_record(change.file).get("directories", ()) if change.after is None else ():
            with contextlib.suppress(OSError):  # something else is in it
                Path(directory).rmdir()
        record.unlink(missing_ok=True)


def _write_atomically(file: Path, text: str) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    mode = stat.S_IMODE(file.stat().st_mode) if file.exists() else 0o600
    descriptor, name = tempfile.mkstemp(dir=file.parent, prefix=f".{file.name}.")
    try:
        with os.fdopen(descriptor, "wb") as made:
            made.write(text.encode())
            made.flush()
            os.fchmod(made.fileno(), mode)
            os.fsync(made.fileno())
        os.replace(name, file)
    except BaseException:
        os.unlink(name)
        raise


def _read(file: Path) -> str | None:
    try:
        return file.read_bytes().decode()
    except FileNotFoundError:
        return None
    except UnicodeDecodeError as error:
        raise InvalidRequest(f"{file} is not UTF-8: nothing is changed") from error


def _has(text: str, one: Addition) -> bool:
    found = _find(text, one.path)
    if found is None or one.default:
        return found is not None
    return bool(one.value in found.value if one.item and found.mark == "[" else found.value == one.value)


def _find(text: str, path: Sequence[str]) -> jsonc.Node | None:
    node: jsonc.Node | None = jsonc.parse(text)
    for key in path:
        node = node.find(key) if node is not None else None
    return node


def _record(
    file: Path, before: str | None, after: str, steps: list[tuple[int, int]], made: list[Addition]
) -> dict[str, Any]:
    """The record of an addition, with what was recorded of the file before."""
    earlier = _load_record(file) if before is not None else {}
    same = not earlier or earlier["after"] == _digest(before or "")
    paths = dict.fromkeys(one.path[:length] for one in made for length in range(1, len(one.path) + one.item))
    new = [list(path) for path in paths if before is None or _find(before, path) is None]
    return {
        "created": earlier.get("created", before is None),
        "after": _digest(after) if same else "",  # empty: somebody changed the file between two additions
        "steps": [*earlier.get("steps", ()), *steps],
        "additions": [*earlier.get("additions", ()), *([one.path, one.value, one.item] for one in made)],
        "made": [*earlier.get("made", ()), *new],
        "directories": earlier.get("directories", []),
    }


def _load_record(file: Path) -> dict[str, Any]:
    try:
        found: dict[str, Any] = json.loads(_record_file(file).read_text("utf-8"))
    except (OSError, ValueError):
        return {}
    return found


def _record_file(file: Path) -> Path:
    base = os.environ.get("XDG_STATE_HOME") or Path.home() / ".local/state"
    return Path(base) / "memstream/connect" / f"{hashlib.sha256(bytes(file.absolute())).hexdigest()[:24]}.json"


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def _check_toml(file: Path, text: str) -> None:
    try:
        tomllib.loads(text.replace("\r\n", "\n"))
    except tomllib.TOMLDecodeError as error:
        raise _refusal(file, error) from error


def _refusal(file: Path, error: Exception) -> InvalidRequest:
    return InvalidRequest(f"{file}: {error}; nothing is changed")
