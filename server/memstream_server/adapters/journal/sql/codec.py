"""Encoding of the journal's blobs: msgpack of the port's values, after a version byte.

A fragment is a map of its fields without those at their default, so a default must never change: older rows give a
newer field its default. Events are arrays without field names:
the event log is kept, and a name would take more bytes than the value.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable
from dataclasses import replace
from functools import partial
from hashlib import blake2b
from typing import Any, TypeAlias, TypeVar

import msgspec
import numpy as np
import numpy.typing as npt
from msgspec.structs import force_setattr

from memstream_server.adapters.journal.database.database import Packed
from memstream_server.core.events import Event
from memstream_server.core.policy import HistoryPolicy, Policy, Profile, Truth
from memstream_server.core.values import Enhancement, Fragment
from memstream_server.ports.blocks import Block
from memstream_server.ports.conversations import Message, Plan
from memstream_server.ports.journal.errors import Unreadable
from memstream_server.ports.journal.records import Labels, RecallReceipt, Space
from memstream_server.ports.journal.rows import Terms
from memstream_server.ports.journal.writing import BatchReceipt, Outcome, Rejection

VERSION = 1
"""First byte of every blob. Another value raises Unreadable: a newer server wrote the blob."""
_PREFIX = bytes([VERSION])
_COMPRESSED = b"\x02"
"""First byte of events that are compressed."""
_COMPRESSED_BYTES_MIN = 256
"""A lone observation has fewer, and would save little."""
_HASH_BYTES, _COUNT_BYTES, _VERSION_BYTES = 8, 2, 2
_TERM_BYTES = _HASH_BYTES + _COUNT_BYTES
SOURCES = msgspec.msgpack.encode("sources")
"""Part of the record of a fragment that has sources."""
HASH_WIDTH = 16
"""Bytes of an observation's content hash."""

T = TypeVar("T")
_Lists: TypeAlias = "tuple[Event, ...] | tuple[Enhancement, ...] | tuple[Rejection, ...] | tuple[Outcome, ...]"
Record: TypeAlias = "Fragment | BatchReceipt | RecallReceipt | Message | Plan | Block | _Lists"
"""What a blob holds."""


def _to_native(value: Any) -> Any:
    """Convert a numpy scalar to the Python number; any other type is a bug of the caller."""
    if isinstance(value, np.generic):
        return value.item()
    raise TypeError(f"the journal cannot hold a {type(value).__name__}")


_encoder = msgspec.msgpack.Encoder(enc_hook=_to_native)
_json = msgspec.json.Encoder(enc_hook=_to_native)


class _Citing(msgspec.Struct):
    """What the record of a fragment says of its sources."""

    sources: tuple[str, ...] = ()


_fragment = msgspec.msgpack.Decoder(Fragment)
_citing = msgspec.msgpack.Decoder(_Citing)
_fragments = msgspec.msgpack.Decoder(list[int | Fragment])
_events = msgspec.msgpack.Decoder(tuple[Event, ...])
_rejections = msgspec.msgpack.Decoder(tuple[Rejection, ...])
_outcomes = msgspec.msgpack.Decoder(tuple[Outcome, ...])
_policy = msgspec.json.Decoder(Policy)
_labels = msgspec.json.Decoder(Labels)


class _StoredSpace(msgspec.Struct):
    """A space as `meta` has it: under the key `partitions` is the number that the index chose."""

    model: str
    dimension: int
    index_layout: int = msgspec.field(name="partitions")


_space = msgspec.json.Decoder(_StoredSpace)


def encode_record(value: Record) -> bytes:
    """The version, and the value as msgpack."""
    return _PREFIX + _encoder.encode(value)


def _decode_blob(decoder: msgspec.msgpack.Decoder[T], blob: bytes) -> T:
    if blob[0] != VERSION:
        raise Unreadable(f"a record has version {blob[0]}, this server reads {VERSION}: start a newer memstream")
    return _decode_checked(decoder, memoryview(blob)[1:])


def _decode_checked(decoder: msgspec.msgpack.Decoder[T] | msgspec.json.Decoder[T], data: memoryview | str) -> T:
    try:
        return decoder.decode(data)  # type: ignore[arg-type]  # the pairs below match decoder and data
    except msgspec.DecodeError as error:  # ValidationError included
        raise Unreadable(f"a record of the journal cannot be decoded ({error}): restore a backup") from error


decode_receipt = partial(_decode_blob, msgspec.msgpack.Decoder(BatchReceipt))
decode_enhancements = partial(_decode_blob, msgspec.msgpack.Decoder(tuple[Enhancement, ...]))
decode_recall_receipt = partial(_decode_blob, msgspec.msgpack.Decoder(RecallReceipt))
decode_message = partial(_decode_blob, msgspec.msgpack.Decoder(Message))
decode_plan = partial(_decode_blob, msgspec.msgpack.Decoder(Plan))
decode_block = partial(_decode_blob, msgspec.msgpack.Decoder(Block))


def decode_fragment(blob: bytes, access_count: int, access_time_us: int, model: str | None = None) -> Fragment:
    """The fragment with the access statistics of its columns and the model of its present vector (empty: no vector).

    None keeps the model of the record. A vector that the client supplied belongs to the model it was written with.
    """
    fragment = _decode_blob(_fragment, blob)
    _set_current_columns(fragment, access_count, access_time_us, fragment.model if model is None else model)
    return fragment


def decode_sources(blob: bytes) -> tuple[str, ...]:
    """The sources alone, in a tenth of the time."""
    return _decode_blob(_citing, blob).sources


def decode_fragments(
    blobs: Packed, access_counts: Iterable[int], access_times_us: Iterable[int], models: Iterable[str]
) -> list[Fragment]:
    """Decode many fragments at once, in half the time: the version byte is a msgpack integer."""
    count = len(blobs.sizes)
    try:
        found = _fragments.decode(b"\xdd" + (2 * count).to_bytes(4, "big") + blobs.data)
    except msgspec.DecodeError:
        found = []
    fragments: list[Fragment] = [each for each in found if isinstance(each, Fragment)]
    if found[::2] != [VERSION] * count:
        fragments = [_decode_blob(_fragment, blob) for blob in blobs.values()]  # raises for the blob that is wrong
    for fragment, times, last, model in zip(fragments, access_counts, access_times_us, models, strict=True):
        if fragment.access_count != times or fragment.access_time_us != last or fragment.model != model:
            _set_current_columns(fragment, times, last, model)
    return fragments


def _set_current_columns(fragment: Fragment, access_count: int, access_time_us: int, model: str) -> None:
    """Set the current columns on a new fragment, which no other code refers to yet."""
    if fragment.model != model:
        force_setattr(fragment, "model", model)
        force_setattr(fragment, "own_vector", False)
    force_setattr(fragment, "access_count", access_count)
    force_setattr(fragment, "access_time_us", access_time_us)


def encode_events(events: tuple[Event, ...]) -> bytes:
    """Those of a large batch are compressed to a third or less: their ids begin alike, and an event repeats one."""
    packed = encode_record(events)
    if len(packed) < _COMPRESSED_BYTES_MIN:
        return packed
    return _COMPRESSED + zlib.compress(memoryview(packed)[1:], 1)


def decode_events(blob: bytes) -> tuple[Event, ...]:
    return _decode_blob(_events, _expand_events(blob))


def _expand_events(blob: bytes) -> bytes:
    if blob[:1] != _COMPRESSED:
        return blob
    try:
        return _PREFIX + zlib.decompress(memoryview(blob)[1:])
    except zlib.error as error:
        raise Unreadable(f"a record of the journal cannot be decoded ({error}): restore a backup") from error


def encode_rejections(rejections: tuple[Rejection, ...]) -> bytes | None:
    """None for no rejections, the usual case."""
    return encode_record(rejections) if rejections else None


def decode_rejections(blob: bytes | None) -> tuple[Rejection, ...]:
    return () if blob is None else _decode_blob(_rejections, blob)


def decode_outcomes(blob: bytes | None) -> tuple[Outcome, ...] | None:
    """None if the receipt keeps no outcomes."""
    return None if blob is None else _decode_blob(_outcomes, blob)


def encode_hashes(hashes: tuple[bytes, ...]) -> bytes:
    """Concatenate. Raises ValueError unless each hash has HASH_WIDTH bytes."""
    packed = b"".join(hashes)
    if any(len(item) != HASH_WIDTH for item in hashes):
        raise ValueError(f"a content hash has {HASH_WIDTH} bytes")
    return packed


def decode_hashes(blob: bytes) -> list[bytes]:
    return [blob[at : at + HASH_WIDTH] for at in range(0, len(blob), HASH_WIDTH)]


def encode_terms(terms: Terms | None) -> bytes | None:
    """Hashes, counts, version. The split points follow from the widths of 8, 2 and 2 bytes; version 0 is left out."""
    if terms is None:
        return None
    if len(terms.hashes) * _COUNT_BYTES != len(terms.counts) * _HASH_BYTES:
        raise ValueError("terms need as many counts as hashes")
    version = terms.version.to_bytes(_VERSION_BYTES, "little") if terms.version else b""
    return terms.hashes + terms.counts + version


def decode_terms(blob: bytes | None) -> Terms | None:
    if blob is None:
        return None
    count = len(blob) // _TERM_BYTES
    cut, end = count * _HASH_BYTES, count * _TERM_BYTES
    return Terms(blob[:cut], blob[cut:end], int.from_bytes(blob[end:], "little"))


def decode_terms_of_all(
    blobs: Packed,
) -> tuple[npt.NDArray[np.uint64], npt.NDArray[np.uint16], npt.NDArray[np.int64], npt.NDArray[np.uint16]]:
    """(hashes, counts, terms per fragment, version per fragment) of many fragments; NULL has no terms."""
    bytes_of = np.array([size or 0 for size in blobs.sizes], np.int64)
    sizes, versioned = np.divmod(bytes_of, _TERM_BYTES)
    versioned //= _VERSION_BYTES
    pairs = np.frombuffer(blobs.data, "<u2")  # a hash is four of these
    widths = np.stack([sizes * (_HASH_BYTES // _COUNT_BYTES), sizes, versioned], axis=1).ravel()
    part = np.repeat(np.tile(np.arange(3, dtype=np.int8), len(sizes)), widths)
    versions = np.zeros(len(sizes), np.uint16)
    versions[versioned > 0] = pairs[part == 2]
    return pairs[part == 0].view("<u8"), pairs[part == 1], sizes, versions


def encode_policy(policy: Policy) -> str:
    return _json.encode(policy).decode()


def decode_policy(data: str) -> Policy:
    policy = _decode_checked(_policy, data)
    if policy.profile is Profile.DBGPT:  # written before these fields existed; this profile turns them off
        if '"fold"' not in data.partition('"conflicts"')[0]:  # `conflicts` has a field of that name, too
            policy = replace(policy, recall=replace(policy.recall, fold=False))
        if '"truth"' not in data:
            policy = replace(policy, recall=replace(policy.recall, truth=Truth.ALL))
        if '"conflicts"' not in data:
            policy = replace(policy, conflicts=replace(policy.conflicts, suspect=False))
        if '"history"' not in data:
            policy = replace(policy, history=HistoryPolicy(versions=0, receipts=0))
        elif '"receipts"' not in data:
            policy = replace(policy, history=replace(policy.history, receipts=0))
    return policy


def encode_labels(labels: Labels) -> str:
    return _json.encode(labels).decode()


def hash_label(label: tuple[str, str]) -> bytes:
    """The key by which a label is found."""
    return blake2b(_json.encode(label), digest_size=HASH_WIDTH).digest()


def decode_labels(data: str) -> Labels:
    return _decode_checked(_labels, data)


def encode_space(space: Space) -> str:
    return _json.encode(_StoredSpace(space.model, space.dimension, space.index_layout)).decode()


def decode_space(data: str) -> Space:
    stored = _decode_checked(_space, data)
    return Space(stored.model, stored.dimension, stored.index_layout)
