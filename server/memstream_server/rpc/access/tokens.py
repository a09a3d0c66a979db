"""JSON web tokens: fetches the issuer's public keys (JWKS) from a URL or file, and verifies tokens."""

from __future__ import annotations

import asyncio
import json
import time
import urllib.request
from http.client import HTTPException
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import jwt
import structlog

from memstream_server.rpc.access.files import AccessError, Watched
from memstream_server.rpc.errors import Unauthenticated
from memstream_server.settings import is_loopback

log = structlog.get_logger(__name__)

ALGORITHMS = frozenset({"RS256", "RS384", "RS512", "PS256", "PS384", "PS512", "ES256", "ES384", "ES512", "EdDSA"})
"""Asymmetric ones only: with a shared secret every verifier could also issue tokens."""
REFRESH_S = 300.0
"""Keys of a URL are fetched again after this time; calls use the old keys meanwhile."""
REFETCH_PAUSE_S = 3.0
"""Minimum time between two fetches when a token names an unknown key."""
FETCH_TIMEOUT_S = 5.0
LEEWAY_S = 30.0
"""Tolerated difference between the issuer's clock and the server's."""
_JWKS_BYTES_MAX = 1 << 20
_TOKEN_CHARS_MAX = 8_192
_KID_CHARS_MAX = 64
RSA_BITS_MIN = 2_048
"""Of RFC 7518; PyJWT only warns below it."""

_Keys = tuple[jwt.PyJWK, ...]


class JwtIdentities:
    """Verifies tokens of one issuer for one audience."""

    def __init__(self, jwks: str, issuer: str, audience: str) -> None:
        """`jwks` is an https URL (http on loopback), or a path. Raises AccessError for an invalid file."""
        self._issuer = issuer
        self._audience = audience
        self._remote = _RemoteKeys(jwks) if "://" in jwks else None
        self._file = None if self._remote else Watched(Path(jwks), _parse_keys)

    async def verify_subject(self, token: str) -> str:
        """The subject of a token; see `verify_claims`."""
        subject: str = (await self.verify_claims(token))["sub"]
        return subject

    async def verify_claims(self, token: str) -> dict[str, Any]:
        """The claims of a token that the issuer signed for this audience and that is valid now, with a subject. Raises
        Unauthenticated."""
        try:
            header = jwt.get_unverified_header(token) if len(token) <= _TOKEN_CHARS_MAX else {}
        except jwt.InvalidTokenError:
            header = {}
        algorithm = header.get("alg")
        if not isinstance(algorithm, str) or algorithm not in ALGORITHMS:  # a header may hold any JSON value
            raise Unauthenticated("the bearer token is neither an API key nor a JWT signed by an asymmetric key")
        key = await self._find_issuer_key(header.get("kid"))
        if key is None:
            raise Unauthenticated("the issuer of the JWT has no such key")
        return self._verify_token(token, key)

    def _verify_token(self, token: str, key: jwt.PyJWK) -> dict[str, Any]:
        try:
            claims: dict[str, Any] = jwt.decode(
                token,
                key,
                algorithms=[key.algorithm_name],
                audience=self._audience,
                issuer=self._issuer,
                leeway=LEEWAY_S,
                options={"require": ["exp", "iss", "aud", "sub"]},
            )
        except jwt.ExpiredSignatureError:
            raise Unauthenticated("the JWT has expired") from None
        except (jwt.InvalidAudienceError, jwt.InvalidIssuerError):
            raise Unauthenticated("the JWT is of another issuer, or for another audience") from None
        except jwt.PyJWTError:  # its text may repeat claims
            raise Unauthenticated("the JWT is not valid") from None
        if not isinstance(claims["sub"], str) or not claims["sub"]:
            raise Unauthenticated("the JWT has no subject")
        return claims

    async def _find_issuer_key(self, kid: object) -> jwt.PyJWK | None:
        if self._file is not None:
            return _find_key(self._file.read_current(), kid)
        assert self._remote is not None
        if (key := _find_key(self._remote.keys, kid)) is None:
            await self._remote.fetch_again()
            key = _find_key(self._remote.keys, kid)
        self._remote.refresh()
        return key


class _RemoteKeys:
    """The keys of a URL. The last fetched keys stay in use while the URL does not respond."""

    def __init__(self, url: str) -> None:
        if not _is_safe_url(url):
            raise AccessError(f"jwt_jwks is {url!r}: keys are taken over https, or from a file")
        self._url = url
        self._fetched_s = -REFETCH_PAUSE_S - REFRESH_S
        self._fetching: asyncio.Task[None] | None = None
        self._text = ""
        self.keys: _Keys | None = None

    async def fetch_again(self) -> None:
        """Fetches and waits, unless the last fetch is recent."""
        if self._fetching is not None or time.monotonic() - self._fetched_s >= REFETCH_PAUSE_S:
            await asyncio.shield(self._start_fetch())

    def refresh(self) -> None:
        """Fetches in the background if the last fetch is old."""
        if self._fetching is None and time.monotonic() - self._fetched_s >= REFRESH_S:
            self._start_fetch()

    def _start_fetch(self) -> asyncio.Task[None]:
        if self._fetching is None:
            self._fetching = asyncio.create_task(self._fetch())
        return self._fetching

    async def _fetch(self) -> None:
        try:
            text = await asyncio.to_thread(_download_text, self._url)
            if text != self._text:
                self.keys, self._text = _parse_keys(text), text
        except (OSError, HTTPException, ValueError) as error:
            log.warning("issuer_keys_unavailable", url=self._url, reason=error)
        finally:
            self._fetched_s = time.monotonic()
            self._fetching = None


def _find_key(keys: _Keys | None, kid: object) -> jwt.PyJWK | None:
    """The key with that id; a token without a key id means the only key."""
    if keys is None:
        return None
    if kid is None:
        return keys[0] if len(keys) == 1 else None
    return next((key for key in keys if key.key_id == kid), None)


def _download_text(url: str) -> str:
    with urllib.request.urlopen(url, timeout=FETCH_TIMEOUT_S) as answer:
        if not _is_safe_url(answer.geturl()):
            raise AccessError("was sent on to an address without TLS")
        text: bytes = answer.read(_JWKS_BYTES_MAX)
    return text.decode()


def _parse_keys(text: str) -> _Keys:
    """The keys that may verify tokens; the log names the others. Raises AccessError if none is left."""
    try:
        given = [each for each in json.loads(text)["keys"] if isinstance(each, dict)]
    except (KeyError, TypeError, json.JSONDecodeError):
        raise AccessError("is not a JSON web key set with usable keys") from None
    usable, unused = [], []
    for each in given:
        key = _parse_key(each)
        if isinstance(key, str):
            unused.append({"kid": str(each.get("kid"))[:_KID_CHARS_MAX], "reason": key})
        else:
            usable.append(key)
    if unused:
        log.warning("issuer_keys_unused", keys=unused)
    if not usable:
        reasons = ", ".join(sorted({each["reason"] for each in unused})) or "it is empty"
        raise AccessError(f"is not a JSON web key set with usable keys: {reasons}")
    return tuple(usable)


def _parse_key(given: dict[str, Any]) -> jwt.PyJWK | str:
    """The key, or why it must not verify tokens."""
    operations = given.get("key_ops", ["verify"])
    if given.get("use", "sig") != "sig" or not isinstance(operations, list) or "verify" not in operations:
        return "not for signatures"
    if "d" in given:
        return "a private key"
    try:
        key = jwt.PyJWK(given)
    except (jwt.PyJWTError, AttributeError, TypeError, ValueError):
        return "malformed, or of an unknown kind"
    if key.algorithm_name not in ALGORITHMS:
        return "not of an asymmetric algorithm"
    if key.key_type == "RSA" and key.key.key_size < RSA_BITS_MIN:
        return f"an RSA key of less than {RSA_BITS_MIN} bits"
    return key


def _is_safe_url(url: str) -> bool:
    parts = urlsplit(url)
    if parts.scheme == "https":
        return True
    return parts.scheme == "http" and is_loopback(parts.hostname or "")
