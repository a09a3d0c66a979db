"""State documents of an app, a user or a session: read, written, deleted."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from enum import StrEnum

from memstream.argument_types import Items
from memstream.arguments import check_fields, checked_items
from memstream.channel import Link, new_request_id
from memstream.v1 import conversation_service_pb2 as pb
from memstream.wiretypes import members_by_number, optional_timestamp_from_wire


class StateScope(StrEnum):
    """To what a state document belongs."""

    APP = "app"
    USER = "user"
    SESSION = "session"


_MEMBERS = members_by_number(StateScope, pb.StateScope.DESCRIPTOR)
_SCOPES = {scope: number for number, scope in _MEMBERS.items()}
_KEYS_MAX = 1_000
"""Of one call."""


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


@check_fields
@dataclass(frozen=True, slots=True)
class StateKey:
    """A state document of a namespace by its place."""

    scope: StateScope
    name: str


async def get_state(link: Link, namespace: str, scope: StateScope, name: str) -> State:
    """Reads a state document."""
    request = pb.GetStateRequest(namespace=namespace, scope=scope_to_wire(scope), name=name)
    return state_from_wire((await link.call(link.conversations.GetState, request)).state)


async def get_states(link: Link, namespace: str, keys: Items[StateKey]) -> dict[StateKey, State]:
    """Reads those that exist."""
    left = list(checked_items("keys", keys, StateKey))
    found: dict[StateKey, State] = {}
    while left:
        request = pb.GetStatesRequest(
            namespace=namespace,
            keys=[pb.StateKey(scope=scope_to_wire(key.scope), name=key.name) for key in left[:_KEYS_MAX]],
        )
        answer = await link.call(link.conversations.GetStates, request)
        found |= {StateKey(_MEMBERS[wire.scope], wire.name): state_from_wire(wire) for wire in answer.states}
        left = left[max(1, answer.answered) :]
    return found


async def delete_state(link: Link, namespace: str, scope: StateScope, name: str, etag: str) -> bool:
    """Deletes a state document."""
    request = pb.DeleteStateRequest(
        namespace=namespace, scope=scope_to_wire(scope), name=name, etag=etag, request_id=new_request_id()
    )
    return (await link.call(link.conversations.DeleteState, request)).deleted
