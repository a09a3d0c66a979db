"""Answers to repeats: a mutation with a request_id gets the first answer again, for as long as it is kept."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

from google.protobuf.message import Message

from memstream_server.engine.errors import EngineError, RequestIdConflict
from memstream_server.engine.requests import Once
from memstream_server.ports.journal.records import Answer
from memstream_server.rpc.wire.observations import digest_of

R = TypeVar("R", bound=Message)
T = TypeVar("T")


class Answers(Protocol):
    """Where answers are kept: the engine, or its conversations."""

    async def stored_answer(self, request: str) -> Answer | None:
        """The answer a request_id got before."""
        ...


@dataclass(frozen=True, slots=True)
class IdempotentCall(Generic[R]):
    """One mutation's identity: the namespace, the rpc and the client's request_id."""

    request: Message
    key: str
    response_type: type[R]

    async def first_answer(self, answers: Answers) -> R | None:
        """What this request_id was answered before. Raises RequestIdConflict when it was another request."""
        stored = await answers.stored_answer(self.key)
        if stored is None:
            return None
        if not stored.digest:
            raise RequestIdConflict("this request came before, and what it was about was erased since")
        if stored.digest != self._digest():
            raise RequestIdConflict("this request_id came before with another request; use a new one for each")
        return self.response_type.FromString(stored.response)

    def answer(self, response: R) -> Answer:
        """To be stored in the transaction that makes it true."""
        return Answer(self.key, self._digest(), response.SerializeToString(), time.time_ns() // 1_000)

    def _digest(self) -> bytes:
        return digest_of(self.request.SerializeToString(deterministic=True))


def idempotent_call(
    request: Message, namespace: str, request_id: str, response_type: type[R]
) -> IdempotentCall[R] | None:
    """None where the client gave no request_id."""
    if not request_id:
        return None
    return IdempotentCall(request, "\n".join((namespace, request.DESCRIPTOR.name, request_id)), response_type)


async def first_answer(call: IdempotentCall[R] | None, answers: Answers) -> R | None:
    """The stored answer, if this is a repeat."""
    return None if call is None else await call.first_answer(answers)


def commit_with_answer(call: IdempotentCall[R] | None, response: Callable[[T], R]) -> Once[T] | None:
    """What the engine needs to commit the call's answer with what it changes."""
    return None if call is None else Once(call.key, lambda result: call.answer(response(result)))


async def answered(call: IdempotentCall[R] | None, answers: Answers, act: Callable[[], Awaitable[R]]) -> R:
    """The first answer if this is a repeat, else that of `act`.

    A repeat may overtake the call it repeats, whose client gave up: then `act` is refused for what that call did, or
    because it was answered, and its answer is there by then.
    """
    if (first := await first_answer(call, answers)) is not None:
        return first
    try:
        return await act()
    except EngineError:
        if (first := await first_answer(call, answers)) is not None:
            return first
        raise


def answer_of(call: IdempotentCall[R] | None, response: Callable[[], R]) -> Answer | None:
    """The answer to store, if repeats of the call are to get it."""
    return None if call is None else call.answer(response())
