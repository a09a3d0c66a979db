"""The requirements of LangGraph's own tests of a store, tested on its InMemoryStore and on ours.

test_langgraph.py runs this in LangGraph's environment, with MEMSTREAM_TARGET set. Tests only for ours are at the end.
"""

from __future__ import annotations

import asyncio
import os
import uuid
from collections.abc import Iterator
from typing import Any

import pytest
from langgraph.store.base import (
    BaseStore,
    GetOp,
    InvalidNamespaceError,
    Item,
    ListNamespacesOp,
    MatchCondition,
    PutOp,
    SearchOp,
)
from langgraph.store.memory import InMemoryStore

import memstream
from memstream.errors import InvalidRequest
from memstream.langgraph import MemstreamStore
from memstream.langgraph.naming import external_id, memory_name
from memstream.sync import Client


def letter_vectors(texts: list[str]) -> list[list[float]]:
    """Embeddings for LangGraph's store: one dimension for each letter."""
    return [[float(text.lower().count(letter)) for letter in "abcdefghijklmnopqrstuvwxyz "] for text in texts]


@pytest.fixture(scope="session")
def client() -> Iterator[Client]:
    with memstream.sync.connect(os.environ["MEMSTREAM_TARGET"]) as connected:
        yield connected


def ours(client: Client, **settings: Any) -> MemstreamStore:
    return MemstreamStore(client, f"lg-{uuid.uuid4().hex[:12]}", **settings)


@pytest.fixture(params=["memstream", "in_memory"])
def store(request: pytest.FixtureRequest, client: Client) -> BaseStore:
    if request.param == "memstream":
        return ours(client)
    return InMemoryStore(index={"dims": 27, "embed": letter_vectors})


@pytest.fixture
def own(client: Client) -> MemstreamStore:
    return ours(client)


def keys(items: Any) -> list[str]:
    return [item.key for item in items]


# ---- items


def test_an_item_is_put_read_replaced_and_deleted(store: BaseStore) -> None:
    where = ("test", "documents")
    assert store.search(("test",)) == []
    store.put(where, "one", {"title": "First", "content": "Hello"})
    item = store.get(where, "one")
    assert item is not None
    assert (item.namespace, item.key, item.value) == (where, "one", {"title": "First", "content": "Hello"})
    store.put(where, "one", {"title": "Changed"})
    changed = store.get(where, "one")
    assert changed is not None
    assert changed.value == {"title": "Changed"}
    assert changed.updated_at >= item.updated_at
    assert changed.created_at <= changed.updated_at
    assert store.get(("test", "others"), "one") is None
    store.put(where, "two", {"title": "Second"})
    assert sorted(keys(store.search(("test",)))) == ["one", "two"]
    store.delete(where, "one")
    store.delete(where, "one")
    store.delete(("never", "there"), "one")
    assert store.get(where, "one") is None
    assert keys(store.search(("test",))) == ["two"]
    store.put(where, "one", {"title": "Again"})
    again = store.get(where, "one")
    assert again is not None
    assert again.value == {"title": "Again"}


async def asked_asynchronously(store: BaseStore) -> None:
    where = ("test", "async")
    await asyncio.gather(*(store.aput(where, f"k{number}", {"number": number}) for number in range(5)))
    item = await store.aget(where, "k3")
    assert item is not None
    assert item.value == {"number": 3}
    assert sorted(keys(await store.asearch(("test",)))) == [f"k{number}" for number in range(5)]
    assert keys(await store.asearch(("test",), filter={"number": {"$gte": 4}})) == ["k4"]
    await store.adelete(where, "k3")
    assert await store.aget(where, "k3") is None
    assert await store.alist_namespaces(prefix=("test",)) == [where]
    assert store.get(where, "k4") is not None, "blocking calls work while a loop runs"


def test_the_asynchronous_calls_behave_the_same(store: BaseStore) -> None:
    asyncio.run(asked_asynchronously(store))
    asyncio.run(store.aput(("test", "async"), "later", {"number": 9}))  # another event loop
    assert store.get(("test", "async"), "later") is not None


@pytest.mark.parametrize(
    "value",
    [
        {},
        {"empty": "", "none": None, "yes": True, "list": [1, 2.5, {"deep": ["x"]}], "big": 2**60},
        {"text": "Grüße, 你好, שלום, 🚂", "control": "a\x00b\nc"},
        {"long": "word " * 8_000},
        {"log": "nothing happened\n" * 60_000, "tags": ["🚂", None]},
    ],
    ids=["empty", "kinds", "unicode", "long", "1 MB"],
)
def test_a_value_is_returned_unchanged(store: BaseStore, value: dict[str, Any]) -> None:
    store.put(("values",), "key", value)
    item = store.get(("values",), "key")
    assert item is not None
    assert item.value == value


@pytest.mark.parametrize("key", ["a/b", "with space", "schlüssel", "日" * 60, "k" * 500, "tab\there", "~~x", "."])
def test_any_text_is_a_key(store: BaseStore, key: str) -> None:
    store.put(("keys",), key, {"key": key})
    store.put(("keys",), f"{key}!", {"key": "another"})
    item = store.get(("keys",), key)
    assert item is not None
    assert (item.key, item.value) == (key, {"key": key})
    assert sorted(keys(store.search(("keys",)))) == sorted([key, f"{key}!"])


@pytest.mark.parametrize(
    ("namespace", "other"),
    [
        (("test", "a_b"), ("test", "a-b")),
        (("test", "x%"), ("test", "xy")),
        (("test", "User"), ("test", "user")),
        (("test", "line\n"), ("test", "line")),
        (("test", "日本"), ("test", "日木")),
        (("test", "~2e"), ("test", "~")),
        (("n" * 200, "x"), ("n" * 200, "y")),
        (("-", "_"), ("_", "-")),
    ],
)
def test_any_labels_form_a_distinct_namespace(
    store: BaseStore, namespace: tuple[str, ...], other: tuple[str, ...]
) -> None:
    store.put(namespace, "key", {"of": "one"})
    store.put(other, "key", {"of": "other"})
    for where, said in ((namespace, "one"), (other, "other")):
        item = store.get(where, "key")
        assert item is not None
        assert item.value == {"of": said}
        assert [(found.namespace, found.value) for found in store.search(where)] == [(where, {"of": said})]
    assert set(store.list_namespaces()) == {namespace, other}


@pytest.mark.parametrize(
    "namespace", [(), ("the", "thing.about"), ("some", ""), ("langgraph", "foo")], ids=["none", "dot", "blank", "own"]
)
def test_namespaces_that_langgraph_rejects_are_rejected(store: BaseStore, namespace: tuple[str, ...]) -> None:
    with pytest.raises(InvalidNamespaceError):
        store.put(namespace, "key", {"a": 1})
    with pytest.raises(InvalidNamespaceError):
        asyncio.run(store.aput(namespace, "key", {"a": 1}))


def test_batches_skip_the_namespace_check(store: BaseStore) -> None:
    for namespace in (("langgraph", "foo"), ("a.b",), ("a", "b")):
        store.batch([PutOp(namespace, "key", {"at": list(namespace)})])
        (item,) = store.batch([GetOp(namespace, "key")])
        assert isinstance(item, Item)
        assert item.value == {"at": list(namespace)}


# ---- batches


def test_a_batch_answers_in_order_and_reads_before_it_writes(store: BaseStore) -> None:
    store.put(("test", "foo"), "one", {"data": "1"})
    store.put(("test", "bar"), "two", {"data": "2"})
    results = store.batch(
        [
            GetOp(("test", "foo"), "one"),
            PutOp(("test", "bar"), "two", {"data": "new"}),
            SearchOp(("test",), filter={"data": "1"}),
            ListNamespacesOp(),
            GetOp(("test",), "three"),
            GetOp(("test", "bar"), "two"),
        ]
    )
    first, put, found, listed, missing, read = results
    assert isinstance(first, Item)
    assert first.value == {"data": "1"}
    assert put is None
    assert keys(found) == ["one"]
    assert listed == [("test", "bar"), ("test", "foo")]
    assert missing is None
    assert isinstance(read, Item)
    assert read.value == {"data": "2"}
    after = store.get(("test", "bar"), "two")
    assert after is not None
    assert after.value == {"data": "new"}


def test_the_last_write_of_a_key_wins(store: BaseStore) -> None:
    results = store.batch(
        [
            PutOp(("test",), "a", {"n": 1}),
            PutOp(("test",), "b", {"n": 1}),
            PutOp(("test",), "a", {"n": 2}),
            PutOp(("test",), "b", None),
            PutOp(("test",), "c", None),
            PutOp(("test",), "c", {"n": 3}),
        ]
    )
    assert results == [None] * 6
    assert {item.key: item.value for item in store.search(("test",))} == {"a": {"n": 2}, "c": {"n": 3}}


def test_a_large_batch_is_written_completely(store: BaseStore) -> None:
    store.batch([PutOp(("many", str(number % 3)), f"k{number}", {"n": number}) for number in range(300)])
    found = store.search(("many",), limit=1_000)
    assert sorted(item.value["n"] for item in found) == list(range(300))
    assert len(store.search(("many", "1"), limit=1_000)) == 100


# ---- search without a query


@pytest.fixture
def documents(store: BaseStore) -> BaseStore:
    values = [
        (("base", "documents", "user1"), "a", {"title": "Doc 1", "author": "John", "tags": ["x"], "n": 1, "on": True}),
        (
            ("base", "documents", "user2"),
            "b",
            {"title": "Doc 2", "author": "Jane", "tags": ["y"], "n": 2.5, "on": False},
        ),
        (
            ("base", "reports", "d1"),
            "c",
            {"title": "Report", "author": "John", "tags": ["x", "y"], "n": 30, "on": True},
        ),
        (("base", "reports", "d2"), "d", {"title": "O'Brien's", "author": "Al", "meta": {"a": {"b": 1}}, "n": -4}),
    ]
    for namespace, key, value in values:
        store.put(namespace, key, value)
    return store


@pytest.mark.parametrize(
    ("filter", "expected"),
    [
        (None, "abcd"),
        ({"author": "John"}, "ac"),
        ({"author": "John", "n": 30}, "c"),
        ({"author": "john"}, ""),
        ({"author": "public' OR '1'='1"}, ""),
        ({"title": "O'Brien's"}, "d"),
        ({"tags": ["x"]}, "a"),
        ({"meta": {"a": {"b": 1}}}, "d"),
        ({"meta": {"a": {"b": 2}}}, ""),
        ({"n": {"$gt": 2}}, "bc"),
        ({"n": {"$gte": 2.5, "$lt": 30}}, "b"),
        ({"n": {"$lte": 1}}, "ad"),
        ({"n": {"$lt": float("inf")}}, "abcd"),
        ({"n": {"$eq": float("nan")}}, ""),
        ({"n": {"$lt": 10**100}}, "abcd"),
        ({"author": {"$eq": "Al"}}, "d"),
        ({"author": {"$ne": "John"}}, "bd"),
        ({"on": True}, "ac"),
        ({"nothing": "there"}, ""),
    ],
)
def test_filters_select_matching_items(documents: BaseStore, filter: dict[str, Any] | None, expected: str) -> None:
    assert "".join(sorted(keys(documents.search(("base",), filter=filter)))) == expected


def test_an_unknown_operator_is_rejected(documents: BaseStore) -> None:
    with pytest.raises(ValueError, match="near"):
        documents.search(("base",), filter={"n": {"$near": 1}})


def test_a_prefix_ends_at_a_label(store: BaseStore) -> None:
    for namespace in (("user",), ("user", "1"), ("user", "10"), ("users", "1"), ("my", "user")):
        store.put(namespace, "key", {"a": 1})
    assert {item.namespace for item in store.search(("user",))} == {("user",), ("user", "1"), ("user", "10")}
    assert {item.namespace for item in store.search(("user", "1"))} == {("user", "1")}
    assert len(store.search(())) == 5
    assert store.search(("nobody",)) == []


def test_pages_are_disjoint_and_complete(documents: BaseStore) -> None:
    pages = [keys(documents.search(("base",), limit=2, offset=offset)) for offset in (0, 2, 4)]
    assert [len(page) for page in pages] == [2, 2, 0]
    assert sorted(pages[0] + pages[1]) == list("abcd")
    filtered = [keys(documents.search(("base",), filter={"author": "John"}, limit=1, offset=n)) for n in (0, 1, 2)]
    assert sorted(filtered[0] + filtered[1]) == ["a", "c"]
    assert filtered[2] == []


# ---- search with a query


def test_a_query_ranks_and_scores(store: BaseStore) -> None:
    for key, text in {"zoo": "zany zebra Xerxes", "dogs": "something about dogs", "birds": "text about birds"}.items():
        store.put(("test",), key, {"text": text})
    first, *rest = store.search(("test",), query="zany Xerxes")
    assert first.key == "zoo"
    assert first.score is not None
    assert all(one.score is not None and one.score < first.score for one in rest)
    store.put(("test",), "zoo", {"text": "new text about dogs"})
    later = {one.key: one.score for one in store.search(("test",), query="zany Xerxes")}
    assert (later.get("zoo") or 0) < first.score


def test_a_query_applies_a_filter(store: BaseStore) -> None:
    for key, text, color, score in (
        ("doc1", "red apple", "red", 4.5),
        ("doc2", "red car", "red", 3.0),
        ("doc3", "green apple", "green", 4.0),
        ("doc4", "blue car", "blue", 3.5),
    ):
        store.put(("test",), key, {"text": text, "color": color, "score": score})
    assert keys(store.search(("test",), query="apple", filter={"color": "red"})) == ["doc1", "doc2"]
    assert keys(store.search(("test",), query="car", filter={"color": "red"}))[0] == "doc2"
    high = keys(store.search(("test",), query="blue car", filter={"score": {"$gt": 3.2}}))
    assert high[0] == "doc4"
    assert sorted(high) == ["doc1", "doc3", "doc4"]
    assert keys(store.search(("test",), query="apple", filter={"score": {"$gte": 4.0}, "color": "green"})) == ["doc3"]


def test_a_query_pages_in_falling_order(store: BaseStore) -> None:
    for number in range(5):
        store.put(("test", str(number % 2)), f"doc{number}", {"text": f"test document number {number}"})
    everything = store.search(("test",), query="test", limit=10)
    assert len(everything) == 5
    scores = [one.score or 0 for one in everything]
    assert scores == sorted(scores, reverse=True)
    pages = [keys(store.search(("test",), query="test", limit=2, offset=offset)) for offset in (0, 2, 4)]
    assert pages == [keys(everything)[:2], keys(everything)[2:4], keys(everything)[4:]]


@pytest.mark.parametrize("query", ["", None, "test " * 100, "test!@#$%^&*()", "nothing like it"])
def test_queries_of_any_text_find_the_item(store: BaseStore, query: str | None) -> None:
    store.put(("test",), "doc", {"text": "test document"})
    assert keys(store.search(("test",), query=query)) == ["doc"]


def test_a_put_can_select_the_searched_fields(store: BaseStore) -> None:
    store.put(("test",), "doc3", {"key0": "anchovies", "key1": "bread", "key2": "cheese"}, index=["key0", "key1"])
    store.put(("test",), "doc4", {"key0": "eggs", "key1": "bread", "key3": "grapes"}, index=["key1", "key3"])
    assert keys(store.search(("test",), query="anchovies"))[0] == "doc3"
    assert keys(store.search(("test",), query="grapes"))[0] == "doc4"
    assert [item.value["key0"] for item in store.search(("test",))] == ["anchovies", "eggs"]


# ---- namespaces

NAMESPACES = [
    ("a", "b", "c"),
    ("a", "b", "d", "e"),
    ("a", "b", "d", "i"),
    ("a", "b", "f"),
    ("a", "c", "f"),
    ("b", "a", "f"),
    ("users", "123"),
    ("users", "456", "settings"),
    ("admin", "users", "789"),
]


@pytest.fixture
def named(store: BaseStore) -> BaseStore:
    store.batch([PutOp(namespace, "key", {"at": list(namespace)}) for namespace in NAMESPACES])
    return store


@pytest.mark.parametrize(
    ("asked", "expected"),
    [
        ({}, sorted(NAMESPACES)),
        ({"prefix": ("a", "b")}, NAMESPACES[:4]),
        ({"suffix": ("f",)}, NAMESPACES[3:6]),
        ({"prefix": ("a",), "suffix": ("f",)}, NAMESPACES[3:5]),
        ({"prefix": ("a", "b"), "max_depth": 3}, [("a", "b", "c"), ("a", "b", "d"), ("a", "b", "f")]),
        ({"prefix": ("a", "b"), "limit": 2}, NAMESPACES[:2]),
        ({"prefix": ("a", "b"), "offset": 2}, NAMESPACES[2:4]),
        ({"prefix": ("a", "*", "f")}, NAMESPACES[3:5]),
        ({"suffix": ("*", "f")}, NAMESPACES[3:6]),
        ({"prefix": ("nobody",)}, []),
        ({"prefix": ("users", "123")}, [("users", "123")]),
        ({"prefix": ("users", "*")}, [("users", "123"), ("users", "456", "settings")]),
        ({"prefix": ("*", "users"), "suffix": ("*", "settings")}, []),
        ({"max_depth": 1}, [("a",), ("admin",), ("b",), ("users",)]),
        ({"max_depth": 1, "limit": 2, "offset": 1}, [("admin",), ("b",)]),
        ({"prefix": ("a", "b", "c", "d", "e")}, []),
    ],
)
def test_namespaces_are_listed_by_condition(
    named: BaseStore, asked: dict[str, Any], expected: list[tuple[str, ...]]
) -> None:
    assert named.list_namespaces(**asked) == expected


def test_a_batch_lists_namespaces_by_condition(named: BaseStore) -> None:
    conditions = (MatchCondition("prefix", ("a",)), MatchCondition("suffix", ("d", "*")))
    assert named.batch([ListNamespacesOp(match_conditions=conditions)]) == [NAMESPACES[1:3]]


def test_namespaces_are_paged(store: BaseStore) -> None:
    store.batch([PutOp(("space", f"sub_{number:02d}"), "key", {"n": number}) for number in range(40)])
    pages = [store.list_namespaces(prefix=("space",), limit=15, offset=offset) for offset in (0, 15, 30)]
    assert [label for page in pages for _, label in page] == [f"sub_{number:02d}" for number in range(40)]


# ---- ours alone: what InMemoryStore has not, or does in another way


def test_an_empty_store_returns_nothing(own: MemstreamStore) -> None:
    assert own.list_namespaces() == []
    assert own.search(()) == []
    assert own.search((), query="anything") == []
    assert own.get(("a",), "b") is None
    assert own.batch([]) == []


def test_a_namespace_without_items_is_not_listed(own: MemstreamStore) -> None:
    own.put(("a",), "key", {"a": 1})
    own.put(("b",), "key", {"a": 1})
    own.delete(("a",), "key")
    assert own.list_namespaces() == [("b",)]


def test_unindexed_items_are_found_only_without_a_query(own: MemstreamStore) -> None:
    own.put(("test",), "shown", {"text": "about dogs"})
    own.put(("test",), "hidden", {"text": "about dogs"}, index=False)
    own.put(("test",), "absent", {"text": "about dogs"}, index=["title"])
    assert keys(own.search(("test",), query="about dogs")) == ["shown"]
    assert sorted(keys(own.search(("test",)))) == ["absent", "hidden", "shown"]
    own.put(("test",), "hidden", {"text": "about dogs"})
    assert sorted(keys(own.search(("test",), query="about dogs"))) == ["hidden", "shown"]


def test_the_store_can_select_the_searched_fields(client: Client) -> None:
    store = ours(client, fields=["text", "notes[*].title"])
    store.put(("test",), "a", {"text": "trains", "secret": "zebra", "notes": [{"title": "kippers"}, {"title": "owls"}]})
    store.put(("test",), "b", {"text": "zebra", "secret": "trains"})
    assert keys(store.search(("test",), query="zebra"))[0] == "b"
    assert keys(store.search(("test",), query="owls"))[0] == "a"
    assert keys(store.search(("test",), query="trains"))[0] == "a"
    item = store.get(("test",), "a")
    assert item is not None
    assert item.value["secret"] == "zebra"


def test_a_filter_finds_items_that_rank_low(own: MemstreamStore) -> None:
    own.batch([PutOp(("test",), f"k{n}", {"text": f"tea number {n}", "odd": n % 2 == 1, "n": n}) for n in range(250)])
    found = own.search(("test",), query="tea", filter={"n": {"$gte": 245}}, limit=50)
    assert sorted(item.value["n"] for item in found) == [245, 246, 247, 248, 249]
    assert len(own.search(("test",), query="tea", filter={"odd": True}, limit=200)) == 125


def test_a_filter_finds_items_that_rank_below_thousands(own: MemstreamStore) -> None:
    """More items fail the filter than one query can exclude."""
    rare = {3, 1700, 2500}
    own.batch([PutOp(("test",), f"k{n}", {"text": f"tea number {n}", "rare": n in rare}) for n in range(2_600)])
    found = own.search(("test",), query="tea number 3", filter={"rare": True})
    assert {int(item.key[1:]) for item in found} == rare
    assert keys(found)[0] == "k3"


def test_a_search_lists_only_its_namespaces(own: MemstreamStore) -> None:
    """Long labels have the same beginning; the whole label decides."""
    long = "x" * 200
    for label in ("bob", "bobby", "bo", long, long + "y", long + "z"):
        own.put(("users", label), "k", {"of": label})
        own.put(("users", label, "deep"), "k", {"of": label})
    for label in ("bob", long, long + "y"):
        assert [item.value["of"] for item in own.search(("users", label))] == [label, label]
        assert own.list_namespaces(prefix=("users", label)) == [("users", label), ("users", label, "deep")]


def test_a_filter_compares_only_equal_types(own: MemstreamStore) -> None:
    own.put(("test",), "text", {"n": "5", "day": "2026-05-08"})
    own.put(("test",), "number", {"n": 5, "day": None})
    own.put(("test",), "truth", {"n": True})
    assert keys(own.search(("test",), filter={"n": {"$gt": 1}})) == ["number"]
    assert keys(own.search(("test",), filter={"n": 1})) == []
    assert keys(own.search(("test",), filter={"day": {"$lt": "2026-06-01"}})) == ["text"]


def test_items_expire_unless_they_are_read(client: Client) -> None:
    store = ours(client, ttl={"default_ttl": 60, "refresh_on_read": True})
    assert store.supports_ttl
    memory = client.memory(f"{store._namespace}/{memory_name(('test',))}")

    def expiry(key: str) -> Any:
        return memory.get_fragment(external_id=key).expire_time

    store.put(("test",), "default", {"a": 1})
    store.put(("test",), "own", {"a": 1}, ttl=10)
    store.put(("test",), "forever", {"a": 1}, ttl=None)
    assert expiry("forever") is None
    assert (expiry("default") - expiry("own")).total_seconds() == pytest.approx(3_000, abs=300)
    for read in (
        lambda refresh: store.get(("test",), "own", refresh_ttl=refresh),
        lambda refresh: store.search(("test",), refresh_ttl=refresh),
        lambda refresh: store.search(("test",), query="a", refresh_ttl=refresh),
    ):
        before = expiry("own")
        read(False)
        assert expiry("own") == before
        read(True)
        assert expiry("own") > before
    store.put(("test",), "own", {"a": 2}, ttl=None)
    assert expiry("own") is None
    store.put(("test",), "brief", {"a": 1}, ttl=1e-4 / 60)
    while store.get(("test",), "brief", refresh_ttl=False) is not None:
        pass
    assert sorted(keys(store.search(("test",)))) == ["default", "forever", "own"]
    assert sorted(keys(store.search(("test",), query="a"))) == ["default", "forever", "own"]


def test_a_read_moves_the_expiry_of_only_the_read_items(client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    store = ours(client, ttl={"default_ttl": 60, "refresh_on_read": True})
    store.put(("test",), "key", {"a": 1})
    refresh = MemstreamStore._refresh

    async def late(self: MemstreamStore, items: Any) -> None:
        """Puts from another store between the read and its refresh."""
        await other.aput(("test",), "key", {"a": 2}, ttl=None)
        await refresh(self, items)

    other = MemstreamStore(client, store._namespace)
    monkeypatch.setattr(MemstreamStore, "_refresh", late)
    memory = client.memory(f"{store._namespace}/{memory_name(('test',))}")
    for read in (
        lambda: store.get(("test",), "key"),
        lambda: store.search(("test",), query="a"),
    ):
        store.put(("test",), "key", {"a": 1})
        assert read() is not None
        assert memory.get_fragment(external_id="key").expire_time is None, "the last put has no expiry"


def test_nothing_is_dropped_or_merged(own: MemstreamStore) -> None:
    """The same words many times, which short-term memory would merge into one fragment."""
    own.batch([PutOp(("test",), f"k{number}", {"text": "the same words"}) for number in range(60)])
    for number in range(60, 70):
        own.put(("test",), f"k{number}", {"text": "the same words"})
        own.search(("test",), query="the same words")
    assert len(own.search(("test",), limit=100)) == 70
    assert len(own.search(("test",), query="the same words", limit=100)) == 70


def test_two_stores_share_the_items_on_the_server(client: Client, own: MemstreamStore) -> None:
    other = MemstreamStore(client, own._namespace)
    own.put(("test",), "key", {"text": "trains"})
    assert keys(other.search(("test",), query="trains")) == ["key"]
    client.delete_memory(f"{own._namespace}/{memory_name(('test',))}")
    assert own.get(("test",), "key") is None
    own.put(("test",), "key", {"text": "planes"})  # this creates the memory again
    assert [item.value for item in other.search(())] == [{"text": "planes"}]


def test_fragments_of_other_clients_are_not_items(client: Client, own: MemstreamStore) -> None:
    own.put(("test",), "key", {"text": "trains"})
    client.memory(f"{own._namespace}/{memory_name(('test',))}").observe_batch(["trains"])
    client.create_memory(f"{own._namespace}/someone").observe_batch(["trains"])
    assert keys(own.search(())) == ["key"]
    assert keys(own.search((), query="trains")) == ["key"]
    assert own.list_namespaces() == [("test",)]


def test_a_rejection_of_the_server_is_raised(own: MemstreamStore) -> None:
    with pytest.raises(InvalidRequest, match="at most"):
        own.put(("test",), "key", {"text": "x" * 5_000_000})
    with pytest.raises(TypeError):
        own.put(("test",), "key", {"text": object()})
    assert own.search(()) == []


LOG = "the train left at noon\n" + "nothing happened\n" * 60_000


def list_elsewhere(client: Client, store: MemstreamStore) -> int:
    """How many values the server keeps outside of fragments."""
    return len(list(client.list_conversations(store._namespace)))


def test_a_large_value_is_found_and_listed(own: MemstreamStore) -> None:
    own.put(("logs", "one"), "noon", {"text": LOG, "of": "monday"})
    own.put(("logs", "two"), "tea", {"title": "tea", "text": LOG, "of": "tuesday"}, index=["title"])
    own.put(("logs", "two"), "hidden", {"text": LOG, "of": "monday"}, index=False)
    assert sorted(keys(own.search(("logs",)))) == ["hidden", "noon", "tea"]
    (first, _) = own.search(("logs",), query="when did the train leave?")
    assert (first.key, first.value) == ("noon", {"text": LOG, "of": "monday"})
    assert keys(own.search(("logs",), query="tea", filter={"of": "tuesday"})) == ["tea"]
    assert sorted(own.list_namespaces()) == [("logs", "one"), ("logs", "two")]


def test_a_large_value_leaves_nothing_when_it_goes(client: Client, own: MemstreamStore) -> None:
    where = ("logs",)
    own.put(where, "a", {"text": LOG})
    own.put(where, "b", {"text": LOG})
    own.put(where, "a", {"text": LOG + "more"})
    assert list_elsewhere(client, own) == 2
    assert [item.value["text"] == LOG for item in own.search(where)] == [False, True]
    own.batch([PutOp(where, "a", {"text": "short"}), PutOp(where, "b", None), PutOp(where, "c", {"text": LOG})])
    assert {item.key: len(item.value["text"]) for item in own.search(where)} == {"a": 5, "c": len(LOG)}
    assert list_elsewhere(client, own) == 1
    own.delete(where, "c")
    assert list_elsewhere(client, own) == 0


def test_a_large_value_lives_as_long_as_its_item(client: Client, own: MemstreamStore) -> None:
    own.put(("logs",), "a", {"text": LOG}, ttl=600)
    (first,) = client.list_conversations(own._namespace)
    assert own.get(("logs",), "a") is not None
    (later,) = client.list_conversations(own._namespace)
    assert first.expire_time is not None
    assert later.expire_time is not None
    assert later.expire_time > first.expire_time, "a read extends it"
    assert own.get(("logs",), "a", refresh_ttl=False) is not None
    assert list(client.list_conversations(own._namespace)) == [later]


async def read_while_it_changes(store: MemstreamStore) -> None:
    values = [{"text": LOG + mark} for mark in "ab"]
    await store.aput(("logs",), "a", values[0])

    async def change() -> None:
        for number in range(12):
            await store.aput(("logs",), "a", values[number % 2])

    changing = asyncio.create_task(change())
    while not changing.done():
        item = await store.aget(("logs",), "a")
        assert item is not None
        assert item.value in values
    await changing


def test_a_reader_sees_one_put_or_the_other(client: Client, own: MemstreamStore) -> None:
    asyncio.run(read_while_it_changes(own))
    assert list_elsewhere(client, own) == 1


def test_names_are_never_shared() -> None:
    labels = ["", "a", "A", "a.b", "~", "~2e", ".", "-", "a" * 130, "a" * 131, "é", "\n"]
    namespaces = [(), *((one,) for one in labels), *((one, two) for one in labels for two in labels)]
    names = [memory_name(namespace) for namespace in namespaces]
    assert len(set(names)) == len(namespaces)
    assert max(map(len, names)) <= 128
    tried = [*labels, "~~" + "0" * 32, external_id(""), "k" * 128, "k" * 129]
    assert len({external_id(key) for key in tried}) == len(set(tried))


WRONG: list[tuple[str, str, dict[str, Any]]] = [
    ("filter.$or", "search", {"namespace_prefix": ("t",), "filter": {"$or": [{"n": 1}, {"n": 2}]}}),
    ("filter.$and", "search", {"namespace_prefix": ("t",), "filter": {"$and": []}, "query": "x"}),
    ("filter.n.$near", "search", {"namespace_prefix": ("t",), "filter": {"n": {"$near": 1}}}),
    ("filter.n.x", "search", {"namespace_prefix": ("t",), "filter": {"n": {"$gt": 3, "x": 1}}}),
    ("filter.n.$gt", "search", {"namespace_prefix": ("t",), "filter": {"n": {"$gt": [3]}}}),
    ("filter.n.deep.$lt", "search", {"namespace_prefix": ("t",), "filter": {"n": {"deep": {"$lt": None}}}}),
    ("filter", "search", {"namespace_prefix": ("t",), "filter": "n=3"}),
    ("namespace_prefix", "search", {"namespace_prefix": "users"}),
    ("limit", "search", {"namespace_prefix": ("t",), "limit": True}),
    ("limit", "search", {"namespace_prefix": ("t",), "limit": -1}),
    ("offset", "search", {"namespace_prefix": ("t",), "offset": "0"}),
    ("query", "search", {"namespace_prefix": ("t",), "query": "\ud800"}),
    ("namespace", "put", {"namespace": "users", "key": "k", "value": {}}),
    ("namespace[0]", "put", {"namespace": ("\ud800",), "key": "k", "value": {}}),
    ("index", "put", {"namespace": ("t",), "key": "k", "value": {}, "index": "text"}),
    ("ttl", "put", {"namespace": ("t",), "key": "k", "value": {}, "ttl": float("nan")}),
    ("value", "put", {"namespace": ("t",), "key": "k", "value": {"x": object()}}),
    ("body", "put", {"namespace": ("t",), "key": "k", "value": {"x": "\ud800"}}),
    ("namespace", "get", {"namespace": "users", "key": "k"}),
    ("max_depth", "list_namespaces", {"max_depth": True}),
]


def called(store: MemstreamStore, method: str, given: dict[str, Any]) -> Any:
    """Calls a method; the prefix of a search is positional, as in LangGraph."""
    prefix = [given["namespace_prefix"]] if method == "search" else []
    return getattr(store, method)(
        *prefix, **{name: value for name, value in given.items() if name != "namespace_prefix"}
    )


@pytest.mark.parametrize(("argument", "method", "given"), WRONG)
def test_wrong_arguments_are_named(own: MemstreamStore, argument: str, method: str, given: dict[str, Any]) -> None:
    with pytest.raises(memstream.InvalidArgument) as caught:
        called(own, method, given)
    assert caught.value.argument == argument


def test_wrong_arguments_write_nothing(client: Client, own: MemstreamStore) -> None:
    for _, method, given in WRONG:
        with pytest.raises(memstream.InvalidArgument):
            called(own, method, given)
    assert own.search(()) == []
    for settings in ({"fields": "text"}, {"fields": [7]}, {"field": ["text"]}, {"ttl": {"default": 5}}):
        with pytest.raises(memstream.InvalidArgument):
            ours(client, **settings)
    with pytest.raises(memstream.InvalidArgument, match="namespace"):
        MemstreamStore(client, "a b")


def test_a_memory_of_another_kind_is_not_used(client: Client, own: MemstreamStore) -> None:
    client.create_memory(f"{own._namespace}/{memory_name(('test',))}", kind=memstream.MemoryKind.SENSORY)
    with pytest.raises(memstream.MemoryExists) as caught:
        own.put(("test",), "key", {"text": "trains"})
    assert caught.value.details["differs"] == "kind, labels.langgraph.namespace"
