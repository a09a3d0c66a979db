"""Checks whether lines are an importable export: line by line, in bounded memory, without I/O.

The ids and external ids of a memory are collected to find duplicates: 26 and 24 bytes per fragment. Those that are
superseded are collected to check chains: 300 bytes each.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from hashlib import blake2b, sha256
from itertools import chain

import msgspec
import numpy as np

from memstream_server.core.filters import Filter
from memstream_server.core.json_text import find_fault
from memstream_server.core.tiers import TIERS
from memstream_server.core.values import METADATA_DEPTH_MAX, MetadataValue, Structured, Tier
from memstream_server.engine.operations.transfer.lines import (
    FORMAT,
    VERSION,
    BlockLine,
    ConversationLine,
    End,
    FragmentLine,
    Line,
    MemoryLine,
    MessageLine,
    PlanLine,
    StateLine,
    StructuredLine,
    decode_line,
    policy_of,
    version_of,
)
from memstream_server.ports.blocks import StandingAnswer

ID_CHARS = 26
DIGEST_BYTES = 16
HELD_MAX = {Tier.SENSORY: 10_000, Tier.SHORT_TERM: 1_000}
"""The largest number of fragments per tier that a policy allows."""
ENHANCEMENTS_MAX = 10_000
_INT64 = range(-(2**63), 2**63)
_AN_ID = re.compile(r"[0-9A-HJKMNP-TV-Z]{26}")
FILTERS_MAX = 256
"""In the filter of a block's question, as in a request."""
SCOPES_MAX = 100
"""Of a block's question, as of a recall."""


class MalformedExport(Exception):
    """The lines are not an importable export: line, field and description."""

    def __init__(self, line: int, field: str, description: str) -> None:
        super().__init__(f"line {line}{', ' if field else ''}{field}: {description}")
        self.line = line
        self.field = field
        self.description = description


@dataclass(frozen=True, slots=True)
class ImportTerms:
    """The server's bounds and model, and the new name, which an import must fit."""

    dimension: int
    model: str
    name_bytes_max: int
    has_stemmer: Callable[[str], bool]
    """Whether there is a stemmer for that language."""
    rename: str = ""
    """The new name of the only memory in the export; empty keeps it."""
    blocks_max: int = 64
    """Blocks of a memory."""


@dataclass(slots=True)
class Summary:
    """What an export contains."""

    memories: list[tuple[str, str]] = field(default_factory=list)
    """(name, seed in hexadecimal)"""
    conversations: list[str] = field(default_factory=list)
    states: set[tuple[str, str]] = field(default_factory=set)
    fragments: int = 0
    blocks: int = 0
    messages: int = 0
    plans: int = 0
    sha256: str = ""


@dataclass(slots=True)
class _Memory:
    line: MemoryLine
    number: int
    count: int = 0
    position: int = -1
    ids: bytearray = field(default_factory=bytearray)
    keys: bytearray = field(default_factory=bytearray)
    key_lines: list[int] = field(default_factory=list)
    held: dict[Tier, int] = field(default_factory=lambda: {Tier.SENSORY: 0, Tier.SHORT_TERM: 0})
    newer: dict[str, str] = field(default_factory=dict)
    """By id of a superseded fragment: the one that supersedes it."""
    blocks: int = 0
    block: int = 0
    """The last version of a block."""
    block_names: set[str] = field(default_factory=set)
    named: dict[str, str] = field(default_factory=dict)
    """By id: the fragment, not a forgotten one, that names it in `supersedes`."""


@dataclass(slots=True)
class _Conversation:
    line: ConversationLine
    number: int
    messages: int = 0
    plans: int = 0
    message: int = 0
    plan: int = 0
    client_ids: set[str] = field(default_factory=set)


class Checker:
    """Pass every line in order to `check_line`, then call `summarize_export`. Both raise Malformed."""

    def __init__(self, terms: ImportTerms) -> None:
        self._terms = terms
        self._number = 0
        self._hash = sha256()
        self._found = Summary()
        self._uids: set[str] = set()
        self._names: set[str] = set()
        self._section: _Memory | _Conversation | None = None
        self._ended = False

    def check_line(self, raw: bytes) -> Line:
        """Check the next line, without its line break."""
        self._number += 1
        if self._ended:
            raise self._error_at("", "comes after the end of the export")
        line = self._check_header(raw) if self._number == 1 else self._decode_line(raw)
        if isinstance(line, End):
            self._check_end(line)
        else:
            self._hash.update(raw)
            self._hash.update(b"\n")
            self._take_line(line)
        return line

    def summarize_export(self) -> Summary:
        """The contents of a complete export."""
        if not self._ended:
            self._number += 1
            raise self._error_at("", "the export is incomplete: its last line, of type end, is missing")
        return self._found

    # ---- one line
    def _check_header(self, raw: bytes) -> Line:
        try:
            said = version_of(raw)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
            raise self._error_at("", f"is not the first line of a {FORMAT}") from None
        if said.type != "export" or said.format != FORMAT:
            raise self._error_at("", f"is not the first line of a {FORMAT}")
        if said.version != VERSION:
            raise self._error_at(
                "version", f"is {said.version}, this server reads {VERSION}: import it with a newer server"
            )
        return self._decode_line(raw)

    def _decode_line(self, raw: bytes) -> Line:
        try:
            return decode_line(raw)
        except msgspec.ValidationError as error:
            text, _, path = str(error).partition(" - at `$")
            raise self._error_at(path.rstrip("`").lstrip("."), text) from None
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise self._error_at("", f"is not JSON: {error}") from None

    def _take_line(self, line: Line) -> None:
        if isinstance(line, FragmentLine):
            self._check_fragment(line)
        elif isinstance(line, BlockLine):
            self._check_block(line)
        elif isinstance(line, MessageLine):
            self._check_message(line)
        elif isinstance(line, PlanLine):
            self._check_plan(line)
        elif isinstance(line, MemoryLine):
            self._close_section()
            self._check_memory(line)
        elif isinstance(line, ConversationLine):
            self._close_section()
            self._check_conversation(line)
        elif isinstance(line, StateLine):
            self._close_section()
            self._check_state(line)
        elif self._number > 1:
            raise self._error_at("type", "is a second header: import the files one by one")

    def _check_memory(self, line: MemoryLine) -> None:
        self._check_name("namespace", line.namespace)
        self._check_name("name", line.name)
        if self._found.memories and self._terms.rename:
            raise self._error_at("name", "is a second memory: only the export of a single memory can be renamed")
        if line.name in self._names or line.uid in self._uids:
            raise self._error_at("name", f"{line.name!r} or its uid came before")
        self._names.add(line.name)
        self._uids.add(line.uid)
        if not self._terms.has_stemmer(policy_of(line.policy).language):
            raise self._error_at("policy.language", "is a language without a stemmer on this server")
        self._section = _Memory(line, self._number)
        self._found.memories.append((line.name, line.seed))

    def _check_name(self, name: str, value: str) -> None:
        size = len(value.encode())
        if size > self._terms.name_bytes_max:
            raise self._error_at(name, f"has {size} bytes, this server allows {self._terms.name_bytes_max}")

    def _check_fragment(self, line: FragmentLine) -> None:
        memory = self._section
        if not isinstance(memory, _Memory) or memory.blocks:
            raise self._error_at("type", "is fragment, but no memory (without blocks) precedes it")
        if line.position <= memory.position:
            raise self._error_at("position", f"is {line.position}, must be above {memory.position}")
        memory.position = line.position
        memory.count += 1
        memory.ids += line.id.encode()
        for name in ("speaker", "session", "external_id"):
            self._check_name(name, getattr(line, name))
        if line.external_id:
            memory.keys += blake2b(line.external_id.encode(), digest_size=DIGEST_BYTES).digest()
            memory.key_lines.append(self._number)
        self._check_place(memory, line)
        self._check_truth(memory, line)
        self._check_content(line)
        for name in ("vector", "content_vector"):
            self._check_vector(line, name, getattr(line, name))
        self._found.fragments += 1

    def _check_block(self, line: BlockLine) -> None:
        memory = self._section
        if not isinstance(memory, _Memory):
            raise self._error_at("type", "is block, but no memory precedes it")
        self._check_name("name", line.name)
        if not memory.block < line.version <= memory.line.block_version:
            last = memory.line.block_version
            raise self._error_at("version", f"is {line.version}, must be above {memory.block} and up to {last}")
        if line.update_time_us < line.create_time_us:
            raise self._error_at("update_time_us", "is before create_time_us")
        memory.block = line.version
        memory.blocks += 1
        memory.block_names.add(line.name)
        if len(memory.block_names) > self._terms.blocks_max:
            raise self._error_at("name", f"is that of one block more than the {self._terms.blocks_max} of a memory")
        for key, value in line.metadata.items():
            self._check_metadata(f"metadata.{key}", value, 1)
        if line.standing is not None:
            self._check_standing(line.standing)
        self._found.blocks += 1

    def _check_standing(self, standing: StandingAnswer) -> None:
        asked = standing.question
        if not asked.text.strip():
            raise self._error_at("standing.question.text", "is empty")
        bounds: tuple[tuple[str, float, float, float], ...] = (
            ("limit", 1 if asked.limit is None else asked.limit, 1, 1_000),
            ("min_relevance", asked.min_relevance or 0, 0, 1),
            ("min_interval_us", asked.min_interval_us, 0, 86_400_000_000),
        )
        for name, value, low, high in bounds:
            if not low <= value <= high:
                raise self._error_at(f"standing.question.{name}", f"must be from {low} to {high}")
        named = {scope.memory for scope in asked.scopes}
        if len(named) < len(asked.scopes) or len(named) > SCOPES_MAX:
            raise self._error_at("standing.question.scopes", f"must be at most {SCOPES_MAX} different memories")
        if _count_filters(asked.filter) > FILTERS_MAX:
            raise self._error_at("standing.question.filter", f"has more than {FILTERS_MAX} filters")
        for id_ in (*standing.sources, *chain(*standing.citations)):
            if not _AN_ID.fullmatch(id_):
                raise self._error_at("standing", "cites what is no id")

    def _check_place(self, memory: _Memory, line: FragmentLine) -> None:
        if line.tier not in TIERS[memory.line.kind]:
            raise self._error_at("tier", f"is {line.tier}, which a memory of kind {memory.line.kind} does not have")
        if line.duplicate_count > line.enhancement_count:
            raise self._error_at("duplicate_count", "is above enhancement_count, of which it is a part")
        if bool(line.repeat_time_us) != bool(line.repeat_position) or 0 < line.repeat_position <= line.position:
            raise self._error_at("repeat_position", "and repeat_time_us are those of a repeat that was received later")
        if line.id in line.sources:
            raise self._error_at("sources", "name the fragment itself")
        if line.tier is Tier.LONG_TERM or line.forget_time_us is not None:
            if line.enhancements or line.content_vector is not None:
                raise self._error_at(
                    "enhancements", "and content_vector are only allowed for fragments held in sensory or short-term"
                )
            return
        if len(line.enhancements) > ENHANCEMENTS_MAX:
            raise self._error_at("enhancements", f"are more than {ENHANCEMENTS_MAX}")
        if line.enhancement_count != len(line.enhancements) + line.duplicate_count:
            raise self._error_at("enhancement_count", "is not the sum of the enhancements and duplicate_count")
        for one in line.enhancements:
            if one.structured is not None and values_of(one.structured).text() != one.text:
                raise self._error_at("enhancements", "have a text that differs from the structured observation")
        memory.held[line.tier] += 1
        if memory.held[line.tier] > HELD_MAX[line.tier]:
            raise self._error_at("tier", f"{line.tier} has more than {HELD_MAX[line.tier]} fragments")

    def _check_truth(self, memory: _Memory, line: FragmentLine) -> None:
        if (
            line.valid_until_us is not None
            and line.valid_from_us is not None
            and line.valid_until_us <= line.valid_from_us
        ):
            raise self._error_at("valid_until_us", "is not after valid_from_us")
        if line.superseded_by is not None:
            memory.newer[line.id] = line.superseded_by
        for older in line.supersedes if line.forget_time_us is None else ():
            if memory.named.setdefault(older, line.id) != line.id:
                raise self._error_at("supersedes", f"name {older}, which {memory.named[older]} supersedes")

    def _check_content(self, line: FragmentLine) -> None:
        if line.structured is not None and structured_text(line) != line.content:
            raise self._error_at("content", "differs from the text of the structured observation")
        for key, value in line.metadata.items():
            self._check_metadata(f"metadata.{key}", value, 1)

    def _check_metadata(self, name: str, value: MetadataValue, depth: int) -> None:
        if isinstance(value, int) and value not in _INT64:
            raise self._error_at(name, "is not a 64-bit integer")
        if isinstance(value, list | dict):
            if depth > METADATA_DEPTH_MAX:
                raise self._error_at(name, f"is nested more than {METADATA_DEPTH_MAX} deep")
            for each in value if isinstance(value, list) else value.values():
                self._check_metadata(name, each, depth + 1)

    def _check_vector(self, line: FragmentLine, name: str, packed: bytes | None) -> None:
        if packed is None:
            if name == "vector" and line.own_vector:
                raise self._error_at(name, "is missing: the client gave it, so the server cannot make it")
            return
        if not line.model:
            raise self._error_at(name, "has no model")
        if not packed or len(packed) % 4:
            raise self._error_at(name, "is not an array of float32")
        numbers = np.frombuffer(packed, "<f4").astype(np.float64)
        if not np.isfinite(numbers).all():
            raise self._error_at(name, "has a number that is not finite")
        if abs(float(np.linalg.norm(numbers)) - 1) > 1e-3:
            raise self._error_at(name, "is not of unit length")
        if line.model == self._terms.model and len(numbers) != self._terms.dimension:
            raise self._error_at(name, f"has {len(numbers)} numbers, {line.model} has {self._terms.dimension}")

    def _check_conversation(self, line: ConversationLine) -> None:
        self._check_name("namespace", line.namespace)
        self._check_name("name", line.name)
        if self._found.conversations and line.name <= self._found.conversations[-1]:
            raise self._error_at("name", "is not above the name of the preceding conversation")
        completed = line.completions > 0 and line.completed_number == line.last_number
        if line.completed_number > line.last_number or (line.completed and not completed):
            raise self._error_at("completed_number", "does not fit last_number and completions")
        if line.state is not None:
            self._check_json("state", line.state)
        self._section = _Conversation(line, self._number)
        self._found.conversations.append(line.name)

    def _check_message(self, line: MessageLine) -> None:
        talk = self._section
        if not isinstance(talk, _Conversation) or talk.plans:
            raise self._error_at("type", "is message, but no conversation (without plans) precedes it")
        if not talk.message < line.number <= talk.line.last_number:
            raise self._error_at("number", f"must be above {talk.message} and up to {talk.line.last_number}")
        if line.body is not None:
            self._check_json("body", line.body)
        if line.client_id in talk.client_ids:
            raise self._error_at("client_id", "is that of an earlier message")
        if line.client_id:
            talk.client_ids.add(line.client_id)
        talk.message = line.number
        talk.messages += 1
        self._found.messages += 1

    def _check_plan(self, line: PlanLine) -> None:
        talk = self._section
        if not isinstance(talk, _Conversation):
            raise self._error_at("type", "is plan, but no conversation precedes it")
        if line.number <= talk.plan:
            raise self._error_at("number", f"must be above {talk.plan}")
        talk.plan = line.number
        talk.plans += 1
        self._found.plans += 1

    def _check_state(self, line: StateLine) -> None:
        self._check_name("name", line.name)
        self._check_json("document", line.document)
        if (line.scope, line.name) in self._found.states:
            raise self._error_at("name", "is that of an earlier state document of its scope")
        self._found.states.add((line.scope, line.name))

    def _check_json(self, name: str, text: str) -> None:
        if wrong := find_fault(text.encode()):
            raise self._error_at(name, f"is not JSON: {wrong}")

    # ---- end of a section, end of the export
    def _close_section(self) -> None:
        section, self._section = self._section, None
        if isinstance(section, _Memory):
            if section.count != section.line.fragments:
                raise self._error_at(
                    "", f"the memory line announces {section.line.fragments} fragments, but {section.count} follow"
                )
            if section.blocks != section.line.blocks:
                raise self._error_at(
                    "", f"the memory line announces {section.line.blocks} blocks, but {section.blocks} follow"
                )
            self._check_unique(section.ids, ID_CHARS, "id", lambda index: section.number + 1 + index)
            self._check_chains(section)
            self._check_unique(section.keys, DIGEST_BYTES, "external_id", section.key_lines.__getitem__)
        elif section is not None:
            announced = section.line.messages, section.line.plans
            if announced != (section.messages, section.plans):
                came = f"but {section.messages} messages and {section.plans} plans follow"
                raise self._error_at(
                    "", f"the conversation line announces {announced[0]} messages and {announced[1]} plans, {came}"
                )

    def _check_chains(self, memory: _Memory) -> None:
        """Both ends of a supersession name each other, and no chain closes."""
        apart = sorted(memory.newer.items() ^ memory.named.items())
        if apart:
            older, newer = apart[0]
            raise self._error_at("superseded_by", f"of {older} and supersedes of {newer} do not name each other")
        ended: set[str] = set()
        for start in memory.newer:
            passed: list[str] = []
            at = start
            while at in memory.newer and at not in ended:
                passed.append(at)
                at = memory.newer[at]
                if len(passed) > len(memory.newer):
                    raise self._error_at("superseded_by", f"leads from {start} back to itself")
            ended.update(passed)

    def _check_unique(self, packed: bytearray, width: int, name: str, line_of: Callable[[int], int]) -> None:
        """Raises MalformedExport at the second of two equal values."""
        values = np.frombuffer(packed, f"S{width}")  # compares all bytes: the values have one width
        order = values.argsort(kind="stable")
        again = np.flatnonzero(values[order][1:] == values[order][:-1])
        if len(again):
            second = int(order[again + 1].min())
            raise MalformedExport(line_of(second), name, "occurs twice in this memory")

    def _check_end(self, line: End) -> None:
        self._close_section()
        found = self._found
        self._check_renamed()
        counted = {
            "memories": len(found.memories),
            "fragments": found.fragments,
            "conversations": len(found.conversations),
            "messages": found.messages,
            "plans": found.plans,
            "states": len(found.states),
            "blocks": found.blocks,
            "sha256": self._hash.hexdigest(),
        }
        for name, count in counted.items():
            if getattr(line, name) != count:
                raise self._error_at(
                    name, f"is {getattr(line, name)}, the preceding lines have {count}: the export is damaged"
                )
        found.sha256 = line.sha256
        self._ended = True

    def _check_renamed(self) -> None:
        """Check that the memory's conversation can get the new name too."""
        new, old = self._terms.rename, [name for name, _ in self._found.memories]
        if new and new not in old and {new, *old} <= {*self._found.conversations}:
            raise self._error_at(
                "name", f"two conversations of the export would be named {new!r}: {new!r} itself and {old[0]!r}"
            )

    def _error_at(self, name: str, description: str) -> MalformedExport:
        return MalformedExport(self._number, name, description)


def structured_text(line: FragmentLine) -> str:
    """The content that belongs to a structured observation."""
    return "" if line.structured is None else values_of(line.structured).text()


def values_of(line: StructuredLine) -> Structured:
    """The structured observation of a line."""
    return Structured(**msgspec.structs.asdict(line))


__all__ = ["Checker", "ImportTerms", "MalformedExport", "Summary", "structured_text", "values_of"]


def _count_filters(chosen: Filter) -> int:
    """With all that is inside."""
    inner = (*chosen.all_of, *chosen.any_of, *chosen.none_of)
    return 1 + sum(map(_count_filters, inner))
