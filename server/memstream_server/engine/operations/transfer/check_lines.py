"""Whether lines are an export that can be imported: line by line, in bounded memory, without I/O.

What fits together only at the end of a memory (ids that occur twice) is kept as 26 and 24 bytes a fragment.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from hashlib import blake2b, sha256

import msgspec
import numpy as np

from memstream_server.core.tiers import TIERS
from memstream_server.core.values import Structured, Tier
from memstream_server.engine.operations.transfer.lines import (
    FORMAT,
    VERSION,
    ConversationLine,
    End,
    FragmentLine,
    Line,
    MemoryLine,
    MessageLine,
    PlanLine,
    StructuredLine,
    decoded,
    policy_of,
    version_of,
)

ID_CHARS = 26
DIGEST_BYTES = 16
HELD_MAX = {Tier.SENSORY: 10_000, Tier.SHORT_TERM: 1_000}
"""What the bounds of a policy allow a tier to hold."""
ENHANCEMENTS_MAX = 10_000
_INT64 = range(-(2**63), 2**63)


class Malformed(Exception):
    """The lines are no export that can be imported: where, and what is wrong."""

    def __init__(self, line: int, field: str, description: str) -> None:
        super().__init__(f"line {line}{', ' if field else ''}{field}: {description}")
        self.line = line
        self.field = field
        self.description = description


@dataclass(frozen=True, slots=True)
class Terms:
    """What an import has to fit: the server's bounds and model, and the name it is to get."""

    dimension: int
    model: str
    name_bytes_max: int
    speaks: Callable[[str], bool]
    """Whether there is a stemmer of that language."""
    rename: str = ""
    """Set where the one memory of the export is to have another name."""


@dataclass(slots=True)
class Summary:
    """What was found."""

    memories: list[tuple[str, str]] = field(default_factory=list)
    """(name, seed in hexadecimal)"""
    conversations: list[str] = field(default_factory=list)
    fragments: int = 0
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


@dataclass(slots=True)
class _Conversation:
    line: ConversationLine
    number: int
    messages: int = 0
    plans: int = 0
    message: int = 0
    plan: int = 0


class Checker:
    """Give it every line in order, then ask for the `summary`. Both raise Malformed."""

    def __init__(self, terms: Terms) -> None:
        self._terms = terms
        self._number = 0
        self._hash = sha256()
        self._found = Summary()
        self._uids: set[str] = set()
        self._names: set[str] = set()
        self._section: _Memory | _Conversation | None = None
        self._ended = False

    def line(self, raw: bytes) -> Line:
        """The next line, without its end."""
        self._number += 1
        if self._ended:
            raise self._wrong("", "comes after the end of the export")
        line = self._header(raw) if self._number == 1 else self._decoded(raw)
        if isinstance(line, End):
            self._end(line)
        else:
            self._hash.update(raw)
            self._hash.update(b"\n")
            self._take(line)
        return line

    def summary(self) -> Summary:
        """What was in a whole export."""
        if not self._ended:
            self._number += 1
            raise self._wrong("", "the export was cut: its last line, of type end, is missing")
        return self._found

    # ---- one line
    def _header(self, raw: bytes) -> Line:
        try:
            said = version_of(raw)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
            raise self._wrong("", f"is not the first line of a {FORMAT}") from None
        if said.type != "export" or said.format != FORMAT:
            raise self._wrong("", f"is not the first line of a {FORMAT}")
        if said.version != VERSION:
            raise self._wrong("version", f"is {said.version}, this server reads {VERSION}: import it with a newer one")
        return self._decoded(raw)

    def _decoded(self, raw: bytes) -> Line:
        try:
            return decoded(raw)
        except msgspec.ValidationError as error:
            text, _, path = str(error).partition(" - at `$")
            raise self._wrong(path.rstrip("`").lstrip("."), text) from None
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise self._wrong("", f"is not JSON: {error}") from None

    def _take(self, line: Line) -> None:
        if isinstance(line, FragmentLine):
            self._fragment(line)
        elif isinstance(line, MessageLine):
            self._message(line)
        elif isinstance(line, PlanLine):
            self._plan(line)
        elif isinstance(line, MemoryLine):
            self._close()
            self._memory(line)
        elif isinstance(line, ConversationLine):
            self._close()
            self._conversation(line)
        elif self._number > 1:
            raise self._wrong("type", "is a second first line: import the files one by one")

    def _memory(self, line: MemoryLine) -> None:
        self._named("namespace", line.namespace)
        self._named("name", line.name)
        if self._found.memories and self._terms.rename:
            raise self._wrong("name", "is a second memory: only the export of one can be given another name")
        if line.name in self._names or line.uid in self._uids:
            raise self._wrong("name", f"{line.name!r} or its uid came before")
        self._names.add(line.name)
        self._uids.add(line.uid)
        if not self._terms.speaks(policy_of(line.policy).language):
            raise self._wrong("policy.language", "is none that this server has a stemmer for")
        self._section = _Memory(line, self._number)
        self._found.memories.append((line.name, line.seed))

    def _named(self, name: str, value: str) -> None:
        size = len(value.encode())
        if size > self._terms.name_bytes_max:
            raise self._wrong(name, f"has {size} bytes, this server allows {self._terms.name_bytes_max}")

    def _fragment(self, line: FragmentLine) -> None:
        memory = self._section
        if not isinstance(memory, _Memory):
            raise self._wrong("type", "is fragment where no memory came before")
        if line.position <= memory.position:
            raise self._wrong("position", f"is {line.position}, must be above {memory.position}")
        memory.position = line.position
        memory.count += 1
        memory.ids += line.id.encode()
        for name in ("speaker", "session", "external_id"):
            self._named(name, getattr(line, name))
        if line.external_id:
            memory.keys += blake2b(line.external_id.encode(), digest_size=DIGEST_BYTES).digest()
            memory.key_lines.append(self._number)
        self._place(memory, line)
        self._content(line)
        for name in ("vector", "content_vector"):
            self._vector(line, name, getattr(line, name))
        self._found.fragments += 1

    def _place(self, memory: _Memory, line: FragmentLine) -> None:
        if line.tier not in TIERS[memory.line.kind]:
            raise self._wrong("tier", f"is {line.tier}, which a memory of kind {memory.line.kind} has not")
        if line.duplicate_count > line.enhancement_count:
            raise self._wrong("duplicate_count", "is above enhancement_count, of which it is a part")
        if line.id in line.sources:
            raise self._wrong("sources", "name the fragment itself")
        if line.tier is Tier.LONG_TERM or line.forget_time_us is not None:
            if line.enhancements or line.content_vector is not None:
                raise self._wrong("enhancements", "and content_vector are of held fragments, this one is not")
            return
        if len(line.enhancements) > ENHANCEMENTS_MAX:
            raise self._wrong("enhancements", f"are more than {ENHANCEMENTS_MAX}")
        if line.enhancement_count != len(line.enhancements) + line.duplicate_count:
            raise self._wrong("enhancement_count", "is not the sum of the enhancements and duplicate_count")
        for one in line.enhancements:
            if one.structured is not None and values_of(one.structured).text() != one.text:
                raise self._wrong("enhancements", "have a text that is not that of the structured observation")
        memory.held[line.tier] += 1
        if memory.held[line.tier] > HELD_MAX[line.tier]:
            raise self._wrong("tier", f"{line.tier} holds more than {HELD_MAX[line.tier]}")

    def _content(self, line: FragmentLine) -> None:
        if line.structured is not None and structured_text(line) != line.content:
            raise self._wrong("content", "is not the text of the structured observation")
        for key, value in line.metadata.items():
            if isinstance(value, int) and value not in _INT64:
                raise self._wrong(f"metadata.{key}", "is no integer of 64 bits")

    def _vector(self, line: FragmentLine, name: str, packed: bytes | None) -> None:
        if packed is None:
            if name == "vector" and line.own_vector:
                raise self._wrong(name, "is missing: the client gave it, so nobody can make it anew")
            return
        if not line.model:
            raise self._wrong(name, "has no model")
        if not packed or len(packed) % 4:
            raise self._wrong(name, "is no array of float32")
        numbers = np.frombuffer(packed, "<f4").astype(np.float64)
        if not np.isfinite(numbers).all():
            raise self._wrong(name, "has a number that is not finite")
        if abs(float(np.linalg.norm(numbers)) - 1) > 1e-3:
            raise self._wrong(name, "is not of unit length")
        if line.model == self._terms.model and len(numbers) != self._terms.dimension:
            raise self._wrong(name, f"has {len(numbers)} numbers, {line.model} has {self._terms.dimension}")

    def _conversation(self, line: ConversationLine) -> None:
        self._named("namespace", line.namespace)
        self._named("name", line.name)
        if self._found.conversations and line.name <= self._found.conversations[-1]:
            raise self._wrong("name", "is not above the name of the conversation before")
        completed = line.completions > 0 and line.completed_number == line.last_number
        if line.completed_number > line.last_number or (line.completed and not completed):
            raise self._wrong("completed_number", "does not fit last_number and completions")
        self._section = _Conversation(line, self._number)
        self._found.conversations.append(line.name)

    def _message(self, line: MessageLine) -> None:
        talk = self._section
        if not isinstance(talk, _Conversation) or talk.plans:
            raise self._wrong("type", "is message where no conversation (or its plans) came before")
        if not talk.message < line.number <= talk.line.last_number:
            raise self._wrong("number", f"must be above {talk.message} and up to {talk.line.last_number}")
        if talk.message and line.number != talk.message + 1:
            raise self._wrong("number", f"must be {talk.message + 1}: messages follow one another without a gap")
        talk.message = line.number
        talk.messages += 1
        self._found.messages += 1

    def _plan(self, line: PlanLine) -> None:
        talk = self._section
        if not isinstance(talk, _Conversation):
            raise self._wrong("type", "is plan where no conversation came before")
        if line.number <= talk.plan:
            raise self._wrong("number", f"must be above {talk.plan}")
        talk.plan = line.number
        talk.plans += 1
        self._found.plans += 1

    # ---- the end of a section, and of all
    def _close(self) -> None:
        section, self._section = self._section, None
        if isinstance(section, _Memory):
            if section.count != section.line.fragments:
                raise self._wrong("", f"{section.line.fragments} fragments were announced, {section.count} came")
            self._once(section.ids, ID_CHARS, "id", lambda index: section.number + 1 + index)
            self._once(section.keys, DIGEST_BYTES, "external_id", section.key_lines.__getitem__)
        elif section is not None:
            announced = section.line.messages, section.line.plans
            if announced != (section.messages, section.plans):
                came = f"{section.messages} messages and {section.plans} plans came"
                raise self._wrong("", f"{announced[0]} messages and {announced[1]} plans were announced, {came}")
            if section.messages and section.message != section.line.last_number:
                raise self._wrong("", f"messages end at {section.message}, last_number is {section.line.last_number}")

    def _once(self, packed: bytearray, width: int, name: str, line_of: Callable[[int], int]) -> None:
        """Raises Malformed at the second of two equal values."""
        values = np.frombuffer(packed, f"S{width}")  # equal where all bytes are: their widths are
        order = values.argsort(kind="stable")
        again = np.flatnonzero(values[order][1:] == values[order][:-1])
        if len(again):
            second = int(order[again + 1].min())
            raise Malformed(line_of(second), name, "came before in this memory")

    def _end(self, line: End) -> None:
        self._close()
        found = self._found
        self._renamed()
        counted = {
            "memories": len(found.memories),
            "fragments": found.fragments,
            "conversations": len(found.conversations),
            "messages": found.messages,
            "plans": found.plans,
            "sha256": self._hash.hexdigest(),
        }
        for name, count in counted.items():
            if getattr(line, name) != count:
                raise self._wrong(name, f"is {getattr(line, name)}, the lines before give {count}: something was lost")
        found.sha256 = line.sha256
        self._ended = True

    def _renamed(self) -> None:
        """The conversation that has the name of the memory goes by its new one, too."""
        new, old = self._terms.rename, [name for name, _ in self._found.memories]
        if new and new not in old and {new, *old} <= {*self._found.conversations}:
            raise self._wrong("name", f"two conversations would be named {new!r}: that one, and {old[0]!r}")

    def _wrong(self, name: str, description: str) -> Malformed:
        return Malformed(self._number, name, description)


def structured_text(line: FragmentLine) -> str:
    """What the content of a structured observation is."""
    return "" if line.structured is None else values_of(line.structured).text()


def values_of(line: StructuredLine) -> Structured:
    """The structured observation of its parts."""
    return Structured(**msgspec.structs.asdict(line))


__all__ = ["Checker", "Malformed", "Summary", "Terms", "structured_text", "values_of"]
