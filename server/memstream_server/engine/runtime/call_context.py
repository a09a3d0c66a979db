"""Where work comes from: an actor works for many calls, and its log lines and spans are those of the call at hand."""

from __future__ import annotations

import contextlib
import contextvars
from collections.abc import Iterator

Origin = contextvars.Context
"""What was current when work was asked for."""
here = contextvars.copy_context
"""The origin of what is asked for now."""
nowhere = contextvars.Context
"""The origin of what nobody asked for."""


@contextlib.contextmanager
def working_for(origin: Origin) -> Iterator[None]:
    """What was current there is current here meanwhile; to be left by the task that entered it."""
    tokens = [(variable, variable.set(value)) for variable, value in origin.items()]
    try:
        yield
    finally:
        for variable, token in tokens:
            variable.reset(token)
