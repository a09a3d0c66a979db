"""Recalls over several memories: what a caller may not recall cannot be told from what does not exist."""

from __future__ import annotations

import json
import uuid
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import grpc
import grpc.aio
import httpx2
import pytest
from google.protobuf import json_format
from google.protobuf.timestamp_pb2 import Timestamp
from google.rpc import code_pb2
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import memstream
from memstream.errors import PermissionDenied
from memstream.v1 import stream_service_pb2 as pb
from memstream.v1 import stream_service_pb2_grpc as stubs
from memstream.v1.scope_pb2 import LabelSelector, RecallScope
from tests.access.conftest import Guarded
from tests.support.seeds import rounds

NOW = Timestamp(seconds=2_000_000_000)
FOUND = "the tea is green"


@pytest.fixture
async def mark(guarded: Guarded) -> str:
    """Memories a/MARK-core, a/MARK-plain, b/MARK-core: the first and the last have the label team=core."""
    mark = f"m{uuid.uuid4().hex[:8]}"
    async with memstream.connect(guarded.server.address, token=guarded.keys["root"]) as client:
        for path, labels in (
            (f"a/{mark}-core", {"team": "core", "of": mark}),
            (f"a/{mark}-plain", {"of": mark}),
            (f"b/{mark}-core", {"team": "core", "of": mark}),
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


async def test_a_context_loses_what_a_right_no_longer_covers(guarded: Guarded, mark: str) -> None:
    own, lost = f"a/{mark}-core", f"b/{mark}-core"
    async with (
        memstream.connect(guarded.server.address, token=guarded.keys["root"]) as root,
        memstream.connect(guarded.server.address, token=guarded.keys["core"]) as client,
    ):
        await root.memory(lost).observe_batch(["the kettle is red"])
        first = await client.context([own, lost], "Which tea, and which kettle?")
        assert "kettle is red" in first.text
        await root.memory(lost).update(labels={"of": mark})
        with pytest.raises(PermissionDenied):
            await client.context([own, lost], "And now?", after=first)
        later = await client.context([own, lost], "And now?", after=first, partial=True)
        assert {one.memory for one in later.citations} <= {own}
        assert "kettle is red" not in later.text


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


Door = Callable[[Guarded, str, Sequence[RecallScope]], Awaitable[tuple[str, str]]]
"""Sends scopes with a key; returns name and message of the status of the refusal."""


def headers(guarded: Guarded, key: str) -> tuple[tuple[str, str], ...]:
    return (("authorization", f"Bearer {guarded.keys[key]}"),)


async def refused_once(guarded: Guarded, key: str, scopes: Sequence[RecallScope]) -> tuple[str, str]:
    with pytest.raises(grpc.aio.AioRpcError) as error:
        await ask(guarded, key, *scopes)
    return error.value.code().name, error.value.details() or ""


async def refused_over_http(guarded: Guarded, key: str, scopes: Sequence[RecallScope]) -> tuple[str, str]:
    request = pb.RecallOnceRequest(query=pb.RecallQuery(text="tea", scopes=scopes))
    async with httpx2.AsyncClient() as client:
        path = f"http://{guarded.http}/memstream.v1.StreamService/RecallOnce"
        given = {"content-type": "application/json", **dict(headers(guarded, key))}
        answer = await client.post(path, content=json_format.MessageToJson(request), headers=given, timeout=30)
    assert answer.status_code >= 400
    said = json.loads(answer.text)
    return str(said["code"]).upper(), said["message"]


async def refused_on_stream(
    guarded: Guarded, key: str, scopes: Sequence[RecallScope], subscribe: bool = False
) -> tuple[str, str]:
    """The query fails; the stream stays open and answers the next one."""
    async with grpc.aio.insecure_channel(guarded.server.address) as channel:
        call = stubs.StreamServiceStub(channel).Recall(metadata=headers(guarded, key))  # type: ignore[no-untyped-call]
        await call.write(pb.RecallRequest(open=pb.RecallOpen(done_in_recollections=True)))
        bad = pb.RecallQuery(query_id="bad", text="tea", scopes=scopes, subscribe=subscribe)
        await call.write(pb.RecallRequest(query=bad))
        nothing = [RecallScope(prefix="a/no-memory-has-this-name")]
        await call.write(pb.RecallRequest(query=pb.RecallQuery(query_id="good", text="tea", scopes=nothing)))
        await call.write(pb.RecallRequest(close=pb.RecallClose()))
        said = [one async for one in call]
    assert "good" in [one.recollections.query_id for one in said if one.HasField("recollections")]
    (failed,) = [one.failed for one in said if one.HasField("failed")]
    assert failed.query_id == "bad"
    return code_pb2.Code.Name(failed.status.code), failed.status.message


async def refused_standing(guarded: Guarded, key: str, scopes: Sequence[RecallScope]) -> tuple[str, str]:
    return await refused_on_stream(guarded, key, scopes, subscribe=True)


DOORS: tuple[Door, ...] = (refused_once, refused_over_http, refused_on_stream, refused_standing)


@pytest.mark.parametrize("door", DOORS)
async def test_bad_scopes_are_refused_at_every_door(guarded: Guarded, mark: str, door: Door) -> None:
    own, other, absent = f"a/{mark}-core", f"b/{mark}-core", f"a/{mark}-absent"
    for scopes, code, said in (
        ([], "INVALID_ARGUMENT", ""),
        (named(*(f"a/m{number}" for number in range(101))), "INVALID_ARGUMENT", "at most 100"),
        (named(own, own), "INVALID_ARGUMENT", "twice"),
        (named(own, absent), "NOT_FOUND", absent),
        (named(own, other), "PERMISSION_DENIED", other),
        (named(own, f"{other}-absent"), "PERMISSION_DENIED", f"{other}-absent"),
        ([RecallScope()], "INVALID_ARGUMENT", "query.scopes[0]"),
        ([RecallScope(memory="nameless")], "INVALID_ARGUMENT", "query.scopes[0].memory"),
        ([RecallScope(labels=LabelSelector())], "INVALID_ARGUMENT", "query.scopes[0].labels"),
    ):
        found = await door(guarded, "alice", scopes)
        assert found[0] == code, found
        assert said in found[1]


_PATHS = ("a/{}-core", "a/{}-plain", "b/{}-core", "b/{}-absent", "a/{}-absent")
_scopes = st.lists(
    st.sampled_from(_PATHS).map(lambda path: ("memory", path))
    | st.sampled_from(("a/{}", "b/{}", "a/{}-c")).map(lambda path: ("prefix", path))
    | st.sampled_from(("a", "b")).map(lambda namespace: ("labels", namespace)),
    min_size=2,
    max_size=4,
    unique=True,
)
_MAY = {"root": "", "alice": "a/", "core": "-core", "nobody": "none"}
"""What the paths of the memories have that a key may recall."""


@pytest.mark.drawn
@settings(max_examples=rounds(60, 6), deadline=None, suppress_health_check=list(HealthCheck))
@given(key=st.sampled_from(sorted(_MAY)), drawn=_scopes, near_misses=st.sampled_from((0, 20)))
async def test_what_a_right_excludes_appears_nowhere(
    guarded: Guarded, mark: str, key: str, drawn: list[tuple[str, str]], near_misses: int
) -> None:
    """The answer is that to a caller with all rights who names what is allowed: in each score and count, too."""
    scopes, selected = list[RecallScope](), dict[str, None]()
    there = [path.format(mark) for path in _PATHS if "absent" not in path]
    by_name = [place.format(mark) for kind, place in drawn if kind == "memory"]
    for kind, place in drawn:
        place = place.format(mark)
        if kind == "labels":
            scopes.append(RecallScope(labels=LabelSelector(namespace=place, labels={"team": "core", "of": mark})))
        else:
            scopes.append(RecallScope(**{kind: place}))  # type: ignore[arg-type]  # a field of RecallScope
    for path in there:
        by_label = path.endswith("-core") and ("labels", path[0]) in drawn
        by_prefix = any(kind == "prefix" and path.startswith(place.format(mark)) for kind, place in drawn)
        if path in by_name or by_label or by_prefix:
            selected[path] = None
    allowed = {path for path in selected if _MAY[key] in path}
    fields: dict[str, Any] = {"reinforce": False, "explain": True, "near_misses": near_misses, "limit": 20}
    answer = await ask(guarded, key, *scopes, partial=True, **fields)
    asked = [part.memory for part in answer.done.memories]
    assert set(asked) == allowed
    nothing = [RecallScope(prefix="b/no-memory-has-this-name")] * 2
    theirs = await ask(guarded, "root", *named(*asked), *nothing, **fields)
    assert answer.SerializeToString(deterministic=True) == theirs.SerializeToString(deterministic=True)
    hidden = [path for path in by_name if _MAY[key] not in path and not (key == "alice" and path.startswith("a/"))]
    if hidden:  # whether one exists cannot be told from the refusal either
        exists = await refused_once(guarded, key, named(hidden[0]))
        absent = await refused_once(guarded, key, named(f"{hidden[0]}x"))
        assert exists == (absent[0], absent[1].replace(f"{hidden[0]}x", hidden[0]))
