"""Answers to repeats: a mutation with a request_id gets the first answer again, for as long as it is kept."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Generic, TypeVar

from google.protobuf.message import Message

from memstream_server.engine.errors import RequestIdConflict
from memstream_server.ports.journal import Answer
from memstream_server.rpc.wire.observations import digest_of

if TYPE_CHECKING:
    from memstream_server.engine.engine import Engine

R = TypeVar("R", bound=Message)


@dataclass(frozen=True, slots=True)
class Repeatable(Generic[R]):
    """One mutation's identity: the namespace, the rpc and the client's request_id."""

    request: Message
    key: str
    response_type: type[R]

    async def first_answer(self, engine: Engine) -> R | None:
        """What this request_id was answered before. Raises RequestIdConflict when it was another request."""
        stored = await engine.stored_answer(self.key)
        if stored is None:
            return None
        if stored.digest != self._digest():
            raise RequestIdConflict("this request_id came before with another request; use a new one for each")
        return self.response_type.FromString(stored.response)

    def answer(self, response: R) -> Answer:
        """To be stored in the transaction that makes it true."""
        return Answer(self.key, self._digest(), response.SerializeToString(), time.time_ns() // 1_000)

    def _digest(self) -> bytes:
        return digest_of(self.request.SerializeToString(deterministic=True))


def repeatable(request: Message, namespace: str, request_id: str, response_type: type[R]) -> Repeatable[R] | None:
    """None where the client gave no request_id."""
    if not request_id:
        return None
    return Repeatable(request, "\n".join((namespace, request.DESCRIPTOR.name, request_id)), response_type)


async def first_answer(call: Repeatable[R] | None, engine: Engine) -> R | None:
    """The stored answer, if this is a repeat."""
    return None if call is None else await call.first_answer(engine)


def answer_of(call: Repeatable[R] | None, response: Callable[[], R]) -> Answer | None:
    """The answer to store, if repeats of the call are to get it."""
    return None if call is None else call.answer(response())
