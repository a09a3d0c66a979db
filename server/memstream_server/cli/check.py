"""`memstream check`: asks a memory questions and checks the answers against a file of expectations."""

from __future__ import annotations

import asyncio
import contextlib
import tempfile
import uuid
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from xml.etree import ElementTree

import click
from rich.text import Text

from memstream import errors
from memstream.answer_values import Answer, Recollection
from memstream.client import Client, connect
from memstream.local_client import local
from memstream.memory import Memory
from memstream.sent import Sent
from memstream.values import Truth
from memstream_server.cli.check_file import BadFileError, Check, Expectation, Question, policy_problem, read_check
from memstream_server.cli.failures import Failure, Misuse
from memstream_server.cli.options import json_option
from memstream_server.cli.output import create_table, escape_line, fragment_text, open_console, print_json, print_parts
from memstream_server.cli.server import to_failure

_WORDS_SHOWN = 60
_BEST_SHOWN = 3


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


def _judge(asked: Question, answer: Answer, ids: dict[str, set[str]], current: set[str]) -> list[Result]:
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
