"""Scenarios: text files of commands with the events and state that they must produce, for all drivers alike.

A file is a head of directives, then blocks separated by blank lines; `#` begins a comment line. A block is command
lines, a line `----`, and the expected output. With MEMSTREAM_REWRITE=1 tests write the actual output.

    drivers: core, engine            which drivers can run the file (default: all of core, engine, client)
    draws: shown                     print the draws, too (only where ids are fixed: in the core driver)

    memory kind=hybrid profile=dbgpt short_term.capacity=2      creates a memory; aliases restart
    policy short_term.capacity=1                                changes its policy
    observe "text" speaker=.. session=.. importance=.. vector=[1,0] external_id=.. thought="..."
        supersedes=f1,f2 valid_from=.. valid_until=..           seconds of the scenario's clock
    supersede f1,f2 by=f3                                       prints how many, or what was refused
    recall "text" vector=[1,0] session=.. limit=1               prints the hits, then the effects of reinforcement
    clear short_term long_term | forget f1 | restore f1 | erase f1 | pin f1 | unpin f1
    update f1 text="..." vector=[0,1] importance=0.9
    state                                                       prints the tiers, one fragment a line
    anything else                                               the driver's `extra`

Fragments are called f1, f2, ... in order of observation (repeats and echoes count), insights i1, i2, ... in order of
appearance. Vectors are scaled to unit length; a driver whose model has more dimensions pads them with zeros, which
preserves every cosine. The events of each command are printed after it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Protocol

import numpy as np

from memstream_server.core.events import Event
from memstream_server.core.policy import PROFILES, Policy, Profile, iterate_tunables, with_value
from memstream_server.core.values import Fragment, MemoryKind, Structured, Tier, Vector

DRIVERS = ("core", "engine", "client")
Value = str | list[float]


@dataclass(frozen=True, slots=True)
class Command:
    """One line: a name, words (with aliases already resolved to ids for the driver), and options."""

    name: str
    words: tuple[str, ...] = ()
    options: Mapping[str, Value] = field(default_factory=dict)

    def text(self, option: str, default: str = "") -> str:
        value = self.options.get(option, default)
        if not isinstance(value, str):
            raise ValueError(f"{self.name}: {option} is not text")
        return value

    def number(self, option: str) -> float | None:
        return float(self.text(option)) if option in self.options else None

    def vector(self) -> Vector | None:
        value = self.options.get("vector")
        if value is None or isinstance(value, str):
            return None
        vector = np.array(value, dtype=np.float32)
        return vector / np.linalg.norm(vector)


@dataclass(frozen=True, slots=True)
class MemorySpec:
    """A memory to create: `overrides` are dotted policy fields on top of the profile's."""

    kind: MemoryKind
    profile: Profile
    overrides: Mapping[str, object]

    def policy(self) -> Policy:
        return override_policy(PROFILES[self.profile], self.overrides)


@dataclass(frozen=True, slots=True, eq=False)
class Said:
    """An observation to send. `content` is the structured observation's text if there is one."""

    content: str
    structured: Structured | None
    speaker: str
    session: str
    importance: float | None
    external_id: str
    vector: Vector | None
    metadata: tuple[tuple[str, str], ...] = ()
    ttl_s: float | None = None
    observe_time_s: float | None = None
    supersedes: tuple[str, ...] = ()
    valid_from_s: float | None = None
    valid_until_s: float | None = None


@dataclass(frozen=True, slots=True, eq=False)
class Query:
    """A recall. Without a limit, the policy's applies."""

    text: str
    session: str
    limit: int | None
    vector: Vector | None


@dataclass(frozen=True, slots=True, eq=False)
class Change:
    """An update of one fragment: None leaves a field unchanged."""

    id: str
    content: str | None = None
    vector: Vector | None = None
    importance: float | None = None
    pinned: bool | None = None


class Driver(Protocol):
    """A memory to run scenarios against. Each method returns once all its effects are stored."""

    async def create(self, spec: MemorySpec) -> None:
        """Create a new memory; later calls refer to it."""
        ...

    async def set_policy(self, overrides: Mapping[str, object]) -> None: ...

    async def observe(self, said: Said) -> str:
        """The id given to the observation, also for a repeat or an echo."""
        ...

    async def recall(self, query: Query) -> list[str]:
        """Ids by rank, without working memory; reinforcement is stored when this returns."""
        ...

    async def clear(self, tiers: Sequence[Tier]) -> None: ...

    async def forget(self, ids: Sequence[str]) -> None: ...

    async def restore(self, ids: Sequence[str]) -> None: ...

    async def erase(self, ids: Sequence[str]) -> None: ...

    async def supersede(self, olds: Sequence[str], new: str) -> str:
        """How many were superseded, or the id that closes a cycle, as text to print."""
        ...

    async def update(self, change: Change) -> None: ...

    async def events(self) -> list[Event]:
        """The memory's events that were not returned yet, in order."""
        ...

    async def fragments(self) -> list[Fragment]:
        """All live and forgotten fragments, in order of position."""
        ...

    async def extra(self, command: Command) -> list[str]:
        """A command that only some drivers know; returns lines to print (ids become aliases). Raises ValueError."""
        ...


# ---- reading and writing files


@dataclass(frozen=True, slots=True)
class Block:
    """Commands and their expected output; `verbatim` are the lines (comments, blanks) before them."""

    verbatim: tuple[str, ...]
    commands: tuple[str, ...]
    expected: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Scenario:
    """A parsed file. `head` and `tail` are kept, so that a rewrite changes only the expected output."""

    directives: Mapping[str, str]
    blocks: tuple[Block, ...]
    tail: tuple[str, ...]

    @property
    def drivers(self) -> tuple[str, ...]:
        named = self.directives.get("drivers")
        return tuple(name.strip() for name in named.split(",")) if named else DRIVERS


_DIRECTIVE = re.compile(r"(drivers|draws): *(.+)")


def parse_scenario(text: str) -> Scenario:
    """Read a scenario file's text. Raises ValueError on a block without `----`."""
    directives: dict[str, str] = {}
    blocks: list[Block] = []
    verbatim: list[str] = []
    lines = text.splitlines()
    at = 0
    while at < len(lines):
        line = lines[at]
        if directive := _DIRECTIVE.fullmatch(line):
            directives[directive[1]] = directive[2]
        if directive or not line.strip() or line.startswith("#"):
            verbatim.append(line)
            at += 1
            continue
        rule = _find(lines, at, "----")
        end = _find(lines, rule, "")
        blocks.append(Block(tuple(verbatim), tuple(lines[at:rule]), tuple(lines[rule + 1 : end])))
        verbatim, at = [], end
    return Scenario(directives, tuple(blocks), tuple(verbatim))


def _find(lines: Sequence[str], start: int, wanted: str) -> int:
    for at in range(start, len(lines)):
        if lines[at].strip() == wanted:
            return at
    if wanted == "":
        return len(lines)
    raise ValueError(f"line {start + 1}: a block without {wanted}")


def render(scenario: Scenario, outputs: Iterable[Sequence[str]]) -> str:
    """The file's text with these outputs in place of the expected ones."""
    lines: list[str] = []
    for block, output in zip(scenario.blocks, outputs, strict=True):
        lines += [*block.verbatim, *block.commands, "----", *output]
    return "\n".join([*lines, *scenario.tail]) + "\n"


_TOKEN = re.compile(
    r"""\s*(?:(?P<key>[a-z_][a-z0-9_.]*)=)?(?P<value>"(?:[^"\\]|\\.)*"|\[[^\]]*\]|[^\s"\[]+)""",
)


def parse_command(line: str) -> Command:
    """Read one command line. Quoted values are JSON strings, bracketed ones lists of numbers."""
    words: list[str] = []
    options: dict[str, Value] = {}
    at = 0
    while at < len(line.rstrip()):
        token = _TOKEN.match(line, at)
        if token is None:
            raise ValueError(f"cannot read {line!r} from column {at + 1}")
        raw = token["value"]
        value: Value = json.loads(raw) if raw[0] in '"[' else raw
        if token["key"]:
            options[token["key"]] = value
        elif isinstance(value, str):
            words.append(value)
        at = token.end()
    return Command(words[0], tuple(words[1:]), options)


# ---- commands to values

_OPTIONAL = {
    "short_term.similarity_min",
    "recall.dense_weight",
    "recall.lexical_weight",
    "recall.context_weight",
    "recall.weak_below",
}


def overrides_of(options: Mapping[str, Value]) -> dict[str, object]:
    """Dotted policy fields with typed values. Raises ValueError for an unknown name."""
    current = {name: value for name, value, _ in iterate_tunables(PROFILES[Profile.DEFAULT])}
    found: dict[str, object] = {}
    for name, raw in options.items():
        if name not in current or not isinstance(raw, str):
            raise ValueError(f"no policy field {name}")
        found[name] = _typed(name, raw, current[name])
    return found


def _typed(name: str, raw: str, current: object) -> object:
    if isinstance(current, bool):
        return raw == "true"
    if name in _OPTIONAL:
        return None if raw == "none" else float(raw)
    return type(current)(raw) if isinstance(current, int | float | str) else raw  # enums are str


def override_policy(policy: Policy, overrides: Mapping[str, object]) -> Policy:
    """The policy with dotted fields set."""
    for name, value in overrides.items():
        policy = with_value(policy, name, value)
    return policy


def spec_of(command: Command) -> MemorySpec:
    rest = {name: value for name, value in command.options.items() if name not in ("kind", "profile")}
    kind = MemoryKind(command.text("kind", MemoryKind.HYBRID))
    return MemorySpec(kind, Profile(command.text("profile", Profile.DEFAULT)), overrides_of(rest))


def said_of(command: Command) -> Said:
    names = [item.name for item in fields(Structured) if item.name in command.options]
    structured = Structured(**{name: command.text(name) for name in names}) if names else None
    return Said(
        content=structured.text() if structured else command.words[0],
        structured=structured,
        speaker=command.text("speaker"),
        session=command.text("session"),
        importance=command.number("importance"),
        external_id=command.text("external_id"),
        vector=command.vector(),
        metadata=(("tag", command.text("tag")),) if "tag" in command.options else (),
        ttl_s=command.number("ttl"),
        observe_time_s=command.number("time"),
        supersedes=tuple(each for each in command.text("supersedes").split(",") if each),
        valid_from_s=command.number("valid_from"),
        valid_until_s=command.number("valid_until"),
    )


def query_of(command: Command) -> Query:
    limit = command.number("limit")
    return Query(command.words[0], command.text("session"), None if limit is None else int(limit), command.vector())


def change_of(command: Command) -> Change:
    content = command.text("text") if "text" in command.options else None
    return Change(command.words[0], content, command.vector(), command.number("importance"))
