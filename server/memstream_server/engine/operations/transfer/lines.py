"""The lines of an export and the bounds of their fields. docs/export.schema.json is generated from these classes.

A missing field has its default; an unknown field is refused, so that nothing is lost silently.
"""

from __future__ import annotations

from dataclasses import fields, is_dataclass, replace
from typing import Annotated, Any, Literal, TypeAlias, get_type_hints

import msgspec
from msgspec import UNSET, Meta, UnsetType

from memstream_server.core.policy import PROFILES, Policy, Profile
from memstream_server.core.suspicions import ConflictDecision, ConflictReason
from memstream_server.core.values import FragmentKind, MemoryKind, MetadataValue, Role, Tier
from memstream_server.ports.blocks import StandingAnswer
from memstream_server.ports.conversations import PlanState

FORMAT = "memstream-export"
VERSION = 1

_END = r"(?![\s\S])"  # not $, which would allow a line break at the end
Id: TypeAlias = Annotated[str, Meta(pattern=rf"^[0-9A-HJKMNP-TV-Z]{{26}}{_END}", description="a ULID")]
Name: TypeAlias = Annotated[str, Meta(pattern=rf"^[A-Za-z0-9][A-Za-z0-9._~\-]*{_END}", max_length=1_024)]
Key: TypeAlias = Annotated[str, Meta(pattern=rf"^[^\x00-\x1f\x7f]*{_END}", max_length=4_096)]
Time: TypeAlias = Annotated[
    int,
    Meta(ge=-62_135_596_800_000_000, le=253_402_300_799_999_999, description="microseconds since the Unix epoch, UTC"),
]
Count: TypeAlias = Annotated[int, Meta(ge=0, le=2**53)]
Position: TypeAlias = Annotated[int, Meta(ge=0, le=2**32 - 2)]
Number: TypeAlias = Annotated[int, Meta(ge=1, le=2**31 - 1)]
Share: TypeAlias = Annotated[float, Meta(ge=0, le=1)]
Base64: TypeAlias = Annotated[bytes, Meta(max_length=1 << 22, description="base64 of float32, little-endian")]
Small: TypeAlias = Annotated[int, Meta(ge=0, le=2**31 - 1)]


def _add_bounds(kind: Any, meta: Any) -> Any:
    low, high = meta.get("low"), meta.get("high")
    return kind if low is None or high is None else Annotated[kind, Meta(ge=low, le=high)]


def _struct_of(dataclass: Any) -> Any:
    """A struct for a dataclass of tunables that refuses unknown fields. Every field except the profile may be
    missing.
    """
    hints = get_type_hints(dataclass)
    typed: list[Any] = []
    for item in fields(dataclass):
        hint = hints[item.name]
        kind = _struct_of(hint) if is_dataclass(hint) else _hint_of(hint, item)
        typed.append((item.name, kind) if hint is Profile else (item.name, kind | UnsetType, UNSET))
    return msgspec.defstruct(dataclass.__name__, typed, forbid_unknown_fields=True, kw_only=True, frozen=True)


def _hint_of(hint: Any, item: Any) -> Any:
    if hint in (int, float):
        return _add_bounds(hint, item.metadata)
    if hint == float | None:
        return _add_bounds(float, item.metadata) | None
    return hint


PolicyLine: Any = _struct_of(Policy)


class _Line(msgspec.Struct, forbid_unknown_fields=True, omit_defaults=True, tag_field="type", kw_only=True):
    """A JSON object on its own line; `type` names its kind."""


class Header(_Line, tag="export", kw_only=True):
    """The first line."""

    format: Literal["memstream-export"]
    version: Literal[1]
    server: str
    """Version of the exporting server."""
    time_us: Time
    vectors: bool
    """Whether the export includes vectors."""


class MemoryLine(_Line, tag="memory", kw_only=True):
    """A memory; its fragments follow."""

    namespace: Name
    name: Name
    uid: Id
    kind: MemoryKind
    policy: PolicyLine
    labels: dict[str, str]
    seed: Annotated[str, Meta(pattern=rf"^([0-9a-f]{{2}}){{1,64}}{_END}", description="hexadecimal")]
    """Key of the random draws: an imported memory continues the same draws."""
    revision: Count
    """The revision of all its lines."""
    create_time_us: Time
    update_time_us: Time
    reflection_aggregate: Annotated[float, Meta(ge=0, le=1e12)]
    fragments: Count
    """How many fragment lines follow."""
    blocks: Count = 0
    """How many block lines follow them."""
    block_version: Position = 0
    """The last version that was given to one of its blocks."""


class StructuredLine(msgspec.Struct, forbid_unknown_fields=True, omit_defaults=True, kw_only=True):
    """The parts of a structured observation."""

    question: str = ""
    thought: str = ""
    phase: str = ""
    action_intention: str = ""
    action_reason: str = ""
    action: str = ""
    action_input: str = ""
    observation: str = ""


class EnhancementLine(msgspec.Struct, forbid_unknown_fields=True, omit_defaults=True, kw_only=True):
    """One enhancement of a held fragment."""

    id: Id
    text: str
    recollection: bool = False
    structured: StructuredLine | None = None
    """`text` is its text."""


class ConflictLine(msgspec.Struct, forbid_unknown_fields=True, omit_defaults=True, kw_only=True):
    """A suspicion of which the fragment is the newer one."""

    older: Id
    reason: ConflictReason
    time_us: Time
    decision: ConflictDecision | None = None
    """None while it is open."""
    note: Annotated[str, Meta(max_length=1_000, pattern=rf"^[^\x00]*{_END}")] = ""
    decide_time_us: Time | None = None


class FragmentLine(_Line, tag="fragment", kw_only=True):
    """A fragment of the memory above it, in order of position."""

    id: Id
    position: Position
    content: Annotated[str, Meta(min_length=1)]
    tier: Tier
    importance: Share
    observe_time_us: Time
    create_time_us: Time
    repeat_time_us: Time = 0
    """When its words were observed last, if a repeat was counted here; else 0."""
    repeat_position: Position = 0
    """The position of that repeat in the order of receipt."""
    access_time_us: Time = 0
    version: Count = 0
    kind: FragmentKind = FragmentKind.OBSERVATION
    structured: StructuredLine | None = None
    speaker: Key = ""
    role: Role | None = None
    session: Key = ""
    access_count: Count = 0
    enhancement_count: Small = 0
    duplicate_count: Small = 0
    sources: list[Id] = []
    metadata: dict[Annotated[str, Meta(min_length=1, max_length=128)], MetadataValue] = {}
    expire_time_us: Time | None = None
    pinned: bool = False
    external_id: Key = ""
    token_count: Small = 0
    forget_time_us: Time | None = None
    own_vector: bool = False
    """The client gave the vector, so every export includes it."""
    own_importance: bool = False
    """The client gave the importance."""
    ttl_us: Annotated[int, Meta(ge=0, le=2**62)] | None = None
    """The time to live that the client gave; determines `expire_time_us`."""
    superseded_by: Id | None = None
    """The fragment that supersedes it: one of this memory that is not forgotten and names it in `supersedes`."""
    supersedes: list[Id] = []
    """The fragments that it supersedes; of a forgotten fragment, those that it superseded."""
    supersede_time_us: Time | None = None
    valid_from_us: Time | None = None
    valid_until_us: Time | None = None
    """Its content is true from `valid_from_us` until before this."""
    model: Key = ""
    """The space of the vectors; empty if the fragment has none."""
    vector: Base64 | None = None
    """Of the indexed text."""
    content_vector: Base64 | None = None
    """Of the content alone; held fragments only."""
    enhancements: list[EnhancementLine] = []
    """Held fragments only."""
    conflicts: list[ConflictLine] = []
    """Suspicions of which it is the newer fragment. An import leaves out those whose older one is not in the memory."""


class BlockLine(_Line, tag="block", kw_only=True):
    """A version of a block of the memory above it, in order of version. Its writer is the importer."""

    version: Annotated[int, Meta(ge=1, le=2**32 - 2)]
    name: Name
    text: str = ""
    max_tokens: Small = 0
    metadata: dict[Annotated[str, Meta(min_length=1, max_length=128)], MetadataValue] = {}
    create_time_us: Time
    """Of the block."""
    update_time_us: Time
    """Of this version."""
    standing: StandingAnswer | None = None
    """What it was made of, if the block keeps itself."""


class ConversationLine(_Line, tag="conversation", kw_only=True):
    """A conversation; its messages and plans follow."""

    namespace: Name
    name: Name
    last_number: Small
    completed: bool
    completions: Small
    completed_number: Small
    create_time_us: Time
    messages: Count
    plans: Count
    labels: dict[str, str] = {}
    ttl_us: Annotated[int, Meta(ge=1, le=2**62)] | None = None
    """It expires so long after `update_time_us`. Absent: never."""
    update_time_us: Time = 0
    """Absent: `create_time_us`."""
    state: str | None = None
    """The state document of its session: JSON, as text."""


class MessageLine(_Line, tag="message", kw_only=True):
    """A message of the conversation above it, in order of number."""

    number: Number
    sender: Key
    receiver: Key = ""
    role: str = ""
    content: str = ""
    rounds: Annotated[int, Meta(ge=-(2**31), le=2**31 - 1)] = 0
    success: bool | None = None
    app_code: str = ""
    app_name: str = ""
    current_goal: Annotated[str, Meta(pattern=rf"^[^\x00]*{_END}")] = ""
    context: str = ""
    review_info: str = ""
    action_report: str = ""
    model_name: str = ""
    resource_info: str = ""
    create_time_us: Time
    update_time_us: Time
    name: str = ""
    tool_call_id: str = ""
    client_id: Annotated[str, Meta(pattern=rf"^[^\x00]*{_END}")] = ""
    metadata: dict[str, MetadataValue] = {}
    time_us: Time | None = None
    body: str | None = None
    """JSON, as text."""


class PlanLine(_Line, tag="plan", kw_only=True):
    """A plan of the conversation above it, in order of number."""

    number: Number
    title: str = ""
    content: str = ""
    agent: str = ""
    resource_name: str = ""
    rely: str = ""
    agent_model: str = ""
    retry_times: Annotated[int, Meta(ge=-(2**31), le=2**31 - 1)] = 0
    max_retry_times: Annotated[int, Meta(ge=-(2**31), le=2**31 - 1)] = 0
    state: PlanState = PlanState.TODO
    result: str = ""
    create_time_us: Time
    update_time_us: Time


class StateLine(_Line, tag="state", kw_only=True):
    """A state document of an app or a user of the namespace."""

    scope: Literal["app", "user"]
    name: Key
    document: str
    """JSON, as text."""
    update_time_us: Time


class End(_Line, tag="end", kw_only=True):
    """The last line. An export without it, or with other counts, is incomplete."""

    memories: Count
    fragments: Count
    conversations: Count
    messages: Count
    plans: Count
    states: Count = 0
    blocks: Count = 0
    """Versions of blocks."""
    sha256: Annotated[str, Meta(pattern=rf"^[0-9a-f]{{64}}{_END}")]
    """Of all bytes before this line, in hexadecimal."""


Line: TypeAlias = (
    Header | MemoryLine | FragmentLine | BlockLine | ConversationLine | MessageLine | PlanLine | StateLine | End
)

_encoder = msgspec.json.Encoder()
_decoder: msgspec.json.Decoder[Line] = msgspec.json.Decoder(Line)


class HeaderVersion(msgspec.Struct):
    """The fields of the header in every version."""

    type: str = ""
    format: str = ""
    version: int = 0


version_of = msgspec.json.Decoder(HeaderVersion).decode


def encode_line(line: Line) -> bytes:
    """The line with its line break."""
    return _encoder.encode(line) + b"\n"


def decode_line(raw: bytes) -> Line:
    """Raises msgspec.MsgspecError, UnicodeDecodeError or RecursionError, which describe place and cause."""
    return _decoder.decode(raw)


def build_schema() -> dict[str, Any]:
    """The JSON Schema of one line."""
    found = msgspec.json.schema(Line)
    del found["discriminator"]  # specific to OpenAPI
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": f"A line of a memstream export, version {VERSION}",
        **found,
    }


def policy_line(policy: Policy) -> Any:
    """A policy as its line's struct."""
    return msgspec.convert(policy, PolicyLine, from_attributes=True)


def policy_of(line: Any) -> Policy:
    """The policy of a line. A missing field takes the default of the line's profile."""
    made: Policy = _overlay_policy(PROFILES[line.profile], line)
    return made


def _overlay_policy(defaults: Any, line: Any) -> Any:
    present = {name: value for name in line.__struct_fields__ if (value := getattr(line, name)) is not UNSET}
    return replace(
        defaults,
        **{
            name: _overlay_policy(getattr(defaults, name), value) if isinstance(value, msgspec.Struct) else value
            for name, value in present.items()
        },
    )


__all__ = [
    "FORMAT",
    "VERSION",
    "BlockLine",
    "ConflictLine",
    "ConversationLine",
    "End",
    "EnhancementLine",
    "FragmentLine",
    "Header",
    "Line",
    "MemoryLine",
    "MessageLine",
    "PlanLine",
    "StateLine",
    "StructuredLine",
    "build_schema",
    "decode_line",
    "encode_line",
    "policy_line",
    "policy_of",
    "version_of",
]  # fmt: skip
