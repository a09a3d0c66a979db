"""A small scripted OpenAI-compatible server: embeddings and chat completions, with faults on request.

    async with FakeOpenAI(dimension=8) as fake:
        fake.fail(Fault(status=429, headers={"retry-after": "1"}), Fault(body=b"no json"))
        fake.say("an insight")
        ...                       # a client with base_url=fake.base_url
        assert fake.embedded == [["first text"]]

Requests are answered in order of arrival. Each takes the next fault; when no faults are left, it gets a valid reply, as
a stream if requested. The request by which a server probes the endpoint's capabilities is answered separately
(`checks`), so that it takes no fault meant for another request.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import hashlib
import json
import re
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
from aiohttp import web

from tests.support.local_http import Handler, LocalHttp

JSON = dict[str, Any]
CHECKED = "The sky is blue."
"""What the question of what an endpoint takes is about. Not imported: this runs where no server is installed, too."""

_DAY = re.compile(r"^\[\d{1,2} \w+ \d{4}\] ")
"""The beginning of a fragment's indexed text."""


@dataclass(frozen=True, slots=True)
class Fault:
    """Replaces or alters one reply.

    `status` other than 200 gives an error body; `body` replaces the reply; `change` alters the valid reply's JSON;
    `delay_s` comes before any of them; `hang_up` closes the connection without an answer; `endless_s` sends spaces
    forever, with that pause after each 64 KiB.
    """

    status: int = 200
    headers: Mapping[str, str] = field(default_factory=dict)
    body: bytes | None = None
    change: Callable[[JSON], None] | None = None
    delay_s: float = 0.0
    hang_up: bool = False
    endless_s: float | None = None


SOUND = Fault()


@dataclass(frozen=True, slots=True)
class Seen:
    """One received request: path, JSON body, and the bearer token."""

    path: str
    body: JSON
    key: str


class FakeOpenAI(LocalHttp):
    """The server. Settings are plain attributes and may be changed while it runs."""

    def __init__(self, dimension: int = 8) -> None:
        super().__init__()
        self.dimension = dimension
        self.latency_s = 0.0
        """Delay before every reply."""
        self.refuses: Callable[[str], bool] = lambda text: not text
        """An embeddings request with such an input gets 400."""
        self.vector: Callable[[str], npt.NDArray[np.float32]] = self._vector
        """Vector for a text. The default is fixed per text, not of unit length, and ignores the date in front:
        otherwise the ranking would depend on the day of the run."""
        self.spoil: Callable[[JSON, JSON], None] = lambda body, reply: None
        """Alters every valid reply, by the request's body."""
        self.complete: Callable[[JSON], str] = lambda body: ""
        """Answer for a chat request's body once the answers given to `say` are used up."""
        self.seen: list[Seen] = []
        self.checks: list[Seen] = []
        """The capability probes."""
        self.in_flight = 0
        """Requests neither answered nor cancelled."""
        self.in_flight_max = 0
        self._faults: deque[Fault] = deque()
        self._now: Fault | None = None
        self._answers: deque[str] = deque()
        self._released = asyncio.Event()
        self._released.set()

    def fail(self, *faults: Fault) -> None:
        """Queue one fault for each of the next requests."""
        self._faults.extend(faults)

    def fail_now(self, fault: Fault) -> None:
        """Apply this fault to the request whose reply is being made."""
        self._now = fault

    def heal(self) -> None:
        """Drop the remaining faults."""
        self._faults.clear()

    def hold(self) -> None:
        """Answer nothing until `release`."""
        self._released.clear()

    def release(self) -> None:
        """Answer the requests held, and later ones at once."""
        self._released.set()

    def say(self, *answers: str) -> None:
        """Queue one answer for each of the next chat requests."""
        self._answers.extend(answers)

    @property
    def embedded(self) -> list[list[str]]:
        """The inputs of the embeddings requests so far, including failed ones."""
        return [list(each.body["input"]) for each in self.seen if each.path.endswith("/embeddings")]

    @property
    def base_url(self) -> str:
        """The URL of its API."""
        return f"{self.address}/v1"

    def routes(self) -> Mapping[str, Handler]:
        return {"/v1/embeddings": self._embeddings, "/v1/chat/completions": self._chat}

    async def _embeddings(self, request: web.Request) -> web.StreamResponse:
        return await self._handle_request(request, self._embedding_reply)

    async def _chat(self, request: web.Request) -> web.StreamResponse:
        return await self._handle_request(request, self._chat_reply)

    async def _handle_request(self, request: web.Request, reply: Callable[[JSON], JSON | None]) -> web.StreamResponse:
        body = await request.json()
        seen = Seen(request.path, body, request.headers.get("authorization", "").removeprefix("Bearer "))
        if CHECKED in str(body.get("messages")):
            self.checks.append(seen)
            return web.json_response(_make_completion(body, '{"weather": [false]}', len(self.checks)))
        self.seen.append(seen)
        fault = self._faults.popleft() if self._faults else SOUND
        self.in_flight += 1
        self.in_flight_max = max(self.in_flight_max, self.in_flight)
        try:
            await asyncio.sleep(self.latency_s + fault.delay_s)
            await self._released.wait()
            if fault.endless_s is not None:
                return await _send_endlessly(request, fault.endless_s)
            if (failed := self._fault_response(request, fault)) is not None:
                return failed
            made = reply(body)
            if made is not None:
                self.spoil(body, made)
            now, self._now = self._now, None
            if now is not None and (failed := self._fault_response(request, now)) is not None:
                return failed
            return self._sound_response(fault, made, streamed=bool(body.get("stream")))
        finally:
            self.in_flight -= 1

    def _fault_response(self, request: web.Request, fault: Fault) -> web.StreamResponse | None:
        if fault.hang_up and request.transport is not None:
            request.transport.abort()
        if fault.body is not None:
            return web.Response(
                status=fault.status, body=fault.body, headers=fault.headers, content_type="application/json"
            )
        if fault.status != 200 or fault.hang_up:
            return _error_response(fault.status, f"scripted {fault.status}", fault.headers)
        return None

    def _sound_response(self, fault: Fault, reply: JSON | None, *, streamed: bool) -> web.StreamResponse:
        if reply is None:
            return _error_response(400, "an input is refused", {})
        if fault.change is not None:
            fault.change(reply)
        if streamed:
            return web.Response(text=_stream_events(reply), content_type="text/event-stream", headers=fault.headers)
        return web.json_response(reply, headers=fault.headers)

    def _embedding_reply(self, body: JSON) -> JSON | None:
        texts = [body["input"]] if isinstance(body["input"], str) else list(body["input"])
        if any(self.refuses(text) for text in texts):
            return None
        packed = body.get("encoding_format") == "base64"
        data = [
            {"object": "embedding", "index": place, "embedding": _encode_vector(self.vector(text), packed)}
            for place, text in enumerate(texts)
        ]
        return {
            "object": "list",
            "model": body["model"],
            "data": data,
            "usage": {"prompt_tokens": 1, "total_tokens": 1},
        }

    def _chat_reply(self, body: JSON) -> JSON:
        answer = self._answers.popleft() if self._answers else self.complete(body)
        return _make_completion(body, answer, len(self.seen))

    def _vector(self, text: str) -> npt.NDArray[np.float32]:
        words = _DAY.sub("", text)
        seed = int.from_bytes(hashlib.blake2b(words.encode(), digest_size=8).digest(), "little")
        return np.random.default_rng(seed).normal(size=self.dimension).astype(np.float32)


def _make_completion(body: JSON, answer: str, number: int) -> JSON:
    return {
        "id": f"chat-{number}",
        "object": "chat.completion",
        "created": 0,
        "model": body["model"],
        "choices": [{"index": 0, "finish_reason": "stop", "message": {"role": "assistant", "content": answer}}],
        "usage": {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2},
    }


async def _send_endlessly(request: web.Request, pause_s: float) -> web.StreamResponse:
    response = web.StreamResponse(headers={"Content-Type": "application/json"})
    await response.prepare(request)
    with contextlib.suppress(ConnectionError):  # the client has disconnected
        while True:
            await response.write(b" " * (64 << 10))
            await asyncio.sleep(pause_s)
    return response


def _encode_vector(vector: npt.NDArray[np.float32], packed: bool) -> str | list[float]:
    return base64.b64encode(vector.astype("<f4").tobytes()).decode() if packed else vector.tolist()


def _stream_events(reply: JSON) -> str:
    """A completion as a stream: its whole text in one chunk, then the end."""
    deltas: list[JSON] = []
    for choice in reply["choices"]:
        said = {"role": choice["message"]["role"], "content": choice["message"]["content"]}
        deltas.append({"index": choice["index"], "delta": said, "finish_reason": None})
        deltas.append({"index": choice["index"], "delta": {}, "finish_reason": choice["finish_reason"]})
    head = {name: value for name, value in reply.items() if name not in ("choices", "usage")}
    chunks = [head | {"object": "chat.completion.chunk", "choices": [delta]} for delta in deltas]
    return "".join(f"data: {json.dumps(chunk)}\n\n" for chunk in chunks) + "data: [DONE]\n\n"


def _error_response(status: int, message: str, headers: Mapping[str, str]) -> web.Response:
    body = {"error": {"message": message, "type": "scripted", "code": None, "param": None}}
    return web.json_response(body, status=status, headers=headers)
