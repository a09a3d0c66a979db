"""Recalls over several memories: what a caller may not recall cannot be told from what does not exist."""

from __future__ import annotations

import uuid
from typing import Any

import grpc
import grpc.aio
import pytest
from google.protobuf.timestamp_pb2 import Timestamp

import memstream
from memstream.v1 import stream_service_pb2 as pb
from memstream.v1 import stream_service_pb2_grpc as stubs
from memstream.v1.scope_pb2 import RecallScope
from tests.access.conftest import Guarded

NOW = Timestamp(seconds=2_000_000_000)
FOUND = "the tea is green"


@pytest.fixture
async def mark(guarded: Guarded) -> str:
    """Memories a/MARK-core, a/MARK-plain, b/MARK-core: the first and the last have the label team=core."""
    mark = f"m{uuid.uuid4().hex[:8]}"
    async with memstream.connect(guarded.server.address, token=guarded.keys["root"]) as client:
        for path, labels in (
            (f"a/{mark}-core", {"team": "core"}),
            (f"a/{mark}-plain", {}),
            (f"b/{mark}-core", {"team": "core"}),
        ):
            memory = await client.create_memory(path, labels=labels)
            await memory.observe_batch([FOUND])
    return mark


async def ask(guarded: Guarded, key: str, *scopes: RecallScope, **fields: Any) -> pb.RecallOnceResponse:
    async with grpc.aio.insecure_channel(guarded.server.address) as channel:
        stub: Any = stubs.StreamServiceStub(channel)
        query = pb.RecallQuery(text="tea", now=NOW, scopes=scopes, **fields)
        answer: pb.RecallOnceResponse = await stub.RecallOnce(
            pb.RecallOnceRequest(query=query), metadata=[("authorization", f"Bearer {guarded.keys[key]}")]
        )
        answer.done.timings.clear()
        return answer


def named(*paths: str) -> list[RecallScope]:
    return [RecallScope(memory=path) for path in paths]


async def refused(guarded: Guarded, key: str, *paths: str) -> tuple[grpc.StatusCode, str]:
    with pytest.raises(grpc.aio.AioRpcError) as error:
        await ask(guarded, key, *named(*paths))
    return error.value.code(), error.value.details() or ""


@pytest.mark.parametrize("key", ["alice", "core"])
async def test_a_scope_without_right_fails_by_name(guarded: Guarded, mark: str, key: str) -> None:
    own, other = f"a/{mark}-core", f"b/{mark}-plain" if key == "alice" else f"a/{mark}-plain"
    there = await refused(guarded, key, own, other)
    absent = await refused(guarded, key, own, f"{other}x")
    assert there[0] is absent[0] is grpc.StatusCode.PERMISSION_DENIED
    assert other in there[1]
    assert absent[1] == there[1].replace(other, f"{other}x")


@pytest.mark.parametrize("key", ["alice", "core"])
async def test_partial_hides_what_is_forbidden(guarded: Guarded, mark: str, key: str) -> None:
    own, other = f"a/{mark}-core", f"b/{mark}-core" if key == "alice" else f"a/{mark}-plain"
    with_other = await ask(guarded, key, *named(own, other), partial=True)
    with_absent = await ask(guarded, key, *named(own, "b/nowhere"), partial=True)
    assert with_other == with_absent
    assert [part.memory for part in with_other.done.memories] == [own]


async def test_a_selection_has_only_what_may_be_recalled(guarded: Guarded, mark: str) -> None:
    for key, found in (
        ("root", {f"a/{mark}-core", f"a/{mark}-plain", f"b/{mark}-core"}),
        ("alice", {f"a/{mark}-core", f"a/{mark}-plain"}),
        ("core", {f"a/{mark}-core", f"b/{mark}-core"}),
        ("nobody", set()),
    ):
        scopes = [RecallScope(prefix=f"{namespace}/{mark}") for namespace in ("a", "b")]
        answer = await ask(guarded, key, *scopes)
        assert {part.memory for part in answer.done.memories} == found
        assert answer.done.eligible == len(found)


async def test_scores_do_not_tell_of_hidden_memories(guarded: Guarded, mark: str) -> None:
    alone = await ask(guarded, "core", *named(f"a/{mark}-core"), RecallScope(prefix="b/none"))
    beside = await ask(guarded, "core", RecallScope(prefix=f"a/{mark}"))
    assert [one.relevance for one in alone.recollections.recollections] == [
        one.relevance for one in beside.recollections.recollections
    ]


async def test_a_grant_by_label_is_for_one_memory(guarded: Guarded, mark: str) -> None:
    async with memstream.connect(guarded.server.address, token=guarded.keys["core"]) as client:
        assert [one.fragment.content for one in await client.memory(f"a/{mark}-core").recall_once("tea")] == [FOUND]
        for name in (f"a/{mark}-plain", f"a/{mark}-absent"):
            with pytest.raises(memstream.PermissionDenied):
                await client.memory(name).recall_once("tea")
        with pytest.raises(memstream.PermissionDenied):  # the grant has no other verb
            await client.memory(f"a/{mark}-core").describe()
        with pytest.raises(memstream.PermissionDenied):  # nor the namespace as a whole
            _ = [one async for one in client.list_memories("a")]


@pytest.mark.parametrize("key", ["alice", "core"])
async def test_a_context_has_only_what_the_caller_may_recall(guarded: Guarded, mark: str, key: str) -> None:
    own, other = f"a/{mark}-core", f"b/{mark}-core" if key == "alice" else f"a/{mark}-plain"
    async with memstream.connect(guarded.server.address, token=guarded.keys["root"]) as root:
        theirs = await root.context([own, other], "tea")
        assert len(theirs.citations) == 1  # both say the same
        forged = await root.context([other], "tea")
    async with memstream.connect(guarded.server.address, token=guarded.keys[key]) as client:
        with pytest.raises(memstream.PermissionDenied, match=other):
            await client.context([own, other], "tea")
        assert (await client.context([own], "tea")).citations
        for path in (other, own):
            turn = await client.context([path], "green", partial=True, after=forged)
            assert {citation.memory for citation in turn.citations} <= {own}
            assert FOUND not in turn.text or path == own
        with pytest.raises(memstream.PermissionDenied, match="read for 'the conversation"):
            await client.context([], "tea", conversation="b/talk")
        async with client.recall([own]) as stream:
            with pytest.raises(memstream.PermissionDenied, match=other):
                await stream.context("tea", scopes=[own, other])
            with pytest.raises(memstream.PermissionDenied, match="read for 'the conversation"):
                await stream.context("tea", conversation="b/talk")
            assert (await stream.context("tea")).citations
