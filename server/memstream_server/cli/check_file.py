"""Reads the file of `memstream check`: observations, questions, and what their answers must hold.

YAML, checked with pydantic; every problem names its line and key.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, date, datetime
from pathlib import Path
from typing import Any, TypeAlias

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from memstream.errors import InvalidRequest
from memstream.policy_codec import policy_to_wire
from memstream.values import Observation
from memstream_server.cli.records import Format, Malformed, RecordReader, parse_record

LIMIT = 10
Path_: TypeAlias = tuple[str | int, ...]
"""Keys and positions that lead to a value of the file."""


class BadFileError(Exception):
    """The file cannot be run; the text has file, line and key."""


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Expectation(_Strict):
    """One thing that an answer must hold, or must not."""

    id: str | None = None
    """The observation with this id."""
    contains: str | None = None
    """Any recollection with this text, in any case of letters."""
    first: int | None = Field(None, ge=1, le=1_000)
    """Among the first N; the question's limit by default."""
    absent: bool = False
    """Must not appear."""
    current: bool | None = None
    """Whether it must be current, that is, neither superseded nor outside its validity."""

    @model_validator(mode="after")
    def _has_one_subject(self) -> Expectation:
        if (self.id is None) == (self.contains is None):
            raise ValueError("needs exactly one of id and contains")
        if self.absent and self.first is not None:
            raise ValueError("first does not go with absent: an absent one is nowhere in the answer")
        if self.current is not None and self.absent:
            raise ValueError("current does not go with absent: give one of them")
        if self.current is False and (self.id is None or self.first is not None):
            raise ValueError("current: false needs an id and no first: such a fragment is usually not in the answer")
        return self


class Question(_Strict):
    """A query and its expectations."""

    question: str = Field(min_length=1)
    limit: int = Field(LIMIT, ge=1, le=1_000)
    expect: tuple[Expectation, ...] = ()
    weak: bool | None = None
    """Whether the answer must be marked as weak, or must not be."""

    @model_validator(mode="after")
    def _expects_something(self) -> Question:
        if not self.expect and self.weak is None:
            raise ValueError("expects nothing: give expect")
        return self


class _File(_Strict):
    policy: dict[str, Any] | None = None
    policy_file: str | None = None
    now: datetime | None = None
    observations: tuple[dict[str, Any], ...] = ()
    observations_file: str | None = None
    questions: tuple[Question, ...] = Field(min_length=1)


@dataclass(frozen=True)
class Check:
    """A file that can be run."""

    path: Path
    policy: Mapping[str, Any]
    now: datetime | None
    observations: Sequence[tuple[str, Observation]]
    """In order, each with its id, or an empty one; `supersedes` may name ids of the file."""
    questions: Sequence[Question]
    document: Document
    """For errors that only the server finds."""


class Document:
    """A YAML file with the line of every value. Raises BadFileError."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            loader = yaml.SafeLoader(path.read_text("utf-8"))
            try:
                self._node = loader.get_single_node()
                self._check_keys(self._node)
                self.content = loader.construct_document(self._node) if self._node is not None else None
            finally:
                loader.dispose()
        except yaml.MarkedYAMLError as error:
            mark = error.problem_mark or error.context_mark
            raise BadFileError(f"{path}:{mark.line + 1 if mark else 1}: is not YAML: {error.problem}") from error
        except (yaml.YAMLError, UnicodeDecodeError) as error:
            raise BadFileError(f"{path}:1: is not YAML: {' '.join(str(error).split())}") from error
        except OSError as error:
            raise BadFileError(f"{path}: cannot be read: {error.strerror}") from error
        if not isinstance(self.content, dict):
            raise BadFileError(f"{path}:1: must be a mapping with observations and questions")

    def problem(self, where: Path_, text: str) -> BadFileError:
        """The error for the value at `where`."""
        line, known = self._line_of(where)
        key = "".join(f"[{part + 1}]" if isinstance(part, int) else f".{part}" for part in known).lstrip(".")
        return BadFileError(f"{self.path}:{line}: {key}: {text}" if key else f"{self.path}:{line}: {text}")

    def _line_of(self, where: Path_) -> tuple[int, Path_]:
        """The line of a value, or of the nearest one that exists around it; a missing key keeps its name."""
        node, line = self._node, self._node.start_mark.line + 1
        for depth, part in enumerate(where):
            if isinstance(node, yaml.MappingNode):
                found = next(((key, value) for key, value in node.value if key.value == str(part)), None)
                if found is None:
                    return line, where[: depth + 1]
                line, node = found[0].start_mark.line + 1, found[1]
            elif isinstance(node, yaml.SequenceNode) and isinstance(part, int) and part < len(node.value):
                node = node.value[part]
                line = node.start_mark.line + 1
            else:  # a part that names a type of pydantic's
                return line, where[:depth]
        return line, where

    def _check_keys(self, node: Any) -> None:
        """YAML forbids a key that is given twice, PyYAML takes the last one."""
        if isinstance(node, yaml.SequenceNode):
            for item in node.value:
                self._check_keys(item)
        if isinstance(node, yaml.MappingNode):
            seen = set()
            for key, value in node.value:
                if isinstance(key, yaml.ScalarNode):
                    if key.value in seen:
                        raise BadFileError(f"{self.path}:{key.start_mark.line + 1}: {key.value}: is given twice")
                    seen.add(key.value)
                self._check_keys(value)


def read_check(path: Path, policy_file: Path | None = None) -> Check:
    """Reads and checks a file; `policy_file` replaces the policy in it. Raises BadFileError."""
    document = Document(path)
    try:
        file = _File.model_validate(document.content)
    except ValidationError as error:
        problems = error.errors(include_url=False, include_context=False)
        # A misspelt key is also a missing one: its line is the better place.
        first = min(problems, key=lambda problem: problem["type"] != "extra_forbidden")
        raise document.problem(tuple(first["loc"]), _message(first)) from None
    observations = [*_observations_of_file(document, file.observations_file), *_observations(document, file)]
    ids = [id for id, _ in observations if id]
    for number, question in enumerate(file.questions):
        _check_question(document, number, question, ids)
    if not observations:
        raise document.problem(("observations",), "there are none: give observations or observations_file")
    now = file.now.replace(tzinfo=UTC) if file.now is not None and file.now.tzinfo is None else file.now
    policy = _policy(document, file, policy_file)
    return Check(path, policy, now, observations, file.questions, document)


_PLAINER = {
    "tuple_type": "must be a list",
    "dict_type": "must be a mapping of keys to values",
    "model_type": "must be a mapping of keys to values",
    "too_short": "must not be empty",
}
"""What is wrong by pydantic's type of error, in YAML's words."""


def _message(error: Mapping[str, Any]) -> str:
    if error["type"] == "extra_forbidden":
        return "there is no such key"
    return _PLAINER.get(error["type"]) or str(error["msg"]).removeprefix("Value error, ")


def _check_question(document: Document, number: int, question: Question, ids: Sequence[str]) -> None:
    where: Path_ = ("questions", number)
    for place, expectation in enumerate(question.expect):
        here: Path_ = (*where, "expect", place)
        if expectation.id is not None and expectation.id not in ids:
            raise document.problem((*here, "id"), f"no observation has the id {expectation.id!r}")
        if expectation.first is not None and expectation.first > question.limit:
            raise document.problem((*here, "first"), f"is more than the question's limit of {question.limit}")


def _observations(document: Document, file: _File) -> Iterator[tuple[str, Observation]]:
    seen: set[str] = set()
    for number, fields_ in enumerate(file.observations):
        where: Path_ = ("observations", number)
        rest = {str(name): value for name, value in fields_.items() if name != "id"}
        id = fields_.get("id", "")
        if not isinstance(id, str):
            raise document.problem((*where, "id"), "must be text")
        if id and id in seen:
            raise document.problem((*where, "id"), f"{id!r} is given twice")
        seen.add(id)
        parsed = parse_record(json.dumps(rest, default=_json_value))
        if isinstance(parsed, Malformed):
            wrong = min((name for name in rest if name in parsed.problem), key=parsed.problem.index, default=None)
            raise document.problem(where if wrong is None else (*where, wrong), parsed.problem)
        yield id, parsed


def _json_value(value: object) -> str:
    if isinstance(value, date):  # YAML reads a time without quotes as one
        return value.isoformat()
    return str(value)


def _observations_of_file(document: Document, name: str | None) -> Iterator[tuple[str, Observation]]:
    if name is None:
        return
    path, reader = document.path.parent / name, RecordReader(Format.AUTO)
    try:
        lines = path.read_bytes().splitlines()
    except OSError as error:
        raise document.problem(("observations_file",), f"{path} cannot be read: {error.strerror}") from error
    for number, line in enumerate(lines, 1):
        parsed = reader.read_line(line)
        if isinstance(parsed, Malformed):
            raise BadFileError(f"{path}:{number}: {parsed.problem}")
        if parsed is not None:
            yield "", parsed


def _policy(document: Document, file: _File, override: Path | None) -> Mapping[str, Any]:
    if file.policy is not None and file.policy_file is not None:
        raise document.problem(("policy_file",), "does not go with policy: give one of them")
    policy: Mapping[str, Any] = file.policy or {}
    source = document
    prefix: Path_ = ("policy",)
    chosen = override or (document.path.parent / file.policy_file if file.policy_file is not None else None)
    if chosen is not None:
        source, prefix = Document(chosen), ()
        policy = source.content or {}
    try:
        policy_to_wire(policy)
    except InvalidRequest as error:
        raise policy_problem(source, prefix, error) from error
    return policy


def policy_problem(document: Document, prefix: Path_, error: InvalidRequest) -> BadFileError:
    """The error for a policy that the SDK or the server refuses."""
    for violation in error.violations:
        head, *keys = violation.field.split(".")
        if head == "policy":
            return document.problem((*prefix, *keys), violation.description)
    return document.problem(prefix, error.summary())
