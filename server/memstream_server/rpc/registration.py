"""Registers services from the contract's descriptors; rpcs that a servicer lacks are refused with CAPABILITY_MISSING.

A servicer is a plain object. Each rpc that it implements is a coroutine, or an async generator for a streamed response,
named in snake case. An rpc that is in the contract and not implemented is therefore refused without code of its own.
"""

from __future__ import annotations

import re
from collections.abc import AsyncIterator, Callable, Iterable
from typing import Any

import grpc
import grpc.aio
from google.protobuf.descriptor import MethodDescriptor, ServiceDescriptor
from google.protobuf.message_factory import GetMessageClass

from memstream.v1 import server_service_pb2 as pb
from memstream_server.engine.errors import CapabilityMissing
from memstream_server.rpc.rpc_table import RPC_RULES, path_of

Services = Iterable[tuple[ServiceDescriptor, object]]


Wrap = Callable[[MethodDescriptor, Callable[..., Any]], Callable[..., Any]]


Handlers = dict[str, "grpc.RpcMethodHandler[Any, Any]"]


def make_handlers(services: Services, wrap: Wrap | None = None) -> Handlers:
    """The handler of every rpc, by path. `wrap` may wrap a handler; a wrapped handler may return bytes."""
    return {
        path_of(method): _make_handler(method, servicer, wrap)
        for service, servicer in services
        for method in service.methods
    }


class Registered(grpc.GenericRpcHandler):
    """Finds the handlers for the gRPC server."""

    def __init__(self, handlers: Handlers) -> None:
        self._handlers = handlers

    def service(self, handler_call_details: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler[Any, Any] | None:
        """The handler of a path; None for an unknown one."""
        return self._handlers.get(handler_call_details.method)


def list_capabilities(services: Services) -> list[pb.Capability.ValueType]:
    """Optional capabilities of which the server implements every rpc."""
    have: set[str] = set()
    missing: set[str] = set()
    for service, servicer in services:
        for method in service.methods:
            if capability := RPC_RULES[path_of(method)].capability:
                (have if hasattr(servicer, method_name(method)) else missing).add(capability)
    return sorted(pb.Capability.Value(f"CAPABILITY_{each}") for each in have - missing)


def method_name(method: MethodDescriptor) -> str:
    """The servicer's method: `RecallOnce` is `recall_once`."""
    return re.sub(r"(?<!^)(?=[A-Z])", "_", method.name).lower()


def _make_handler(method: MethodDescriptor, servicer: object, wrap: Wrap | None) -> grpc.RpcMethodHandler[Any, Any]:
    kinds = {
        (False, False): grpc.unary_unary_rpc_method_handler,
        (False, True): grpc.unary_stream_rpc_method_handler,
        (True, False): grpc.stream_unary_rpc_method_handler,
        (True, True): grpc.stream_stream_rpc_method_handler,
    }
    behaviour = getattr(servicer, method_name(method), None) or _refusing_handler(method)
    if wrap is not None:
        behaviour = wrap(method, behaviour)
    make = kinds[method.client_streaming, method.server_streaming]
    return make(behaviour, GetMessageClass(method.input_type).FromString, _serialize_response)


def _serialize_response(message: Any) -> bytes:
    data: bytes = message if isinstance(message, bytes) else message.SerializeToString()
    return data


def _refusing_handler(method: MethodDescriptor) -> Any:
    capability = RPC_RULES[path_of(method)].capability
    text = f"this server does not implement {method.full_name}"

    async def answer(_request: object, _context: object) -> None:
        raise CapabilityMissing(text, capability=capability)

    async def stream(_request: object, _context: object) -> AsyncIterator[None]:
        if capability:  # always true; the `yield` makes this a generator
            raise CapabilityMissing(text, capability=capability)
        yield None

    return stream if method.server_streaming else answer
