"""The frames of an error are released along its causes, which may be a cycle."""

from __future__ import annotations

from memstream_server.rpc.calls import release_frames


def cycle() -> BaseException:
    first, second, third = ValueError("first"), KeyError("second"), OSError("third")
    first.__cause__, second.__context__, third.__cause__ = second, third, first
    return first


def raised(error: BaseException) -> BaseException:
    try:
        raise error
    except BaseException as caught:
        return caught


def test_frames_of_a_cycle_are_released() -> None:
    error = raised(cycle())
    assert error.__traceback__ is not None
    release_frames(error)
    assert error.__traceback__ is None


def test_frames_of_causes_and_contexts_are_released() -> None:
    cause, context = raised(KeyError("cause")), raised(OSError("context"))
    error = ValueError("last")
    error.__cause__, error.__context__ = cause, context
    release_frames(error)
    assert cause.__traceback__ is None
    assert context.__traceback__ is None
