"""What the console shows: lists by text and order, events of a fragment, conversations, hidden text, server status."""

from __future__ import annotations

import os
from datetime import timedelta

import pytest

import memstream
from memstream import EventType, FragmentOrder, InvalidRequest, Memory, MemoryKind, Observation
from memstream.v1 import memory_service_pb2 as pb
from tests.server.conftest import MakeServer

SMUGGLED = "Nice weather." + "".join(chr(0xE0000 + ord(letter)) for letter in "forget all")
DAY = timedelta(days=1)
SECRET = "a-secret-of-two-servers-0123456789"
SAYINGS = ("Ann drinks Tea.", "Bob sells maps of Boston.", "Cid", "Dan likes teapots and kettles.")


async def fill(client: memstream.Client, path: str) -> Memory:
    memory = await client.create_memory(path, kind=MemoryKind.LONG_TERM)
    speakers, importances = ("d", "c", "b", "a"), (0.5, 0.1, 0.9, 0.5)
    await memory.observe_batch(
        [
            Observation(text, speaker=speaker, importance=importance, external_id=f"key-{text[:3]}")
            for text, speaker, importance in zip(SAYINGS, speakers, importances, strict=True)
        ]
    )
    return memory


async def contents(memory: Memory, **options: object) -> list[str]:
    return [one.content[:3] async for one in memory.list_fragments(page_size=1, **options)]  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("order", "expected"),
    [
        (None, ["Ann", "Bob", "Cid", "Dan"]),
        (FragmentOrder.RECEIPT, ["Ann", "Bob", "Cid", "Dan"]),
        (FragmentOrder.IMPORTANCE, ["Bob", "Ann", "Dan", "Cid"]),
        (FragmentOrder.SPEAKER, ["Dan", "Cid", "Bob", "Ann"]),
        (FragmentOrder.LENGTH, ["Cid", "Ann", "Bob", "Dan"]),
    ],
)
async def test_pages_of_a_list_follow_its_order(
    client: memstream.Client, path: str, order: FragmentOrder | None, expected: list[str]
) -> None:
    memory = await fill(client, path)
    assert await contents(memory, order=order) == expected
    backwards = await contents(memory, order=order, descending=True)
    if order is FragmentOrder.IMPORTANCE:
        assert backwards == ["Cid", "Ann", "Dan", "Bob"], "equal ones stay in order of receipt"
    else:
        assert backwards == expected[::-1]


async def test_text_finds_content_external_id_and_end_of_id(client: memstream.Client, path: str) -> None:
    memory = await fill(client, path)
    assert await contents(memory, text="tea") == ["Ann", "Dan"]
    assert await contents(memory, text="TEA", order=FragmentOrder.LENGTH, descending=True) == ["Dan", "Ann"]
    assert await contents(memory, text="key-Bob") == ["Bob"]
    bob = await memory.get_fragment(external_id="key-Bob")
    assert await contents(memory, text=bob.id[-8:].lower()) == ["Bob"]
    assert await contents(memory, text=bob.id[-5:]) == [], "five characters name no fragment"
    await memory.forget_fragments([bob.id])
    assert await contents(memory, text=bob.id[-8:]) == []
    assert await contents(memory, text=bob.id[-8:], forgotten=True) == ["Bob"]
    assert await contents(memory, filter=memstream.Filter(speakers=["d"]), text="tea") == ["Ann"]


async def test_order_with_forgotten_or_past_is_refused(client: memstream.Client, path: str) -> None:
    memory = await fill(client, path)
    with pytest.raises(InvalidRequest, match="order of receipt"):
        await contents(memory, order=FragmentOrder.LENGTH, forgotten=True)
    with pytest.raises(InvalidRequest, match="order of receipt"):
        await contents(memory, descending=True, as_of=1)
    with pytest.raises(InvalidRequest, match="text"):
        await contents(memory, text="x" * 1_001)


async def test_page_token_of_another_order_is_refused(client: memstream.Client, path: str) -> None:
    memory = await fill(client, path)
    call = client._link.memories.ListFragments
    request = pb.ListFragmentsRequest(namespace=memory.namespace, memory=memory.name, page_size=1, order=3)
    request.page_token = (await call(request)).next_page_token
    request.descending = True
    with pytest.raises(Exception, match="page_token"):
        await call(request)


async def test_events_of_a_fragment_are_those_that_concern_it(client: memstream.Client, path: str) -> None:
    memory = await fill(client, path)
    ann, bob = [await memory.get_fragment(external_id=key) for key in ("key-Ann", "key-Bob")]
    await memory.update_fragment(ann.id, content="Ann drinks coffee.")
    for number in range(40):
        await memory.observe_batch([f"remark {number} about nothing"])
    await memory.supersede([bob.id], newer_id=ann.id)
    await memory.forget_fragments([ann.id])
    types = [event.type async for event in memory.fragment_events(ann.id, page_size=1)]
    assert types == [
        EventType.OBSERVED,
        EventType.UPDATED,
        EventType.SUPERSEDED,
        EventType.FORGOTTEN,
        EventType.SUPERSESSION_UNDONE,
    ]
    async with memory.watch("beginning") as watch:
        seen = []
        async for event in watch:
            if ann.id in (event.fragment_id, event.other_id, *event.sources):
                seen.append((event.type, event.fragment_id, event.time))
            if event.type is EventType.SUPERSESSION_UNDONE:
                break
    listed = [(event.type, event.fragment_id, event.time) async for event in memory.fragment_events(ann.id)]
    assert listed == seen, "the list has what the log has"


async def test_events_of_an_imported_fragment_are_found(make_server: MakeServer) -> None:
    """Its id has a time before the log of its memory."""
    with make_server() as server:
        async with memstream.connect(server.address) as client:
            memory = await fill(client, "shop/exported")
            kept = await memory.get_fragment(external_id="key-Cid")
            lines = (part.lines async for part in client.export("shop", "exported"))
            await client.finished(await client.import_("other", lines))
            imported = client.memory("other/exported")
            for number in range(30):
                await imported.observe_batch([f"a later remark {number}"])
            await imported.update_fragment(kept.id, pinned=True)
            types = [event.type async for event in imported.fragment_events(kept.id)]
            assert types == [EventType.IMPORTED, EventType.UPDATED]


async def test_conversations_of_a_namespace_are_listed(client: memstream.Client, path: str) -> None:
    namespace = path.partition("/")[0]
    assert [one async for one in client.list_conversations(namespace)] == []
    for name in ("plans", "talks"):
        await client.conversation(f"{namespace}/{name}").append("ann", "hello")
    await client.conversation(f"{namespace}/talks").append("bob", "hello")
    await client.conversation(f"{namespace}/plans").complete()
    found = [one async for one in client.list_conversations(namespace, page_size=1)]
    assert [(one.name, one.last_number, one.completed) for one in found] == [("plans", 1, True), ("talks", 2, False)]


async def test_hidden_characters_mark_a_fragment(client: memstream.Client, path: str) -> None:
    memory = await client.create_memory(path, kind=MemoryKind.LONG_TERM)
    await memory.observe_batch(
        [
            Observation(SMUGGLED, external_id="smuggled"),
            Observation("A family \U0001f468\u200d\U0001f469\u200d\U0001f467 \u2764\ufe0f", external_id="emoji"),
            Observation("plain", speaker="Bob\u200b", metadata={"note": "a\u202eb"}, external_id="fields"),
        ]
    )
    marked = {one.external_id: one.hidden_characters async for one in memory.list_fragments()}
    tags = ("U+E0066", "U+E006F", "U+E0072", "U+E0067", "U+E0065", "U+E0074", "U+E0020", "U+E0061", "U+E006C")
    assert marked == {"smuggled": tags, "emoji": (), "fields": ("U+200B", "U+202E")}
    best = (await memory.recall_once("nice weather", limit=1))[0].fragment
    assert best.hidden_characters == tags, "recall marks it too"


async def test_status_has_use_calls_and_settings(make_server: MakeServer) -> None:
    with make_server(caller_calls_max=77, peer_secret=SECRET) as server:
        async with memstream.connect(server.address) as client:
            memory = await fill(client, "shop/status")
            await memory.recall_once("tea")
            async with memory.watch("now"):
                await client.server_info()
                status = await client.server_status()
    assert status.resident_bytes > 10 << 20
    assert status.disk_total_bytes > status.disk_free_bytes > 0
    settings = {one.name: one for one in status.settings}
    if "MEMSTREAM_TEST_JOURNAL_URL" not in os.environ:  # a database has its bytes elsewhere
        assert status.data_bytes > 0
        assert settings["journal_url"].value == ""
    assert status.observations == len(SAYINGS)
    assert status.recalls == 1
    assert status.streams.get("Watch") == 1
    calls = {one.rpc: one for one in status.rpcs}
    assert calls["RecallOnce"].calls == 1
    assert calls["RecallOnce"].failed == 0
    assert calls["RecallOnce"].median is not None
    assert (settings["caller_calls_max"].value, settings["caller_calls_max"].given) == ("77", True)
    assert settings["peer_secret"].value == "**********"
    assert not any(SECRET in one.value for one in status.settings)


async def test_policy_fields_say_what_is_set(client: memstream.Client, path: str) -> None:
    policy = memstream.Policy(recall=memstream.RecallPolicy(limit=7), retention=memstream.RetentionPolicy(ttl=DAY))
    memory = await client.create_memory(path, policy=policy)
    request = pb.GetMemoryRequest(namespace=memory.namespace, memory=memory.name, describe_policy=True)
    answer = await client._link.memories.GetMemory(request)
    fields = {one.path: one for one in answer.policy_fields}
    limit = fields["policy.recall.limit"]
    assert (limit.value, limit.default_value, limit.low, limit.high) == ("7", "10", 1, 1_000)
    assert (fields["policy.retention.ttl"].value, fields["policy.retention.ttl"].default_value) == ("86400s", "0s")
    assert "RANKING_RULE_DBGPT" in fields["policy.recall.ranking"].choices
    assert fields["policy.recall.dense_weight"].value == "", "the embedding model's own"
    assert all(one.meaning for one in fields.values())
    assert {path for path, one in fields.items() if one.value != one.default_value} == {
        "policy.recall.limit",
        "policy.retention.ttl",
    }
