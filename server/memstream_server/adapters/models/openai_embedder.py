"""Embeddings from an OpenAI-compatible endpoint.

Rule 1. resilience.py handles retries, backoff and the deadline; endpoint.py finds the accepted request parts.
Rule 2. A malformed or oversized reply is a failed attempt, never a vector. Of a well-formed reply each usable vector is
kept; the texts of the others are sent again without these, in halves if no vector is usable.
Rule 3. Before the embedder refuses texts, it sends a harmless text: a misconfigured endpoint must not cost a memory its
vectors. If a text makes the endpoint fail (500, a malformed reply, an unusable vector) while the harmless one succeeds,
only that text is refused, not the texts in the same request.

Concurrent calls share requests (`Batches`); a single call is sent immediately.

Rule 4. At most `concurrency` requests are in flight; later calls wait. A request takes one text of each waiting call
in turn until it is full, so that a call with one text does not wait for a call with a thousand.
Rule 5. A refused request is split in halves until the refused texts are isolated. Texts without an answer in a
request that has others go together into another one. Both go first.
Rule 6. A call that ends early withdraws its unsent texts. A request is cancelled if all its callers have left and the
last one was cancelled. A failure of one request cancels no other: that one may be the probe of a circuit breaker, and
the circuit would stay open for as long as each call has texts for several requests.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
from collections import Counter, deque
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Generic, TypeAlias, TypeVar

import numpy as np
import numpy.typing as npt
import structlog

from memstream_server.adapters.models.endpoint import (
    Endpoint,
    EndpointClient,
    RequestPart,
    SingleFlight,
    negotiate_parts,
)
from memstream_server.adapters.models.resilience import (
    ForeignReplyError,
    MalformedError,
    MalformedReplyError,
    RefusedError,
    Resilience,
    ResilientCalls,
    StatusError,
    TransientError,
)
from memstream_server.ports.models import EmbeddingModel, ModelRefused, ModelUnavailable, Spent

T = TypeVar("T")


class _Call(Generic[T]):
    """The texts of one caller."""

    def __init__(self, texts: Sequence[str]) -> None:
        self.texts = texts
        self.waiting = deque(range(len(texts)))
        """Indices of the texts that were not sent yet."""
        self.answers: list[T | None] = [None] * len(texts)
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._left = len(texts)

    def set_answer(self, place: int, answer: T | None) -> None:
        self.answers[place] = answer
        self._left -= 1
        if not self._left and not self.done.done():
            self.done.set_result(None)


_Batch = list[tuple[_Call[T], int]]
"""The texts of one request, as (call, index in the call)."""


class Batches(Generic[T]):
    """A batcher as the module describes. Use from one event loop."""

    def __init__(
        self,
        ask: Callable[[list[str]], Awaitable[Sequence[T | None]]],
        *,
        texts_max: int,
        characters_max: int,
        concurrency: int,
    ) -> None:
        """`ask` sends one request and returns an answer per text, None without one. It raises RefusedError if there is
        none at all and a text may be the reason.

        A text longer than `characters_max` gets its own request.
        """
        self._ask = ask
        self._texts_max = texts_max
        self._characters_max = characters_max
        self._concurrency = concurrency
        self._calls: deque[_Call[T]] = deque()
        """Calls with unsent texts."""
        self._halves: deque[_Batch[T]] = deque()
        self._under_way: dict[asyncio.Task[None], _Batch[T]] = {}

    async def fetch_answers(self, texts: Sequence[str]) -> list[T | None]:
        """The answers, in order; None for a refused text. Raises what `ask` raises, except RefusedError."""
        call: _Call[T] = _Call(texts)
        if texts:
            self._calls.append(call)
            self._start_requests()
            try:
                await call.done
            except asyncio.CancelledError:
                self._withdraw_texts(call)
                self._cancel_abandoned_requests()
                raise
            except Exception:
                self._withdraw_texts(call)
                raise
        return call.answers

    async def close(self) -> None:
        """Cancel all requests; waiting callers get ModelUnavailable."""
        closing = ModelUnavailable("the server is going away")
        _fail_calls(self._calls, closing)
        for batch in (*self._halves, *self._under_way.values()):
            _fail_calls((call for call, _ in batch), closing)
        self._calls.clear()
        self._halves.clear()
        tasks = list(self._under_way)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _withdraw_texts(self, call: _Call[T]) -> None:
        """Withdraw the unsent texts of a call that is not complete."""
        if not call.done.cancel() and not call.done.cancelled():
            call.done.exception()  # mark as retrieved: a caller cancelled at the same moment never reads it
        if call in self._calls:
            self._calls.remove(call)

    def _cancel_abandoned_requests(self) -> None:
        for task, batch in self._under_way.items():
            if all(each.done.done() for each, _ in batch):
                task.cancel()

    def _start_requests(self) -> None:
        while len(self._under_way) < self._concurrency:
            batch = self._next_batch()
            if not batch:
                return
            task = asyncio.create_task(self._run_request(batch))
            self._under_way[task] = batch
            task.add_done_callback(self._end_request)

    def _end_request(self, task: asyncio.Task[None]) -> None:
        batch = self._under_way.pop(task)
        if task.cancelled():  # its callers have left, or from within `ask`
            _fail_calls((call for call, _ in batch), ModelUnavailable("the request was given up"))
        self._start_requests()

    def _next_batch(self) -> _Batch[T]:
        """The next request; empty if no texts wait."""
        while self._halves:
            half = [(call, place) for call, place in self._halves.popleft() if not call.done.done()]
            if half:
                return half
        return self._take_texts()

    def _take_texts(self) -> _Batch[T]:
        """One text of each waiting call, in turn, until the request is full."""
        batch: _Batch[T] = []
        room = self._characters_max
        while self._calls and len(batch) < self._texts_max:
            call = self._calls[0]
            room -= len(call.texts[call.waiting[0]])
            if batch and room < 0:
                break
            batch.append((self._calls.popleft(), call.waiting.popleft()))
            if call.waiting:
                self._calls.append(call)
        return batch

    async def _run_request(self, batch: _Batch[T]) -> None:
        try:
            answers = await self._ask([call.texts[place] for call, place in batch])
            self._set_answers(batch, answers)
        except RefusedError:
            self._set_answers(batch, [None] * len(batch))
        except Exception as error:  # passed to every caller with a text in the request
            _fail_calls((call for call, _ in batch), error)

    def _set_answers(self, batch: _Batch[T], answers: Sequence[T | None]) -> None:
        """Pass the answers on; texts without one are tried again with fewer others, and refused if they were alone."""
        again: _Batch[T] = []
        for (call, place), answer in zip(batch, answers, strict=True):
            if answer is not None or len(batch) == 1:
                call.set_answer(place, answer)
            else:
                again.append((call, place))
        if len(again) == len(batch):
            middle = len(batch) // 2
            self._halves.extend((batch[:middle], batch[middle:]))
        elif again:
            self._halves.append(again)


def _fail_calls(calls: Iterable[_Call[T]], error: Exception) -> None:
    for call in calls:
        if not call.done.done():
            call.done.set_exception(error)


log = structlog.get_logger(__name__)

Floats: TypeAlias = npt.NDArray[np.float32]
Read: TypeAlias = Floats | MalformedError
"""A vector of a reply, or why it is unusable."""
REPLY_BYTES_MAX = 32 << 20
"""64 vectors of 20,000 numbers as decimal text."""
_HARMLESS = "memory"
"""The text of the first request, which finds the dimension."""
_PACKED = RequestPart("encoding_format", ("encoding_format", "encoding format", "base64"))
"""Vectors as base64 of little-endian float32: a third of the bytes of decimal text."""


@dataclass(frozen=True, slots=True)
class OpenAIEmbedding:
    """Settings of the endpoint. `reading` has the scale of the model's cosines; its name and dimension are ignored."""

    model: str
    base_url: str
    api_key: str = field(default="", repr=False)
    """Empty for endpoints without authentication."""
    headers: Mapping[str, str] = field(default_factory=dict, repr=False)
    query: Mapping[str, str] = field(default_factory=dict, repr=False)
    dimensions: int | None = None
    """Requests shorter vectors, which only some models support."""
    batch_texts: int = 64
    batch_characters: int = 100_000
    input_characters: int = 8_000
    """Longer texts are truncated. 8,000 characters are 2,000 tokens of English, at most about 8,000 in any language."""
    concurrency: int = 4
    """Requests in flight."""
    timeout_s: float = 15.0
    """Per attempt."""
    resilience: Resilience = field(default_factory=Resilience)
    reading: EmbeddingModel = field(default_factory=lambda: EmbeddingModel(name="", dimension=0))


class OpenAIEmbedder:
    """ports.models.Embedder over HTTP. Use from one event loop."""

    def __init__(
        self,
        settings: OpenAIEmbedding,
        calls: ResilientCalls | None = None,
        spent: Callable[[float], None] | None = None,
        usage: Spent | None = None,
    ) -> None:
        """`spent` is called with the tokens of every reply that reports them; `usage` counts them, and requests."""
        self._settings = settings
        self._client = EndpointClient(
            Endpoint(settings.base_url, settings.api_key, settings.headers, settings.query, settings.timeout_s)
        )
        self._calls = calls or ResilientCalls(settings.resilience)
        self._batches: Batches[Floats] = Batches(
            self._request_vectors,
            texts_max=settings.batch_texts,
            characters_max=settings.batch_characters,
            concurrency=settings.concurrency,
        )
        self._asking, self._doubting = SingleFlight(self._ask_model), SingleFlight(self._embed_harmless)
        self._spent = spent
        self._usage = usage or Spent("embedder", settings.model)
        self._model: EmbeddingModel | None = None
        self._parts: frozenset[str] = frozenset()
        """Request parts that the endpoint accepts; valid once `_model` is known."""

    async def model(self) -> EmbeddingModel:
        """The space. The first call requests a vector for the dimension. Raises ModelUnavailable."""
        return self._model or await self._asking.join_run()

    async def embed(self, texts: Sequence[str], namespace: str = "") -> Floats:
        """(len(texts), dimension), rows of unit length.

        Raises ModelUnavailable, or ModelRefused with the indices of the texts that the model refuses permanently.
        """
        model = await self.model()
        found = await self._batches.fetch_answers([text[: self._settings.input_characters] for text in texts])
        refused = [place for place, vector in enumerate(found) if vector is None]
        if refused and len(refused) == len(texts):
            before = self._parts
            await self._doubting.join_run()
            if self._parts != before:  # another endpoint answers: the texts are not the reason
                raise ModelUnavailable("the endpoint takes other requests than it did")
        if refused:
            raise ModelRefused(f"{self._settings.model} refuses {len(refused)} of {len(texts)} texts", refused)
        vectors = [vector for vector in found if vector is not None]
        return np.stack(vectors) if vectors else np.zeros((0, model.dimension), np.float32)

    async def close(self) -> None:
        """Close the connections."""
        await self._asking.close()
        await self._doubting.close()
        await self._batches.close()
        await self._client.close()

    async def _ask_model(self) -> EmbeddingModel:
        dimension = len(await self._embed_harmless())
        self._model = replace(self._settings.reading, name=self._settings.model, dimension=dimension)
        return self._model

    async def _request_vectors(self, texts: list[str]) -> list[Floats | None]:
        """Unit vectors; None for a text without a usable one. Raises RefusedError if the texts, and not an outage, are
        the reason that there is none, and ModelUnavailable.
        """
        dimension = (await self.model()).dimension
        found = await self._try_request(texts, dimension)
        if any(vector is not None for vector in found):
            return found
        await self._doubting.join_run()
        if len(texts) > 1:
            raise RefusedError("the endpoint fails with these texts and no other")
        return await self._try_request(texts, dimension)

    async def _try_request(self, texts: list[str], dimension: int) -> list[Floats | None]:
        """As _request_vectors, without doubt about the texts; all None if they may be the reason of a failure."""
        try:
            return await self._calls.run(lambda: self._attempt_request(texts, dimension))
        except ModelUnavailable as error:
            if not _is_about_texts(error):
                raise
            return [None] * len(texts)

    async def _attempt_request(self, texts: list[str], dimension: int) -> list[Floats | None]:
        try:
            reply = await self._send_texts(texts, self._parts)
        except StatusError as error:
            raise error.translate_error() from error
        found = self._read_vectors(reply, len(texts), dimension)
        unusable = [one for one in found if isinstance(one, MalformedError)]
        if unusable:
            log.warning("embeddings_unusable", reason=unusable[0], texts=len(unusable), of=len(texts))
        return [None if isinstance(one, MalformedError) else one for one in found]

    async def _embed_harmless(self) -> Floats:
        """Embed a text that no model refuses, after negotiation. Raises ModelUnavailable."""
        try:
            return await self._calls.run(self._negotiate_parts)
        except RefusedError as error:
            raise ModelUnavailable(f"the endpoint refuses any input: {error}", summary=error.summary) from error

    async def _negotiate_parts(self) -> Floats:
        async def send_with_parts(parts: frozenset[str]) -> dict[str, Any]:
            return await self._send_texts([_HARMLESS], parts)

        dimension = None if self._model is None else self._model.dimension
        try:
            parts, reply = await negotiate_parts(send_with_parts, (_PACKED,))
            (found,) = self._read_vectors(reply, 1, dimension)
            if isinstance(found, MalformedError) and _PACKED.name in parts:  # some accept the part and send no bytes
                parts -= {_PACKED.name}
                (found,) = self._read_vectors(await send_with_parts(parts), 1, dimension)
        except StatusError as error:
            raise error.translate_error(harmless=True) from error
        except ForeignReplyError as error:
            raise TransientError(error.format_text(harmless=True), summary=error.summary) from error
        if isinstance(found, MalformedError):
            raise TransientError(f"malformed reply: {found}")
        self._parts = parts
        return found

    def _read_vectors(self, reply: Mapping[str, Any], count: int, dimension: int | None) -> list[Read]:
        try:
            found = parse_vectors(reply, count, dimension, self._count_tokens)
        except TransientError:
            self._usage.failed += 1
            raise
        if all(isinstance(one, MalformedError) for one in found):
            self._usage.failed += 1
        return found

    def _count_tokens(self, tokens: int) -> None:
        self._usage.prompt_tokens += tokens
        if self._spent is not None:
            self._spent(tokens)

    async def _send_texts(self, texts: list[str], parts: frozenset[str]) -> dict[str, Any]:
        body: dict[str, Any] = {"model": self._settings.model, "input": texts}
        if self._settings.dimensions is not None:
            body["dimensions"] = self._settings.dimensions
        if _PACKED.name in parts:
            body["encoding_format"] = "base64"
        self._usage.requests += 1
        try:
            return await self._client.post_json("/embeddings", body, "data", REPLY_BYTES_MAX)
        except BaseException as error:
            self._usage.failed += 1
            if isinstance(error, MalformedError):
                raise MalformedReplyError(f"malformed reply: {error}") from error
            raise


def _is_about_texts(error: ModelUnavailable) -> bool:
    """Whether the endpoint answered, and its texts may be why it failed: 500 without a further reason, or a reply that
    is malformed as a whole.
    """
    attempt = error.__cause__
    if isinstance(attempt, MalformedReplyError):
        return True
    status = None if attempt is None else attempt.__cause__
    return isinstance(status, StatusError) and status.status == 500


def parse_vectors(
    document: Mapping[str, Any], count: int, dimension: int | None, spent: Callable[[int], None] | None = None
) -> list[Read]:
    """The unit vectors of a reply in the order of the `count` texts; for a text without a usable one, the reason.

    Numbers are a list, or base64 of little-endian float32. Raises MalformedReplyError if there is no list of vectors.
    `spent` is called with the tokens if the reply reports them.
    """
    items = document.get("data")
    if not isinstance(items, list):
        raise MalformedReplyError("malformed reply: 'data' is no list")
    usage = document.get("usage")
    tokens = usage.get("prompt_tokens") if isinstance(usage, dict) else None
    if spent is not None and isinstance(tokens, int) and tokens > 0:
        spent(tokens)
    found: list[Read] = []
    for item in _order_items(items, count):
        try:
            found.append(_read_vector(item, dimension))
        except MalformedError as error:
            found.append(error)
    return found


def _order_items(items: Sequence[object], count: int) -> list[object]:
    """The item of each text; None for a text whose item is absent or not certain.

    Items without any `index` are in order. If exactly one item has none, its index is 0: endpoints based on protocol
    buffers omit zeros.
    """
    given = [_index_of(item) for item in items]
    if all(index is None for index in given):
        return list(items) if len(items) == count else [None] * count
    times = Counter(given)
    if len(items) == count and times[None] == 1 and not times[0]:
        given[given.index(None)], times[0] = 0, 1
    once = {index: item for index, item in zip(given, items, strict=True) if times[index] == 1}
    return [once.get(number) for number in range(count)]


def _index_of(item: object) -> int | None:
    """The item's index; -1, which is no text's, for one that is no whole number."""
    index = item.get("index") if isinstance(item, dict) else None
    return index if index is None or type(index) is int else -1


def _read_vector(item: object, dimension: int | None) -> Floats:
    """The unit vector of an item. Raises MalformedError."""
    if not isinstance(item, dict):
        raise MalformedError("there is no vector for a text")
    numbers = _read_numbers(item.get("embedding"))
    if not len(numbers) or (dimension or len(numbers)) != len(numbers):
        wanted = "" if dimension is None else f", not {dimension}"
        raise MalformedError(f"a vector of {len(numbers)} numbers came{wanted}")
    length = np.linalg.norm(numbers.astype(np.float64))
    if not np.isfinite(length):
        raise MalformedError("a vector has numbers that are not finite")
    if not length:
        raise MalformedError("a vector is zero")
    unit: Floats = (numbers / length).astype(np.float32)
    return unit


def _read_numbers(embedding: object) -> Floats:
    try:
        if isinstance(embedding, str):
            numbers = np.frombuffer(base64.b64decode(embedding, validate=True), "<f4")
        else:
            numbers = np.asarray(embedding, np.float32)
    except (ValueError, TypeError, OverflowError, binascii.Error) as error:
        raise MalformedError(f"a vector is no numbers: {type(error).__name__}") from error
    if numbers.ndim == 2 and len(numbers) == 1:  # some servers return a list of vectors per text
        numbers = numbers[0]
    if numbers.ndim != 1:
        raise MalformedError("a vector is no list of numbers")
    return numbers
