"""An HTTP server that answers like a recorded OpenAI-compatible server: tests/models/endpoints/*.json.

A recording has `refusals`, of which the first match is sent, and the bodies of successful replies with the placeholders
`$index`, `$embedding` and `$answer`. `sent` lists what a valid request of ours has in its body.
"""

from __future__ import annotations

import base64
import copy
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from aiohttp import web

from tests.support.local_http import Handler, LocalHttp

RECORDINGS = Path(__file__).parents[1] / "models" / "endpoints"
NAMES = sorted(path.stem for path in RECORDINGS.glob("*.json"))
DIMENSION = 8


def direction_of(text: str) -> np.ndarray[Any, np.dtype[np.float32]]:
    """The vector that the server returns for a text; not of unit length."""
    return np.random.default_rng(len(text)).normal(size=DIMENSION).astype("<f4")


def score_all(texts: list[str]) -> str:
    """A rating of 7 for each text of a question."""
    return json.dumps({"scores": [{"number": number, "score": 7} for number, _ in enumerate(texts, 1)]})


class RecordedEndpoint(LocalHttp):
    """The server. `answer` makes the model's reply from the texts it is asked about."""

    def __init__(self, name: str, answer: Callable[[list[str]], str] = score_all) -> None:
        super().__init__()
        self.recording: dict[str, Any] = json.loads((RECORDINGS / f"{name}.json").read_text(encoding="utf-8"))
        self.answer = answer
        self.requests: list[tuple[str, int, dict[str, Any]]] = []
        """Path, response status, and body of each request."""
        self.prompts: list[list[str]] = []
        """The texts of each answered chat request."""

    @property
    def base_url(self) -> str:
        """The URL that a user of that server would configure."""
        return self.address + str(self.recording["base_path"])

    @property
    def secrets(self) -> list[str]:
        """Values that must never be shown."""
        given = [self.recording.get("api_key", ""), *self.recording.get("headers", {}).values()]
        return [secret for secret in given if secret]

    def settings(self, prefix: str) -> dict[str, str]:
        """The server's settings for it; `prefix` is `embedding_` or `llm_`."""
        found = {f"{prefix}base_url": self.base_url}
        if key := self.recording.get("api_key"):
            found[f"{prefix}api_key"] = key
        for kind, mark in (("headers", ","), ("query", "&")):
            if pairs := self.recording.get(kind):
                found[f"{prefix}{kind}"] = mark.join(f"{name}={value}" for name, value in pairs.items())
        return found

    def routes(self) -> Mapping[str, Handler]:
        return {"/{path:.*}": self._reply}

    async def _reply(self, request: web.Request) -> web.Response:
        body = await request.json()
        refusal = next((one for one in self.recording["refusals"] if _matches(one["when"], request, body)), None)
        self.requests.append((request.path, 200 if refusal is None else refusal["status"], body))
        if refusal is None:
            return web.json_response(self._sound_reply(request, body))
        if "text" in refusal:
            return web.Response(status=refusal["status"], text=refusal["text"])
        key = request.headers.get("Authorization", "").removeprefix("Bearer ")
        text = json.dumps(refusal["body"]).replace("$path", request.path).replace("$key", key)
        return web.Response(status=refusal["status"], text=text, content_type="application/json")

    def _sound_reply(self, request: web.Request, body: dict[str, Any]) -> Any:
        if request.path.endswith("/embeddings"):
            return self._embeddings(body)
        texts = texts_of(body)
        self.prompts.append(texts)
        said = json.dumps(self.answer(texts))[1:-1]
        return json.loads(json.dumps(self.recording["chat"]["body"]).replace("$answer", said))

    def _embeddings(self, body: dict[str, Any]) -> Any:
        shape = self.recording["embeddings"]
        reply = copy.deepcopy(shape["body"])
        (item,) = reply["data"]
        packed = shape["base64"] and body.get("encoding_format") == "base64"
        reply["data"] = [
            {
                name: index if value == "$index" else _encode_vector(text, packed) if value == "$embedding" else value
                for name, value in item.items()
                if not (name == "index" and index == 0 and shape.get("omits_zero_index"))
            }
            for index, text in enumerate(body["input"])
        ]
        return reply


def texts_of(body: dict[str, Any]) -> list[str]:
    """The texts of a question: the JSON at the end of its last message."""
    content = body["messages"][-1]["content"]
    data = json.loads(content[content.index('{"') if content.startswith("{") else content.rindex("\n{") :])
    return [one["text"] if isinstance(one, dict) else one for one in data["texts"]]


def _encode_vector(text: str, packed: bool) -> Any:
    numbers = direction_of(text)
    return base64.b64encode(numbers.tobytes()).decode() if packed else numbers.tolist()


def _matches(when: dict[str, Any], request: web.Request, body: dict[str, Any]) -> bool:
    (kind, value), *_ = when.items()
    if kind == "path":
        return bool(request.path == value)
    if kind == "path_not":
        return request.path not in value
    if kind == "authorization_not":
        return bool(request.headers.get("Authorization") != value)
    if kind == "header_not":
        return any(request.headers.get(name) != wanted for name, wanted in value.items())
    if kind == "query_lacks":
        return value not in request.query
    if kind == "body_has":
        return value in body
    if kind == "role":
        return any(message["role"] == value for message in body.get("messages", []))
    if kind == "model":
        return bool(body.get("model") == value)
    if kind == "input":
        return any(value in text for text in body.get("input", []))
    if kind == "text":
        return any(value in str(message["content"]) for message in body.get("messages", []))
    raise AssertionError(f"a recording has the unknown condition {kind}")
