"""`memstream export` writes memories to a file; `memstream import` reads them, or what another program wrote."""

from __future__ import annotations

import os
import sys
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import IO

import click
import msgspec
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn

from memstream.client import Client
from memstream.importers import SHAPES, Importer, InvalidSource, Options, Result, Source, Target, choose_shape
from memstream.importers.messengers import DATE_ORDERS
from memstream.importers.sources import URI_SCHEMES
from memstream.policy import Profile
from memstream.resources import Operation
from memstream.transfer import ExportPart
from memstream.values import Filter, MemoryKind
from memstream_server.cli.failures import Exit, Failure, Missing, Misuse
from memstream_server.cli.long_work import continuing_operation
from memstream_server.cli.options import TimeParam, filter_options, json_option, time_zone_option
from memstream_server.cli.output import open_console, print_json, print_line
from memstream_server.cli.server import Server, server_options


class _LastLine(msgspec.Struct):
    type: str = ""
    memories: int = 0
    conversations: int = 0


@contextmanager
def progress_bar(what: str, unit: str = "fragments") -> Iterator[tuple[Progress, TaskID]]:
    """Shows a progress bar on standard error, if that is a terminal."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TextColumn(unit))
    with Progress(
        *columns, console=open_console(stderr=True), transient=True, disable=not sys.stderr.isatty()
    ) as progress:
        yield progress, progress.add_task(what, total=None)


@click.command("export", short_help="Export a memory or a namespace to a file.")
@click.argument("what", metavar="NAMESPACE[/MEMORY]")
@click.option(
    "--output", "-o", type=click.Path(path_type=Path, dir_okay=False), help="Output file. Default: standard output."
)
@click.option(
    "--vectors", is_flag=True, help="Include vectors: larger, but an import need not embed the content again."
)
@filter_options
@server_options
@json_option
def export_command(
    what: str, output: Path | None, vectors: bool, chosen: Filter | None, server: Server, as_json: bool
) -> None:
    """Export a memory, or all memories and conversations of a namespace, as JSON Lines.

    Each memory is a snapshot at one revision, with the fragments of all tiers. The file gets its name when it is
    complete. With filter flags: only matching fragments, without conversations.

    \b
      memstream export demo/joy -o joy.jsonl
      memstream export demo --vectors -o demo.jsonl
      memstream export demo/joy | gzip > joy.jsonl.gz
      memstream export demo --where 'metadata.project = "apollo"' -o apollo.jsonl
    """
    namespace, _, memory = what.partition("/")

    def export(client: Client) -> AsyncIterator[ExportPart]:
        return client.export(namespace, memory, include_vectors=vectors, filter=chosen)

    if output is None:
        server.run_with_client(lambda client: _export_to_file(export(client), namespace, sys.stdout.buffer))
        return
    part = output.with_name(f".{output.name}.{os.getpid()}")
    try:
        with part.open("xb") as file:
            count = server.run_with_client(lambda client: _export_to_file(export(client), namespace, file))
            file.flush()
            os.fsync(file.fileno())
        part.replace(output)
    except OSError as error:
        raise Failure(f"{output} could not be written: {error.strerror}") from error
    finally:
        part.unlink(missing_ok=True)
    size = output.stat().st_size
    if as_json:
        print_json({"file": str(output), "fragments": count, "bytes": size})
    else:
        print_line(f"exported {count:,} fragments of {what} to {output} ({size:,} bytes)", err=True)


async def _export_to_file(parts: AsyncIterator[ExportPart], namespace: str, file: IO[bytes]) -> int:
    done, last = 0, b""
    with progress_bar("exporting") as (progress, task):
        async for part in parts:
            file.write(part.lines)
            done, last = part.done, part.lines
            progress.update(task, completed=part.done, total=part.total)
    file.flush()
    end = msgspec.json.decode(last.splitlines()[-1] if last else b"{}", type=_LastLine)
    if end.type != "end":
        raise Failure("the export is truncated: its last line is missing")
    if not end.memories and not end.conversations:
        warning = f"memstream: warning: the export is empty: {namespace} has no memory and no conversation"
        print_line(warning, err=True)
    return done


ATTRIBUTES = ("text", "id", "speaker", "session", "time", "importance", "vector")
_OURS = b'"memstream-export"'
"""In the first line of an export of a memstream server."""


@dataclass(frozen=True, slots=True)
class _Foreign:
    """What only sources of other programs have."""

    shape: str
    conversations: str
    options: Options
    kind: str | None
    profile: str | None

    @property
    def given(self) -> bool:
        return self != _Foreign("", "", Options(), None, None)


class FieldParam(click.ParamType[tuple[str, str]]):
    """ATTRIBUTE=FIELD."""

    name = "attribute=field"

    def convert(self, value: object, param: click.Parameter | None, ctx: click.Context | None) -> tuple[str, str]:
        attribute, _, field = str(value).partition("=")
        if attribute not in ATTRIBUTES or not field:
            self.fail(f"{value!r} is not ATTRIBUTE=FIELD; attributes are {', '.join(ATTRIBUTES)}", param, ctx)
        return attribute, field


@click.command("import", short_help="Import an export, or chats and memories of another program.")
@click.argument("source")
@click.argument("destination", metavar="NAMESPACE[/MEMORY]")
@click.option(
    "--from",
    "shape",
    type=click.Choice([shape.name for shape in SHAPES]),
    help="The program that the source is from. Default: recognised by its shape.",
)
@click.option(
    "--memory", default="", metavar="NAME", help="The memory's name; of an export with one memory, its new name."
)
@click.option(
    "--dry-run",
    "--validate-only",
    "validate_only",
    is_flag=True,
    help="Check the whole source, report what is kept and lost, write nothing.",
)
@click.option(
    "--conversations",
    type=click.Choice(["none", "feed", "only"]),
    default="none",
    show_default=True,
    help="Chats as observations; as conversations that feed the memory; as conversations only.",
)
@click.option("--date-order", type=click.Choice(DATE_ORDERS), help="WhatsApp: the order of day, month and year.")
@click.option("--collection", default="", metavar="NAME", help="Chroma, Milvus: the collection.")
@click.option(
    "--field",
    "fields",
    type=FieldParam(),
    multiple=True,
    help="Chroma, Milvus, LangGraph: take text, id, speaker, session, time, importance or vector from this field.",
)
@click.option(
    "--time", "missing_time", type=TimeParam(), metavar="TIME", help="Time of records whose own cannot be read."
)
@click.option("--model", default="", metavar="NAME", help="Milvus: keep the vectors, which are from this model.")
@click.option("--milvus-token", envvar="MILVUS_TOKEN", default="", show_envvar=True, help="Credential for Milvus.")
@click.option(
    "--kind",
    type=click.Choice([MemoryKind.HYBRID.value, MemoryKind.LONG_TERM.value]),
    help="The tiers of a new memory. Default: hybrid.",
)
@click.option(
    "--profile", type=click.Choice([each.value for each in Profile]), help="The source of a new policy's defaults."
)
@time_zone_option(of="Time zone of times without one", expose=True)
@click.option("--wait/--no-wait", default=True, show_default=True, help="Of an export: return when it is imported.")
@click.option(
    "--request-id", default="", metavar="TEXT", help="Of an export: lets a repeat resume where the first run stopped."
)
@server_options
@json_option
def import_command(
    source: str,
    destination: str,
    shape: str | None,
    memory: str,
    validate_only: bool,
    conversations: str,
    date_order: str | None,
    collection: str,
    fields: tuple[tuple[str, str], ...],
    missing_time: datetime | None,
    model: str,
    milvus_token: str,
    kind: str | None,
    profile: str | None,
    time_zone: str | None,
    wait: bool,
    request_id: str,
    server: Server,
    as_json: bool,
) -> None:
    """Import SOURCE: an export of memstream into a NAMESPACE, or chats and memories of another program into a
    NAMESPACE/MEMORY, which is created if necessary.

    SOURCE is a file, a zip archive as it was downloaded, a directory, or the URI of a store. It is read twice: to check
    and count it, then to send it, so nothing is sent of what cannot be read to its end. A run that was interrupted
    continues where it stopped; a second run changes nothing; a later export adds what is new.

    \b
      memstream import joy.jsonl demo                              # an export of memstream
      memstream import chatgpt.zip demo/joy --dry-run
      memstream import _chat.txt demo/joy --date-order dmy --time-zone Europe/Berlin
      memstream import slack.zip demo/team --conversations feed
      memstream import ./chroma demo/notes --collection notes --field importance=importance
      memstream import --from milvus http://127.0.0.1:19530 demo/library --collection docs
    """
    options = Options(time_zone or "", date_order or "", collection, dict(fields), milvus_token, model, missing_time)
    asked = _Foreign(shape or "", "" if conversations == "none" else conversations, options, kind, profile)
    file = Path(source)
    if shape is None and _is_ours(file):
        if asked.given:
            raise Misuse(f"{source} is an export of memstream, for which no option of other programs applies")
        _import_export(file, destination, memory, validate_only, wait, request_id, server, as_json)
        return
    if not source.startswith(URI_SCHEMES) and not file.exists():
        raise Missing(f"there is no file {source}")
    if not wait or request_id:
        raise Misuse("--no-wait and --request-id apply to exports of memstream only")
    path = f"{destination}/{memory}" if memory else destination
    if ("/" not in path and conversations != "only") or path.count("/") > 1:
        raise Misuse(f"{path!r} does not name the memory to import into: give NAMESPACE/MEMORY")
    done = _import_foreign(source, path, asked, validate_only, server, quiet=as_json)
    if as_json:
        print_json(done)
    else:
        _print_result(done, validate_only)
    if done.rejected:
        sys.exit(Exit.REJECTED)


def _is_ours(file: Path) -> bool:
    try:
        with file.open("rb") as opened:
            return _OURS in opened.readline(4_096)
    except (OSError, ValueError):
        return False


def _import_foreign(given: str, path: str, asked: _Foreign, dry_run: bool, server: Server, quiet: bool) -> Result:
    target = Target(
        path,
        asked.conversations,
        MemoryKind(asked.kind) if asked.kind else MemoryKind.HYBRID,
        Profile(asked.profile) if asked.profile else None,
    )
    try:
        with Source(given) as source, progress_bar("reading", "records") as (progress, task):
            shape = choose_shape(source, asked.shape)
            if asked.conversations and not shape.chat:
                raise Misuse(f"{shape.name} has no conversations: leave --conversations out")

            def show(doing: str, done: int, total: int | None) -> None:
                progress.update(task, description=doing, completed=done, total=total, visible=not quiet)

            importer = Importer(source, shape, asked.options, target, show)
            return server.run_with_client(lambda client: importer.run(client, dry_run))
    except FileNotFoundError as error:
        raise Missing(str(error)) from error
    except InvalidSource as error:
        raise Misuse(str(error)) from error


def _print_result(done: Result, dry_run: bool) -> None:
    report = done.report
    print_line(f"{done.source} is from {done.shape}: {_list_counts(report.kept) or 'nothing to import'}")
    if report.earliest and report.latest:
        print_line(f"times: {report.earliest:%Y-%m-%d} to {report.latest:%Y-%m-%d}")
    if report.lost:
        print_line(f"lost: {_list_counts(report.lost)}")
    if report.skipped:
        reasons = (f"{count:,} ({why})" for why, count in report.skipped.most_common())
        print_line(f"skipped: {', '.join(reasons)}")
    for place in report.places:
        print_line(f"  {place}", err=True)
    if dry_run:
        print_line("nothing was written: this was a dry run")
    elif done.sent:
        print_line(f"imported {done.sent - len(done.rejected):,} of {done.records:,} records into {done.target}")
    else:
        print_line(f"{done.target} already has the {done.records:,} records: nothing was changed")
    for one in done.rejected:
        print_line(f"  rejected: {one}", err=True)


def _list_counts(counts: Counter[str]) -> str:
    return ", ".join(f"{count:,} {what}" for what, count in counts.most_common())


def _import_export(
    file: Path,
    namespace: str,
    memory: str,
    validate_only: bool,
    wait: bool,
    request_id: str,
    server: Server,
    as_json: bool,
) -> None:
    if not os.access(file, os.R_OK):
        raise Misuse(f"{file} cannot be read")

    repeated = False

    async def work(client: Client) -> Operation:
        nonlocal repeated
        started = await client.import_(
            namespace, file, memory=memory, request_id=request_id, validate_only=validate_only
        )
        repeated = started.end_time is not None
        if validate_only or not wait:
            return started
        with continuing_operation(started), progress_bar("importing") as (progress, task):
            return await client.finished(
                started, lambda now: progress.update(task, completed=now.done, total=now.total or None)
            )

    operation = server.run_with_client(work)
    if as_json:
        print_json(operation)
    elif validate_only:
        print_line(f"{file} is valid and can be imported: {operation.total:,} fragments")
    elif operation.end_time is None:
        print_line(f"started the import as operation {operation.id}")
    elif repeated and operation.state.value == "succeeded":
        print_line(
            f"nothing was imported: operation {operation.id} with this --request-id has imported "
            f"{operation.done:,} fragments before"
        )
    elif operation.state.value == "succeeded":
        where = f"{operation.namespace}/{operation.memory}" if operation.memory else operation.namespace
        print_line(f"imported {operation.done:,} fragments of {file} into {where}")
    else:
        raise Failure(f"the import was {operation.state.value} after {operation.done:,} fragments")
