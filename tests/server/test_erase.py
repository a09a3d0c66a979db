"""Erasure on a real server: no file of the data directory contains the erased content or data derived from it."""

from __future__ import annotations

import asyncio
import json
import random
import sqlite3
import uuid
from collections.abc import AsyncIterator, Iterable, Mapping
from contextlib import closing, suppress
from pathlib import Path

import grpc.aio
import numpy as np
import pytest

import memstream
from memstream import Filter, FragmentKind, Memory, MemoryKind, Observation, OperationState
from memstream.v1 import memory_service_pb2 as pb
from memstream.v1.memory_service_pb2_grpc import MemoryServiceStub
from memstream_server.adapters.journal.sql import codec
from memstream_server.adapters.journal.sql.vector_forms import INDEXED, decode_bytes, pack
from tests.server.conftest import MakeServer, restarted, started
from tests.server.listing import fragments
from tests.support.fake_openai import JSON, FakeOpenAI
from tests.support.journals import only_sqlite
from tests.support.seeds import rounds
from tests.support.server import ServerProcess
from tests.support.waiting import until

pytestmark = pytest.mark.with_index

DIMENSION = 64
MERGING = {"short_term": {"merge_content": True, "similarity_rule": "cosine", "similarity_min": 0.9}}


def secret() -> str:
    """A word that occurs nowhere else."""
    return f"zq{uuid.uuid4().hex}"


def files_with(data_dir: Path, needles: Mapping[str, bytes]) -> dict[str, set[str]]:
    """The needles found, with the names of the data files that contain them."""
    found: dict[str, set[str]] = {}
    for path in data_dir.rglob("*"):
        if not path.is_file():
            continue
        with suppress(FileNotFoundError):  # the server removes files meanwhile
            data = path.read_bytes()
            for name, needle in needles.items():
                if needle in data:
                    found.setdefault(name, set()).add(path.name)
    return found


def needles_of(data_dir: Path, words: Iterable[str], ids: Iterable[str]) -> dict[str, bytes]:
    """The words, and the quarters of every vector of these fragments, as the journal stores it and as float32."""
    out = {word: word.encode() for word in words}
    chosen = list(ids)
    marks = ",".join("?" * len(chosen))
    with closing(sqlite3.connect(f"file:{data_dir / 'journal.db'}?mode=ro", uri=True)) as journal:
        indexed = journal.execute(
            f"SELECT f.id, v.vector FROM vectors v JOIN fragments f ON f.key = v.key WHERE f.id IN ({marks})", chosen
        ).fetchall()
        held = journal.execute(f"SELECT id || '+', vector FROM anchors WHERE id IN ({marks})", chosen).fetchall()
    assert {id_ for id_, _ in indexed} == set(chosen)
    for id_, vector in (*indexed, *held):
        if vector is not None and vector != INDEXED:
            assert len(vector) == 2 * DIMENSION + 1
            for form, data in (("half", vector[:-1]), ("whole", pack(decode_bytes(vector)))):
                quarter = len(data) // 4
                out |= {f"{id_}/{form}/{part}": data[part * quarter : (part + 1) * quarter] for part in range(4)}
    return out


def question_vector(data_dir: Path) -> bytes:
    """The vector of the query in the only receipt of a recall."""
    with closing(sqlite3.connect(f"file:{data_dir / 'journal.db'}?mode=ro", uri=True)) as journal:
        ((payload,),) = journal.execute("SELECT payload FROM recall_receipts").fetchall()
    vector = codec.decode_recall_receipt(payload).vector
    assert vector is not None
    return vector[: len(vector) // 4]


@pytest.fixture
async def fake() -> AsyncIterator[FakeOpenAI]:
    async with FakeOpenAI(dimension=DIMENSION) as endpoint:
        yield endpoint


def modelled(make_server: MakeServer, fake: FakeOpenAI) -> ServerProcess:
    """A server whose vectors and insights come from the scripted endpoint."""
    return make_server(
        embedding="openai",
        embedding_model="fake-embedding",
        embedding_base_url=fake.base_url,
        embedding_api_key="sk",
        llm_model="fake-llm",
        llm_base_url=fake.base_url,
        llm_api_key="sk",
        llm_scoring="false",
        index_partitions=2,
    )


def insightful(fake: FakeOpenAI, said: str) -> None:
    def answer(body: JSON) -> str:
        form = body["response_format"]["json_schema"]["name"]
        return json.dumps({"insights": [said]} if form == "insights" else {form: []})

    fake.complete = answer


def alike(fake: FakeOpenAI, mark: str) -> None:
    """Similar texts with the mark, each with its own vector."""
    base = fake._vector(mark)
    plain = fake.vector
    fake.vector = lambda text: (base + 0.05 * fake._vector(text)).astype(np.float32) if mark in text else plain(text)


async def ids_of(memory: Memory, *observations: Observation) -> list[str]:
    result = await memory.observe_batch(observations)
    return [outcome.fragment_id for outcome in result.outcomes]


async def crowd(client: memstream.Client, namespace: str) -> None:
    """Interleaved rows of many memories, so that the journal's pages split and rows move."""
    memories = [await client.create_memory(f"{namespace}/crowd-{n}", kind=MemoryKind.LONG_TERM) for n in range(6)]
    for turn in range(5):
        for memory in memories:
            await memory.observe_batch([f"{memory.name} waits in line {turn} {place} " * 8 for place in range(10)])


async def indexed(client: memstream.Client, *memories: Memory) -> None:
    async def look() -> bool:
        return all([(await memory.stats()).unindexed == 0 for memory in memories])

    await until(look)


async def insight_of(memory: Memory) -> list[str]:
    return [one.id for one in await fragments(memory) if one.kind is FragmentKind.INSIGHT]


async def check_recalls(memory: Memory, erased: str, kept: str) -> None:
    """The only receipt ranked the erased fragment and has no query; a recall finds the other one."""
    (receipt,) = [one async for one in memory.list_receipts()]
    assert (receipt.what, receipt.erased_ids, receipt.query_erased) == (None, (erased,), True)
    (hit,) = await memory.recall_once("this one stays", limit=1)
    assert hit.fragment.id == kept


@only_sqlite("a database has files and a log of its own")
async def test_erased_content_is_in_no_data_file(make_server: MakeServer, fake: FakeOpenAI) -> None:
    """Of every tier; enhancers, merged, derived, put by key, returned in answers; also through kill -9."""
    words = {
        name: secret()
        for name in ("sensory", "anchor", "enhancer", "long", "key", "put", "insight", "merged", "version", "asked")
    }
    insightful(fake, f"They repeat {words['insight']}.")
    for mark in ("alike-a", "alike-b", "alike-c"):
        alike(fake, mark)
    server = await started(modelled(make_server, fake))
    async with memstream.connect(server.address) as client:
        await crowd(client, "ns")
        tiers = await client.create_memory("ns/tiers", policy={"sensory": {"capacity": 1}})
        long = await client.create_memory("ns/long", kind=MemoryKind.LONG_TERM)
        merging = await client.create_memory("ns/merging", policy={"sensory": {"capacity": 0}, **MERGING})
        wise = await client.create_memory("ns/wise", policy={"sensory": {"capacity": 0}})
        anchor, enhancer, last = await ids_of(
            tiers,
            Observation(f"alike-a {words['anchor']}", importance=0.9),
            Observation(f"alike-a {words['enhancer']}", importance=0.9),
            Observation(f"apart {words['sensory']}", importance=0.9),
        )
        (kept,) = await ids_of(long, Observation("this one stays"))
        (row,) = await ids_of(long, Observation(f"long {words['long']}", external_id=f"key-{words['key']}"))
        await long.update_fragment(row, content=f"for a moment {words['version']}")  # kept as a version, like "long"
        await long.put_fragment(f"put {words['put']}", external_id=f"key-{words['key']}")
        assert (await long.recall_once(f"where was it put, {words['asked']}?", receipt=True)).receipt_id
        texts = ["alike-b 0", f"alike-b {words['merged']}", "alike-b 2", "alike-b 3"]
        merged = await ids_of(merging, *(Observation(text, importance=0.9) for text in texts))
        source = await ids_of(wise, *(Observation(f"alike-c {n}", importance=0.9) for n in range(5)))
        (derived,) = await until(lambda: insight_of(wise))
        (of_merged,) = await until(lambda: insight_of(merging))
        whole = (await merging.get_fragment(merged[0])).content
        await indexed(client, tiers, long, merging, wise)
        erased: list[tuple[Memory, list[str]]] = [
            (tiers, [enhancer, last]),
            (long, [row]),
            (merging, [merged[1]]),
            (wise, [source[0]]),
        ]
        ids = [enhancer, last, row, merged[1], source[0], derived, of_merged]
        gone = {name: word for name, word in words.items() if name not in ("anchor", "long")}
        needles = needles_of(server.data_dir, gone.values(), ids) | {
            words["long"]: words["long"].encode(),
            "question": question_vector(server.data_dir),
        }
        assert whole == ";".join(texts)
        before = files_with(server.data_dir, needles)
        assert before.keys() >= {word for name, word in words.items() if name != "anchor"} | {"question"}
        assert {name for names in before.values() for name in names} >= {"journal.db-wal"}
        started_ = [await memory.erase_fragments(each) for memory, each in erased]
        assert [each.type for each in started_] == ["erase"] * 4
    await restarted(server)  # during the erasure
    async with memstream.connect(server.address) as client:
        for operation in started_:
            assert (await client.finished(operation)).state is OperationState.SUCCEEDED
        assert files_with(server.data_dir, needles) == {}
        assert set(files_with(server.data_dir, {"a": words["anchor"].encode()})) == {"a"}
        assert [one.id for one in await fragments(client.memory("ns/tiers"))] == [anchor]
        assert [one.id for one in await fragments(client.memory("ns/long"))] == [kept]
        assert [one.id for one in await fragments(client.memory("ns/wise"))] == source[1:]
        (left,) = [one for one in await fragments(client.memory("ns/merging")) if one.id == merged[0]]
        assert (left.content, left.sources) == ("alike-b 0;alike-b 2;alike-b 3", tuple(merged[2:]))
        await check_recalls(client.memory("ns/long"), row, kept)
        await indexed(client, *(client.memory(f"ns/{name}") for name in ("tiers", "long", "merging", "wise")))
        assert files_with(server.data_dir, needles) == {}
    assert await asyncio.to_thread(server.stop) == 0
    assert files_with(server.data_dir, needles) == {}
    assert "Traceback" not in server.log()


async def test_filter_matches_forgotten_and_pinned(client: memstream.Client, path: str) -> None:
    memory = await client.create_memory(path, kind=MemoryKind.LONG_TERM)
    said = [Observation(f"line {n}", speaker="Bob" if n % 2 else "Joy") for n in range(6)]
    ids = await ids_of(memory, *said)
    await memory.forget_fragments([ids[1]])
    await memory.update_fragment(ids[3], pinned=True)
    ended = await client.finished(await memory.erase_fragments(filter=Filter(speakers=["Bob"])))
    assert (ended.state, ended.done, ended.total, ended.unit) == (OperationState.SUCCEEDED, 3, 3, "fragments")
    assert [one.id for one in await fragments(memory)] == ids[::2]
    assert await fragments(memory, forgotten=True) == []
    assert "line 3" not in [hit.fragment.content for hit in await memory.recall_once("line 3")]


async def test_unknown_and_foreign_ids_are_skipped(client: memstream.Client, path: str) -> None:
    memory = await client.create_memory(path)
    other = await client.create_memory(f"{path}-other")
    (mine,), (theirs,) = await ids_of(memory, Observation("mine")), await ids_of(other, Observation("theirs"))
    ended = await client.finished(await memory.erase_fragments([theirs, "01J00000000000000000000000"]))
    assert ended.state is OperationState.SUCCEEDED
    assert [one.id for one in await fragments(memory)] == [mine]
    assert [one.id for one in await fragments(other)] == [theirs]


async def test_what_an_erasure_refuses(client: memstream.Client, path: str) -> None:
    memory = await client.create_memory(path)
    some = "01J00000000000000000000000"
    for ids, chosen in (((), None), ((), Filter()), ((some,), Filter(speakers=["Bob"])), (("x",), None)):
        with pytest.raises(memstream.InvalidRequest):
            await memory.erase_fragments(ids, filter=chosen)
    with pytest.raises(memstream.InvalidRequest, match="1,001"):
        await memory.erase_fragments([f"01J{number:023d}" for number in range(1_001)])
    with pytest.raises(memstream.MemoryNotFound):
        await client.memory(f"{path}-nobody").erase_fragments([some])
    assert [each async for each in client.operations(memory.namespace)] == []
    assert memstream.Capability.ERASE in (await client.server_info()).capabilities


async def test_the_answer_of_a_put_is_not_told_again(
    shared: ServerProcess, client: memstream.Client, path: str
) -> None:
    memory = await client.create_memory(path, kind=MemoryKind.LONG_TERM)
    async with grpc.aio.insecure_channel(shared.address) as channel:
        stub = MemoryServiceStub(channel)
        request = pb.PutFragmentRequest(namespace=memory.namespace, memory=memory.name, request_id="r1")
        request.observation.content, request.observation.external_id = "Bob lives in Leeds", "home"
        first = await stub.PutFragment(request)
        assert await stub.PutFragment(request) == first
        await client.finished(await memory.erase_fragments([first.fragment.id]))
        with pytest.raises(grpc.aio.AioRpcError, match="erased"):
            await stub.PutFragment(request)
    assert await fragments(memory) == []


async def test_streams_go_on_while_others_are_erased(client: memstream.Client, path: str) -> None:
    memory = await client.create_memory(path, kind=MemoryKind.LONG_TERM)
    ids = await ids_of(memory, *(Observation(f"old {n}") for n in range(20)))
    async with memory.observe("p") as stream:
        erasures = [asyncio.create_task(_erased(client, memory, ids[n::4])) for n in range(4)]
        for number in range(200):
            await stream.send(f"new {number}")
        await stream.flush()
        assert await asyncio.gather(*erasures) == [OperationState.SUCCEEDED] * 4
    assert sorted(one.content for one in await fragments(memory)) == sorted(f"new {n}" for n in range(200))


async def _erased(client: memstream.Client, memory: Memory, ids: list[str]) -> OperationState:
    return (await client.finished(await memory.erase_fragments(ids))).state


@pytest.mark.drawn
@pytest.mark.parametrize("seed", range(rounds(2, 1)))
@only_sqlite("a database has files and a log of its own")
async def test_no_history_leaves_bytes_of_what_was_erased(make_server: MakeServer, seed: int) -> None:
    """Random observations, updates, puts, recalls, erasures and kills in several memories."""
    draw = random.Random(seed)
    live: dict[str, tuple[str, str]] = {}
    gone: set[str] = set()
    server = await started(make_server(index_partitions=2))
    for _ in range(rounds(4, 2)):
        async with memstream.connect(server.address) as client:
            for number in range(3):
                await client.create_memory(f"ns/m{number}", kind=MemoryKind.LONG_TERM, exist_ok=True)
            for _ in range(8):
                await _live_a_little(client, draw, live)
            memory, ids, words = _chosen(draw, live)
            operation = await client.memory(memory).erase_fragments(ids)
            if draw.random() < 0.5:
                await restarted(server)  # kills it during the erasure
        async with memstream.connect(server.address) as client:
            assert (await client.finished(operation)).state is OperationState.SUCCEEDED
            gone |= words
            live = {word: place for word, place in live.items() if word not in words}
            found = await asyncio.to_thread(files_with, server.data_dir, {one: one.encode() for one in (*gone, *live)})
            assert found.keys() & gone == set()
            assert found.keys() >= live.keys()
    assert await asyncio.to_thread(server.stop) == 0
    assert await asyncio.to_thread(files_with, server.data_dir, {word: word.encode() for word in gone}) == {}


async def _live_a_little(client: memstream.Client, draw: random.Random, live: dict[str, tuple[str, str]]) -> None:
    path = f"ns/m{draw.randrange(3)}"
    memory = client.memory(path)
    words = [f"zq{draw.getrandbits(120):030x}" for _ in range(draw.randint(1, 60))]
    texts = [f"{word} {'and so on ' * draw.choice([0, 1, 30])}" for word in words]
    for word, id_ in zip(words, await ids_of(memory, *map(Observation, texts)), strict=True):
        live[word] = path, id_
    mine = [word for word, (its, _) in live.items() if its == path]
    await memory.recall_once(f"what about {draw.choice(mine)}?", limit=3)
    for word in draw.sample(mine, min(5, len(mine))):
        if draw.random() < 0.5:
            await memory.update_fragment(live[word][1], content=f"{word} is here")
        else:
            await memory.forget_fragments([live[word][1]])


def _chosen(draw: random.Random, live: dict[str, tuple[str, str]]) -> tuple[str, list[str], set[str]]:
    """A memory, and some of its fragments with their words."""
    memory = draw.choice(sorted({path for path, _ in live.values()}))
    mine = [word for word, (path, _) in live.items() if path == memory]
    words = draw.sample(mine, draw.randint(1, min(40, len(mine))))
    return memory, [live[word][1] for word in words], set(words)
