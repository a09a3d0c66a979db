"""`memstream check`: asks a memory questions and checks the answers against a file of expectations.

The file has observations, questions, and what their answers must hold. It is YAML, checked with pydantic; every problem
names its line and key.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import tempfile
import uuid
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, date, datetime
from pathlib import Path
from typing import Any, TypeAlias
from xml.etree import ElementTree

import click
import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator
from rich.text import Text

from memstream import errors
from memstream.answer_values import Answer, Recollection
from memstream.client import Client, connect
from memstream.errors import InvalidRequest
from memstream.local_client import local
from memstream.memory import Memory
from memstream.policy_codec import policy_to_wire
from memstream.sent import Sent
from memstream.values import Observation, Truth
from memstream_server.cli.failures import Failure, Misuse
from memstream_server.cli.options import json_option
from memstream_server.cli.output import create_table, escape_line, fragment_text, open_console, print_json, print_parts
from memstream_server.cli.records import Format, MalformedLine, RecordReader, parse_record
from memstream_server.cli.server import to_failure

_WORDS_SHOWN = 60
_BEST_SHOWN = 3
LIMIT = 10
Path_: TypeAlias = tuple[str | int, ...]
"""Keys and positions that lead to a value of the file."""


@dataclass(frozen=True, slots=True)
class Result:
    """One expectation against one answer."""

    question: str
    expectation: str
    passed: bool
    place: int | None
    """Where the recollection is in the answer, from 1; None if it is not there."""
    best: tuple[str, ...]
    """The first recollections, for a failure."""


@click.command("check", short_help="Check what a memory recalls against a file of expectations.")
@click.argument("file", type=click.Path(path_type=Path))
@click.option("--policy", "policy_file", type=click.Path(path_type=Path), help="YAML file of another policy.")
@click.option("--address", metavar="HOST:PORT", help="A running server. Default: one for this check alone.")
@click.option("--token", envvar="MEMSTREAM_TOKEN", show_envvar=True, metavar="TEXT", help="Its API key or JWT.")
@click.option("--junit", type=click.Path(path_type=Path), metavar="FILE", help="Also write the results as JUnit XML.")
@json_option
def check_command(
    file: Path, policy_file: Path | None, address: str | None, token: str | None, junit: Path | None, as_json: bool
) -> None:
    """Store the observations of FILE (YAML) in a new memory, ask its questions, and check the answers.

    \b
      memstream check letters.yaml
      memstream check letters.yaml --policy candidate.yaml --junit results.xml

    Exits with 1 if an expectation failed, with 2 if FILE is wrong. docs/checks.md explains the file.
    """
    try:
        check = read_check(file, policy_file)
        results = asyncio.run(_run_check(check, address, token))
    except BadFileError as error:
        raise Misuse(str(error)) from error
    except errors.MemstreamError as error:
        raise to_failure(error, address or "the throw-away server") from error
    if junit is not None:
        try:
            _write_junit(junit, check, results)
        except OSError as error:
            raise Failure(f"{junit} cannot be written: {error.strerror}") from error
    failed = sum(not result.passed for result in results)
    if as_json:
        print_json({"passed": len(results) - failed, "failed": failed, "results": results})
    else:
        _print_results(results, failed)
    click.get_current_context().exit(1 if failed else 0)


# ---- running


async def _run_check(check: Check, address: str | None, token: str | None) -> list[Result]:
    async with _client(address, token) as client:
        path = f"check/{uuid.uuid4().hex[:12]}"
        try:
            memory = await client.create_memory(path, policy=dict(check.policy))
        except errors.InvalidRequest as error:
            raise policy_problem(check.document, ("policy",), error) from error
        try:
            ids = await _store_observations(memory, check)
            current = await _current_ids(memory, check)
            async with memory.recall() as recall:
                # One after the other, without reinforcement: no question changes the answer to another one.
                answers = [
                    await recall.query(asked.question, limit=asked.limit, now=check.now, reinforce=False)
                    if check.now is not None
                    else await recall.query(asked.question, limit=asked.limit, reinforce=False)
                    for asked in check.questions
                ]
        finally:
            await client.delete_memory(path)
    pairs = zip(check.questions, answers, strict=True)
    return [result for asked, answer in pairs for result in _judge(asked, answer, ids, current)]


@contextlib.asynccontextmanager
async def _client(address: str | None, token: str | None) -> AsyncIterator[Client]:
    if address is not None:
        async with connect(address, token=token) as client:
            yield client
        return
    with tempfile.TemporaryDirectory(prefix="memstream-check-") as folder:
        async with local(Path(folder) / "data") as client:
            yield client


async def _store_observations(memory: Memory, check: Check) -> dict[str, set[str]]:
    """Returns the fragments of each observation with an id: its own, and the one that it was counted on."""
    named: dict[str, Sent] = {}
    async with memory.observe(producer="check", outcomes=True) as stream:
        for id, observation in check.observations:
            keys = [await _fragment_of(named[key], key) if key in named else key for key in observation.supersedes]
            sent = await stream.send(replace(observation, supersedes=keys) if keys else observation)
            if id:
                named[id] = sent
        await stream.flush()
        if stream.rejected:
            raise BadFileError(f"{check.path}: the server rejects an observation: {stream.rejected[0].error.summary()}")
        outcomes = {id: (await sent).outcome for id, sent in named.items()}
    return {id: {got.fragment_id, got.other_id} - {""} for id, got in outcomes.items() if got is not None}


async def _fragment_of(sent: Sent, key: str) -> str:
    """The fragment of an earlier observation of the file."""
    outcome = (await sent).outcome
    return key if outcome is None else outcome.other_id or outcome.fragment_id


async def _current_ids(memory: Memory, check: Check) -> set[str]:
    """The ids of the current fragments, if an expectation asks for them."""
    if not any(expectation.current is not None for asked in check.questions for expectation in asked.expect):
        return set()
    return {fragment.id async for fragment in memory.list_fragments(truth=Truth.CURRENT)}


def _judge(asked: CheckQuestion, answer: Answer, ids: dict[str, set[str]], current: set[str]) -> list[Result]:
    best = tuple(fragment_text(hit.fragment) for hit in answer[:_BEST_SHOWN])
    results = []
    for expectation in asked.expect:
        places = (
            at
            for at, hit in enumerate(answer, 1)
            if _matches(expectation, hit, ids) and (expectation.current is not True or hit.fragment.id in current)
        )
        place = next(places, None)
        within = expectation.first or asked.limit
        passed = place is None if expectation.absent else place is not None and place <= within
        if expectation.current is False:
            passed = current.isdisjoint(ids.get(expectation.id or "", ()))
        results.append(Result(asked.question, _describe(expectation, within), passed, place, best))
    if asked.weak is not None:
        expected = "weak" if asked.weak else "not weak"
        results.append(Result(asked.question, f"answer is {expected}", answer.weak is asked.weak, None, best))
    return results


def _matches(expectation: Expectation, hit: Recollection, ids: dict[str, set[str]]) -> bool:
    """A reply is at the place of its message."""
    if expectation.id is not None:
        shown = {one.id for one in hit.fragments} | {*hit.folded_ids}
        return not ids.get(expectation.id, set()).isdisjoint(shown)
    return any((expectation.contains or "").casefold() in fragment_text(one).casefold() for one in hit.fragments)


def _describe(expectation: Expectation, within: int) -> str:
    subject = expectation.id if expectation.id is not None else f'"{expectation.contains}"'
    if expectation.current is False:
        return f"{subject} not current"
    words = f"{subject} absent" if expectation.absent else f"{subject} in the first {within}"
    return f"{words}, current" if expectation.current else words


# ---- results


def _print_results(results: Sequence[Result], failed: int) -> None:
    table = create_table("", "question", "expectation", "place", numbers=("place",), wide="question")
    for result in results:
        table.add_row(
            "ok" if result.passed else "FAILED",
            escape_line(result.question, _WORDS_SHOWN),
            escape_line(result.expectation, _WORDS_SHOWN),
            "-" if result.place is None else str(result.place),
        )
    lines = [Text(""), Text(f"{len(results) - failed} passed, {failed} failed")]
    for result in results:
        if not result.passed:
            lines += [Text(""), escape_line(f"FAILED: {result.question} ({result.expectation}); best answers:", 200)]
            lines += [escape_line(f"  {number}. {text}", 160) for number, text in enumerate(result.best, 1)]
    print_parts(open_console(), table, *lines)


def _write_junit(path: Path, check: Check, results: Sequence[Result]) -> None:
    """One test case for each expectation, its question as the class. Raises OSError."""
    failed = sum(not result.passed for result in results)
    suite = ElementTree.Element(
        "testsuite", name=check.path.name, tests=str(len(results)), failures=str(failed), errors="0", skipped="0"
    )
    for result in results:
        case = ElementTree.SubElement(
            suite, "testcase", classname=_xml_text(result.question), name=_xml_text(result.expectation)
        )
        if not result.passed:
            found = "not in the answer" if result.place is None else f"at place {result.place}"
            failure = ElementTree.SubElement(case, "failure", message=found)
            failure.text = _xml_text("\n".join(f"{number}. {text}" for number, text in enumerate(result.best, 1)))
    root = ElementTree.Element("testsuites")
    root.append(suite)
    ElementTree.ElementTree(root).write(path, encoding="utf-8", xml_declaration=True)


def _xml_text(text: str) -> str:
    """XML 1.0 has no control characters but these."""
    return "".join(character for character in text if character >= " " or character in "\n\t")


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


class CheckQuestion(_Strict):
    """A query and its expectations."""

    question: str = Field(min_length=1)
    limit: int = Field(LIMIT, ge=1, le=1_000)
    expect: tuple[Expectation, ...] = ()
    weak: bool | None = None
    """Whether the answer must be marked as weak, or must not be."""

    @model_validator(mode="after")
    def _expects_something(self) -> CheckQuestion:
        if not self.expect and self.weak is None:
            raise ValueError("expects nothing: give expect")
        return self


class _File(_Strict):
    policy: dict[str, Any] | None = None
    policy_file: str | None = None
    now: datetime | None = None
    observations: tuple[dict[str, Any], ...] = ()
    observations_file: str | None = None
    questions: tuple[CheckQuestion, ...] = Field(min_length=1)


@dataclass(frozen=True)
class Check:
    """A file that can be run."""

    path: Path
    policy: Mapping[str, Any]
    now: datetime | None
    observations: Sequence[tuple[str, Observation]]
    """In order, each with its id, or an empty one; `supersedes` may name ids of the file."""
    questions: Sequence[CheckQuestion]
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


def _check_question(document: Document, number: int, question: CheckQuestion, ids: Sequence[str]) -> None:
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
        if isinstance(parsed, MalformedLine):
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
        if isinstance(parsed, MalformedLine):
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
