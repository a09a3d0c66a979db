"""Golden bytes of the contract: every message with every field set, as bytes on the wire and as protobuf JSON.

Each release has one file, which never changes after it: messages that old clients send or have stored must keep their
meaning. `make generate` writes the file of the next release, which tests require to cover the whole contract.
"""

from __future__ import annotations

import base64
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from google.protobuf import descriptor_pool, json_format, message_factory
from google.protobuf.any_pb2 import Any as AnyMessage
from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.duration_pb2 import Duration
from google.protobuf.field_mask_pb2 import FieldMask
from google.protobuf.message import Message
from google.protobuf.timestamp_pb2 import Timestamp
from google.rpc.error_details_pb2 import ErrorInfo

from memstream.v1 import event_pb2, fragment_pb2, stream_service_pb2
from tests.support.contract import FILES

GOLDEN = Path(__file__).with_name("golden")
NEXT_RELEASE = "0.1"
"""Raise it with the release: until then, its file follows the contract."""
DEEP = 2
"""Levels of nested messages with all fields set; deeper ones only have their first field."""
F = FieldDescriptor

Entry = dict[str, Any]


def descriptors() -> list[Descriptor]:
    """Every message of the contract except map entries."""
    return sorted((one for file in FILES for one in file.message_types_by_name.values()), key=lambda d: d.full_name)


def message_of(name: str) -> Message:
    """Creates an empty message by its full name."""
    return message_factory.GetMessageClass(descriptor_pool.Default().FindMessageTypeByName(name))()


def entries() -> Iterator[Entry]:
    """Yields for each message: all fields set; each further alternative of its oneofs; empty optional fields."""
    for descriptor in descriptors():
        yield _entry(descriptor, "whole", _filled(descriptor))
        for oneof in descriptor.oneofs:
            for field in oneof.fields[1:]:
                message = message_of(descriptor.full_name)
                _fill(message, field, 0)
                yield _entry(descriptor, field.name, message)
        optional = [field for field in descriptor.fields if _is_optional(field)]
        if optional:
            message = message_of(descriptor.full_name)
            for field in optional:
                setattr(message, field.name, field.default_value)
            yield _entry(descriptor, "set to nothing", message)


def _is_optional(field: FieldDescriptor) -> bool:
    oneof = field.containing_oneof
    return oneof is not None and len(oneof.fields) == 1 and oneof.name == f"_{field.name}"


def _entry(descriptor: Descriptor, name: str, message: Message) -> Entry:
    return {
        "type": descriptor.full_name,
        "name": name,
        "bytes": base64.b64encode(message.SerializeToString(deterministic=True)).decode(),
        "json": json_format.MessageToDict(message),
    }


def _filled(descriptor: Descriptor, depth: int = 0) -> Message:
    message = message_of(descriptor.full_name)
    chosen = {oneof.name: oneof.fields[0].name for oneof in descriptor.oneofs}
    for field in descriptor.fields if depth <= DEEP else descriptor.fields[:1]:
        if field.containing_oneof is None or chosen[field.containing_oneof.name] == field.name:
            _fill(message, field, depth)
    return message


def _fill(message: Message, field: FieldDescriptor, depth: int) -> None:
    target = getattr(message, field.name)
    if field.message_type is not None and field.message_type.GetOptions().map_entry:
        value = field.message_type.fields_by_name["value"]
        if value.message_type is None:
            target[f"key of {field.name}"] = _scalar(value, 1)
        else:
            target[f"key of {field.name}"].CopyFrom(_message(value, depth))
    elif field.is_repeated:
        if field.message_type is not None:
            target.extend([_message(field, depth), message_of(field.message_type.full_name)])
        else:
            target.extend([_scalar(field, 0), _scalar(field, 1)])
    elif field.message_type is not None:
        target.CopyFrom(_message(field, depth))
    else:
        setattr(message, field.name, _scalar(field, 0))


def _message(field: FieldDescriptor, depth: int) -> Message:
    match field.message_type.full_name:
        case "google.protobuf.Timestamp":
            return Timestamp(seconds=1_790_000_000 + field.number, nanos=500_000_000)
        case "google.protobuf.Duration":
            return Duration(seconds=field.number, nanos=250_000_000)
        case "google.protobuf.FieldMask":
            return FieldMask(paths=["policy.recall.alpha", "labels"])
        case "google.protobuf.Any":
            detail = AnyMessage()
            detail.Pack(ErrorInfo(reason="INVALID_FIELD", domain="memstream.dev", metadata={"id": "1"}))
            return detail
    return _filled(field.message_type, depth + 1)


def _scalar(field: FieldDescriptor, nth: int) -> Any:
    number = field.number * 1000 + nth
    match field.type:
        case F.TYPE_STRING:
            return f"{field.name} \u00e9\u4e16\U0001f642 {nth}"
        case F.TYPE_BYTES:
            return bytes([0, 1, 254, 255, nth])
        case F.TYPE_BOOL:
            return True
        case F.TYPE_INT64:
            return number + 2**53
        case F.TYPE_INT32:
            return -number if nth else number
        case F.TYPE_FLOAT | F.TYPE_DOUBLE:
            return number + 0.25
        case F.TYPE_ENUM:
            return field.enum_type.values[-1 - nth].number
    raise AssertionError(f"the contract has a field of another type now: {field.full_name}")


def future() -> Iterator[Entry]:
    """Yields messages of a later contract, with unknown fields and enum values, which must survive a round trip."""
    unknown = bytes([0xC2, 0x3E, 3]) + b"new"  # field 1000, of 3 bytes
    event = event_pb2.Event(fragment_id="01J", to_tier=fragment_pb2.TIER_LONG_TERM)
    newer = event_pb2.Event.FromString(event.SerializeToString() + unknown)
    newer.type = 999  # type: ignore[assignment]  # an unknown value on purpose
    yield _entry(event_pb2.Event.DESCRIPTOR, "unknown field and enum value", newer)
    events = stream_service_pb2.WatchEvents(events=[newer, event])
    yield _entry(stream_service_pb2.WatchEvents.DESCRIPTOR, "the same inside of another message", events)
    nothing_known = stream_service_pb2.ObserveResponse.FromString(unknown)
    yield _entry(stream_service_pb2.ObserveResponse.DESCRIPTOR, "a kind of message that is unknown", nothing_known)


def main() -> None:
    """Writes the file of a release (without an argument: of the next one), or future.json."""
    name = sys.argv[1] if sys.argv[1:] else NEXT_RELEASE
    messages = list(future() if name == "future" else entries())
    text = json.dumps({"contract": name, "messages": messages}, indent=1, ensure_ascii=False)
    (GOLDEN / f"{name}.json").write_text(text + "\n", "utf-8")


if __name__ == "__main__":
    main()
