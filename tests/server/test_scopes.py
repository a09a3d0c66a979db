"""A recall over several memories: one ranking, with the rights, filters and limits of each."""

from __future__ import annotations

import uuid
from collections.abc import AsyncIterator
from typing import Any

import grpc
import grpc.aio
import pytest
from google.protobuf.timestamp_pb2 import Timestamp
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import memstream
from memstream.v1 import stream_service_pb2 as pb
from memstream.v1 import stream_service_pb2_grpc as stubs
from memstream.v1.fragment_pb2 import FragmentFilter
from memstream.v1.scope_pb2 import LabelSelector, RecallScope
from memstream.values import Observation
from tests.support.seeds import rounds
from tests.support.server import ServerProcess

TEXTS = {
    "bob": ["Bob drinks green tea", "Bob's sister lives in Oslo", "the bicycle is red", "Bob likes tea with milk"],
    "core": ["the team meets on Monday", "tea is in the kitchen on the third floor", "the build takes nine minutes"],
    "joy": ["I answer in short sentences", "asked about tea, I recommended oolong tea"],
}
NOW = Timestamp(seconds=2_000_000_000)
"""Recency counts from here, so that two answers are equal."""


@pytest.fixture
async def names(client: memstream.Client) -> dict[str, str]:
    """Three memories of one namespace, by short name."""
    namespace = f"s-{uuid.uuid4().hex[:10]}"
    paths = {name: f"{namespace}/{name}" for name in TEXTS}
    for name, path in paths.items():
        memory = await client.create_memory(
            path,
            labels={"team": "core"} if name != "bob" else {},
            policy={"conflicts": {"suspect": False}},  # else a later statement goes before its earlier twin
        )
        await memory.observe_batch([Observation(text, session=f"s-{name}") for text in TEXTS[name]])
    return paths


@pytest.fixture
async def stub(shared: ServerProcess) -> AsyncIterator[Any]:
    async with grpc.aio.insecure_channel(shared.address) as channel:
        yield stubs.StreamServiceStub(channel)


def query(*scopes: RecallScope, text: str = "tea", **fields: Any) -> pb.RecallOnceRequest:
    given: dict[str, Any] = {"reinforce": False, "now": NOW} | fields
    return pb.RecallOnceRequest(query=pb.RecallQuery(text=text, scopes=scopes, **given))


def scopes_of(names: dict[str, str], **weights: float) -> list[RecallScope]:
    return [RecallScope(memory=path, weight=weights.get(name, 1.0)) for name, path in names.items()]


def comparable(answer: pb.RecallOnceResponse) -> bytes:
    """Its bytes without the seconds that the steps took."""
    answer.done.timings.clear()
    return answer.SerializeToString(deterministic=True)


_fields = st.fixed_dictionaries(
    {"text": st.sampled_from(["tea", "Does Bob like tea with milk?", "bicycle yesterday", "\u8336"])},
    optional={
        "limit": st.integers(1, 6),
        "explain": st.booleans(),
        "near_misses": st.integers(0, 6),
        "token_budget": st.integers(1, 60),
        "min_relevance": st.sampled_from([0.0, 0.2, 0.9]),
        "omit_working_memory": st.booleans(),
        "fold": st.booleans(),
        "filter": st.sampled_from(["s-bob", "none"]).map(lambda each: FragmentFilter(sessions=[each])),
    },
)


@pytest.mark.drawn
@settings(max_examples=rounds(60, 6), deadline=None, suppress_health_check=list(HealthCheck))
@given(fields=_fields, in_scope=st.booleans())
async def test_one_scope_is_the_memory_byte_for_byte(
    stub: Any, names: dict[str, str], fields: dict[str, Any], in_scope: bool
) -> None:
    """Also on a stream and of a standing query; in_scope: limit and filter are the scope's. Only timings differ."""
    namespace, _, name = names["bob"].partition("/")
    given: dict[str, Any] = {"reinforce": False, "now": NOW} | fields
    own = {each: given[each] for each in ("limit", "filter") if in_scope and each in given}
    scope = RecallScope(memory=names["bob"], **own)
    alone = pb.RecallQuery(query_id="1", **given)
    scoped = pb.RecallQuery(query_id="1", scopes=[scope], **{each: given[each] for each in given.keys() - own.keys()})
    once = comparable(await stub.RecallOnce(pb.RecallOnceRequest(query=scoped)))
    assert once == comparable(
        await stub.RecallOnce(pb.RecallOnceRequest(namespace=namespace, memory=name, query=alone))
    )
    answers = []
    for opening, asked in ((pb.RecallOpen(namespace=namespace, memory=name), alone), (pb.RecallOpen(), scoped)):
        standing = pb.RecallQuery.FromString(asked.SerializeToString())
        standing.query_id, standing.subscribe = "2", True
        standing.ClearField("reinforce")
        call = stub.Recall()
        for message in (
            pb.RecallRequest(open=opening),
            pb.RecallRequest(query=asked),
            pb.RecallRequest(query=standing),
        ):
            await call.write(message)
        said: dict[str, list[bytes]] = {"1": [], "2": []}
        over = 0
        async for message in messages(call):
            if message.HasField("done"):
                message.done.timings.clear()
                over += 1
            if query_id := message.done.query_id or message.recollections.query_id:
                said[query_id].append(message.SerializeToString(deterministic=True))
            if over == 2:
                break
        call.cancel()
        answers.append(said)
    assert all(answers[0].values())
    assert answers[0] == answers[1]


async def test_the_order_is_that_of_score_times_weight(stub: Any, names: dict[str, str]) -> None:
    weights = {"bob": 1.0, "core": 3.0, "joy": 0.5}
    answer = await stub.RecallOnce(query(*scopes_of(names, **weights)))
    by_path = {path: weights[name] for name, path in names.items()}
    keys = [one.score * by_path[one.memory] for one in answer.recollections.recollections]
    assert keys == sorted(keys, reverse=True)
    assert [one.rank for one in answer.recollections.recollections] == list(range(1, len(keys) + 1))
    assert {one.memory for one in answer.recollections.recollections} == set(names.values())


async def test_each_memory_says_what_it_contributed(stub: Any, names: dict[str, str]) -> None:
    answer = await stub.RecallOnce(query(*scopes_of(names), limit=4))
    parts = {part.memory: part for part in answer.done.memories}
    assert list(parts) == list(names.values())
    assert len(answer.recollections.recollections) == 4 == sum(part.recollections for part in parts.values())
    assert [parts[names[name]].eligible for name in TEXTS] == [4, 3, 2]
    assert answer.done.eligible == 9
    assert answer.done.best_relevance == max(part.best_relevance for part in parts.values())
    assert all(part.revision > 1 for part in parts.values())
    assert not answer.done.revision


async def test_a_scope_has_a_limit_and_a_filter(stub: Any, names: dict[str, str]) -> None:
    bob = RecallScope(memory=names["bob"], limit=1)
    core = RecallScope(memory=names["core"])
    core.filter.sessions.append("no such session")
    answer = await stub.RecallOnce(query(bob, core, RecallScope(memory=names["joy"])))
    found = [one.memory for one in answer.recollections.recollections]
    assert found.count(names["bob"]) == 1
    assert names["core"] not in found
    assert {part.memory: part.eligible for part in answer.done.memories}[names["core"]] == 0


async def test_prefix_and_labels_select(stub: Any, names: dict[str, str]) -> None:
    namespace = names["bob"].partition("/")[0]
    for scope, found in (
        (RecallScope(prefix=f"{namespace}/"), {"bob", "core", "joy"}),
        (RecallScope(prefix=namespace[:-1]), {"bob", "core", "joy"}),
        (RecallScope(prefix=f"{namespace}/j"), {"joy"}),
        (RecallScope(labels=LabelSelector(namespace=namespace, labels={"team": "core"})), {"core", "joy"}),
        (RecallScope(prefix=f"{namespace}/zz"), set()),
    ):
        answer = await stub.RecallOnce(query(scope))
        assert {part.memory for part in answer.done.memories} == {names[each] for each in found}


async def test_a_named_scope_goes_before_a_selection(stub: Any, names: dict[str, str]) -> None:
    namespace = names["bob"].partition("/")[0]
    answer = await stub.RecallOnce(
        query(RecallScope(prefix=f"{namespace}/"), RecallScope(memory=names["joy"], limit=1))
    )
    assert [one.memory for one in answer.recollections.recollections].count(names["joy"]) == 1
    assert next(part.memory for part in answer.done.memories) == names["joy"]


async def test_the_budget_is_of_all_together(stub: Any, names: dict[str, str]) -> None:
    answer = await stub.RecallOnce(query(*scopes_of(names), token_budget=20, omit_working_memory=True))
    assert 0 < answer.done.tokens <= 20
    assert len({one.memory for one in answer.recollections.recollections}) >= 1


async def test_partial_leaves_out_what_is_absent(stub: Any, names: dict[str, str]) -> None:
    asked = [*scopes_of(names), RecallScope(memory="nobody/here")]
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await stub.RecallOnce(query(*asked))
    assert refused.value.code() is grpc.StatusCode.NOT_FOUND
    assert "nobody/here" in (refused.value.details() or "")
    answer = await stub.RecallOnce(query(*asked, partial=True))
    assert comparable(answer) == comparable(await stub.RecallOnce(query(*scopes_of(names))))


@pytest.mark.parametrize(
    ("scopes", "field"),
    [
        ([RecallScope()], "query.scopes[0]"),
        ([RecallScope(memory="joy")], "query.scopes[0].memory"),
        ([RecallScope(memory="a/b"), RecallScope(memory="a/b")], "query.scopes"),
        ([RecallScope(memory=f"a/{number}") for number in range(101)], "query.scopes"),
        ([RecallScope(prefix="/")], "query.scopes[0].prefix"),
        ([RecallScope(labels=LabelSelector())], "query.scopes[0].labels.labels"),
        ([RecallScope(memory="a/b", weight=float("nan"))], "query.scopes[0].weight"),
        ([RecallScope(memory="a/b", limit=0)], "query.scopes[0].limit"),
        ([RecallScope(prefix="a/", min_revision=3)], "query.scopes[0].min_revision"),
    ],
)
async def test_wrong_scopes_are_named(stub: Any, scopes: list[RecallScope], field: str) -> None:
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await stub.RecallOnce(query(*scopes))
    assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert field in (refused.value.details() or "")


async def test_no_scopes_and_no_memory_are_refused(stub: Any) -> None:
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await stub.RecallOnce(query())
    assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT


async def test_a_receipt_of_each_memory_replays(client: memstream.Client, stub: Any, names: dict[str, str]) -> None:
    answer = await stub.RecallOnce(query(*scopes_of(names), receipt=True))
    assert not answer.done.receipt_id
    for part in answer.done.memories:
        replay = await client.memory(part.memory).replay(part.receipt_id)
        assert replay.same


async def test_several_memories_rank_as_one(client: memstream.Client, stub: Any, names: dict[str, str]) -> None:
    whole = await client.create_memory(f"{names['bob'].partition('/')[0]}-whole/all")
    for name, texts in TEXTS.items():
        await whole.observe_batch([Observation(text, session=f"s-{name}") for text in texts])
    one = await whole.recall_once("tea kitchen", reinforce=False, limit=9)
    several = (await stub.RecallOnce(query(*scopes_of(names), text="tea kitchen", limit=9))).recollections
    assert {hit.fragment.content: round(hit.relevance, 5) for hit in one} == {
        hit.fragment.content: round(hit.relevance, 5) for hit in several.recollections
    }


async def messages(call: Any) -> AsyncIterator[pb.RecallResponse]:
    while isinstance(message := await call.read(), pb.RecallResponse):
        yield message


async def test_a_stream_answers_queries_with_scopes(stub: Any, names: dict[str, str]) -> None:
    once = await stub.RecallOnce(query(*scopes_of(names)))
    call = stub.Recall()
    await call.write(pb.RecallRequest(open=pb.RecallOpen(done_in_recollections=True)))
    asked = query(*scopes_of(names)).query
    asked.query_id = "1"
    await call.write(pb.RecallRequest(query=asked))
    unnamed = pb.RecallQuery(query_id="2", text="tea")
    await call.write(pb.RecallRequest(query=unnamed))
    await call.write(pb.RecallRequest(close=pb.RecallClose()))
    found = [one async for one in messages(call)]
    answers = [one.recollections for one in found if one.HasField("recollections")]
    assert [one.fragment.id for one in answers[0].recollections] == [
        one.fragment.id for one in once.recollections.recollections
    ]
    assert [part.memory for part in answers[0].done.memories] == list(names.values())
    failed = [one.failed for one in found if one.HasField("failed")]
    assert [one.query_id for one in failed] == ["2"]


async def test_a_standing_query_follows_several(client: memstream.Client, stub: Any, names: dict[str, str]) -> None:
    call = stub.Recall()
    await call.write(pb.RecallRequest(open=pb.RecallOpen(done_in_recollections=True)))
    asked = query(*scopes_of(names), text="elephant", limit=20).query
    asked.query_id, asked.subscribe = "1", True
    asked.ClearField("reinforce")
    await call.write(pb.RecallRequest(query=asked))
    stream = messages(call)
    assert (await anext(stream)).HasField("opened")
    first = (await anext(stream)).recollections
    assert len(first.done.memories) == 3
    for name in ("joy", "core"):
        await client.memory(names[name]).observe_batch([f"the elephant of {name} is grey"])
        change = (await anext(stream)).recollections
        assert change.recollections[0].memory == names[name]
        assert change.recollections[0].fragment.content == f"the elephant of {name} is grey"
    call.cancel()


async def test_the_sdk_asks_several_memories(client: memstream.Client, names: dict[str, str]) -> None:
    answer = await client.recall_once([*names.values()], "tea", limit=5, reinforce=False)
    assert [part.memory for part in answer.memories] == list(names.values())
    assert {one.memory for one in answer} <= set(names.values())
    assert sum(part.recollections for part in answer.memories) == len(answer) == 5
    scopes = [
        memstream.Scope(names["bob"], weight=9.0, limit=1),
        memstream.Scope(labels={"team": "core"}, namespace=names["bob"].partition("/")[0]),
    ]
    weighed = await client.recall_once(scopes, "tea", reinforce=False)
    assert [one.memory for one in weighed].count(names["bob"]) == 1
    assert weighed[0].memory == names["bob"]
    with pytest.raises(memstream.MemoryNotFound, match="nobody/here"):
        await client.recall_once([names["joy"], "nobody/here"], "tea")
    left = await client.recall_once([names["joy"], "nobody/here"], "tea", partial=True, reinforce=False)
    assert [part.memory for part in left.memories] == [names["joy"]]


async def test_a_stream_of_the_sdk_asks_several_memories(client: memstream.Client, names: dict[str, str]) -> None:
    once = await client.recall_once([*names.values()], "tea", reinforce=False, omit_working_memory=True)
    async with client.recall([*names.values(), "nobody/here"], partial=True) as stream:
        answer = await stream.query("tea", reinforce=False, omit_working_memory=True)
        assert [one.fragment.id for one in answer] == [one.fragment.id for one in once]
        assert [part.memory for part in answer.memories] == list(names.values())
        async with stream.subscribe("elephant") as changes:
            await anext(changes)
            await client.memory(names["joy"]).observe_batch(["the elephant of joy is grey"])
            change = await anext(changes)
            assert [(one.memory, one.fragment.content) for one in change.entered][:1] == [
                (names["joy"], "the elephant of joy is grey")
            ]
    async with client.recall([names["joy"], "nobody/here"]) as stream:
        with pytest.raises(memstream.MemoryNotFound, match="nobody/here"):
            await stream.query("tea")


async def test_a_hundred_scopes_and_nothing_selected(stub: Any, names: dict[str, str]) -> None:
    absent = [RecallScope(memory=f"nobody/m{number}") for number in range(97)]
    answer = await stub.RecallOnce(query(*scopes_of(names), *absent, partial=True))
    assert comparable(answer) == comparable(await stub.RecallOnce(query(*scopes_of(names))))
    nothing = await stub.RecallOnce(query(RecallScope(prefix="nobody/none-")))
    assert (nothing.done.weak, len(nothing.done.memories), len(nothing.recollections.recollections)) == (True, 0, 0)


async def test_what_a_filter_excludes_is_counted_nowhere(client: memstream.Client, names: dict[str, str]) -> None:
    chosen = memstream.Filter(sessions=["s-bob"])
    answer = await client.recall_once([*names.values()], "tea", filter=chosen, reinforce=False)
    assert {one.memory for one in answer} == {names["bob"]}
    assert [part.eligible for part in answer.memories] == [4, 0, 0]
    assert (answer.eligible, len(answer.working_memory)) == (4, 4)


async def test_several_memories_as_of_a_time(client: memstream.Client, names: dict[str, str]) -> None:
    listed = [one async for one in client.memory(names["joy"]).list_fragments()]
    then = max(one.create_time for one in listed if one.create_time is not None)
    await client.memory(names["joy"]).observe_batch(["tea tea tea, said later"])
    past = await client.recall_once([*names.values()], "tea", as_of=then, limit=20)
    assert "tea tea tea, said later" not in {one.fragment.content for one in past}
    now = await client.recall_once([*names.values()], "tea", limit=20, reinforce=False)
    assert "tea tea tea, said later" in {one.fragment.content for one in now}


async def test_filters_are_inside_of_filters(client: memstream.Client, names: dict[str, str]) -> None:
    memory = client.memory(names["bob"])
    sessions = memstream.Filter(sessions=["s-bob"])
    nothing = memstream.Filter(sessions=["none"])
    for chosen, count in (
        (memstream.Filter(any_of=[nothing, sessions]), 4),
        (memstream.Filter(all_of=[nothing, sessions]), 0),
        (memstream.Filter(none_of=[sessions]), 0),
        (memstream.Filter(none_of=[memstream.Filter(none_of=[sessions])]), 4),
    ):
        assert len([one async for one in memory.list_fragments(chosen)]) == count
        assert len(await memory.recall_once("tea", filter=chosen, reinforce=False)) == count
