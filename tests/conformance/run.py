"""The Python runner: `python -m tests.conformance.run golden|cases|secure ADDRESS FILE...`; the others work alike.

`golden` checks golden bytes, `cases` runs cases, `secure` connects to tests/toolchains/front.py with the TLS files of a
folder.

The runner prints one JSON object per line: `{"case": name, "wrong": text}`, with empty text for a success, and
`{"ask": what}`, after which it reads a line as confirmation. `cut` resets all connections, `kill` and `stop` end and
restart the server, `down` refuses connections until `up`, `away` for some seconds, `revoke` invalidates the oldest key.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import json
import sys
import uuid
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
from google.protobuf import descriptor_pool, json_format
from google.protobuf.message import Message
from google.rpc.error_details_pb2 import BadRequest, ErrorInfo
from google.rpc.status_pb2 import Status

from tests.conformance import clients
from tests.conformance.golden import message_of
from tests.conformance.matching import differs, filled, found

READ_S = 30.0
TRIES = 10
BROKEN = {"UNAVAILABLE", "INTERNAL", "UNKNOWN", "CANCELLED"}
Step = dict[str, Any]


REASON_LOST = "Internal error from Core"
"""grpc.aio's status of a call that ended during a write; it hides the server's status (grpc/grpc#36066)."""


class Wrong(Exception):
    """An answer differs from the case."""


class Lost(Exception):
    """gRPC lost the server's status: the case is repeated."""


def say(**what: object) -> None:
    print(json.dumps(what), flush=True)


def ask(what: str) -> None:
    """Asks for an action on the server or its connections and waits for it."""
    say(ask=what)
    if not sys.stdin.readline():
        raise Wrong("nobody answers")


def golden(file: Path) -> None:
    """Checks that golden bytes decode to their JSON, and that the JSON encodes to the same bytes."""
    content = json.loads(file.read_text("utf-8"))
    for entry in content["messages"]:
        message, data, wrong = message_of(entry["type"]), base64.b64decode(entry["bytes"]), ""
        message.ParseFromString(data)
        if json_format.MessageToDict(message) != entry["json"]:
            wrong = f"it is read as {json_format.MessageToJson(message)}"
        elif not same_bytes(message.SerializeToString(), data):
            wrong = "passed on, it has other bytes"
        elif content["contract"] != "future":
            again = json_format.ParseDict(entry["json"], message_of(entry["type"]))
            wrong = "" if same_bytes(again.SerializeToString(), data) else "it is written with other bytes"
        say(case=f"{content['contract']}: {entry['type']}: {entry['name']}", wrong=wrong)


def same_bytes(one: bytes, other: bytes) -> bool:
    """Whether two encodings are equal except for the order of fields, which differs between languages."""
    return sorted(one) == sorted(other)


def method_of(name: str) -> Any:
    """The descriptor of "Service/Method"."""
    service, _, method = name.partition("/")
    return descriptor_pool.Default().FindServiceByName(f"memstream.v1.{service}").methods_by_name[method]


class Case:
    """One case being run. Each stream has its own connection, so that a broken one does not affect the others."""

    def __init__(self, address: str) -> None:
        self._address = address
        self._calling = self._channel()
        self._kept = {"ns": f"c-{uuid.uuid4().hex[:12]}"}
        self._streams: dict[str, tuple[Any, Any]] = {}

    async def run(self, steps: list[Step]) -> None:
        for number, step in enumerate(steps, 1):
            try:
                await self._step(filled(step, self._kept))
            except Wrong as wrong:
                raise Wrong(f"step {number}: {wrong}") from None
        for call, _ in self._streams.values():
            call.cancel()

    def _channel(self) -> grpc.aio.Channel:
        return grpc.aio.insecure_channel(self._address, options=[("grpc.use_local_subchannel_pool", 1)])

    async def _step(self, step: Step) -> None:
        match step:
            case {"call": name}:
                await self._call(name, step)
            case {"open": stream, "stream": name}:
                self._streams[stream] = (self._begin(self._channel(), name, step), method_of(name))
            case {"send": stream}:
                await self._send(stream, step)
            case {"receive": stream, "message": message}:
                await self._receive(stream, message)
            case {"finish": stream}:
                await asyncio.wait_for(self._finish(stream, step.get("error")), READ_S)
            case {"cancel": stream}:
                self._streams.pop(stream)[0].cancel()
            case {"ask": what}:
                await asyncio.to_thread(ask, what)
                self._calling = self._channel()
            case {"client": _}:
                wrong = await clients.run(self._address, step, lambda what: asyncio.to_thread(ask, what))
                if wrong:
                    raise Wrong(wrong)

    def _begin(self, channel: grpc.aio.Channel, name: str, step: Step) -> Any:
        method = method_of(name)
        kind = f"{'stream' if method.client_streaming else 'unary'}_{'stream' if method.server_streaming else 'unary'}"
        make = getattr(channel, kind)(
            f"/{method.containing_service.full_name}/{method.name}",
            request_serializer=lambda message: message.SerializeToString(),
            response_deserializer=lambda data: _parsed(method.output_type.full_name, data),
        )
        options = {"metadata": tuple(step.get("metadata", {}).items()), "wait_for_ready": True}
        if kind == "stream_stream":
            return make(**options)
        return lambda request, **more: make(request, **options, **more)

    async def _call(self, name: str, step: Step) -> None:
        request = _request(name, step["request"], step)
        try:
            answer = await self._begin(self._calling, name, step)(request, timeout=step.get("timeoutS", READ_S))
        except grpc.aio.AioRpcError as error:
            _check_error(step.get("error"), error)
            return
        if "error" in step:
            raise Wrong(f"it did not fail, it answered {answer}")
        actual = json_format.MessageToDict(answer)
        if wrong := differs(step["answer"], actual):
            raise Wrong(wrong)
        self._kept |= {key: found(actual, path) for key, path in step.get("keep", {}).items()}

    async def _send(self, stream: str, step: Step) -> None:
        call, method = self._streams[stream]
        request = _request(f"{method.containing_service.name}/{method.name}", step["message"], step)
        if method.client_streaming:
            with contextlib.suppress(grpc.aio.AioRpcError, asyncio.InvalidStateError):  # the reader gets the error
                await call.write(request)
        else:
            self._streams[stream] = (call(request), method)

    async def _receive(self, stream: str, expected: Any) -> None:
        """Reads until a message matches."""
        seen: list[Any] = []
        call = self._streams[stream][0]
        try:
            async with asyncio.timeout(READ_S):
                while (message := await call.read()) is not grpc.aio.EOF:
                    seen.append(json_format.MessageToDict(message))
                    if not differs(expected, seen[-1]):
                        return
        except TimeoutError:
            raise Wrong(f"nothing came for {READ_S:.0f} s that is {expected}; before: {seen}") from None
        except grpc.aio.AioRpcError as error:
            raise Wrong(f"the stream ended: {error.code().name} {error.details()}; before: {seen}") from None
        raise Wrong(f"the stream ended; before: {seen}")

    async def _finish(self, stream: str, expected: Any) -> None:
        call, method = self._streams.pop(stream)
        try:
            if method.client_streaming and expected is None:
                await call.done_writing()
            while await call.read() is not grpc.aio.EOF:
                pass
        except grpc.aio.AioRpcError as error:
            _check_error(expected, error)
            return
        if expected is not None:
            raise Wrong("the stream ended without an error")


def _request(method: str, content: Any, step: Step) -> Message:
    """Builds a request; `unknown` (base64) appends fields of a later contract."""
    message = json_format.ParseDict(content, message_of(method_of(method).input_type.full_name))
    message.MergeFromString(base64.b64decode(step.get("unknown", "")))
    return message


def _parsed(name: str, data: bytes) -> Message:
    message = message_of(name)
    message.ParseFromString(data)
    return message


def _check_error(expected: Any, error: grpc.aio.AioRpcError) -> None:
    if expected is None:
        raise Wrong(f"it failed: {error.code().name} {error.details()}")
    actual: dict[str, Any] = {"code": error.code().name}
    if expected == {"broken": True}:
        if actual["code"] not in BROKEN:
            raise Wrong(f"it ended as {actual['code']}: {error.details()}")
        return
    if error.details() == REASON_LOST:
        raise Lost
    for key, value in error.trailing_metadata() or ():
        if key == "grpc-status-details-bin":
            for detail in Status.FromString(value if isinstance(value, bytes) else value.encode()).details:
                info, bad = ErrorInfo(), BadRequest()
                if detail.Unpack(info):
                    actual |= {"reason": info.reason, "details": dict(info.metadata)}
                if detail.Unpack(bad):
                    actual["violations"] = [each.field for each in bad.field_violations]
    if wrong := differs(expected, actual, "error"):
        raise Wrong(wrong)


async def cases(address: str, content: Any) -> None:
    """Runs each case of a file."""
    for case in content["cases"]:
        say(case=case["name"], wrong=await _wrong(address, case["steps"]))


async def _wrong(address: str, steps: list[Step]) -> str:
    """Runs a case and returns what was wrong, or an empty text."""
    for _ in range(TRIES):
        try:
            await Case(address).run(steps)
        except Wrong as raised:
            return str(raised)
        except Lost:
            continue
        return ""
    return f"grpc lost the server's status {TRIES} times"


def main() -> None:
    """Runs the files named on the command line."""
    what, address, *files = sys.argv[1:]
    if what == "secure":
        for case, wrong in asyncio.run(clients.secure(address, Path(files[0]))).items():
            say(case=case, wrong=wrong)
        return
    for file in map(Path, files):
        if what == "golden":
            golden(file)
        else:
            asyncio.run(cases(address, json.loads(file.read_text("utf-8"))))


if __name__ == "__main__":
    main()
