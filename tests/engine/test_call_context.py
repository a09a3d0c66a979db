"""An actor works in the context of the call that asked for the work, and leaves that context afterwards."""

from __future__ import annotations

import contextvars

import pytest

from memstream_server.engine.runtime.call_context import capture_origin, empty_origin, working_for

SAID = contextvars.ContextVar("SAID", default="nothing")


def test_work_runs_in_the_context_of_its_call() -> None:
    token = SAID.set("there")
    origin = capture_origin()
    SAID.reset(token)
    with working_for(origin):
        assert SAID.get() == "there"
        with working_for(empty_origin()):
            assert SAID.get() == "there"
    assert SAID.get() == "nothing"


def test_context_is_restored_when_the_work_fails() -> None:
    token = SAID.set("there")
    origin = capture_origin()
    SAID.reset(token)
    with pytest.raises(ValueError, match="work"), working_for(origin):
        raise ValueError("work")
    assert SAID.get() == "nothing"
