"""The OpenAPI 3.1 description of the HTTP port, from protos/memstream/v1: what `GET /openapi.json` answers."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from google.protobuf.descriptor_pb2 import (
    DescriptorProto,
    EnumDescriptorProto,
    FieldDescriptorProto,
    FileDescriptorProto,
    MethodDescriptorProto,
)

from scripts.contract_page import Comments, compile_protos, file_order

PACKAGE = ".memstream.v1."
_FORMS: dict[str, dict[str, Any]] = {
    ".google.protobuf.Timestamp": {"type": "string", "format": "date-time"},
    ".google.protobuf.Duration": {"type": "string", "pattern": r"^-?[0-9]+(\.[0-9]{1,9})?s$"},
    ".google.protobuf.FieldMask": {"type": "string"},
    ".google.protobuf.Struct": {"type": "object"},
    ".google.protobuf.Value": {},
    ".google.protobuf.NullValue": {"type": "null"},
    ".google.protobuf.ListValue": {"type": "array"},
    ".google.rpc.Status": {"$ref": "#/components/schemas/Status"},
}
_LARGE = {"type": ["string", "integer"], "format": "int64"}
_SCALARS: dict[str, dict[str, Any]] = {
    "DOUBLE": {"type": "number"},
    "FLOAT": {"type": "number"},
    "INT32": {"type": "integer", "format": "int32"},
    "UINT32": {"type": "integer", "minimum": 0},
    "FIXED32": {"type": "integer", "minimum": 0},
    "INT64": _LARGE,
    "UINT64": _LARGE,
    "FIXED64": _LARGE,
    "BOOL": {"type": "boolean"},
    "STRING": {"type": "string"},
    "BYTES": {"type": "string", "contentEncoding": "base64"},
}
_PLAIN = {
    "description": "As a plain value, in requests.",
    "type": ["string", "number", "boolean", "null", "array", "object"],
}
_ANY = {"type": "object", "properties": {"@type": {"type": "string"}}, "additionalProperties": True}
_STATUS = {
    "type": "object",
    "description": "A status of gRPC.",
    "properties": {
        "code": {"type": "integer"},
        "message": {"type": "string"},
        "details": {"type": "array", "items": _ANY},
    },
}
_ERROR = {
    "type": "object",
    "description": "Why a call failed.",
    "required": ["code"],
    "properties": {
        "code": {"type": "string", "description": "The code of gRPC, in lower case."},
        "message": {"type": "string", "description": "A sentence."},
        "details": {
            "type": "array",
            "items": {
                "type": "object",
                "properties": {
                    "type": {"type": "string", "description": "The message's name, such as google.rpc.ErrorInfo."},
                    "value": {"type": "string", "contentEncoding": "base64", "description": "Its bytes."},
                    "debug": {"type": "object", "description": "The same as JSON."},
                },
            },
        },
    },
}
_EVENTS = frozenset({"StreamService.Watch", "ConversationService.WatchMessages", "BlockService.WatchBlocks"})
_INFO = (
    "Every call with one request, as JSON over HTTP. A call is a POST; its handlers, identity, rights, limits and "
    "errors are those of the gRPC port. Calls in which the client streams need gRPC. Written from the contract."
)


def openapi_text() -> str:
    """The description as JSON."""
    return json.dumps(build_description(), indent=1, ensure_ascii=False) + "\n"


def build_description() -> dict[str, Any]:
    """The description of the current files."""
    files = sorted(compile_protos(), key=file_order)
    paths: dict[str, Any] = {}
    schemas: dict[str, Any] = {"Error": _ERROR, "Status": _STATUS}
    tags = []
    for file in files:
        comments = Comments(file)
        for place, service in enumerate(file.service):
            where = (FileDescriptorProto.SERVICE_FIELD_NUMBER, place)
            tags.append({"name": service.name, "description": comments.paragraphs(*where)})
            for number, method in enumerate(service.method):
                if not method.client_streaming:
                    text = comments.paragraphs(*where, 2, number)
                    paths[f"/memstream.v1.{service.name}/{method.name}"] = {"post": _call(service.name, method, text)}
        for place, message in enumerate(file.message_type):
            schemas[message.name] = _message(message, comments, FileDescriptorProto.MESSAGE_TYPE_FIELD_NUMBER, place)
        for place, enum in enumerate(file.enum_type):
            schemas[enum.name] = _enum(enum, comments, FileDescriptorProto.ENUM_TYPE_FIELD_NUMBER, place)
    return {
        "openapi": "3.1.0",
        "info": {"title": "memstream", "version": "v1", "description": _INFO, "license": {"name": "Apache-2.0"}},
        "security": [{}, {"bearer": []}],
        "tags": tags,
        "paths": paths,
        "components": {"schemas": schemas, "securitySchemes": {"bearer": {"type": "http", "scheme": "bearer"}}},
    }


def _call(service: str, method: MethodDescriptorProto, text: str) -> dict[str, Any]:
    name = f"{service}.{method.name}"
    answer = {"schema": _named(method.output_type)}
    content: dict[str, Any] = {"application/json": answer}
    if method.server_streaming:
        content = {"text/event-stream": answer} if name in _EVENTS else {"application/connect+json": answer}
    elif name == "StreamService.RecallOnce":
        content["text/event-stream"] = {"schema": _named(f"{PACKAGE}RecallResponse")}
        text += "\n\nWith `query.subscribe` and `accept: text/event-stream`, a standing query."
    error = {"application/json": {"schema": {"$ref": "#/components/schemas/Error"}}}
    return {
        "operationId": name.replace(".", "_"),
        "tags": [service],
        "summary": text.split(". ")[0].split("\n\n")[0].rstrip("."),
        "description": text,
        "requestBody": {"required": True, "content": {"application/json": {"schema": _named(method.input_type)}}},
        "responses": {
            "200": {"description": "The answer.", "content": content},
            "default": {"description": "The call failed.", "content": error},
        },
    }


def _named(full: str) -> dict[str, Any]:
    return {"$ref": f"#/components/schemas/{full.removeprefix(PACKAGE)}"} if full.startswith(PACKAGE) else _FORMS[full]


def _message(message: DescriptorProto, comments: Comments, *path: int) -> dict[str, Any]:
    fields = dict(_fields(message, comments, *path))
    schema = {"type": "object", "properties": fields, "additionalProperties": False}
    described = {"description": comments.paragraphs(*path)}
    return described | ({"anyOf": [schema, _PLAIN]} if message.name == "MetadataValue" else schema)


def _fields(message: DescriptorProto, comments: Comments, *path: int) -> Iterator[tuple[str, dict[str, Any]]]:
    entries = {f".{entry.name}": entry for entry in message.nested_type if entry.options.map_entry}
    for number, field in enumerate(message.field):
        entry = next((one for name, one in entries.items() if field.type_name.endswith(name)), None)
        if entry is not None:
            schema = {"type": "object", "additionalProperties": _value(entry.field[1])}
        elif field.label == FieldDescriptorProto.LABEL_REPEATED:
            schema = {"type": "array", "items": _value(field)}
        else:
            schema = _value(field)
        yield field.json_name, {"description": comments.paragraphs(*path, 2, number)} | schema


def _value(field: FieldDescriptorProto) -> dict[str, Any]:
    if field.type_name:
        return _named(field.type_name)
    return _SCALARS[FieldDescriptorProto.Type.Name(field.type).removeprefix("TYPE_")]


def _enum(enum: EnumDescriptorProto, comments: Comments, *path: int) -> dict[str, Any]:
    values = [f"- `{one.name}`: {comments.line(*path, 2, place)}" for place, one in enumerate(enum.value)]
    text = "\n".join((comments.paragraphs(*path), "", *values))
    return {"description": text, "type": "string", "enum": [one.name for one in enum.value]}
