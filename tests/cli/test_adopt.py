"""`memstream adopt` imports a Milvus Lite collection into a memory on a real server."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner, Result

from memstream import sync
from memstream.values import Tier
from memstream_server.adapters.milvus.existing import PAGE_ROWS, ExistingCollection
from memstream_server.adapters.models.hashing import HashingEmbedder
from memstream_server.cli.group import root
from tests.cli.commands import run
from tests.support.server import ServerProcess

TEXTS = {
    "b1": "I keep bees on the roof",
    'the "second"\\': "The train to Ulm leaves at noon",
    "e": " ",
    "z'9": "Grandmother's cake needs four eggs",
}
MODEL = "hashing-1"


def adopt(server: ServerProcess, *words: str) -> Result:
    """Runs the command in this process, which has already imported pymilvus."""
    return CliRunner().invoke(root, ["adopt", *words], env={"MEMSTREAM_TARGET": server.address})


@contextmanager
def milvus(path: Path) -> Iterator[Any]:
    """A client of a Lite directory that releases it afterwards, as the end of a process does."""
    from milvus_lite.server_manager import server_manager_instance
    from pymilvus import MilvusClient

    client = MilvusClient(str(path), dedicated=True)
    try:
        yield client
    finally:
        client.close()
        server_manager_instance.release_server(str(path))


def rows_of(texts: dict[str, str], vectors: Any) -> list[dict[str, Any]]:
    return [
        {"pk": key, "text": text, "vec": vector, "author": "bob", "at": 1_683_547_200_000 + place, "topic": {"n": 1}}
        for place, ((key, text), vector) in enumerate(zip(texts.items(), vectors, strict=True))
    ]


def make(client: Any, name: str, rows: list[dict[str, Any]]) -> None:
    from pymilvus import DataType

    schema = client.create_schema(auto_id=False, enable_dynamic_field=True)
    schema.add_field("pk", DataType.VARCHAR, is_primary=True, max_length=64)
    schema.add_field("text", DataType.VARCHAR, max_length=100_000)
    schema.add_field("vec", DataType.FLOAT_VECTOR, dim=len(rows[0]["vec"]))
    schema.add_field("at", DataType.INT64)
    client.create_collection(name, schema=schema)
    client.insert(name, rows)
    client.flush(name)


@pytest.fixture(scope="module")
def lite(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`notes` has vectors of the server's own model, `small` some of four numbers, `quick` no schema for its text."""
    path = tmp_path_factory.mktemp("milvus") / "notes.db"
    with milvus(path) as client:
        make(client, "notes", rows_of(TEXTS, HashingEmbedder().vectors(list(TEXTS.values()))))
        many = {f"{number:04}": f"line {number}" for number in range(2 * PAGE_ROWS + 1)} | {"x": "the last is of bees"}
        make(client, "small", rows_of(many, np.ones((len(many), 4), np.float32)))
        make(client, "long", rows_of({"k1": "fits", "k2": "x" * 70_000}, np.ones((2, 4), np.float32)))
        client.create_collection("quick", dimension=4)
        client.insert("quick", [{"id": 1, "vector": [1.0, 0, 0, 0], "content": "dynamic bees"}])
        make(client, "moving", rows_of({"a": "one"}, np.ones((1, 4), np.float32)))
        client.create_collection("untold", dimension=4)
        client.insert("untold", [{"id": 1, "vector": [1.0, 0, 0, 0], "body": "bees"}])
    return path


def everything(path: Path, name: str) -> list[dict[str, Any]]:
    with milvus(path) as client:
        return sorted(
            ({**row} for row in client.query(name, filter="", output_fields=["*"], limit=1_000)),
            key=lambda row: str(row["pk"]),
        )


def test_adopted_hybrid_memory_accepts_observations(server: ServerProcess, lite: Path) -> None:
    before = everything(lite, "notes")
    named = ("--speaker-field", "author", "--time-field", "at", "--metadata-field", "topic", "--model", MODEL)
    words = (str(lite), "notes", "adopted/joy", *named)
    done = run("adopt", *words, target=server.address)
    assert (done.returncode, done.stdout) == (0, "adopted 3 rows of notes as long-term fragments of adopted/joy\n")
    assert done.stderr == "skipped 1 rows without text\n"
    assert everything(lite, "notes") == before

    with sync.connect(server.address) as client:
        joy = client.memory("adopted/joy")
        assert joy.describe().kind.value == "hybrid"
        found = joy.recall_once("when does the train leave?", limit=1)
        assert [hit.fragment.content for hit in found] == ["The train to Ulm leaves at noon"]
        there = found[0].fragment
        assert (there.tier, there.importance, there.speaker, there.external_id) == (
            Tier.LONG_TERM,
            0.5,
            "bob",
            'notes:the "second"\\',
        )
        assert there.observe_time.timestamp() == 1_683_547_200.001
        assert there.metadata == {"topic": {"n": 1}}
        exported = b"".join(part.lines for part in client.export("adopted", "joy", include_vectors=True))

        joy.update(policy={"sensory": {"capacity": 2}, "short_term": {"capacity": 2}})
        joy.observe_batch([f"Bob plants tree number {number}" for number in range(12)])
        tiers = [fragment.tier for fragment in joy.list_fragments()]
        assert tiers.count(Tier.LONG_TERM) > 3
        assert {Tier.SHORT_TERM, Tier.LONG_TERM} <= set(tiers)
        contents = {hit.fragment.content for hit in joy.recall_once("bees on the roof; which tree", limit=10)}
        assert "I keep bees on the roof" in contents
        assert any(content.startswith("Bob plants") for content in contents)

        # The memory has changed since; the request id of the first run shows that the rows are imported.
        count = len(tiers)
        again = adopt(server, *words)
        assert (again.exit_code, "already has the 3 rows of notes: nothing was changed" in again.stdout) == (0, True)
        assert len(list(joy.list_fragments())) == count

    taken = {
        line["content"]: np.frombuffer(base64.b64decode(line["vector"]), "<f4")
        for line in map(json.loads, exported.splitlines())
        if line["type"] == "fragment"
    }
    for row in before:
        if row["text"].strip():
            assert taken[row["text"]] == pytest.approx(row["vec"], abs=1e-6)


def test_adopted_text_is_embedded_by_page(server: ServerProcess, lite: Path) -> None:
    words = (str(lite), "small", "adopted/small", "--kind", "long_term", "--importance", "0.8", "--json")
    done = adopt(server, *words)
    assert done.exit_code == 0, done.stderr
    said = json.loads(done.stdout)
    count = 2 * PAGE_ROWS + 2
    assert (said["fragments"], said["empty"], said["changed"]) == (count, 0, True)
    assert said["operation"]["state"] == "succeeded"
    with sync.connect(server.address) as client:
        small = client.memory("adopted/small")
        assert small.describe().kind.value == "long_term"
        found = small.recall_once("bees", limit=1)[0].fragment
        assert (found.content, found.importance) == ("the last is of bees", 0.8)
        contents = [fragment.content for fragment in small.list_fragments()]
        assert len(contents) == count
        assert contents[:2] == ["line 0", "line 1"]
        revision = small.describe().revision
        again = json.loads(adopt(server, *words).stdout)
        assert (again["changed"], again["operation"]["id"]) == (False, said["operation"]["id"])
        assert small.describe().revision == revision


def test_dynamic_text_field_is_found(server: ServerProcess, lite: Path) -> None:
    done = adopt(server, str(lite), "quick", "adopted/quick", "--profile", "dbgpt")
    assert done.exit_code == 0, done.stderr
    with sync.connect(server.address) as client:
        quick = client.memory("adopted/quick")
        assert quick.describe().policy.profile.value == "dbgpt"
        assert [hit.fragment.content for hit in quick.recall_once("bees")] == ["dynamic bees"]


@pytest.mark.parametrize(
    ("collection", "options", "code", "said"),
    [
        ("nothing", (), 4, "there is no collection 'nothing': there is long, moving, notes, quick, small, untold"),
        (
            "untold",
            (),
            2,
            "no field is named text or content: name the text with --text-field, of id (int64), "
            "vector (float_vector), body (dynamic)",
        ),
        ("notes", ("--text-field", "at"), 2, "at is not a text field: name one with --text-field, of pk (varchar)"),
        ("notes", ("--text-field", "gone"), 1, "no row of notes has text in gone"),
        ("notes", ("--model", "other-2"), 2, "the server's model is hashing-1, so vectors of other-2 cannot"),
        ("small", ("--model", MODEL), 2, "vec has 4 numbers, hashing-1 has 384: it is from another model"),
        ("notes", ("--vector-field", "vec"), 2, "--vector-field requires --model"),
        (
            "long",
            (),
            2,
            "nothing was sent: the row of pk 'k2': text has 70,000 bytes, the server accepts at most 65,536",
        ),
    ],
)
def test_adopt_explains_what_it_rejects(
    server: ServerProcess, lite: Path, collection: str, options: tuple[str, ...], code: int, said: str
) -> None:
    done = adopt(server, str(lite), collection, "adopted/never", *options)
    assert (done.exit_code, done.stdout) == (code, "")
    assert said in " ".join(done.stderr.split())
    with sync.connect(server.address) as client:
        assert "adopted/never" not in {memory.path for memory in client.list_memories("adopted")}


def test_changing_collection_is_not_adopted(server: ServerProcess, lite: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = 0
    pages = ExistingCollection.iterate_pages

    def changed(self: ExistingCollection, fields: Sequence[str]) -> Iterator[list[dict[str, Any]]]:
        nonlocal calls
        calls += 1
        if calls == 2:
            self._client.insert("moving", rows_of({"b": "two"}, np.ones((1, 4), np.float32)))
        return pages(self, fields)

    monkeypatch.setattr(ExistingCollection, "iterate_pages", changed)
    words = (str(lite), "moving", "adopted/moving")
    done = adopt(server, *words)
    assert (done.exit_code, "changed during the run" in done.stderr) == (1, True)
    done = adopt(server, *words)
    assert (done.exit_code, done.stdout) == (0, "adopted 2 rows of moving as long-term fragments of adopted/moving\n")


def test_existing_memory_is_not_overwritten(server: ServerProcess, lite: Path) -> None:
    with sync.connect(server.address) as client:
        taken = client.create_memory("adopted/taken")
        taken.observe_batch(["mine"])
        done = adopt(server, str(lite), "notes", "adopted/taken")
        assert done.exit_code == 1
        assert "there is another memory adopted/taken" in done.stderr
        assert [fragment.content for fragment in taken.list_fragments()] == ["mine"]


def test_locked_directory_is_reported_and_unchanged(server: ServerProcess, lite: Path, tmp_path: Path) -> None:
    for path, said in (
        (tmp_path / "gone.db", "there is no Milvus Lite directory"),
        (tmp_path, "is no directory of Milvus Lite"),
    ):
        done = adopt(server, str(path), "notes", "adopted/never")
        assert (done.exit_code, said in done.stderr) == (4, True), done.stderr
    assert list(tmp_path.iterdir()) == []
    with milvus(lite):
        done = adopt(server, str(lite), "notes", "adopted/never")
        assert (done.exit_code, "another process holds the lock" in done.stderr) == (1, True), done.stderr
