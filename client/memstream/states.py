"""State documents of an app, a user or a session: read, written, deleted."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from enum import StrEnum

from memstream.channel import Link, new_request_id
from memstream.v1 import conversation_service_pb2 as pb
from memstream.wiretypes import members_by_number, optional_timestamp_from_wire


class StateScope(StrEnum):
    """To what a state document belongs."""

    APP = "app"
    USER = "user"
    SESSION = "session"


_SCOPES = {scope: number for number, scope in members_by_number(StateScope, pb.StateScope.DESCRIPTOR).items()}


@dataclass(frozen=True, slots=True)
class State:
    """A state document: JSON as text; `etag` changes with every write."""

    document: str
    etag: str
    update_time: datetime | None


def scope_to_wire(scope: StateScope) -> pb.StateScope.ValueType:
    """Converts a scope."""
    return pb.StateScope.ValueType(_SCOPES[scope])


def state_from_wire(wire: pb.State, document: str | None = None) -> State:
    """Converts a state; `document` is what was written, which the answer does not have."""
    text = wire.document if document is None else document
    return State(text, wire.etag, optional_timestamp_from_wire(wire.update_time, wire.HasField("update_time")))


async def get_state(link: Link, namespace: str, scope: StateScope, name: str) -> State:
    """Reads a state document."""
    request = pb.GetStateRequest(namespace=namespace, scope=scope_to_wire(scope), name=name)
    return state_from_wire((await link.call(link.conversations.GetState, request)).state)


async def delete_state(link: Link, namespace: str, scope: StateScope, name: str) -> bool:
    """Deletes a state document."""
    request = pb.DeleteStateRequest(
        namespace=namespace, scope=scope_to_wire(scope), name=name, request_id=new_request_id()
    )
    return (await link.call(link.conversations.DeleteState, request)).deleted
