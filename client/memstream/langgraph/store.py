"""LangGraph's BaseStore on a server: each namespace is a long-term memory, each item a fragment.

Rule 1. As in LangGraph's own stores, a batch reads before it writes, and the last write of a key wins. When a put
        returns, every later read of any process sees it.
Rule 2. Items leave only by delete and ttl: these memories have no other tier, no capacity and no reflection.
Rule 3. All work runs on the SDK's event loop, so one store serves sync and async graphs in any thread.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Sequence
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from functools import partial
from typing import Any, TypedDict, TypeVar

from langgraph.store.base import (
    BaseStore,
    GetOp,
    Item,
    ListNamespacesOp,
    Op,
    PutOp,
    Result,
    SearchItem,
    SearchOp,
    TTLConfig,
)

from memstream.any_loop import run_on_loop
from memstream.argument_types import Several
from memstream.arguments import check_constructor
from memstream.channel import memory_path
from memstream.errors import EtagMismatch, FragmentNotFound, MemoryExists, MemoryNotFound, NotFound
from memstream.langgraph.items import ELSEWHERE, ID, INDEXED, WHOLE, StoredItem, observation_of, stored_item
from memstream.langgraph.large import LargeValues
from memstream.langgraph.matching import meets_conditions, passes_filter
from memstream.langgraph.naming import (
    LABEL,
    Namespace,
    external_id,
    memory_name,
    name_prefix,
    namespace_label,
    namespace_of,
)
from memstream.langgraph.operations import check_operation
from memstream.memory import Memory
from memstream.sync import Client
from memstream.sync.loop import LOOP
from memstream.values import EventType, Filter, Fragment, FragmentKind, MemoryKind, Observation, Scope, Weights

T = TypeVar("T")
BATCH_MAX = 128
"""Observations in one call: below the server's limits of a batch and, with the longest values, of a message."""
RECALL_MAX = 1_000
"""Recollections of one query."""
NAMED_MAX = 1_000
"""Ids that a query can exclude, or be restricted to."""
PAGE = 1_000
SCOPES_MAX = 100
"""Memories that one recall may name,"""
MEMORIES_MAX = 1_000
"""and that it may ask in all."""
CALLS_MAX = 16
"""Calls in flight for one operation."""
POLICY = {
    "score_importance": False,
    "reflection": {"threshold": 0, "insight_on_promotion": False},
    "recall": {"reinforce": False},
    "retention": {"forget_grace": timedelta(0)},
    "conflicts": {"suspect": False},
}
"""Policy of every memory created here: no LLM calls, and deleted items are erased by the next maintenance. Items come
by score: they are values of keys, and a later one does not replace an earlier one."""


class _CreateOptions(TypedDict):
    """Arguments of `create_memory` for every memory, including existing ones."""

    kind: MemoryKind
    labels: dict[str, str]


@check_constructor
class MemstreamStore(BaseStore):
    """A store in the memstream namespace `namespace`; use a namespace that holds nothing else.

    `fields`: the paths of a value that are searched unless a put overrides them (LangGraph's syntax; "$" is the whole
    value); the server embeds them. `ttl`: LangGraph's TTLConfig; expired items are never returned, and the server
    erases
    them, so `omit_expired` and `sweep_interval_minutes` have no effect.
    """

    supports_ttl = True

    def __init__(
        self, client: Client, namespace: str, *, fields: Several[str] = (WHOLE,), ttl: TTLConfig | None = None
    ) -> None:
        super().__init__()
        memory_path(f"{namespace}/n", "namespace")
        self.ttl_config = ttl
        self._client = client
        self._namespace = namespace
        self._fields = tuple(fields)
        self._made: set[Namespace] = set()
        self._large = LargeValues(client.asynchronous, namespace)

    def batch(self, ops: Iterable[Op]) -> list[Result]:
        """Results in the order of the operations; None for a put."""
        return LOOP.run(self._batch(_checked_operations(ops)))

    async def abatch(self, ops: Iterable[Op]) -> list[Result]:
        """As `batch`, from any event loop."""
        return await run_on_loop(self._batch(_checked_operations(ops)))

    # ---- runs on the SDK's event loop

    async def _batch(self, ops: Sequence[Op]) -> list[Result]:
        results = list(await asyncio.gather(*(self._read(op) for op in ops)))
        puts = {(tuple(op.namespace), op.key): op for op in ops if isinstance(op, PutOp)}
        by_namespace: dict[Namespace, list[PutOp]] = {}
        for (namespace, _), op in puts.items():
            by_namespace.setdefault(namespace, []).append(op)
        await _map_concurrently(by_namespace, lambda namespace: self._write(namespace, by_namespace[namespace]))
        return results

    async def _read(self, op: Op) -> Result:
        if isinstance(op, GetOp):
            return await self._get(op)
        if isinstance(op, SearchOp):
            return await self._search(op)
        if isinstance(op, ListNamespacesOp):
            return await self._list_namespaces(op)
        return None

    def _memory(self, namespace: Namespace) -> Memory:
        return self._client.asynchronous.memory(f"{self._namespace}/{memory_name(namespace)}")

    async def _list_stored_namespaces(self, prefix: Namespace = ()) -> dict[Namespace, bool]:
        """The namespaces below a prefix that have a memory, in order, from one listing; False: it may be empty.

        A memory without fragments is left out. A server that does not count them sets no `change_time` either.
        """
        listed = self._client.asynchronous.list_memories(
            self._namespace, name_prefix=name_prefix(prefix), page_size=PAGE
        )
        found: dict[Namespace, bool] = {}
        async for memory in listed:
            named = namespace_of(memory.labels)
            counted = memory.fragments > 0
            if named is not None and named[: len(prefix)] == prefix and (counted or memory.change_time is None):
                found[named] = counted
        return dict(sorted(found.items()))

    # ---- get

    async def _get(self, op: GetOp) -> Item | None:
        found = await self._get_stored(tuple(op.namespace), op.key)
        if found is None:
            return None
        if op.refresh_ttl:
            await self._refresh([found])
        return found.item()

    async def _get_stored(self, namespace: Namespace, key: str) -> StoredItem | None:
        """The item of a key. Its value is that of one put, even if another put replaces it while it is read."""
        last = ""
        while True:
            try:
                fragment = await self._memory(namespace).get_fragment(external_id=external_id(key))
            except (FragmentNotFound, MemoryNotFound):
                return None
            found = await self._item_of(namespace, fragment)
            if found is not None or fragment.metadata.get(ELSEWHERE, last) == last:
                return found
            last = str(fragment.metadata[ELSEWHERE])

    async def _item_of(self, namespace: Namespace, fragment: Fragment) -> StoredItem | None:
        """The item of a fragment; None if it is no item, or its value is not there any more."""
        value = None
        if ELSEWHERE in fragment.metadata and (value := await self._large.read(fragment)) is None:
            return None
        return stored_item(namespace, fragment, datetime.now(UTC), value)

    async def _refresh(self, items: Iterable[StoredItem]) -> None:
        async def refresh(one: StoredItem, ttl_s: float) -> None:
            try:
                expires = datetime.now(UTC) + timedelta(seconds=float(ttl_s))
                if one.value_in:
                    await self._large.keep(one.value_in, timedelta(seconds=ttl_s))
                await self._memory(one.namespace).update_fragment(one.id, expire_time=expires, etag=one.etag)
            except (NotFound, EtagMismatch):  # deleted, written or refreshed since it was read
                return

        expiring = {one.id: (one, one.ttl_s) for one in items if one.ttl_s is not None}
        await _map_concurrently(expiring, lambda id_: refresh(*expiring[id_]))

    # ---- put and delete

    async def _write(self, namespace: Namespace, puts: Sequence[PutOp]) -> None:
        written = [(put.key, *observation_of(put, self._fields)) for put in puts if put.value is not None]
        gone = [put.key for put in puts if put.value is None]
        if gone:
            await self._delete(namespace, gone)
        small = [(key, observation) for key, observation, large in written if not large]
        for start in range(0, len(small), BATCH_MAX):
            await self._observe(namespace, dict(small[start : start + BATCH_MAX]))
        memory = self._memory(namespace)
        for key, observation, large in written:
            if large:
                put = partial(self._large.put, memory, namespace, key, observation, large)
                await self._with_memory(namespace, put)

    async def _observe(self, namespace: Namespace, observations: dict[str, Observation]) -> None:
        memory = self._memory(namespace)
        done = await self._with_memory(namespace, lambda: memory.observe_batch(list(observations.values())))
        for refused in done.rejected:
            raise refused.error
        keys = list(observations)
        changed = [keys[one.sequence - 1] for one in done.outcomes if one.type is EventType.UPDATED]
        if changed:
            await self._large.clean(memory, namespace, changed)

    async def _with_memory(self, namespace: Namespace, write: Callable[[], Awaitable[T]]) -> T:
        if namespace not in self._made:
            await self._make(namespace)
        try:
            return await write()
        except MemoryNotFound:  # deleted concurrently
            await self._make(namespace)
            return await write()

    async def _make(self, namespace: Namespace) -> None:
        client, path = self._client.asynchronous, self._memory(namespace).path
        what: _CreateOptions = {"kind": MemoryKind.LONG_TERM, "labels": {LABEL: namespace_label(namespace)}}
        try:
            await client.create_memory(path, policy=POLICY, **what)
        except MemoryExists:  # its policy may have been changed
            await client.create_memory(path, exist_ok=True, **what)
        self._made.add(namespace)

    async def _delete(self, namespace: Namespace, keys: Sequence[str]) -> None:
        memory = self._memory(namespace)
        found = await _map_concurrently(keys, lambda key: self._get_stored(namespace, key))
        ids = [one.id for one in found if one is not None]
        if ids:
            await memory.forget_fragments(ids)
            await self._large.clean(memory, namespace, keys)

    # ---- search

    async def _search(self, op: SearchOp) -> list[SearchItem]:
        end = op.offset + op.limit
        within = list(await self._list_stored_namespaces(tuple(op.namespace_prefix)))
        if op.query:
            found = await self._rank_items(within, op, end)
        else:
            found = [(one, None) for one in await self._list_items(within, op, end)]
        page = found[op.offset : end]
        if op.refresh_ttl:
            await self._refresh(one for one, _ in page)
        return [one.search_item(score) for one, score in page]

    async def _list_items(self, within: Sequence[Namespace], op: SearchOp, end: int) -> list[StoredItem]:
        found: list[StoredItem] = []
        for namespace in within:
            if len(found) >= end:
                break
            async for one in self._iterate_items(namespace, PAGE if op.filter else end):
                if passes_filter(one.value, op.filter):
                    found.append(one)
                if len(found) >= end:
                    break
        return found

    async def _iterate_items(self, namespace: Namespace, page: int) -> AsyncIterator[StoredItem]:
        listing = self._memory(namespace).list_fragments(page_size=max(1, min(PAGE, page)))
        try:
            async for fragment in listing:
                if (one := await self._item_of(namespace, fragment)) is not None:
                    yield one
        except MemoryNotFound:
            return

    async def _rank_items(
        self, within: Sequence[Namespace], op: SearchOp, end: int
    ) -> list[tuple[StoredItem, float | None]]:
        """The best of all namespaces, by one recall over their memories, or by one for each thousand."""
        found: list[tuple[StoredItem, float | None]] = []
        for start in range(0, len(within), MEMORIES_MAX):
            found += await self._recall_items(within[start : start + MEMORIES_MAX], op, end)
        return sorted(found, key=lambda one: one[1] or 0.0, reverse=True)

    def _list_scopes(self, within: Sequence[Namespace], op: SearchOp) -> list[str | Scope]:
        """The memories by name if they are few, else by what their names begin with: `within` decides what counts."""
        if len(within) <= SCOPES_MAX:
            return [str(self._memory(namespace).path) for namespace in within]
        return [Scope(prefix=f"{self._namespace}/{name_prefix(tuple(op.namespace_prefix))}")]

    async def _recall_items(
        self, within: Sequence[Namespace], op: SearchOp, end: int
    ) -> list[tuple[StoredItem, float | None]]:
        """The best `end` items that pass the filter, which the server cannot evaluate.

        Queries for the next best until there are enough. When more items failed the filter than a query can exclude,
        queries for the passing items by external id.
        """
        found: dict[str, tuple[StoredItem, float | None]] = {}
        seen: list[str] = []
        limit = min(RECALL_MAX, end if not op.filter else max(end, PAGE // 10))
        while len(seen) <= NAMED_MAX:
            more, last = await self._query_page(within, op, limit, Filter(exclude_ids=seen), seen)
            found |= more
            if last or len(found) >= end:
                return list(found.values())
            limit = min(RECALL_MAX, 2 * limit)
        for each in await _map_concurrently(within, lambda namespace: self._query_passing(namespace, op)):
            found |= each
        return list(found.values())

    async def _query_passing(self, namespace: Namespace, op: SearchOp) -> dict[str, tuple[StoredItem, float | None]]:
        """The items of a namespace that pass the filter, asked for by their keys."""
        found: dict[str, tuple[StoredItem, float | None]] = {}
        names = [
            external_id(one.key)
            async for one in self._iterate_items(namespace, PAGE)
            if passes_filter(one.value, op.filter)
        ]
        for start in range(0, len(names), NAMED_MAX):
            chosen = Filter(metadata={ID: names[start : start + NAMED_MAX]})
            found |= (await self._query_page([namespace], op, RECALL_MAX, chosen, []))[0]
        return found

    async def _query_page(
        self, within: Sequence[Namespace], op: SearchOp, limit: int, chosen: Filter, seen: list[str]
    ) -> tuple[dict[str, tuple[StoredItem, float | None]], bool]:
        """(passing items of one answer by id, whether the memories are exhausted); adds the answer's ids to `seen`."""
        by_path = {str(self._memory(each).path): each for each in within}
        answer = await self._client.asynchronous.recall_once(
            self._list_scopes(within, op),
            op.query or "",
            partial=True,  # one that was deleted since it was listed
            limit=limit,
            weights=Weights(alpha=0, beta=1, gamma=0),
            filter=replace(chosen, kinds=[FragmentKind.OBSERVATION], metadata={**chosen.metadata, INDEXED: True}),
            reinforce=False,
            omit_working_memory=True,
            fold=False,  # two keys may have equal values
        )
        found: dict[str, tuple[StoredItem, float | None]] = {}
        for hit in answer:
            seen.append(hit.fragment.id)
            namespace = by_path.get(hit.memory) if hit.memory else within[0]  # one memory is not named
            one = None if namespace is None else await self._item_of(namespace, hit.fragment)
            if one is not None and passes_filter(one.value, op.filter):
                found[one.id] = (one, hit.relevance)
        return found, not answer or len(answer) >= answer.eligible

    # ---- list namespaces

    async def _list_namespaces(self, op: ListNamespacesOp) -> list[Namespace]:
        """Namespaces that hold items."""
        listed = await self._list_stored_namespaces(_common_prefix(op))
        meant = {each: held for each, held in listed.items() if meets_conditions(each, op.match_conditions)}
        unsure = [each for each, held in meant.items() if not held]
        meant |= dict(zip(unsure, await _map_concurrently(unsure, self._holds_items), strict=True))
        found = {each if op.max_depth is None else each[: op.max_depth]: None for each, held in meant.items() if held}
        return list(found)[op.offset : op.offset + op.limit]

    async def _holds_items(self, namespace: Namespace) -> bool:
        try:
            return (await self._memory(namespace).stats()).long_term > 0
        except MemoryNotFound:
            return False


def _checked_operations(ops: Iterable[Op]) -> list[Op]:
    found = list(ops)
    for op in found:
        check_operation(op)
    return found


def _common_prefix(op: ListNamespacesOp) -> Namespace:
    """The common prefix of all matching namespaces: the first prefix condition, up to a wildcard."""
    for condition in op.match_conditions or ():
        if condition.match_type == "prefix":
            return tuple(itertools.takewhile(lambda label: label != "*", condition.path))
    return ()


async def _map_concurrently(keys: Iterable[Any], work: Callable[[Any], Awaitable[T]]) -> list[T]:
    """The results of `work` for each key, in order, with bounded concurrency."""
    free = asyncio.Semaphore(CALLS_MAX)

    async def one(key: Any) -> T:
        async with free:
            return await work(key)

    return list(await asyncio.gather(*(one(key) for key in keys)))
