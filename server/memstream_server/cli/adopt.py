"""`memstream adopt`: imports a Milvus collection of text and vectors as the long-term tier of a new memory.

Reads the collection twice instead of buffering it: first to validate and count, then to send.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from hashlib import sha256
from typing import TYPE_CHECKING

import click

from memstream.client import Client
from memstream.errors import MemoryNotFound
from memstream.memory import Memory
from memstream.resources import Operation
from memstream_server.cli.failures import Failure, Missing, Misuse
from memstream_server.cli.options import TimeParam, json_option
from memstream_server.cli.output import print_json, print_line
from memstream_server.cli.rows import Adoption, Columns, InvalidRow, fragment_line, header_lines
from memstream_server.cli.server import Server, server_options
from memstream_server.cli.transfer import progress_bar
from memstream_server.core.policy import PROFILES, Profile
from memstream_server.core.values import MemoryKind
from memstream_server.engine.operations.transfer.lines import End, encode_line
from memstream_server.ports.index import IndexUnavailable

if TYPE_CHECKING:
    from memstream_server.adapters.milvus.existing import ExistingCollection, Field

TEXT_FIELDS = ("text", "content")
"""Default names of the text field, in order of preference."""
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


@dataclass(slots=True)
class CollectionCounts:
    """Counts and digest of one pass over the collection."""

    fragments: int = 0
    empty: int = 0
    digest: str = ""
    """SHA-256 of the fragments' lines."""


@dataclass(frozen=True, slots=True)
class NewMemory:
    """Kind and profile of the memory to create."""

    kind: MemoryKind
    profile: Profile


@dataclass(frozen=True, slots=True)
class AdoptionResult:
    """The result of an adoption."""

    collection: str
    memory: str
    fragments: int
    empty: int
    changed: bool
    """False if an earlier run had adopted everything."""
    operation: Operation


@click.command("adopt", short_help="Import a Milvus collection as the long-term tier of a new memory.")
@click.argument("uri")
@click.argument("collection")
@click.argument("memory")
@click.option("--milvus-token", envvar="MILVUS_TOKEN", default="", show_envvar=True, help="Credential for Milvus.")
@click.option("--text-field", default="", metavar="FIELD", help="Field of the text. Default: text, else content.")
@click.option("--id-field", default="", metavar="FIELD", help="Field of the external id. Default: the primary key.")
@click.option("--speaker-field", default="", metavar="FIELD", help="Field of the speaker.")
@click.option("--session-field", default="", metavar="FIELD", help="Field of the session.")
@click.option(
    "--time-field", default="", metavar="FIELD", help="Field of the time: ISO 8601, or Unix seconds, ms or µs."
)
@click.option(
    "--time", "missing_time", type=TimeParam(), metavar="TIME", help="Time of rows whose --time-field is null."
)
@click.option("--metadata-field", multiple=True, metavar="FIELD", help="Field to keep as metadata (may be repeated).")
@click.option("--importance-field", default="", metavar="FIELD", help="Field of the importance, 0 to 1.")
@click.option("--importance", type=click.FloatRange(0, 1), metavar="NUMBER", help="Importance of rows without one.")
@click.option("--model", default="", metavar="NAME", help="Keep the vectors, which are from this model.")
@click.option(
    "--vector-field", default="", metavar="FIELD", help="With --model: field of the vector, if there are several."
)
@click.option(
    "--kind",
    type=click.Choice([MemoryKind.HYBRID.value, MemoryKind.LONG_TERM.value]),
    default=MemoryKind.HYBRID.value,
    show_default=True,
    help="The memory's tiers.",
)
@click.option(
    "--profile",
    type=click.Choice([each.value for each in Profile]),
    default=Profile.DEFAULT.value,
    show_default=True,
    help="The source of its policy's defaults.",
)
@server_options
@json_option
def adopt_command(
    uri: str,
    collection: str,
    memory: str,
    milvus_token: str,
    text_field: str,
    id_field: str,
    speaker_field: str,
    session_field: str,
    time_field: str,
    missing_time: datetime | None,
    metadata_field: tuple[str, ...],
    importance_field: str,
    importance: float | None,
    model: str,
    vector_field: str,
    kind: str,
    profile: str,
    server: Server,
    as_json: bool,
) -> None:
    """Import the rows of a Milvus COLLECTION into a new MEMORY (NAMESPACE/NAME), as long-term fragments.

    URI is the address of a Milvus server, or the path of a Milvus Lite directory, which no other process may have
    open. The collection is not changed. The server embeds the texts again, unless --model says that the vectors are
    from its own model (`memstream info` names it). Rows without text are skipped. A second run changes nothing.

    \b
      memstream adopt ./notes.db notes demo/joy
      memstream adopt ./notes.db notes demo/joy --speaker-field author --time-field written --metadata-field topic
      memstream adopt http://127.0.0.1:19530 docs demo/library --kind long_term --model my-model
    """
    if vector_field and not model:
        raise click.UsageError("--vector-field requires --model, which names the model of the vectors.")
    if missing_time and not time_field:
        raise click.UsageError("--time requires --time-field: without it all rows have the time of the adoption.")
    new = NewMemory(MemoryKind(kind), Profile(profile))
    wanted = Columns(
        key="",
        text=text_field,
        vector=vector_field,
        id=id_field,
        speaker=speaker_field,
        session=session_field,
        time=time_field,
        importance=importance_field,
        metadata=metadata_field,
    )
    namespace, _, name = memory.partition("/")
    default = PROFILES[new.profile].importance_default
    importance = default if importance is None else importance
    missing_us = None if missing_time is None else (missing_time - _EPOCH) // timedelta(microseconds=1)
    adoption = Adoption(collection, namespace, name, wanted, importance, 0, model, missing_us)
    from memstream_server.adapters.milvus.collection import CollectionMissing
    from memstream_server.adapters.milvus.existing import open_existing_collection

    try:
        with open_existing_collection(uri, milvus_token, collection) as source:
            done = server.run_with_client(lambda client: _adopt_collection(client, source, adoption, new))
    except (FileNotFoundError, CollectionMissing) as error:
        raise Missing(str(error)) from error
    except IndexUnavailable as error:
        raise Failure(str(error)) from error
    except InvalidRow as error:
        raise Misuse(f"nothing was sent: {error}") from error
    _print_result(done, as_json)


async def _adopt_collection(
    client: Client, source: ExistingCollection, adoption: Adoption, new: NewMemory
) -> AdoptionResult:
    path = f"{adoption.namespace}/{adoption.memory}"
    named = client.memory(path)
    info = await client.server_info()
    fields = await asyncio.to_thread(source.list_fields)
    columns = choose_columns(fields, source.dynamic, adoption.columns, bool(adoption.model))
    if adoption.model:
        _check_model(adoption.model, info.embedding.name, info.embedding.dimension, columns.vector, fields)
    made_us = await _creation_time_us(named)
    adoption = replace(
        adoption,
        columns=columns,
        time_us=time.time_ns() // 1_000 if made_us is None else made_us,
        content_bytes_max=info.limits.content_bytes_max,
        name_bytes_max=info.limits.name_bytes_max,
    )
    found = CollectionCounts()
    with progress_bar("reading") as (progress, task):
        progress.update(task, total=await asyncio.to_thread(source.rows_about))
        async for _ in _iterate_lines(source, adoption, found):
            progress.update(task, completed=found.fragments + found.empty)
    if not found.fragments:
        raise Failure(f"no row of {adoption.collection} has text in {columns.text}: nothing to adopt")
    head = header_lines(adoption, info.version, new.kind, PROFILES[new.profile], found.fragments)
    with progress_bar("sending") as (progress, task):
        progress.update(task, total=found.fragments)
        begun = await client.import_(
            adoption.namespace,
            _build_export(source, adoption, head, found, lambda done: progress.update(task, completed=done)),
            memory=adoption.memory,
            request_id=f"adopt-{sha256(head + found.digest.encode()).hexdigest()[:32]}",
        )
    with progress_bar("adopting") as (progress, task):
        ended = await client.finished(
            begun, lambda now: progress.update(task, completed=now.done, total=now.total or None)
        )
    if ended.state.value != "succeeded":
        raise Failure(f"the adoption was {ended.state.value} after {ended.done:,} fragments")
    return AdoptionResult(adoption.collection, path, found.fragments, found.empty, made_us is None, ended)


async def _creation_time_us(memory: Memory) -> int | None:
    """The creation time of an existing memory: with it, a repeat produces the lines of the first adoption."""
    try:
        made = (await memory.describe()).create_time
    except MemoryNotFound:
        return None
    return None if made is None else (made - _EPOCH) // timedelta(microseconds=1)


def choose_columns(fields: Sequence[Field], dynamic: bool, wanted: Columns, vectors: bool) -> Columns:
    """The fields to read. Raises Misuse, which lists the existing fields."""
    there = {field.name: field for field in fields}
    listed = ", ".join(f"{field.name} ({field.type.lower() or 'dynamic'})" for field in fields)
    text = wanted.text or next((name for name in TEXT_FIELDS if name in there), "")
    if not text:
        raise Misuse(f"no field is named {' or '.join(TEXT_FIELDS)}: name the text with --text-field, of {listed}")
    vector = ""
    if vectors:
        of_vectors = [field.name for field in fields if field.type == "FLOAT_VECTOR"]
        if not wanted.vector and len(of_vectors) != 1:
            raise Misuse(f"name the vector with --vector-field: there are {len(of_vectors)} float vectors in {listed}")
        vector = wanted.vector or of_vectors[0]
    key = next(field.name for field in fields if field.primary)
    columns = replace(wanted, key=key, text=text, vector=vector)
    if not dynamic and (missing := [name for name in columns.field_names() if name not in there]):
        raise Misuse(f"there is no field {', '.join(missing)}: there are {listed}")
    if text in there and there[text].type not in ("VARCHAR", "TEXT", ""):
        raise Misuse(f"{text} is not a text field: name one with --text-field, of {listed}")
    if vector and (vector not in there or there[vector].type != "FLOAT_VECTOR"):
        raise Misuse(f"{vector} is not a vector of floats: there are {listed}")
    return columns


def _check_model(model: str, served: str, dimension: int, vector: str, fields: Sequence[Field]) -> None:
    if model != served:
        raise Misuse(
            f"the server's model is {served}, so vectors of {model} cannot be kept: omit --model to embed the "
            "texts again"
        )
    found = next(field.dimension for field in fields if field.name == vector)
    if found != dimension:
        raise Misuse(
            f"{vector} has {found} numbers, {served} has {dimension}: it is from another model. Omit --model "
            "to embed the texts again"
        )


async def _iterate_lines(
    source: ExistingCollection, adoption: Adoption, tally: CollectionCounts
) -> AsyncGenerator[bytes, None]:
    """The fragments' lines, a few hundred at a time; fills `tally`. Raises Unfit."""
    digest = sha256()
    pages = source.iterate_pages(adoption.columns.field_names())
    while (page := await asyncio.to_thread(next, pages, None)) is not None:
        lines = bytearray()
        for row in page:
            line = fragment_line(row, tally.fragments, adoption)
            if line is None:
                tally.empty += 1
            else:
                tally.fragments += 1
                lines += line
        digest.update(lines)
        yield bytes(lines)
    tally.digest = digest.hexdigest()


async def _build_export(
    source: ExistingCollection, adoption: Adoption, head: bytes, expected: CollectionCounts, tell: Callable[[int], None]
) -> AsyncIterator[bytes]:
    """A complete export. Raises Failure if the collection has changed since it was counted."""
    digest = sha256(head)
    yield head
    found = CollectionCounts()
    async for lines in _iterate_lines(source, adoption, found):
        digest.update(lines)
        yield lines
        tell(found.fragments)
    if found != expected:
        raise Failure("the collection changed during the run, so nothing was adopted: run the command again")
    yield encode_line(
        End(
            memories=1,
            fragments=found.fragments,
            conversations=0,
            messages=0,
            plans=0,
            sha256=digest.hexdigest(),
        )
    )


def _print_result(done: AdoptionResult, as_json: bool) -> None:
    if as_json:
        print_json(done)
        return
    if done.empty:
        print_line(f"skipped {done.empty:,} rows without text", err=True)
    if done.changed:
        print_line(f"adopted {done.fragments:,} rows of {done.collection} as long-term fragments of {done.memory}")
    else:
        print_line(f"{done.memory} already has the {done.fragments:,} rows of {done.collection}: nothing was changed")
