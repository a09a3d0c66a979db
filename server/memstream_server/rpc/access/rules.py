"""What every rpc needs: a verb, and where in the request its namespace is. Whoever adds an rpc adds its line here."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from memstream_server.rpc.access.caller import Verb


@dataclass(frozen=True, slots=True)
class Need:
    """A right in the namespace at the first of the paths that is not empty; of a stream, in its first message."""

    verb: Verb
    at: tuple[str, ...]
    optional: bool = False
    """Whether a request may name none: its answer is then a list from which its handler leaves out, by `caller.may`."""


@dataclass(frozen=True, slots=True)
class Rule:
    """`needs` must all be met; without any the call needs an identity alone."""

    needs: tuple[Need, ...] = ()
    operation: Verb | None = None
    """Set where the request names an operation: READ, or ADMIN for what the operation itself would need."""
    open: bool = False
    """Whether it is answered to nobody in particular."""


def _rule(verb: Verb, *at: str) -> Rule:
    return Rule((Need(verb, at or ("namespace",)),))


_OPEN = Rule(open=True)
_IDENTITY = Rule()
_OBSERVE, _RECALL, _READ, _WRITE, _FORGET, _ADMIN = (_rule(verb) for verb in Verb)

_OF_MEMSTREAM = {
    "StreamService": {
        "Observe": _rule(Verb.OBSERVE, "open.namespace"),
        "Recall": _rule(Verb.RECALL, "open.namespace"),
        "Watch": _READ,
        "ObserveBatch": _OBSERVE,
        "RecallOnce": _RECALL,
    },
    "MemoryService": {
        "CreateMemory": _WRITE,
        "GetMemory": _READ,
        "ListMemories": _READ,
        "UpdateMemory": _rule(Verb.ADMIN, "memory.namespace"),
        "CloneMemory": Rule((Need(Verb.READ, ("namespace",)), Need(Verb.WRITE, ("new_namespace", "namespace")))),
        "ClearMemory": _FORGET,
        "DeleteMemory": _FORGET,
        "ListNamespaces": Rule((Need(Verb.READ, (), optional=True),)),
        "GetMemoryStats": _READ,
        "GetFragment": _READ,
        "ListFragments": _READ,
        "PutFragment": _WRITE,
        "UpdateFragment": _WRITE,
        "ForgetFragments": _FORGET,
        "RestoreFragments": _FORGET,
        "EraseFragments": _FORGET,
        "ReflectMemory": _WRITE,
        "ExportMemories": _READ,
        "ImportMemories": _rule(Verb.WRITE, "open.namespace"),
    },
    "ConversationService": {
        "AppendMessage": _WRITE,
        "ListMessages": _READ,
        "GetLastMessage": _READ,
        "WatchMessages": _READ,
        "CompleteConversation": _WRITE,
        "DeleteMessages": _FORGET,
        "SavePlans": _WRITE,
        "ListPlans": _READ,
        "UpdatePlan": _WRITE,
        "CompletePlan": _WRITE,
        "RemovePlans": _FORGET,
    },
    "OperationService": {
        "StartReindex": Rule((Need(Verb.ADMIN, ()),)),
        "StartPurge": _FORGET,
        "GetOperation": Rule(operation=Verb.READ),
        "ListOperations": Rule((Need(Verb.READ, ("namespace",), optional=True),)),
        "CancelOperation": Rule(operation=Verb.ADMIN),
    },
    "ServerService": {"GetServerInfo": _IDENTITY},
}

RULES: Mapping[str, Rule] = {
    **{f"/memstream.v1.{name}/{rpc}": rule for name, rpcs in _OF_MEMSTREAM.items() for rpc, rule in rpcs.items()},
    "/grpc.health.v1.Health/Check": _OPEN,
    "/grpc.health.v1.Health/Watch": _OPEN,
    "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo": _IDENTITY,
}
"""By path, as gRPC has it."""

VERB_OF_OPERATION: Mapping[str, Verb] = {
    "reindex": Verb.ADMIN,
    "purge": Verb.FORGET,
    "erase": Verb.FORGET,
    "reflect": Verb.WRITE,
    "import": Verb.WRITE,
}
"""What starting an operation of a type needs, and so cancelling it."""


def namespace_at(request: Any, need: Need) -> str:
    """The namespace that a request names; empty where it names none, and for the server as a whole."""
    for path in need.at:
        value = request
        for name in path.split("."):
            value = getattr(value, name)
        if value:
            return str(value)
    return ""
