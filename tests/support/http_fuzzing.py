"""Generates hostile HTTP requests of any rpc: wrong JSON, envelopes, encodings, headers and HTTP itself.

The message is one of the gRPC fuzzer. What is made of it is wrong in one place, as a rule.
"""

from __future__ import annotations

import functools
import gzip
import json
import struct
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from google.protobuf import json_format
from google.protobuf.descriptor import MethodDescriptor
from google.protobuf.message import DecodeError
from google.protobuf.message_factory import GetMessageClass

from tests.access.calls import path_of
from tests.support.contract import METHODS
from tests.support.fuzzing import Fuzzer

VALUES: list[Any] = [
    *(None, True, 0, -1, 1.5, 2**31, 2**64, -(2**63) - 1, "", "x", "-1", "1e400", "NaN", "Infinity", [], {}),
    *([[]], {"a": {}}, [None], "2020-13-99T99:99:99Z", "0001-01-01T00:00:00Z", "99999999999999999s", "1.0000000001s"),
    *("=", "\x00", "\u202e", "!!!!", "A" * 30_000, "TIER_NOTHING", {"@type": "type.googleapis.com/google.rpc.Status"}),
]
RAW_VALUES = ["1e400", "NaN", "-Infinity", "9" * 5_000, "-0.0", "0x10", '"\\ud800"', '"\\x"', "[" * 400 + "]" * 400]
KINDS = ("application/json", "application/proto", "application/connect+json", "application/connect+proto")
KINDS += (
    "application/grpc-web",
    "application/grpc-web+proto",
    "application/grpc-web+json",
    "application/grpc-web-text",
)
WRONG_KINDS = ("", "text/plain", "application/grpc", "application/grpc+proto", "application/json; charset=utf-16")
WRONG_KINDS += ("application/connect+xml", "application/", "multipart/form-data; boundary=x", "a" * 500, "\xff/\xff")


@functools.cache
def make_bombs() -> tuple[bytes, bytes]:
    """50 MB of zeros in 50 KB, and JSON of 30 MB."""
    return gzip.compress(b"\0" * 50_000_000), gzip.compress(b'{"a":"' + b"x" * 30_000_000 + b'"}')


@dataclass(frozen=True)
class HostileRequest:
    """The bytes to send, and what is wrong with them."""

    method: MethodDescriptor
    wrong: str
    data: bytes
    whole: bool = True
    """Whether an answer can be expected before the connection ends."""


class HttpFuzzer:
    """Generates requests; the same seed gives the same ones."""

    def __init__(self, fuzzer: Fuzzer, host: str, token: str = "") -> None:
        self._fuzzer = fuzzer
        self._draw = fuzzer.draw
        self._host = host
        self._token = token
        self._left = list(METHODS)
        self._manners: list[Callable[[MethodDescriptor], HostileRequest]] = [
            self._of_message,
            self._of_message,
            self._of_json,
            self._of_json,
            self._of_envelope,
            self._of_encoding,
            self._of_headers,
            self._of_http,
        ]

    def request(self) -> HostileRequest:
        """Any rpc; every one at least once."""
        method = self._left.pop() if self._left else self._draw.choice(METHODS)
        return self._draw.choice(self._manners)(method)

    # ---- what is wrong
    def _of_message(self, method: MethodDescriptor) -> HostileRequest:
        kind = self._kind(method)
        return self._sound(method, "message", kind, self._fuzzer.requests(method)[0])

    def _of_json(self, method: MethodDescriptor) -> HostileRequest:
        text = self._spoiled_json(self._fuzzer.requests(method)[0], method)
        kind = "application/connect+json" if method.server_streaming else "application/json"
        body = _envelope(text) if method.server_streaming else text
        return HostileRequest(method, "json", self._post(method, kind, body))

    def _of_envelope(self, method: MethodDescriptor) -> HostileRequest:
        kind = self._draw.choice([each for each in (self._kind(method), *KINDS[4:]) if each not in KINDS[:2]])
        message = self._encode(kind, self._fuzzer.requests(method)[0], method)
        body = self._draw.choice(
            [
                b"",
                b"\0",
                message,
                _envelope(message)[: self._draw.randrange(5 + len(message))],
                struct.pack(">BI", 0, 2**32 - 1) + message,
                struct.pack(">BI", 0, max(0, len(message) - 1)) + message,
                _envelope(message, self._draw.choice([1, 2, 3, 0x80, 0xFF])),
                _envelope(message) * self._draw.choice([2, 50]),
                _envelope(b"") * 3,
                _envelope(message) + self._draw.randbytes(7),
            ]
        )
        return HostileRequest(method, "envelope", self._post(method, kind, body))

    def _of_encoding(self, method: MethodDescriptor) -> HostileRequest:
        kind = self._kind(method)
        message = self._encode(kind, self._fuzzer.requests(method)[0], method)
        squeezed = self._draw.choice([gzip.compress(message), *make_bombs(), gzip.compress(message)[:-4], message])
        encoding = self._draw.choice(
            ["gzip", "gzip", "gzip", "br", "zstd", "deflate", "identity", "gzip, gzip", "\xff"]
        )
        if kind.startswith("application/connect"):
            body, name = _envelope(squeezed, 1), "connect-content-encoding"
        elif kind.startswith("application/grpc"):
            body, name = _envelope(squeezed, 1), "grpc-encoding"
        else:
            body, name = squeezed, "content-encoding"
        return HostileRequest(method, f"{encoding!a} encoding", self._post(method, kind, body, (name, encoding)))

    def _of_headers(self, method: MethodDescriptor) -> HostileRequest:
        kind = self._draw.choice(KINDS + WRONG_KINDS)
        named = self._draw.choice(
            [
                ("connect-timeout-ms", self._draw.choice(["", "-1", "0", "1", "9" * 30, "x", "1.5", "99999999999"])),
                ("grpc-timeout", self._draw.choice(["", "1", "99999999H", "-1S", "1Q"])),
                ("connect-protocol-version", self._draw.choice(["", "2", "x"])),
                ("authorization", self._draw.choice(["", "Bearer", "Basic x", "Bearer " + "x" * 9_000, "Bearer \xff"])),
                ("anything-bin", self._draw.choice(["", "!!", "AAAA=", "\xff\xfe", "A" * 9_000])),
                ("grpc-status-details-bin", "AAAA"),
                ("memstream-memory", self._draw.choice(["", "x", "a/b/c", "\xff", "%" * 300])),
                ("memstream-caller", self._draw.choice(["", "key:root", "a.b"])),
                ("x-request-id", self._draw.choice(["", "\xff" * 10, "x" * 5_000])),
                ("host", self._draw.choice(["evil.example", "", "[", "127.0.0.1:99999999", "\xff"])),
                ("origin", self._draw.choice(["https://evil.example", "null", "\xff", "http://" + self._host])),
                ("accept-encoding", self._draw.choice(["gzip", "br", "*", "gzip;q=0", "\xff"])),
                ("traceparent", self._draw.choice(["", "zz", f"00-{'0' * 32}-{'0' * 16}-00"])),
                ("expect", "100-continue"),
            ]
        )
        message = self._fuzzer.requests(method)[0]
        body = self._body(method, kind if kind in KINDS else KINDS[0], message)
        return HostileRequest(method, f"header {named[0]}", self._post(method, kind, body, named))

    def _of_http(self, method: MethodDescriptor) -> HostileRequest:
        good = self._sound(method, "", "application/json", self._fuzzer.requests(method)[0]).data
        line = f"POST {path_of(method)} HTTP/1.1\r\n".encode()
        host = f"host: {self._host}\r\ncontent-type: application/json\r\n".encode()
        wrong, data, whole = self._draw.choice(
            [
                ("get", good.replace(b"POST ", b"GET ", 1), True),
                ("get with query", good.replace(b" HTTP/1.1", b"?message=%ff&encoding=json HTTP/1.1", 1), True),
                ("method", good.replace(b"POST ", b"M\x00VE ", 1), True),
                ("version", good.replace(b"HTTP/1.1", b"HTTP/9.9", 1), True),
                ("http/1.0", good.replace(b"HTTP/1.1", b"HTTP/1.0", 1), True),
                ("path", good.replace(path_of(method).encode(), b"/%ff/../..//\xc3", 1), True),
                (
                    "length and chunks",
                    line + host + b"content-length: 2\r\ntransfer-encoding: chunked\r\n\r\n{}",
                    False,
                ),
                ("two lengths", line + host + b"content-length: 2\r\ncontent-length: 3\r\n\r\n{}", True),
                ("negative length", line + host + b"content-length: -2\r\n\r\n{}", True),
                ("chunk size", line + host + b"transfer-encoding: chunked\r\n\r\nzz\r\n{}\r\n", False),
                ("huge chunk", line + host + b"transfer-encoding: chunked\r\n\r\nffffffffffff\r\n{}", False),
                ("half a body", line + host + b"content-length: 99\r\n\r\n{", False),
                ("large head", line + host + b"x: " + b"y" * 40_000 + b"\r\n\r\n", True),
                ("many headers", line + host + b"x: y\r\n" * 5_000 + b"content-length: 2\r\n\r\n{}", True),
                ("half a head", line + host[:-2], False),
                ("upgrade", good.replace(b"\r\n", b"\r\nconnection: upgrade\r\nupgrade: h2c\r\n", 1), True),
                ("http/2 preface", b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\0" * 30, True),
                ("pipeline", good * 5, True),
                ("noise", self._draw.randbytes(200) + b"\r\n\r\n", True),
            ]
        )
        return HostileRequest(method, wrong, data, whole)

    # ---- parts
    def _kind(self, method: MethodDescriptor) -> str:
        """A content type that the rpc takes, as a rule."""
        if self._draw.random() < 0.05:
            return self._draw.choice(KINDS)
        streams = method.server_streaming or method.client_streaming
        return self._draw.choice((KINDS[2:4] if streams else KINDS[:2]) + KINDS[4:7])

    def _sound(self, method: MethodDescriptor, wrong: str, kind: str, message: bytes) -> HostileRequest:
        return HostileRequest(method, wrong, self._post(method, kind, self._body(method, kind, message)))

    def _body(self, method: MethodDescriptor, kind: str, message: bytes) -> bytes:
        encoded = self._encode(kind, message, method)
        return encoded if kind in KINDS[:2] else _envelope(encoded)

    def _encode(self, kind: str, message: bytes, method: MethodDescriptor) -> bytes:
        if not kind.endswith("json"):
            return message
        return json.dumps(_as_dict(message, method)).encode()

    def _spoiled_json(self, message: bytes, method: MethodDescriptor) -> bytes:
        tree = _as_dict(message, method)
        places = _find_places(tree)
        if places and self._draw.random() < 0.8:
            holder, key = self._draw.choice(places)
            if self._draw.random() < 0.8:
                holder[key] = self._draw.choice(VALUES)
            elif isinstance(holder, dict):
                holder["noField"] = holder.pop(key)
        text = json.dumps(tree, ensure_ascii=self._draw.random() < 0.5)
        chance = self._draw.random()
        if chance < 0.25 and places:
            holder, key = self._draw.choice(_find_places(tree) or [(tree, "x")])
            holder[key] = "@@"
            text = json.dumps(tree).replace('"@@"', self._draw.choice(RAW_VALUES))
        data = text.encode("utf-8", "surrogatepass")
        if chance > 0.75:
            data = self._draw.choice(
                [
                    data[: self._draw.randrange(len(data) + 1)],
                    b"\xef\xbb\xbf" + data,
                    text.encode("utf-16", "surrogatepass"),
                    data.replace(b"a", b"\xff", 1),
                    data[:-1] + b"," + data[1:],
                    data + data,
                    b'{"a":' * 90 + b"1" + b"}" * 90,
                    b'{"filter":{"not":' * 60 + b"{}" + b"}}" * 60,
                    b"{" + b'"namespace":"ns",' * 3 + b'"memory":"m0"}',
                ]
            )
        return data

    def _post(self, method: MethodDescriptor, kind: str, body: bytes, *more: tuple[str, str]) -> bytes:
        headers = [("host", self._host), ("content-type", kind), ("content-length", str(len(body)))]
        if self._token:
            headers.append(("authorization", f"Bearer {self._token}"))
        if method.name == "RecallOnce":  # it may wait for a revision, for as long as the query says
            headers.append(("grpc-timeout", "1S") if "grpc-web" in kind else ("connect-timeout-ms", "1000"))
        given = {**dict(headers), **dict(more)}
        lines = [f"POST {path_of(method)} HTTP/1.1", *(f"{name}: {value}" for name, value in given.items())]
        return "\r\n".join([*lines, "", ""]).encode("latin-1") + body


def _envelope(message: bytes, flag: int = 0) -> bytes:
    return struct.pack(">BI", flag, len(message)) + message


def _as_dict(message: bytes, method: MethodDescriptor) -> dict[str, Any]:
    """The message as JSON; empty if it does not parse, or has no JSON form (a time out of range)."""
    try:
        parsed = GetMessageClass(method.input_type).FromString(message)
        found: dict[str, Any] = json_format.MessageToDict(parsed)
    except (DecodeError, ValueError, json_format.Error, UnicodeDecodeError):
        return {}
    return found


def _find_places(tree: Any) -> list[tuple[Any, Any]]:
    """Every value in a JSON tree, as its holder and its key or index."""
    keys = tree.keys() if isinstance(tree, dict) else range(len(tree)) if isinstance(tree, list) else ()
    return [place for key in list(keys) for place in [(tree, key), *_find_places(tree[key])]]
