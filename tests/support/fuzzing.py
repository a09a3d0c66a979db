"""Generates requests that are likely to be invalid from the contract's descriptors, with a seeded generator.

A request starts as a valid one, with names, ids, tokens and etags from the server's earlier answers to any rpc. Then
some of its fields are set to boundary values, invalid texts, or values of other fields.
"""

from __future__ import annotations

import json
import random
import string
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from google.protobuf.descriptor import FieldDescriptor, MethodDescriptor
from google.protobuf.message import DecodeError, Message
from google.protobuf.message_factory import GetMessageClass

from memstream_server.core.context.position import pack_position
from memstream_server.core.context.values import FORMAT, Position
from memstream_server.rpc import page_tokens

_F = FieldDescriptor
MEMORIES = ("m0", "m1", "m2", "m3")
IMPORTED = tuple(f"i{number}" for number in range(8))
TALKS = ("t0", "t1")
POOL_MAX = 100
"""Values remembered per field."""
CODE_POINTS = (*range(0xD800), *range(0xE000, 0xF000))
OPAQUE = {
    *("id", "ids", "etag", "memory_uid", "uid", "page_token", "next_page_token", "fragment_id", "other_id"),
    *("fragment_ids", "exclude_ids", "sources", "working_memory_ids", "ranking_ids", "request_id", "query_id"),
    *("newer_id", "older_id", "receipt_id"),
}
TEXTS = [
    *("", " ", "\x00", "a\x00b", "\x1b[2J\x07", "\r\n", "\x7f", "\x85", "\u202eabc\u2066", "\ufeff", "\uffff"),
    *("\U0010ffff", "é" * 200, "e\u0301", "漢字", "😀" * 50, "\u0660\u0661", "a/b", "../../etc", "a" * 129, "%s%n{0}"),
    *(
        "'; DROP TABLE fragments; --",
        "*",
        "a*",
        "-",
        ".",
        "~",
        "null",
        "true",
        "0",
        "-1",
        "1e999",
        "[]",
        "{}",
        '"',
        "\\",
    ),
    *("[" * 2_000, '{"a":' * 500, "NaN", '{"a": 1e400}', "0" * 26, "Z" * 26, "1,2,,3", ",", "9" * 400),
]
INTS = [0, 1, -1, 2, 7, 100, 1_001, 2**31 - 1, -(2**31), 2**32 - 1, 2**32, 2**53 + 1, 2**62, 2**63 - 1, -(2**63)]
FLOATS = [0.0, -0.0, 0.5, 1.0, 1.0000001, -1.0, 1e-320, 1e308, -1e308, float("inf"), float("-inf"), float("nan")]
SECONDS = [0, 1, -1, 1_700_000_000, -62_135_596_800, -62_135_596_801, 253_402_300_799, 253_402_300_800, 2**63 - 1]
SECONDS += [-(2**63), 2**53, 3_153_600_000, 3_153_600_001, 9_223_372_036, 9_223_372_036_855]
NANOS = [0, 1, 999, 999_999_999, 1_000_000_000, -1, -999_999_999, 2**31 - 1, -(2**31)]
MASKS = ["content", "structured", "policy", "labels", "pinned", "policy.recall.limit", "policy.", ".", "policy.x", "*"]
SERVING = "memstream."
BY_EARLIER_ANSWER = (
    *("ResolveConflict", "ReplayRecall", "RestoreFragmentVersion", "SupersedeFragments"),
    *("CancelOperation", "RecallOnce", "ObserveBatch", "Context", "SetState", "GetState", "GetStates"),
    "WriteTogether",
)
"""Most of their requests are sent without invalid fields: one invalid value or a stale id refuses them."""
SEEN = ("FragmentVersion", "RecallReceipt", "Operation")


class Fuzzer:
    """Generates calls. `own` marks its contents; `names` are the namespaces it writes to."""

    def __init__(self, seed: int, names: Sequence[str], own: str, foreign: Fuzzer | None = None) -> None:
        self.draw = random.Random(seed)
        self.own = own
        self.names = names
        self.pool: dict[str, list[str]] = defaultdict(list) if foreign is None else foreign.pool
        """By the field's name; ids and tokens alone, so that two callers may share it."""
        self.exports: list[bytes] = []
        """Whole ones."""
        self.pages: dict[str, Message] = {}
        """By method, the request that gives the next page."""
        self.places: dict[str, tuple[str, str]] = {}
        """By fragment, the namespace and the memory that it was seen in."""
        self.seen: dict[str, list[tuple[str, str, Message]]] = defaultdict(list)
        """By the message's name, with namespace and memory: what a later call names by several fields."""

    # ---- learning from answers
    def learn_export(self, lines: bytes) -> None:
        """Remember a complete export."""
        self.exports = [*self.exports[-10:], lines]

    def learn_page(self, method: MethodDescriptor, sent: bytes, answer: Message) -> None:
        """Remember the request for the next page of a list."""
        token = getattr(answer, "next_page_token", "")
        if token:
            following = GetMessageClass(method.input_type).FromString(sent)
            following.page_token = token  # type: ignore[attr-defined]
            self.pages[method.name] = following

    def learn(self, message: Message, sent: Any = None) -> None:
        """Remember ids and tokens of an answer. `sent` is its request."""
        if message.DESCRIPTOR.name == "Fragment":
            self._remember("fragment_id", message.id)  # type: ignore[attr-defined]
            if (
                "memory" in sent.DESCRIPTOR.fields_by_name
                and sent.DESCRIPTOR.fields_by_name["memory"].message_type is None
            ):
                self.places[message.id] = sent.namespace, sent.memory  # type: ignore[attr-defined]
        elif message.DESCRIPTOR.name in SEEN and sent is not None:
            opening = sent.open if "open" in sent.DESCRIPTOR.fields_by_name else sent
            seen = self.seen[message.DESCRIPTOR.name]
            seen.append((getattr(opening, "namespace", ""), getattr(opening, "memory", ""), message))
            del seen[:-POOL_MAX]
        for field, value in message.ListFields():
            if field.message_type is not None:
                for each in _messages(field, value):
                    self.learn(each, sent)
            elif field.name in OPAQUE and field.type == _F.TYPE_STRING:
                for text in value if field.is_repeated else [value]:
                    self._remember(field.name, text)

    def _remember(self, name: str, text: str) -> None:
        held = self.pool[name]
        held.append(text)
        if len(held) > POOL_MAX:
            del held[: POOL_MAX // 2]
            self.places = {each: self.places[each] for each in self.pool["fragment_id"] if each in self.places}

    # ---- requests
    def requests(self, method: MethodDescriptor) -> list[bytes]:
        """The bytes of a call's messages: one, or a stream's in an order that may be wrong."""
        if not method.client_streaming:
            return [self._bytes(self.request(method))]
        if method.name == "ImportMemories" and self.exports and self.draw.random() < 0.6:
            return self._import(method)
        count = self.draw.choice([1, 2, 3, 4, 6, 12])
        sent = [self._streamed(method, place) for place in range(count)]
        return [self._bytes(each) for each in sent]

    def _import(self, method: MethodDescriptor) -> list[bytes]:
        """One that may be taken: an export, under a name that may be free."""
        opening: Any = GetMessageClass(method.input_type)()
        opening.open.namespace, opening.open.memory = self.draw.choice(self.names), self.draw.choice(IMPORTED)
        lines: Any = GetMessageClass(method.input_type)()
        lines.lines = self._import_lines()
        return [opening.SerializeToString(), lines.SerializeToString()]

    def request(self, method: MethodDescriptor) -> Message:
        """A request that is valid except for a few fields."""
        if method.name in self.pages and self.draw.random() < 0.3:
            return self.pages.pop(method.name)
        made = GetMessageClass(method.input_type)()
        self._fill(made, 0)
        if self.draw.random() < 0.7:
            self._agree(made)
            if method.name in BY_EARLIER_ANSWER and self.draw.random() < 0.7:
                _clear(made, "request_id")
                return made
        for _ in range(self.draw.choice([0, 0, 0, 0, 1, 1, 2, 5])):
            self._spoil(made)
        return made

    def _agree(self, made: Any) -> None:
        """Set fields that must go together, which a descriptor does not say."""
        name = made.DESCRIPTOR.name
        if name == "UpdateFragmentRequest":
            made.update_mask.paths[:] = self.draw.sample(["content", "importance", "metadata", "pinned", "speaker"], 2)
            made.fragment.id = self._fragment(made)
            made.fragment.etag = ""
        elif name == "UpdateMemoryRequest":
            made.update_mask.paths[:] = self.draw.sample(["labels", "policy.recall", "policy.short_term.capacity"], 1)
            made.memory.etag = ""
        elif name in ("ForgetFragmentsRequest", "RestoreFragmentsRequest", "EraseFragmentsRequest"):
            del made.ids[:]
            if self.draw.random() < 0.6:
                made.ClearField("filter")
                made.ids.extend([self._held("fragment_id"), self._fragment(made)])
        elif name in ("GetFragmentRequest", "GetFragmentHistoryRequest"):
            made.id = self._fragment(made)
        elif name == "ContextRequest":
            self._agree_context(made)
        elif name.startswith("List"):
            payload = self.draw.choice([*TEXTS, "1", "-1", "1:x", "9" * 19])
            made.page_token = page_tokens.make_token(made, payload) if self.draw.random() < 0.1 else ""
        elif name in ("ObserveBatchRequest", "RecallOnceRequest"):
            made.ClearField("producer" if name[0] == "O" else "session")
            if self.draw.random() < 0.4:
                self._agree_plain(made)
        else:
            self._agree_earlier(made, name)

    def _agree_earlier(self, made: Any, name: str) -> None:
        """Name what an earlier answer has."""
        if name == "SupersedeFragmentsRequest":
            self._agree_supersede(made)
        elif name == "ResolveConflictRequest":
            made.older_id, made.newer_id = sorted((self._fragment(made), self._neighbour(made)))  # in order of receipt
            made.decision = self.draw.choice([1, 2, 3, 4])
        elif name == "RestoreFragmentVersionRequest" and (version := self._seen(made, "FragmentVersion")):
            made.id, made.version, made.etag = version.fragment.id, version.version, ""
        elif name == "CancelOperationRequest" and self.seen["Operation"]:
            made.id = self.draw.choice(self.seen["Operation"])[2].id  # type: ignore[attr-defined]
        elif name in ("GetMessageRequest", "ReplaceMessageRequest"):
            holder = made if name[0] == "G" else made.message
            holder.number = self.draw.choice([1, 1, 2, 3, 9])
            if name[0] == "G":
                made.ClearField("client_id")
        elif name in ("SetStateRequest", "GetStateRequest"):
            self._agree_state(made)
        elif name == "GetStatesRequest":
            made.ClearField("keys")
            self._agree_state(made.keys.add())
        elif name == "WriteTogetherRequest":
            self._agree_transaction(made)
        elif name == "ReplayRecallRequest" and (receipt := self._seen(made, "RecallReceipt")):
            made.receipt_id = receipt.id

    def _fragment(self, made: Any) -> str:
        """The id of a recently seen fragment; the request is set to its memory."""
        chosen = self._held("fragment_id")
        made.namespace, made.memory = self.places.get(chosen, (made.namespace, made.memory))
        return chosen

    def _agree_plain(self, made: Any) -> None:
        """Statements that are twins, or a query that leaves a receipt."""
        if made.DESCRIPTOR.name == "RecallOnceRequest":
            made.query.Clear()
            made.query.text, made.query.receipt = "budget", True
        else:
            del made.observations[:]
            for _ in range(2):
                made.observations.add(
                    content=f"My {self.own} budget is now {self.draw.randrange(9)} euros", speaker="Ana"
                )

    def _agree_context(self, made: Any) -> None:
        """Paths, and a position of the conversation."""
        for name in ("blocks", "block_tokens", "tail_tokens", "evidence_tokens", "tokenizer", "timeout"):
            made.ClearField(name)
        made.conversation = f"{self.draw.choice(self.names)}/{self.draw.choice(TALKS)}"
        made.after = pack_position(Position(FORMAT, made.conversation, 1, 2)) if self.draw.random() < 0.5 else b""
        made.budget = self.draw.choice([0, 1_000, 30_000])
        if self.draw.random() < 0.5:
            for name in ("scopes", "filter", "embedding", "time_zone", "now", "limit"):
                made.ClearField(name)
            made.scopes.add(memory=f"{self.draw.choice(self.names)}/{self.draw.choice(MEMORIES)}")

    def _agree_state(self, made: Any) -> None:
        """A document that may be written or read."""
        made.scope, made.name = self.draw.choice([1, 2, 3]), self.draw.choice(TALKS)
        if made.DESCRIPTOR.name == "SetStateRequest":
            made.document = json.dumps({"step": self.draw.randrange(9), "of": self.own})
            made.ClearField("precondition")

    def _agree_transaction(self, made: Any) -> None:
        """Writes without preconditions."""
        made.ClearField("writes")
        made.ClearField("memory")
        talk = made.writes.add().append_messages
        talk.conversation = self.draw.choice(TALKS)
        talk.messages.add(role="user", content=f"{self.own} {self._word()}")
        self._agree_state(made.writes.add().set_state)
        if self.draw.random() < 0.3:
            self._agree_state(made.writes.add().delete_state)
            gone = made.writes.add().remove_messages
            gone.conversation, gone.oldest = talk.conversation, 1
        if self.draw.random() < 0.5:
            made.memory = self.draw.choice(MEMORIES)
            put = made.writes.add().put_fragment.observation
            put.external_id, put.content = self._word(), f"{self.own} {self._word()}"

    def _agree_supersede(self, made: Any) -> None:
        """Two fragments of one memory."""
        made.newer_id = self._fragment(made)
        del made.ids[:], made.external_ids[:]
        made.ids.append(self._neighbour(made))

    def _neighbour(self, made: Any) -> str:
        """The id of a seen fragment of the request's memory."""
        place = made.namespace, made.memory
        return self.draw.choice([each for each, seen in self.places.items() if seen == place] or ["0" * 26])

    def _seen(self, made: Any, name: str) -> Any:
        """A message of an earlier answer, or None; the request is set to its memory."""
        if not self.seen[name]:
            return None
        made.namespace, made.memory, chosen = self.draw.choice(self.seen[name])
        return chosen

    def _held(self, name: str) -> str:
        return self.draw.choice(self.pool.get(name) or ["0" * 26])

    def _streamed(self, method: MethodDescriptor, place: int) -> Message:
        """`open` first, as a rule; then any message."""
        made = GetMessageClass(method.input_type)()
        kinds = [field.name for field in method.input_type.oneofs_by_name["message"].fields]
        kind = "open" if place == 0 and self.draw.random() < 0.95 else self.draw.choice(kinds)
        if place and kind == "open" and self.draw.random() < 0.8:
            kind = kinds[1]
        if kind == "lines":
            made.lines = self._import_lines()  # type: ignore[attr-defined]
        elif self.draw.random() < 0.98:
            part = getattr(made, kind)
            part.SetInParent()
            self._fill(part, 1)
            if kind == "batch":
                part.first_sequence = self.draw.choice([1, 1, 1 + place, 2, 0, -1, 2**63 - 1])
        for _ in range(self.draw.choice([0, 0, 0, 1, 2])):
            self._spoil(made)
        return made

    def _bytes(self, message: Message) -> bytes:
        data = message.SerializeToString()
        chance = self.draw.random()
        if not data or chance > 0.04:
            return data
        if chance < 0.01:
            return data[: self.draw.randrange(len(data))]
        if chance < 0.02:
            return data + self.draw.randbytes(self.draw.choice([1, 5, 60]))
        place = self.draw.randrange(len(data))
        return data[:place] + self.draw.randbytes(1) + data[place + 1 :]

    # ---- fields
    def _fill(self, message: Message, depth: int) -> None:
        chosen = {self.draw.choice(list(one.fields)).name for one in message.DESCRIPTOR.oneofs if len(one.fields) > 1}
        for field in message.DESCRIPTOR.fields:
            alone = field.containing_oneof is None or len(field.containing_oneof.fields) == 1
            if not alone and field.name not in chosen:
                continue
            needed = field.name in NEEDED
            if needed or self.draw.random() < (0.25 if depth < 4 else 0.05):
                self._set(message, field, lambda field: self._sound(field, depth), depth)

    def _set(
        self, message: Message, field: FieldDescriptor, value: Callable[[FieldDescriptor], Any], depth: int
    ) -> None:
        if _is_map(field):
            self._put_in_map(message, field, depth)
        elif field.is_repeated:
            count = self.draw.choice([0, 1, 1, 2, 3]) if self.draw.random() < 0.99 else 1_100
            if field.message_type is field.containing_type:  # a filter inside of a filter
                count = min(count, 3)
            if field.name == "embedding":
                count = self.draw.choice([0, 384, 384, 3])
            held = getattr(message, field.name)
            held.extend([value(field) for _ in range(count)])
        elif field.message_type is not None:
            getattr(message, field.name).CopyFrom(value(field))
        else:
            setattr(message, field.name, value(field))

    def _put_in_map(self, message: Message, field: FieldDescriptor, depth: int) -> None:
        held, kind = getattr(message, field.name), field.message_type.fields_by_name["value"]
        for _ in range(self.draw.choice([1, 2]) if self.draw.random() < 0.98 else 70):
            key = self.draw.choice(["topic", "n", self._word()])
            if self.draw.random() < 0.05:
                key = self.draw.choice(TEXTS)
            if kind.message_type is None:
                held[key] = self._sound(kind, depth)
            else:
                self._fill(held[key], depth + 1)

    def _sound(self, field: FieldDescriptor, depth: int) -> Any:
        """A value that may be accepted."""
        if field.message_type is not None:
            made = GetMessageClass(field.message_type)()
            if field.message_type.full_name == "google.protobuf.Timestamp":
                made.seconds = self.draw.choice([0, 1_700_000_000, 1_790_000_000, 4_000_000_000])  # type: ignore[attr-defined]
            elif field.message_type.full_name == "google.protobuf.Duration":
                made.seconds = self.draw.choice([1, 60, 86_400])  # type: ignore[attr-defined]
            elif field.message_type.full_name == "google.protobuf.FieldMask":
                made.paths.append(self.draw.choice(MASKS[:4]))  # type: ignore[attr-defined]
            elif depth < 6:
                self._fill(made, depth + 1)
            return made
        if field.type == _F.TYPE_STRING:
            return self._text(field.name)
        if field.type == _F.TYPE_ENUM:
            return self.draw.choice(
                [value.number for value in field.enum_type.values if value.number or not field.is_repeated]
            )
        if field.type == _F.TYPE_BOOL:
            return self.draw.random() < 0.5
        if field.type in (_F.TYPE_DOUBLE, _F.TYPE_FLOAT):
            return self.draw.random()
        if field.type == _F.TYPE_BYTES:
            return self.draw.randbytes(self.draw.choice([0, 1, 30]))
        return self.draw.choice([0, 1, 2, 10, 50])

    def _text(self, name: str) -> str:
        if "namespace" in name:
            return self.draw.choice(self.names)
        if name in ("memory", "name", "new_memory"):
            return self.draw.choice(MEMORIES if self.draw.random() < 0.9 else IMPORTED)
        if name in ("conversation", "block"):
            return self.draw.choice(TALKS)
        if name in ("ids", "exclude_ids"):
            return self._held("fragment_id")
        if name in ("etag", "page_token") and self.draw.random() < 0.7:
            return ""
        if name in OPAQUE and (held := self.pool.get(name) or self.pool.get(f"next_{name}")):
            return self.draw.choice(held)
        if name in ("query_id", "producer", "external_id", "request_id", "sender", "receiver", "agent", "session"):
            return f"{name}-{self.draw.randrange(6)}"
        if name == "language":
            return self.draw.choice(["english", "german", "auto", "klingon"])
        if name in ("context", "review_info", "action_report", "resource_info"):
            return json.dumps({"a": [1, None, self.own]})
        if name == "rely":
            return self.draw.choice(["1", "1,2", ""])
        return f"{self.own} {' '.join(self._word() for _ in range(self.draw.choice([1, 4, 12])))}"

    def _word(self) -> str:
        return "".join(self.draw.choices(string.ascii_lowercase, k=self.draw.choice([1, 4, 9])))

    # ---- invalid values
    def _spoil(self, message: Message) -> None:
        """Set one field, at any depth, to a value that is likely to be rejected."""
        place = message
        while True:
            inner = [each for field, value in place.ListFields() for each in _inside(field, value)]
            if not inner or self.draw.random() < 0.4:
                break
            place = self.draw.choice(inner)
        fields = [field for field in place.DESCRIPTOR.fields if not _is_map(field)]
        if fields:
            self._set(place, self.draw.choice(fields), self._wrong, 5)

    def _wrong(self, field: FieldDescriptor) -> Any:
        if field.message_type is not None:
            made = GetMessageClass(field.message_type)()
            if {"seconds", "nanos"} == set(field.message_type.fields_by_name):
                made.seconds, made.nanos = self.draw.choice(SECONDS), self.draw.choice(NANOS)  # type: ignore[attr-defined]
            elif field.message_type.full_name == "google.protobuf.FieldMask":
                made.paths.extend(self.draw.choices([*MASKS, *TEXTS], k=3))  # type: ignore[attr-defined]
            return made
        if field.type == _F.TYPE_STRING:
            return self._wrong_text()
        if field.type == _F.TYPE_ENUM:
            return self.draw.choice([0, -1, 9, 99, 2**31 - 1, -(2**31)])
        if field.type == _F.TYPE_BOOL:
            return self.draw.random() < 0.5
        if field.type == _F.TYPE_DOUBLE:
            return self.draw.choice(FLOATS)
        if field.type == _F.TYPE_FLOAT:
            return self.draw.choice([each for each in FLOATS if not 1e38 < abs(each) < float("inf")] + [3.4e38])
        if field.type == _F.TYPE_BYTES:
            return self.draw.randbytes(self.draw.choice([0, 7, 70_000]))
        low, high = _BOUNDS.get(field.type, (-(2**63), 2**63 - 1))
        return self.draw.choice([each for each in INTS if low <= each <= high])

    def _wrong_text(self) -> str:
        chance = self.draw.random()
        if chance < 0.45 and self.pool:  # an id or token of another kind
            return self.draw.choice(self.pool[self.draw.choice(list(self.pool))] or [""])
        if chance < 0.5:
            return "".join(chr(self.draw.choice(CODE_POINTS)) for _ in range(20))
        if chance < 0.51:
            return self.draw.choice(["x", "é", "\x00", "word "]) * 70_000
        return self.draw.choice(TEXTS)

    def _import_lines(self) -> bytes:
        """Lines of an export, some of them changed."""
        if not self.exports or self.draw.random() < 0.2:
            return self.draw.choice([b"", b"\n", b"{}\n", b"[]\n", b"null\n", b"[" * 5_000 + b"\n", b"{", b"\xff\n"])
        whole = self.draw.choice(self.exports)
        if self.draw.random() < 0.4:
            return whole
        lines = whole.splitlines()
        place = self.draw.randrange(len(lines))
        changed = [*lines[:place], self._changed(lines[place]), *lines[place + self.draw.choice([0, 1, 1, 1]) :]]
        return b"\n".join(changed) + self.draw.choice([b"\n", b"\n", b"\n", b""])

    def _changed(self, line: bytes) -> bytes:
        try:
            held = json.loads(line)
        except ValueError:
            return line
        if isinstance(held, dict) and self.draw.random() < 0.5:
            key = self.draw.choice([*held, "other"])
            held[key] = self.draw.choice([None, -1, 1e308, 2**70, "", "\x00", [], {}, [[[]]], {"a": 1}, True, *TEXTS])
        return json.dumps(held).encode()

    def headers(self) -> list[tuple[str, str | bytes]]:
        """Metadata that a client may send; mostly none."""
        if self.draw.random() < 0.9:
            return []
        given: list[tuple[str, str | bytes]] = [
            ("memstream-memory", self.draw.choice([f"{self.names[0]}/m0", "", "x", "a/b/c", "%" * 300])),
            ("x-request-id", self.draw.choice(["r", "a b", "x" * 200, "~!@#$%^&*()", ""])),
            ("traceparent", self.draw.choice(["", "00-0-0-0", "zz", f"00-{'a' * 32}-{'b' * 16}-01"])),
            ("memstream-caller", self.draw.choice(["", "key:root", "a.b.c"])),
            ("memstream-passed-on", "1"),
            ("anything-bin", self.draw.randbytes(20)),
            ("grpc-status-details-bin", self.draw.randbytes(9)),
            ("te-st", "x" * 3_000),
        ]
        return self.draw.sample(given, self.draw.choice([1, 2]))


NEEDED = {
    "namespace",
    "memory",
    "name",
    "conversation",
    "block",
    "content",
    "text",
    "producer",
    "query",
    "observation",
    "message",
}
NEEDED |= {
    "observations",
    "plans",
    "sub_task_number",
    "sender",
    "query_id",
    "new_memory",
    "first_sequence",
    "external_id",
}
_BOUNDS = {
    _F.TYPE_INT32: (-(2**31), 2**31 - 1),
    _F.TYPE_UINT32: (0, 2**32 - 1),
    _F.TYPE_UINT64: (0, 2**63 - 1),
}


def _clear(made: Message, name: str) -> None:
    if name in made.DESCRIPTOR.fields_by_name:
        made.ClearField(name)


def _is_map(field: FieldDescriptor) -> bool:
    return field.message_type is not None and bool(field.message_type.GetOptions().map_entry)


def _messages(field: FieldDescriptor, value: Any) -> Iterator[Message]:
    if _is_map(field):
        return (each for each in value.values() if isinstance(each, Message))
    return iter(value if field.is_repeated else [value])


def _inside(field: FieldDescriptor, value: Any) -> list[Message]:
    return list(_messages(field, value)) if field.message_type is not None else []


def parse_answer(method: MethodDescriptor, data: bytes) -> Message | None:
    """Parse an answer as the contract's message; None if it is not one."""
    try:
        return GetMessageClass(method.output_type).FromString(data)
    except DecodeError:
        return None
