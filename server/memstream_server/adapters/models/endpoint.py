"""Requests to an OpenAI-compatible endpoint through the `openai` package: URL, headers, size limits, and errors.

Rule 1. The client tries the base URL as given. If it does not serve the API (404, 405, or a reply of another
program), the client appends `/v1` once, and keeps the first URL that answers.
Rule 2. The package does not retry (resilience.py does), follows no redirect, and sends no headers of its own or from
its environment variables, because headers may be secrets. Reply bodies are read up to a limit.
Rule 3. Error texts contain neither credentials nor values of the query string.
"""

from __future__ import annotations

import asyncio
import functools
import re
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from typing import Any, Generic, TypeVar
from urllib.parse import SplitResult, parse_qsl, urlsplit

import httpx2
import openai
import structlog

from memstream_server.adapters.models.resilience import (
    ForeignReplyError,
    MalformedError,
    StatusError,
    TransientError,
    error_code,
    parsed_object,
    retry_after_s,
)
from memstream_server.core.printable import number_text
from memstream_server.ports.models import ModelUnavailable

log = structlog.get_logger(__name__)

EXCERPT_CHARACTERS_MAX = 300
_ERROR_BYTES_MAX = 64 << 10
_SECRET_CHARACTERS_MIN = 4
_PATHS = ("/embeddings", "/chat/completions")
"""Suffixes that are stripped from a base URL, in case the operator pasted a full address."""
_VERSION = re.compile(r"/v\d+\w*\Z")
_CREDENTIAL = re.compile(r"(?i:bearer\s+\S+)|\b(?:sk|rk|pk|gsk|xai|hf|AIza)[-_\w*]{6,}")
_MASK = "***"
_KEPT_HEADERS = frozenset({"host", "accept", "connection", "content-length", "content-type"})
"""Headers of the HTTP client that are sent unchanged."""
_reply_bytes_max: ContextVar[int] = ContextVar("reply_bytes_max")
Reply = TypeVar("Reply")
NEGOTIABLE = frozenset({400, 404, 405, 415, 422, 500, 501})
"""Statuses with which endpoints reject an unknown part."""


@dataclass(frozen=True, slots=True)
class Endpoint:
    """Address and credentials of a model endpoint. `repr` hides possible secrets."""

    base_url: str
    api_key: str = field(default="", repr=False)
    """Sent as a bearer token; empty for none."""
    headers: Mapping[str, str] = field(default_factory=dict, repr=False)
    query: Mapping[str, str] = field(default_factory=dict, repr=False)
    timeout_s: float = 15.0
    """Per request."""


@functools.cache
def _load_authorities() -> ssl.SSLContext:
    """The trusted authorities, once for all endpoints: loading them takes 30 ms of CPU and 0.8 MB."""
    return httpx2.create_ssl_context()


class EndpointClient:
    """A client of one endpoint. Use from one event loop."""

    def __init__(self, endpoint: Endpoint) -> None:
        self._endpoint = endpoint
        given = urlsplit(endpoint.base_url)
        self._query = {**dict(parse_qsl(given.query, keep_blank_values=True)), **endpoint.query}
        self._secrets = _secrets_of(endpoint, given, self._query)
        self._bases = _list_bases(given)
        self._base = self._bases[0] if len(self._bases) == 1 else None
        """The base URL in use; None until one has answered."""
        self._headers = httpx2.Headers({"User-Agent": f"memstream/{_package_version()}", "Accept-Encoding": "identity"})
        if endpoint.api_key:
            self._headers["Authorization"] = f"Bearer {endpoint.api_key}"
        self._headers.update(dict(endpoint.headers))
        self._openai = openai.AsyncOpenAI(
            api_key="unused",  # the request hook sets the header
            base_url=self._bases[0],
            max_retries=0,
            timeout=endpoint.timeout_s,
            http_client=httpx2.AsyncClient(
                timeout=endpoint.timeout_s,
                verify=_load_authorities(),
                follow_redirects=False,
                event_hooks={"request": [self._set_headers], "response": [_bound_reply]},
            ),
        )

    async def close(self) -> None:
        """Close the connections."""
        await self._openai.close()

    async def post_json(self, path: str, body: Mapping[str, Any], wanted: str, bytes_max: int) -> dict[str, Any]:
        """POST and return the reply's JSON object, which has the field `wanted`.

        Raises StatusError; ForeignReplyError for a reply of another form; TransientError without a reply; and
        MalformedError for a reply longer than `bytes_max`.
        """
        if self._base is not None:
            return await self._post_once(self._base + path, body, wanted, bytes_max)
        first: StatusError | ForeignReplyError | None = None
        for base in self._bases:
            try:
                reply = await self._post_once(base + path, body, wanted, bytes_max)
            except (StatusError, ForeignReplyError) as error:
                if isinstance(error, StatusError) and error.status not in (404, 405):
                    raise
                first = _join_errors(first, error)
            else:
                self._base = base
                log.info("model_endpoint_found", url=self.mask_url(base + path))
                return reply
        assert first is not None, "there is an address to try"
        raise first

    def mask_url(self, url: str) -> str:
        """A URL for error texts: without credentials, and without the values of the query string."""
        parts = urlsplit(url)
        query = "&".join(f"{name}={_MASK}" for name in self._query)
        host = parts.netloc.rpartition("@")[2]
        return self.mask_text(f"{parts.scheme}://{host}{parts.path}{f'?{query}' if query else ''}")

    def mask_text(self, text: str) -> str:
        """The beginning of a text on one line, without credentials and control characters."""
        for secret in self._secrets:
            text = text.replace(secret, _MASK)
        line = " ".join(_CREDENTIAL.sub(_MASK, text).split())
        shown = "".join(one if one.isprintable() else "?" for one in line[: EXCERPT_CHARACTERS_MAX + 1])
        return shown if len(shown) <= EXCERPT_CHARACTERS_MAX else f"{shown[:EXCERPT_CHARACTERS_MAX]}…"

    async def _set_headers(self, request: httpx2.Request) -> None:
        for name in set(request.headers) - _KEPT_HEADERS:
            del request.headers[name]
        request.headers.update(self._headers)

    async def _post_once(self, url: str, body: Mapping[str, Any], wanted: str, bytes_max: int) -> dict[str, Any]:
        shown = self.mask_url(url)
        bound = _reply_bytes_max.set(bytes_max)
        try:
            reply = await self._openai.post(
                url, cast_to=httpx2.Response, body=body, options={"params": self._query} if self._query else {}
            )
        except openai.APIStatusError as error:
            raise self._status_error(shown, error.response) from None
        except openai.APITimeoutError as error:
            within = f"within {number_text(self._endpoint.timeout_s)} s"
            raise TransientError(f"{shown} does not answer {within}", summary=f"no answer {within}") from error
        except (openai.APIConnectionError, httpx2.HTTPError, httpx2.InvalidURL) as error:
            raise self._connection_error(shown, error.__cause__ or error) from error
        finally:
            _reply_bytes_max.reset(bound)
        return self._read_reply(shown, reply.content, wanted)

    def _connection_error(self, shown: str, error: BaseException) -> Exception:
        if isinstance(error, MalformedError):
            return error
        if isinstance(error, httpx2.InvalidURL):
            return TransientError(f"{shown} is no URL", summary="the address is no URL")
        kind = type(error).__name__
        said = self.mask_text(str(error))
        return TransientError(
            f"{shown} does not answer: {kind}{f' ({said})' if said else ''}", summary=f"no answer ({kind})"
        )

    def _status_error(self, shown: str, response: httpx2.Response) -> StatusError:
        excerpt = self._body_excerpt(response.content)
        if 300 <= response.status_code < 400:  # not followed: that would send our headers to that address
            excerpt = f"a redirect to {self.mask_text(response.headers.get('location', '').partition('?')[0])}"
        return StatusError(
            response.status_code,
            shown,
            code=error_code(response.content),
            excerpt=excerpt,
            retry_after_s=retry_after_s(response.headers),
        )

    def _read_reply(self, shown: str, body: bytes, wanted: str) -> dict[str, Any]:
        try:
            document = parsed_object(body)
        except MalformedError as error:
            raise ForeignReplyError(shown, "no JSON", self._body_excerpt(body)) from error
        if isinstance(document, dict) and wanted in document:
            return document
        said = document.get("error") if isinstance(document, dict) else None
        status = said.get("code") if isinstance(said, dict) else None
        if isinstance(status, int) and 400 <= status < 600:  # some gateways send 200 with the status in the body
            raise StatusError(status, shown, code=error_code(body), excerpt=self._body_excerpt(body))
        raise ForeignReplyError(shown, "an error" if said else f"no {wanted!r} in it", self._body_excerpt(body))

    def _body_excerpt(self, body: bytes) -> str:
        return self.mask_text(body[: 4 * EXCERPT_CHARACTERS_MAX].decode(errors="replace"))


def _join_errors(
    first: StatusError | ForeignReplyError | None, error: StatusError | ForeignReplyError
) -> StatusError | ForeignReplyError:
    """Both errors as one. A status is more specific than a reply of another program."""
    if first is None:
        return error
    if isinstance(first, StatusError):
        first.also = error
        return first
    if isinstance(error, StatusError):
        error.also = first
        return error
    first.also = error
    return first


def _list_bases(given: SplitResult) -> tuple[str, ...]:
    """The base URLs to try, in order, without trailing slashes."""
    path = given.path.rstrip("/")
    for ending in _PATHS:
        path = path.removesuffix(ending)
    base = f"{given.scheme}://{given.netloc}{path.rstrip('/')}"
    return (base,) if _VERSION.search(path) else (base, f"{base}/v1")


def _secrets_of(endpoint: Endpoint, given: SplitResult, query: Mapping[str, str]) -> tuple[str, ...]:
    """The secrets of an endpoint, longest first, because one may contain another."""
    values = [endpoint.api_key, given.password or "", *query.values()]
    for value in endpoint.headers.values():
        values += [value, *value.split()]
    return tuple(sorted({each for each in values if len(each) >= _SECRET_CHARACTERS_MIN}, key=len, reverse=True))


async def _bound_reply(response: httpx2.Response) -> None:
    """Limit the body of a reply; truncate the body of an error."""
    if response.headers.get("content-encoding", "identity").lower() != "identity":
        raise MalformedError("compressed, although the request did not allow it")
    stream = response.stream
    assert isinstance(stream, httpx2.AsyncByteStream), "the client is asynchronous"
    response.stream = _BoundedStream(stream, _reply_bytes_max.get(), cut=not response.is_success)


class _BoundedStream(httpx2.AsyncByteStream):
    """A body of at most `bytes_max` bytes. A longer one raises MalformedError, or is truncated to _ERROR_BYTES_MAX."""

    def __init__(self, stream: httpx2.AsyncByteStream, bytes_max: int, *, cut: bool) -> None:
        self._stream = stream
        self._left = _ERROR_BYTES_MAX if cut else bytes_max
        self._bytes_max = bytes_max
        self._cut = cut

    async def __aiter__(self) -> AsyncIterator[bytes]:
        async for part in self._stream:
            self._left -= len(part)
            if self._left < 0 and not self._cut:
                raise MalformedError(f"longer than {self._bytes_max} bytes")
            yield part
            if self._left <= 0 and self._cut:
                return

    async def aclose(self) -> None:
        await self._stream.aclose()


def _package_version() -> str:
    try:
        return version("memstream")
    except PackageNotFoundError:  # running from a source tree that is not installed
        return "unknown"


@dataclass(frozen=True, slots=True)
class RequestPart:
    """An optional part of a request, and the words that name it in errors."""

    name: str
    words: tuple[str, ...] = ()

    def named_in(self, error: StatusError) -> bool:
        """Whether the error is about this part."""
        said = error.excerpt if error.also is None else f"{error.excerpt} {error.also.excerpt}"
        return any(word in said.lower() for word in self.words)


Send = Callable[[frozenset[str]], Awaitable[Reply]]
"""Sends one request with the parts of these names."""


async def negotiate_parts(send: Send[Reply], parts: Sequence[RequestPart]) -> tuple[frozenset[str], Reply]:
    """Find which optional parts of a request an endpoint accepts, once, with harmless requests: the names of the parts
    that it accepts together, and its last reply.

    Rule 1. Parts are dropped one by one until a request succeeds, beginning with those that the error names. Each
    dropped part is then tried again, unless the last failed request rejected it as invalid (4xx): an outage (500) in
    between, or the rejection of another part, drops no part permanently.
    Rule 2. At most 1 + 2 x len(parts) requests. They contain no text of a memory, so that no tenant's words influence
    the requests of others.

    Raises the first StatusError if the endpoint rejects the request without any part, and whatever else `send` raises.
    """
    taken = {part.name: part for part in parts}
    left_out: list[tuple[RequestPart, StatusError]] = []
    while True:
        try:
            reply = await send(frozenset(taken))
        except StatusError as error:
            if error.status not in NEGOTIABLE or not taken:
                raise left_out[0][1] if left_out and error.status in NEGOTIABLE else error from None
            # Many endpoints name no part: then the first goes, which is tried again below if another one was the cause.
            part = next((one for one in taken.values() if one.named_in(error)), next(iter(taken.values())))
            left_out.append((part, error))
            del taken[part.name]
        else:
            break
    for place, (part, refusal) in enumerate(reversed(left_out)):
        if place == 0 and refusal.status < 500:  # all that changed until the success was this part: it was the cause
            continue
        try:
            reply = await send(frozenset({*taken, part.name}))
        except StatusError as again:
            if again.status not in NEGOTIABLE:
                raise
        else:
            taken[part.name] = part
    return frozenset(taken), reply


T = TypeVar("T")


class SingleFlight(Generic[T]):
    """One run at a time: callers during a run share its result or error. Use from one event loop."""

    def __init__(self, work: Callable[[], Awaitable[T]]) -> None:
        self._work = work
        self._run: asyncio.Task[T] | None = None

    async def join_run(self) -> T:
        """The result of the current run, or of a new one. The cancellation of one caller does not affect the others."""
        if self._run is None:
            self._run = asyncio.create_task(self._run_work())
            self._run.add_done_callback(self._end_run)
        run = self._run
        await asyncio.wait({run})
        if run.cancelled():
            raise ModelUnavailable("the server is stopping")
        return run.result()

    async def close(self) -> None:
        """Cancel the current run."""
        if self._run is not None:
            self._run.cancel()
            await asyncio.gather(self._run, return_exceptions=True)

    async def _run_work(self) -> T:
        return await self._work()

    def _end_run(self, run: asyncio.Task[T]) -> None:
        self._run = None
        if not run.cancelled():
            run.exception()  # mark as retrieved: all callers may have been cancelled
