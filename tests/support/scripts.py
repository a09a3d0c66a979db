"""Scripts for ScriptedServer's connections, and statuses as a memstream server makes them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass

import grpc
from google.protobuf.duration_pb2 import Duration
from google.rpc.error_details_pb2 import BadRequest, ErrorInfo, RetryInfo
from google.rpc.status_pb2 import Status


@dataclass
class Plan:
    """What happens to one connection; the default is normal operation."""

    refuse: Status | None = None
    drop_after: int | None = None  # disconnect after journaling this many items, before acknowledging
    drop_status: grpc.StatusCode = grpc.StatusCode.UNAVAILABLE
    end_after: int | None = None  # the same, but end with OK and no `closed`
    going_away_after: int | None = None
    throttle_s: float = 0.0
    double_acks: bool = False
    drop_at_close: bool = False


def status(code: grpc.StatusCode, reason: str, retry_s: float | None = None, field: str = "", **details: str) -> Status:
    """A google.rpc.Status as a memstream server makes it."""
    made = Status(code=code.value[0], message=f"scripted {reason}")
    made.details.add().Pack(ErrorInfo(reason=reason, domain="memstream.dev", metadata=details))
    if retry_s is not None:
        made.details.add().Pack(RetryInfo(retry_delay=duration(retry_s)))
    if field:
        violation = BadRequest.FieldViolation(field=field, description="scripted")
        made.details.add().Pack(BadRequest(field_violations=[violation]))
    return made


async def until(condition: Callable[[], bool]) -> None:
    """Poll a condition for at most 30 s, which only a failure takes. Raises AssertionError."""
    for _ in range(3_000):
        if condition():
            return
        await asyncio.sleep(0.01)
    raise AssertionError("the condition was not met in time")


def duration(seconds: float) -> Duration:
    """Seconds as a protobuf Duration."""
    made = Duration()
    made.FromNanoseconds(int(seconds * 1e9))
    return made
