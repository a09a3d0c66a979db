"""Work of an actor is done under what was current where it was asked for, and leaves nothing of it behind."""

from __future__ import annotations

import contextvars

import pytest

from memstream_server.engine.runtime.call_context import capture_origin, empty_origin, working_for

SAID = contextvars.ContextVar("SAID", default="nothing")


def test_what_was_current_there_is_current_here_meanwhile() -> None:
    token = SAID.set("there")
    origin = capture_origin()
    SAID.reset(token)
    with working_for(origin):
        assert SAID.get() == "there"
        with working_for(empty_origin()):
            assert SAID.get() == "there"
    assert SAID.get() == "nothing"


def test_it_is_left_when_the_work_fails() -> None:
    token = SAID.set("there")
    origin = capture_origin()
    SAID.reset(token)
    with pytest.raises(ValueError, match="work"), working_for(origin):
        raise ValueError("work")
    assert SAID.get() == "nothing"
