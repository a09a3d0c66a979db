"""The log and trace context of work: an actor serves many calls, and logs each piece of work under the call that asked
for it.
"""

from __future__ import annotations

import contextlib
import contextvars
from collections.abc import Iterator

PRINCIPAL: contextvars.ContextVar[str] = contextvars.ContextVar("memstream_principal", default="")
"""Who called; empty without authentication, and for the server's own work."""
Origin = contextvars.Context
"""The context variables at the time when the work was requested."""
capture_origin = contextvars.copy_context
"""Captures the origin of the current call."""
empty_origin = contextvars.Context
"""The origin of work that no call requested."""


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
