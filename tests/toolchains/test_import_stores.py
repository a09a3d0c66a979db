"""`memstream import` from stores that the real programs have written: Milvus, PostgreSQL, Chroma, LangGraph."""

from __future__ import annotations

import json
import re
from pathlib import Path

import numpy as np
import pytest

from memstream import sync
from memstream.importers.milvus import PAGE_ROWS
from tests.cli.commands import run
from tests.support.server import ServerProcess
from tests.toolchains.environments import Environment
from tests.toolchains.milvus import MilvusServer
from tests.toolchains.postgres import Cluster
from tests.toolchains.programs import Absent

pytestmark = pytest.mark.toolchain


def test_a_collection_of_a_milvus_server_is_imported(milvus: MilvusServer, tmp_path: Path) -> None:
    from pymilvus import DataType, MilvusClient

    count = 2 * PAGE_ROWS + 20
    keys = [f'{number:04} "it\'s" \\ ü' for number in range(count)]
    client = MilvusClient(milvus.uri, timeout=120, dedicated=True)
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


WRITE = """
import sys
import chromadb
from langchain_core.messages import AIMessage, HumanMessage
from langgraph.checkpoint.postgres import PostgresSaver
from langgraph.checkpoint.sqlite import SqliteSaver
from langgraph.graph import START, MessagesState, StateGraph
from langgraph.store.postgres import PostgresStore
from langgraph.store.sqlite import SqliteStore

folder, uri = sys.argv[1:]
notes = chromadb.PersistentClient(folder + "/chroma").get_or_create_collection("notes", embedding_function=None)
notes.add(
    ids=["a", "b", "c"],
    documents=["The train leaves at noon", "Bob keeps bees", "Never seen"],
    embeddings=[[1, 0], [0, 1], [1, 1]],
    metadatas=[{"author": "bob", "importance": 0.75, "tags": ["rail", "time"], "ok": True}, {"n": 3}, {"n": 4}],
)
notes.update(ids=["b"], documents=["Bob keeps goats"], embeddings=[[0, 2]], metadatas=[{"flags": [True, False]}])
notes.delete(ids=["c"])
notes.add(ids=["d"], embeddings=[[2, 2]])

def answer(state):
    return {"messages": [AIMessage([{"type": "text", "text": "Hello " + state["messages"][-1].content}])]}

for store, saver in (
    (SqliteStore.from_conn_string(folder + "/store.sqlite"), SqliteSaver.from_conn_string(folder + "/saver.sqlite")),
    (PostgresStore.from_conn_string(uri), PostgresSaver.from_conn_string(uri)),
):
    with store as items, saver as checkpoints:
        items.setup()
        items.put(("memories", "bob"), "1", {"content": "Likes tea", "who": "bob"})
        items.put(("memories", "bob"), "2", {"content": "Likes plays"}, ttl=60)
        checkpoints.setup()
        graph = StateGraph(MessagesState).add_node("say", answer).add_edge(START, "say")
        graph = graph.compile(checkpointer=checkpoints)
        for thread, text in (("t1", "I am Bob"), ("t2", "I am Ann"), ("t1", "Again")):
            graph.invoke({"messages": [HumanMessage(text)]}, {"configurable": {"thread_id": thread}})
"""


def test_stores_of_the_real_programs_are_imported(postgres: Cluster, tmp_path: Path) -> None:
    """Chroma with updates, deletions and lists in metadata; stores and checkpoints of LangGraph in both databases."""
    stores = Environment("stores", plain=True)
    try:
        stores.python()
    except Absent as absent:
        pytest.skip(str(absent))
    uri = postgres.database()
    stores.run("-c", WRITE, str(tmp_path), uri, home=tmp_path)
    with ServerProcess(tmp_path / "data") as server, sync.connect(server.address) as client:

        def imported(source: str, memory: str, *options: str) -> dict[str, int]:
            """What is lost; the import is repeated and changes nothing."""
            words = ("-m", "memstream_server", "import", source, memory, "--json", *options)
            dry, first, again = (
                json.loads(stores.run(*words, *more, home=tmp_path, MEMSTREAM_TARGET=server.address))
                for more in (["--dry-run"], [], [])
            )
            assert (dry["sent"], dry["report"], again["sent"]) == (0, first["report"], 0)
            lost: dict[str, int] = first["report"]["lost"]
            return lost

        lost = imported(str(tmp_path / "chroma"), "moved/chroma", "--field", "importance=importance")
        assert lost == {"embeddings (the server embeds the texts again)": 2}
        found = list(client.memory("moved/chroma").list_fragments())
        assert [(one.content, dict(one.metadata)) for one in found] == [
            ("The train leaves at noon", {"author": "bob", "importance": 0.75, "tags": ["rail", "time"], "ok": True}),
            ("Bob keeps goats", {"n": 3, "flags": [True, False]}),
        ]
        assert found[0].importance == 0.75
        for name, source in (("sqlite", str(tmp_path / "store.sqlite")), ("postgres", uri)):
            assert imported(source, f"moved/items-{name}") == {"times to live": 1}
            items = list(client.memory(f"moved/items-{name}").list_fragments())
            assert [(one.content, one.metadata["key"]) for one in items] == [("Likes tea", "1"), ("Likes plays", "2")]
        for name, source in (("sqlite", str(tmp_path / "saver.sqlite")), ("postgres", uri)):
            path = f"talks-{name}/all"
            assert imported(source, path, "--from", "langgraph-checkpoints", "--conversations", "feed") == {}
            said = [(one.session, one.speaker, one.content) for one in client.memory(path).list_fragments()]
            assert sorted(said) == [
                ("langgraph-checkpoints.t1", "assistant", "Hello Again"),
                ("langgraph-checkpoints.t1", "assistant", "Hello I am Bob"),
                ("langgraph-checkpoints.t1", "user", "Again"),
                ("langgraph-checkpoints.t1", "user", "I am Bob"),
                ("langgraph-checkpoints.t2", "assistant", "Hello I am Ann"),
                ("langgraph-checkpoints.t2", "user", "I am Ann"),
            ]
            names = [one.name for one in client.list_conversations(f"talks-{name}")]
            assert sorted(names) == ["langgraph-checkpoints.t1", "langgraph-checkpoints.t2"]
