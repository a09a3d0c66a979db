"""API keys: `msk_ID_SECRET`, stored as the SHA-256 of the whole in a JSON file.

The secret has 256 random bits, so a plain hash cannot be reversed by search; the id is not secret and finds the entry.
"""

from __future__ import annotations

import fcntl
import hashlib
import hmac
import json
import os
import re
import secrets
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

from memstream_server.rpc.access.files import AccessError

PREFIX = "msk_"
_KEY = re.compile(r"msk_([0-9a-f]{12})_[A-Za-z0-9_-]{43}")
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._~@-]{0,127}")
_HASH = re.compile(r"[0-9a-f]{64}")


class NoSuchKey(AccessError):
    """The file has no key with that id."""


class InvalidKeyName(AccessError):
    """A key cannot have that name."""


@dataclass(frozen=True, slots=True)
class ApiKey:
    """A key as stored. Several keys may have one name: an operator creates a new key before revoking the old one."""

    id: str
    name: str
    """The principal is key:NAME."""
    sha256: str
    created: str
    """RFC 3339, UTC."""


def parse_keys(text: str) -> Mapping[str, ApiKey]:
    """Keys by id. Raises ValueError without repeating the text."""
    try:
        entries = json.loads(text)["keys"] if text.strip() else []
        keys = [ApiKey(**entry) for entry in entries]
        whole = all(_NAME.fullmatch(key.name) and _HASH.fullmatch(key.sha256) for key in keys)
        whole = whole and all(isinstance(entry["id"], str) for entry in entries)
    except (ValueError, KeyError, TypeError):
        whole = False
    if not whole:
        raise ValueError("is not a file written by `memstream keys`")
    return {key.id: key for key in keys}


def name_of(keys: Mapping[str, ApiKey], given: str) -> str | None:
    """The name of a presented key; None if it is none of these."""
    form = _KEY.fullmatch(given)
    known = keys.get(form[1]) if form else None
    if known is None or not hmac.compare_digest(_hash_secret(given), known.sha256):
        return None
    return known.name


def create_key(file: Path, name: str) -> tuple[ApiKey, str]:
    """Adds a new key to the file, which is created if missing. Returns the key itself, which cannot be shown again.

    Raises AccessError, InvalidKeyName.
    """
    if not _NAME.fullmatch(name):
        raise InvalidKeyName('a key\'s name is of letters, digits, "-", "_", ".", "~" and "@", at most 128')
    id = secrets.token_hex(6)
    given = f"{PREFIX}{id}_{secrets.token_urlsafe(32)}"
    key = ApiKey(id, name, _hash_secret(given), time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()))
    _rewrite_file(file, lambda keys: [*keys, key])
    return key, given


def revoke_key(file: Path, id: str) -> ApiKey:
    """Removes the key from the file. Raises AccessError, NoSuchKey."""
    gone: list[ApiKey] = []

    def without(keys: Sequence[ApiKey]) -> list[ApiKey]:
        gone.extend(key for key in keys if key.id == id)
        if not gone:
            raise NoSuchKey(f"{file} has no key {id!r}: `memstream keys list` shows their ids")
        return [key for key in keys if key.id != id]

    _rewrite_file(file, without)
    return gone[0]


def read_keys(file: Path) -> list[ApiKey]:
    """All keys, oldest first; none without a file. Raises AccessError."""
    try:
        return [*parse_keys(file.read_text(encoding="utf-8")).values()]
    except FileNotFoundError:
        return []
    except OSError as error:
        raise AccessError(f"cannot read {file}: {error.strerror}") from error
    except ValueError as error:
        raise AccessError(f"{file}: {error}") from error


def _rewrite_file(file: Path, changed: Callable[[Sequence[ApiKey]], list[ApiKey]]) -> None:
    """Rewrites the file atomically, under a lock."""
    try:
        with _lock_directory(file):
            text = json.dumps({"keys": [asdict(key) for key in changed(read_keys(file))]}, indent=1)
            part = file.with_name(f"{file.name}.part")
            mode = file.stat().st_mode & 0o777 if file.exists() else 0o600
            part.unlink(missing_ok=True)
            with os.fdopen(os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode), "w", encoding="utf-8") as out:
                out.write(text + "\n")
                out.flush()
                os.fsync(out.fileno())
            part.replace(file)
    except OSError as error:
        raise AccessError(f"cannot write {file}: {error.strerror}") from error


@contextmanager
def _lock_directory(file: Path) -> Iterator[None]:
    directory = os.open(file.absolute().parent, os.O_RDONLY)
    try:
        fcntl.flock(directory, fcntl.LOCK_EX)
        yield
    finally:
        os.close(directory)


def _hash_secret(given: str) -> str:
    return hashlib.sha256(given.encode()).hexdigest()
