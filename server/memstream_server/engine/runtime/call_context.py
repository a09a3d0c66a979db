"""The account, log and trace context of work: an actor serves many calls, and does each piece of work under the call
that asked for it.
"""

from __future__ import annotations

import contextlib
import contextvars
from collections.abc import Iterator
from itertools import count

PRINCIPAL: contextvars.ContextVar[str] = contextvars.ContextVar("memstream_principal", default="")
"""Who called; empty without authentication, and for the server's own work."""
Account = tuple[str, str]
"""(principal, namespace) that pays for work. Without authentication the connection is the principal."""
ACCOUNT: contextvars.ContextVar[Account | None] = contextvars.ContextVar("memstream_account", default=None)
"""None for work of the server that no call asked for."""
PAYER: contextvars.ContextVar[Account | None] = contextvars.ContextVar("memstream_payer", default=None)
"""Who pays for the writes of steps without an account."""
_numbers = count(1)


class Request:
    """A call, or one message of a stream: what the server has computed for it so far."""

    __slots__ = ("cost_s", "number")

    def __init__(self) -> None:
        self.cost_s = 0.0
        self.number = next(_numbers)
        """In order of arrival."""


REQUEST: contextvars.ContextVar[Request | None] = contextvars.ContextVar("memstream_request", default=None)
"""None for work of the server that no call asked for."""
Origin = contextvars.Context
"""The context variables at the time when the work was requested."""
capture_origin = contextvars.copy_context
"""Captures the origin of the current call."""
empty_origin = contextvars.Context
"""The origin of work that no call requested."""


def without_account() -> Origin:
    """The current context without its account, for a task whose steps must run in the order of their creation."""
    context = contextvars.copy_context()
    context.run(PAYER.set, ACCOUNT.get())
    context.run(ACCOUNT.set, None)
    return context


@contextlib.contextmanager
def paid_by(origin: Origin) -> Iterator[None]:
    """Set the account of `origin` for the duration of the block."""
    token = ACCOUNT.set(origin.get(ACCOUNT))
    try:
        yield
    finally:
        ACCOUNT.reset(token)


@contextlib.contextmanager
def working_for(origin: Origin) -> Iterator[None]:
    """Set the context variables of `origin` for the duration of the block. The task that enters the block must leave
    it.
    """
    tokens = [(variable, variable.set(value)) for variable, value in origin.items()]
    try:
        yield
    finally:
        for variable, token in tokens:
            variable.reset(token)
