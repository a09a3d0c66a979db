"""`memstream import` from a real Milvus server, whose filters page through its rows, and from PostgreSQL."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest

from memstream import sync
from memstream.importers.milvus import PAGE_ROWS
from tests.cli.commands import run
from tests.support.server import ServerProcess
from tests.toolchains.milvus import MilvusServer
from tests.toolchains.postgres import Cluster

pytestmark = pytest.mark.toolchain


def test_a_collection_of_a_milvus_server_is_imported(milvus: MilvusServer, tmp_path: Path) -> None:
    from pymilvus import DataType, MilvusClient

    count = 2 * PAGE_ROWS + 20
    keys = [f'{number:04} "it\'s" \\ ü' for number in range(count)]
    client = MilvusClient(milvus.uri, timeout=30, dedicated=True)
    schema = client.create_schema(auto_id=False, enable_dynamic_field=True)
    schema.add_field("pk", DataType.VARCHAR, is_primary=True, max_length=64)
    schema.add_field("content", DataType.VARCHAR, max_length=500)
    schema.add_field("vec", DataType.FLOAT_VECTOR, dim=4)
    index = client.prepare_index_params()
    index.add_index("vec", index_type="HNSW", metric_type="L2", params={"M": 8, "efConstruction": 32})
    client.create_collection("letters", schema=schema, index_params=index)
    rows = [
        {"pk": key, "content": f"letter {place}", "vec": np.ones(4, np.float32), "author": "ann"}
        for place, key in enumerate(keys)
    ]
    for start in range(0, count, 100):  # several segments
        client.insert("letters", rows[start : start + 100])
        if start == 200:
            client.flush("letters")

    with ServerProcess(tmp_path / "data") as server:
        words = ("import", milvus.uri, "moved/letters", "--collection", "letters", "--field", "speaker=author")
        done = run(*words, target=server.address)
        assert (done.returncode, done.stderr) == (0, "")
        with sync.connect(server.address) as asked:
            letters = list(asked.memory("moved/letters").list_fragments())
        assert [letter.content for letter in letters] == [f"letter {place}" for place in range(count)]
        assert {letter.speaker for letter in letters} == {"ann"}
        assert letters[1].external_id == f"letters:{keys[1]}"
        again = run(*words, target=server.address)
        assert (again.returncode, "nothing was changed" in again.stdout) == (0, True)
        missing = run("import", milvus.uri, "moved/x", "--collection", "nothing", target=server.address)
        assert missing.returncode == 2
        assert re.search(r"--collection: .*\bletters\b", missing.stderr), "other tests' collections may be there too"
    assert str(client.get_load_state("letters")["state"]) == "Loaded"
    assert client.query("letters", output_fields=["count(*)"], consistency_level="Strong")[0]["count(*)"] == count
    client.close()


def test_items_of_a_postgres_store_are_imported(postgres: Cluster, tmp_path: Path) -> None:
    import psycopg

    uri = postgres.database().replace("//memstream@", "//memstream:secret@")
    with psycopg.connect(uri) as database:
        database.execute(
            "CREATE TABLE store (prefix text NOT NULL, key text NOT NULL, value jsonb NOT NULL, "
            "created_at timestamptz DEFAULT now(), updated_at timestamptz, PRIMARY KEY (prefix, key))"
        )
        with database.cursor() as rows:
            rows.executemany(
                "INSERT INTO store VALUES (%s, %s, %s::jsonb, '2023-05-08 12:00+00')",
                [("memories.bob", f"{number:04}", f'{{"content": "fact {number}"}}') for number in range(600)],
            )
    with ServerProcess(tmp_path / "data") as server:
        done = run("import", uri, "moved/graph", target=server.address)
        assert (done.returncode, done.stderr) == (0, "")
        assert "is from langgraph: 600 facts" in done.stdout
        assert "secret" not in done.stdout
        with sync.connect(server.address) as asked:
            found = list(asked.memory("moved/graph").list_fragments())
        assert [one.content for one in found] == [f"fact {number}" for number in range(600)]
        assert found[0].metadata == {"namespace": "memories.bob", "key": "0000"}
        assert found[0].observe_time.isoformat() == "2023-05-08T12:00:00+00:00"
        again = run("import", uri, "moved/graph", target=server.address)
        assert "nothing was changed" in again.stdout
        failed = run("import", uri.replace("/memstream-pg", "/none"), "moved/x", target=server.address)
        assert (failed.returncode, "the store cannot be read" in failed.stderr) == (2, True)
        assert "secret" not in failed.stderr
