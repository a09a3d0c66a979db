"""The table of rpcs: rights, locality, optional capability and message size of each. A new rpc adds its line here."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from google.protobuf.descriptor import MethodDescriptor

from memstream_server.rpc.access.caller import Verb


@dataclass(frozen=True, slots=True)
class Need:
    """A right in the namespace at the first of the paths that is not empty; of a stream, in its first message."""

    verb: Verb
    at: tuple[str, ...]
    whole: bool = False
    """Whether it is needed in all of the namespace, whatever memory the request names."""
    optional: bool = False
    """Whether a request may name no namespace: the handler then filters its list by `caller.may`."""


@dataclass(frozen=True, slots=True)
class RpcRule:
    """How the server treats one rpc. All `needs` must be met; without any the call needs an identity alone."""

    needs: tuple[Need, ...] = ()
    operation: Verb | None = None
    """Set where the request names an operation: READ, or ADMIN for the right that starting the operation needs."""
    public: bool = False
    """Whether the rpc needs no identity."""
    served_anywhere: bool = False
    """Whether every server answers from the shared journal; else a call that names a memory goes to its owner."""
    capability: str = ""
    """The optional capability that the rpc belongs to: a name of memstream.v1.Capability without its prefix."""
    large_messages: bool = False
    """Whether a request may have `message_bytes_max` bytes instead of `small_message_bytes_max`."""
    with_bodies: bool = False
    """Whether it may have the small maximum in addition: a body alone may have `message_bytes_max`."""


def _rpc(
    verb: Verb,
    *at: str,
    optional: bool = False,
    served_anywhere: bool = False,
    capability: str = "",
    large_messages: bool = False,
    with_bodies: bool = False,
) -> RpcRule:
    need = Need(verb, at or ("namespace",), optional=optional)
    return RpcRule((need,), None, False, served_anywhere, capability, large_messages or with_bodies, with_bodies)


_OBSERVE, _RECALL, _READ, _WRITE, _FORGET, _ADMIN = Verb
_CLONE = (Need(_READ, ("namespace",)), Need(_WRITE, ("new_namespace", "namespace")))

_MEMSTREAM_RPCS: dict[str, dict[str, RpcRule]] = {
    "StreamService": {
        "Observe": _rpc(_OBSERVE, "open.namespace", large_messages=True),
        # A query with scopes names no namespace: rpc/scopes.py checks the rights for each memory.
        "Recall": _rpc(_RECALL, "open.namespace", capability="SUBSCRIBE", optional=True),  # its standing queries
        "Watch": _rpc(_READ, capability="WATCH"),
        "ObserveBatch": _rpc(_OBSERVE, large_messages=True),
        "RecallOnce": _rpc(_RECALL, optional=True),
    },
    "MemoryService": {
        "CreateMemory": _rpc(_WRITE, served_anywhere=True),
        "GetMemory": _rpc(_READ, served_anywhere=True),
        "ListMemories": _rpc(_READ),
        "UpdateMemory": _rpc(_ADMIN, "memory.namespace"),
        "CloneMemory": RpcRule(_CLONE, served_anywhere=True, capability="LIFECYCLE"),
        "ClearMemory": _rpc(_FORGET, capability="LIFECYCLE"),
        "DeleteMemory": _rpc(_FORGET),
        "ListNamespaces": RpcRule((Need(_READ, (), optional=True),)),
        "GetMemoryStats": _rpc(_READ),
        "GetFragment": _rpc(_READ),
        "ListFragments": _rpc(_READ),  # an order by an attribute needs the memory in RAM
        "ListFragmentEvents": _rpc(_READ, served_anywhere=True),
        "PutFragment": _rpc(_WRITE, capability="LIFECYCLE"),
        "UpdateFragment": _rpc(_WRITE, capability="LIFECYCLE"),
        "ForgetFragments": _rpc(_FORGET, capability="LIFECYCLE"),
        "RestoreFragments": _rpc(_FORGET, capability="LIFECYCLE"),
        "SupersedeFragments": _rpc(_WRITE, capability="LIFECYCLE"),
        "ListConflicts": _rpc(_READ, served_anywhere=True),
        "ResolveConflict": _rpc(_WRITE),
        "GetFragmentHistory": _rpc(_READ),
        "RestoreFragmentVersion": _rpc(_WRITE, capability="LIFECYCLE"),
        "ListRecallReceipts": _rpc(_RECALL, served_anywhere=True),
        "ReplayRecall": _rpc(_RECALL),
        "ListSessions": _rpc(_READ),
        "ListStandingQueries": _rpc(_RECALL, capability="SUBSCRIBE"),
        "EraseFragments": _rpc(_FORGET, capability="ERASE"),
        "ReflectMemory": _rpc(_WRITE, capability="REFLECTION"),
        "ExportMemories": _rpc(_READ, capability="EXPORT"),
        "ImportMemories": _rpc(_WRITE, "open.namespace", capability="EXPORT", large_messages=True),
    },
    "ConversationService": {
        "AppendMessage": _rpc(_WRITE, with_bodies=True),
        "AppendMessages": _rpc(_WRITE, with_bodies=True),
        "ListConversations": _rpc(_READ),
        "ListMessages": _rpc(_READ),
        "GetMessage": _rpc(_READ),
        "GetLastMessage": _rpc(_READ),
        "WatchMessages": _rpc(_READ),
        "CompleteConversation": _rpc(_WRITE),
        "ReplaceMessage": _rpc(_WRITE, with_bodies=True),
        "DeleteMessages": _rpc(_FORGET),
        "RemoveMessages": _rpc(_FORGET),
        "PopMessage": _rpc(_FORGET),
        "GetConversation": _rpc(_READ),
        "UpdateConversation": _rpc(_WRITE),
        "DeleteConversation": _rpc(_FORGET),
        "ForkConversation": RpcRule((Need(_READ, ("namespace",)), Need(_WRITE, ("namespace",)))),
        "GetState": _rpc(_READ),
        "GetStates": _rpc(_READ),
        "SetState": _rpc(_WRITE, with_bodies=True),
        "DeleteState": _rpc(_FORGET),
        "EraseUser": _rpc(_FORGET),
        # A right by a memory's labels does not reach conversations. Writes that delete need FORGET: the handler asks.
        "WriteTogether": RpcRule((Need(_WRITE, ("namespace",), whole=True),), large_messages=True, with_bodies=True),
        "SavePlans": _rpc(_WRITE, large_messages=True),
        "ListPlans": _rpc(_READ),
        "UpdatePlan": _rpc(_WRITE),
        "CompletePlan": _rpc(_WRITE),
        "RemovePlans": _rpc(_FORGET),
    },
    "BlockService": {  # every server writes the shared journal: a write needs no owner
        "PutBlock": _rpc(_WRITE, served_anywhere=True),
        "GetBlock": _rpc(_READ, served_anywhere=True),
        "ListBlocks": _rpc(_READ, served_anywhere=True),
        "ListBlockVersions": _rpc(_READ, served_anywhere=True),
        "EditBlock": _rpc(_WRITE, served_anywhere=True),
        "DeleteBlock": _rpc(_FORGET, served_anywhere=True),
        "WatchBlocks": _rpc(_READ, served_anywhere=True),
    },
    # It names memories, blocks and a conversation: rpc/scopes.py and rpc/context.py check the rights for each.
    "ContextService": {"Context": RpcRule((Need(_RECALL, (), optional=True),))},
    "OperationService": {
        "StartReindex": RpcRule((Need(_ADMIN, ()),)),
        "StartPurge": _rpc(_FORGET),
        "GetOperation": RpcRule(operation=_READ),
        "ListOperations": _rpc(_READ, optional=True, served_anywhere=True),
        "CancelOperation": RpcRule(operation=_ADMIN),
    },
    "ServerService": {"GetServerInfo": RpcRule(), "GetServerStatus": RpcRule((Need(_ADMIN, ()),))},
}
_CAPABILITY_OF_SERVICE = {
    "BlockService": "BLOCKS",
    "ConversationService": "CONVERSATIONS",
    "OperationService": "OPERATIONS",
}
"""Of services that are optional as a whole."""

RPC_RULES: Mapping[str, RpcRule] = {
    **{
        f"/memstream.v1.{service}/{name}": replace(
            rule, capability=rule.capability or _CAPABILITY_OF_SERVICE.get(service, "")
        )
        for service, rules in _MEMSTREAM_RPCS.items()
        for name, rule in rules.items()
    },
    "/grpc.health.v1.Health/Check": RpcRule(public=True),
    "/grpc.health.v1.Health/List": RpcRule(public=True),
    "/grpc.health.v1.Health/Watch": RpcRule(public=True),
    "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo": RpcRule(),
}
"""By path, as gRPC has it."""

VERB_OF_OPERATION: Mapping[str, Verb] = {
    "reindex": Verb.ADMIN,
    "purge": Verb.FORGET,
    "erase": Verb.FORGET,
    "reflect": Verb.WRITE,
    "import": Verb.WRITE,
}
"""The right that starting an operation of a type needs; cancelling needs the same."""


def path_of(method: MethodDescriptor) -> str:
    """The path of a method, as gRPC has it."""
    return f"/{method.containing_service.full_name}/{method.name}"


def names_memory(method: MethodDescriptor) -> bool:
    """Whether a request of the method, or the `open` message of its stream, has a field `memory`."""
    fields = method.input_type.fields_by_name
    opening = fields["open"].message_type if "open" in fields else None
    return "memory" in (fields if opening is None else opening.fields_by_name)


def find_namespace(request: Any, need: Need) -> str:
    """The namespace that a request names; empty where it names none, and for the server as a whole."""
    for path in need.at:
        value = request
        for name in path.split("."):
            value = getattr(value, name)
        if value:
            return str(value)
    return ""


def find_memory_name(request: Any, need: Need) -> str:
    """The name of the memory that a request names beside that namespace; empty if it names none."""
    for path in () if need.whole else need.at:
        *parents, last = path.split(".")
        holder = request
        for name in parents:
            holder = getattr(holder, name)
        if last == "namespace" and holder.namespace:
            named = getattr(holder, "memory", None) or getattr(holder, "name", "")
            return named if isinstance(named, str) else ""
    return ""
