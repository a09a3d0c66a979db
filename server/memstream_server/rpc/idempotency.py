"""Idempotency: a repeated mutation with the same request_id gets the first response while that is kept."""

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
    """Where responses are stored: the engine, or its conversations."""

    async def stored_answer(self, request: str) -> Answer | None:
        """The stored response to a request_id."""
        ...


@dataclass(frozen=True, slots=True)
class IdempotentCall(Generic[R]):
    """The identity of one mutation: namespace, rpc and the client's request_id."""

    request: Message
    key: str
    response_type: type[R]

    async def first_answer(self, answers: Answers) -> R | None:
        """The first response to this request_id. Raises RequestIdConflict if the first request was a different one."""
        stored = await answers.stored_answer(self.key)
        if stored is None:
            return None
        if not stored.digest:
            raise RequestIdConflict("this request came before, and what it was about was erased since")
        if stored.digest != self._digest_request():
            raise RequestIdConflict("this request_id was used with another request; use a new one for each request")
        return self.response_type.FromString(stored.response)

    def make_answer(self, response: R) -> Answer:
        """The response, to be stored in the transaction of the change."""
        return Answer(self.key, self._digest_request(), response.SerializeToString(), time.time_ns() // 1_000)

    def _digest_request(self) -> bytes:
        return digest_of(self.request.SerializeToString(deterministic=True))


def idempotent_call(
    request: Message, namespace: str, request_id: str, response_type: type[R]
) -> IdempotentCall[R] | None:
    """None if the client gave no request_id."""
    if not request_id:
        return None
    return IdempotentCall(request, "\n".join((namespace, request.DESCRIPTOR.name, request_id)), response_type)


async def first_answer(call: IdempotentCall[R] | None, answers: Answers) -> R | None:
    """The stored response, if the request is a repeat."""
    return None if call is None else await call.first_answer(answers)


def commit_with_answer(call: IdempotentCall[R] | None, response: Callable[[T], R]) -> Once[T] | None:
    """What the engine needs to commit the response together with the change."""
    return None if call is None else Once(call.key, lambda result: call.make_answer(response(result)))


async def respond_once(
    call: IdempotentCall[R] | None, answers: Answers, act: Callable[[], Awaitable[R]], *, try_first: bool = False
) -> R:
    """The first response if the request is a repeat, otherwise that of `act`.

    A repeat may overtake the original call after the client gave up on that. Then the engine refuses `act`, because the
    original has made the change or stored its response, and the response is available by then. With `try_first`, no
    answer is read before: for an `act` that is refused to every repeat.
    """
    if not try_first and (first := await first_answer(call, answers)) is not None:
        return first
    try:
        return await act()
    except EngineError:
        if (first := await first_answer(call, answers)) is not None:
            return first
        raise


def answer_from(call: IdempotentCall[R] | None, response: Callable[[T], R]) -> Callable[[T], Answer] | None:
    """What makes the response to store from the result of a change; None if the client gave no request_id."""
    return None if call is None else lambda result: call.make_answer(response(result))


async def respond_to_write(
    call: IdempotentCall[R] | None,
    answers: Answers,
    write: Callable[[Callable[[T], Answer] | None], Awaitable[T]],
    response: Callable[[T], R],
    *,
    in_slices: Callable[[T], Awaitable[R]] | None = None,
) -> R:
    """As `respond_once`, of a `write` that stores its result and the response together. `in_slices` makes the same
    response with pauses.
    """

    async def act() -> R:
        result = await write(answer_from(call, response))
        return response(result) if in_slices is None else await in_slices(result)

    return await respond_once(call, answers, act)


def answer_of(call: IdempotentCall[R] | None, response: Callable[[], R]) -> Answer | None:
    """The response to store, if repeats of the call are to get it."""
    return None if call is None else call.make_answer(response())
