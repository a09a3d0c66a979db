"""Fragments as resources: read, summarized by session, put, change, forget, restore, clear.

A put decides observations in a single decision, to which the etag checks and the answer refer. A stream's observation
is received before it is decided; these are only acknowledged as stored and need no receipt. They may overtake received
observations of streams: the contract promises no order between them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from memstream_server.core.enhancement import merged_text
from memstream_server.core.events import EventType, Purpose
from memstream_server.core.filters import (
    Filter,
    Listing,
    Unmatched,
    drop_named,
    fold_names,
    mask,
    order_slots,
    search_metadata,
    visible,
)
from memstream_server.core.session_summaries import SessionQuery, SessionSummary, summarize_sessions
from memstream_server.core.values import Enhancement, Fragment, Tier
from memstream_server.engine import lifecycle
from memstream_server.engine.errors import EtagMismatch, FragmentNotFound, JournalUnavailable
from memstream_server.engine.lifecycle import FragmentChange, drop_expired, read_fragments, run_decision
from memstream_server.engine.memory.decide import decide_observations
from memstream_server.engine.memory.decision import Decision, account_of
from memstream_server.engine.memory.enrich import EnrichedFragment
from memstream_server.engine.memory.known_fragments import KnownFragments, read_known
from memstream_server.engine.memory.receipts import fragment_of
from memstream_server.engine.memory.superseding import raise_if_refused
from memstream_server.engine.quotas import admit_puts, check_bytes
from memstream_server.engine.requests import ChangeCount, NewObservation, Once, Put, fragment_etag
from memstream_server.engine.runtime.turns import pause_if_due, run_in_slices
from memstream_server.ports.conversation_records import JointWrites
from memstream_server.ports.journal.errors import JournalError
from memstream_server.ports.journal.reading import FragmentQuery, Moment, MomentQuery
from memstream_server.ports.journal.records import FragmentVersion, MemoryRecord, Recorded
from memstream_server.ports.journal.writing import Outcome

if TYPE_CHECKING:
    from memstream_server.engine.memory.actor import Actor
    from memstream_server.engine.runtime.dependencies import EngineModels, Runtime, Storage
    from memstream_server.engine.runtime.registry import Registry
    from memstream_server.ports.models import Account


PAGE = 200
"""Fragments read at once to apply a filter."""


class Fragments:
    """The fragments of all memories."""

    def __init__(self, storage: Storage, models: EngineModels, runtime: Runtime, registry: Registry) -> None:
        self._storage = storage
        self._models = models
        self._runtime = runtime
        self._journal = storage.journal
        self._registry = registry

    @property
    def dimension(self) -> int:
        """Vector dimension."""
        return self._models.embedding_model.dimension

    async def get(self, namespace: str, name: str, id: str = "", external_id: str = "") -> tuple[Fragment, str, int]:
        """(fragment, merged text if it was promoted, the memory's revision). Raises FragmentNotFound."""
        record = await self._registry.read_record(namespace, name)
        if external_id:
            async with self._registry.use(namespace, name) as actor:
                id = actor.working.id_of(external_id)
                actor.raise_if_failed()
                self._registry.ownership.check_lease()
        found = await self._read_unexpired(record, [id]) if id else []
        if not found:
            key = external_id or id
            raise FragmentNotFound(f"there is no fragment {key!r} in {namespace}/{name}", id=key)
        return found[0], await self._merged_text(record, found[0]), record.revision

    async def _merged_text(self, record: MemoryRecord, fragment: Fragment) -> str:
        """The text of a promoted fragment followed by its enhancers', each once. Derived on read, so no text is stored
        twice.

        An enhancer that was received before the anchor was a recollection, and its text is not merged.
        """
        if record.policy.short_term.merge_content or not fragment.sources:
            return ""
        sources = await self._read_unexpired(record, fragment.sources)
        enhancements = tuple(
            Enhancement(one.id, one.content, recollection=one.position < fragment.position) for one in sources
        )
        return merged_text(fragment, enhancements, recollections=False)

    async def read_many(self, namespace: str, name: str, ids: Sequence[str]) -> list[Fragment]:
        """The existing ones of these ids."""
        return await self._read_unexpired(await self._registry.read_record(namespace, name), ids)

    def find_cached(self, uid: str, ids: Sequence[str], steps: int) -> tuple[dict[str, Fragment], Sequence[str], int]:
        """Those of these ids that the fragment cache has, and what supersedes them over at most `steps` steps; the ids
        that it has not: all of them if the memory is not active here; the memory's revision."""
        actor = self._registry.peek(uid)
        if actor is None or actor.failed is not None or not self._registry.ownership.is_valid():
            return {}, ids, 0
        cache, left = actor.working.fragment_cache, ids
        found, absent = dict[str, Fragment](), list[str]()
        for _ in range(steps + 1):
            found |= (known := cache.get_many(left))
            absent += [id_ for id_ in left if id_ not in known]
            left = sorted({one.superseded_by for one in known.values() if one.superseded_by} - found.keys())
            if not left:
                break
        return found, absent, actor.working.record.revision

    async def read_moment(self, wanted: MomentQuery) -> Moment:
        """All of it in one snapshot of the database. Raises JournalUnavailable."""
        caches = [
            (uid, actor.working.fragment_cache, actor.working.fragment_cache.removals)
            for uid, ids in wanted.fragments.items()
            if ids and (actor := self._registry.peek(uid)) is not None
        ]
        try:
            moment = await self._journal.read_moment(wanted)
        except JournalError as error:
            raise JournalUnavailable("the journal cannot be read now", retry_after_s=0.5) from error
        for uid, cache, removals in caches:
            cache.put_read(list(moment.fragments[uid].values()), removals)
        return moment

    async def _read_unexpired(self, record: MemoryRecord, ids: Sequence[str]) -> list[Fragment]:
        """The existing ones of these ids that have not expired."""
        there = await self._journal.get_fragments(record.uid, ids)
        return lifecycle.drop_expired(there, record, self._runtime.clock.now_us())

    async def list_page(
        self, namespace: str, name: str, listing: Listing, after: int, limit: int
    ) -> tuple[list[Fragment], int | None, int, str]:
        """(fragments, start of the next page or None, revision, memory uid).

        `after`: -1 or the start that the page before returned: a position, or a place in the order of an attribute.
        """
        if not listing.is_plain:
            return await self._list_ordered(namespace, name, listing, after, limit)
        record, chosen, forgotten = await self._registry.read_record(namespace, name), listing.chosen, listing.forgotten
        found, has = list[Fragment](), listing.make_test()
        while True:
            query = FragmentQuery(
                tiers=chosen.tiers,
                sessions=chosen.sessions,
                speakers=chosen.speakers,
                kinds=tuple(kind.value for kind in chosen.kinds),
                forgotten=forgotten,
                after=after,
                limit=PAGE,
            )
            page = await self._journal.list_fragments(record.uid, query)
            now_us = self._runtime.clock.now_us()
            # A list of forgotten fragments includes expired ones: they wait to be erased.
            for fragment in page if forgotten else lifecycle.drop_expired(page, record, now_us):
                await pause_if_due()
                if has(fragment, now_us):
                    found.append(fragment)
                    if len(found) > limit:
                        return found[:limit], found[limit - 1].position, record.revision, record.uid
            if len(page) < PAGE:
                return found, None, record.revision, record.uid
            after = page[-1].position

    async def check_selection(
        self, namespace: str, name: str, which: Sequence[str] | Filter, forgotten: bool | None
    ) -> tuple[Unmatched, ...]:
        """As find_unmatched, for what a change selects; ids have no unmatched part."""
        if not isinstance(which, Filter):
            return ()
        return await self.find_unmatched((await self._registry.read_record(namespace, name)).uid, which, forgotten)

    async def find_unmatched(
        self, uid: str, chosen: Filter, forgotten: bool | None, listed: Sequence[Fragment] = ()
    ) -> tuple[Unmatched, ...]:
        """The speakers, sessions and metadata keys of a filter that no fragment of the memory has.

        `forgotten`: None counts the forgotten ones, too. `listed`: what a list by that filter found first; only what is
        not in it is searched.
        """
        unmatched: list[Unmatched] = []
        for field, asked in (
            ("speakers", chosen.speakers),
            ("sessions", chosen.sessions),
            ("metadata", () if listed else chosen.named_keys),  # a list names all keys
        ):
            left = fold_names(asked, field)
            page, query = listed, FragmentQuery(forgotten=forgotten, limit=PAGE)
            while True:
                drop_named(left, page, field)
                if not left:
                    break
                if field == "speakers":
                    query = replace(query, speakers=tuple(left.values()), limit=1)
                elif field == "sessions":
                    query = replace(query, sessions=tuple(left.values()), limit=1)
                page = await self._journal.list_fragments(uid, query)
                if not page:
                    break
                query = replace(query, after=page[-1].position)
            unmatched += [Unmatched(field, each) for each in left.values()]
        return tuple(unmatched)

    async def _list_ordered(
        self, namespace: str, name: str, listing: Listing, after: int, limit: int
    ) -> tuple[list[Fragment], int | None, int, str]:
        """A page in the order of an attribute, computed from the memory in RAM as it is at this call."""
        async with self._registry.use(namespace, name) as actor:
            working, now_us = actor.working, self._runtime.clock.now_us()
            tested = await run_in_slices(search_metadata(working.columns, listing.chosen))
            actor.raise_if_failed()
            self._registry.ownership.check_lease()
            columns, record = working.columns, working.record
            seen = mask(columns, listing.chosen, now_us, record.policy.retention.ttl_s, tested)
            ids = [columns.ids[slot] for slot in order_slots(columns, seen, listing.order, listing.descending)]
        found, has = list[Fragment](), listing.make_test()
        for start in range(after + 1, len(ids), PAGE):
            read = {one.id: one for one in await self._read_unexpired(record, ids[start : start + PAGE])}
            for place, id in enumerate(ids[start : start + PAGE], start):
                await pause_if_due()
                if id in read and has(read[id], now_us):
                    if len(found) == limit:
                        return found, place - 1, record.revision, record.uid
                    found.append(read[id])
        return found, None, record.revision, record.uid

    async def list_events(
        self, namespace: str, name: str, id: str, after: int, limit: int
    ) -> tuple[list[Recorded], int | None, int, str]:
        """(transitions that concern the fragment, the revision after which the next page starts or None, the last
        revision that is pruned or 0, memory uid). `after`: 0 for the first page."""
        record = await self._registry.read_record(namespace, name)
        oldest = await self._journal.list_events(record.uid, 0, 1)
        pruned = oldest[0].revision - 1 if oldest else record.revision
        found: list[Recorded] = []
        more, wanted = True, limit
        while more and wanted > 0:
            part, more = await self._journal.list_fragment_events(record.uid, id, after, wanted)
            found += part
            wanted, after = wanted - sum(len(one.events) for one in part), part[-1].revision if part else after
        return found, found[-1].revision if more else None, pruned, record.uid

    async def list_sessions(
        self, namespace: str, name: str, query: SessionQuery
    ) -> tuple[list[SessionSummary], bool, int, str]:
        """(sessions, whether there are more, revision, memory uid). They are computed from the memory in RAM."""
        async with self._registry.use(namespace, name) as actor:
            working = actor.working
            actor.raise_if_failed()
            self._registry.ownership.check_lease()
            columns = working.columns
            seen = visible(columns, self._runtime.clock.now_us(), working.record.policy.retention.ttl_s)
            found = summarize_sessions(columns, seen, replace(query, limit=query.limit + 1))
            return found[: query.limit], len(found) > query.limit, working.record.revision, working.record.uid

    async def put(
        self, namespace: str, name: str, new: NewObservation, etag: str | None = "", once: Once[Put] | None = None
    ) -> Put:
        """Observe, or update the fragment with that external_id; with etag None, only observe. Raises EtagMismatch."""
        async with self._registry.use(namespace, name) as actor:
            await check_bytes(self._journal, self._runtime.limits, namespace)
            return await put(actor, new, etag, self._storage, self._models, self._runtime, once)

    async def put_together(
        self,
        namespace: str,
        name: str,
        given: Sequence[tuple[NewObservation, str | None]],
        join: Callable[[Sequence[Put]], JointWrites],
        request: str = "",
    ) -> None:
        """Put several observations and write to conversations in one transaction; `join` makes these writes and takes
        what is put. Raises EtagMismatch, PreconditionFailed, and AlreadyAnswered if `request` has an answer."""
        async with self._registry.use(namespace, name) as actor:
            await check_bytes(self._journal, self._runtime.limits, namespace)

            once: Once[Sequence[Put]] | None = Once(request) if request else None
            await put_together(actor, given, self._storage, self._models, self._runtime, once, join)

    async def update(
        self, namespace: str, name: str, change: FragmentChange, once: Once[tuple[Fragment, int]] | None = None
    ) -> tuple[Fragment, int]:
        """(the changed fragment, revision). Raises FragmentNotFound, EtagMismatch."""
        async with self._registry.use(namespace, name) as actor:
            await check_bytes(self._journal, self._runtime.limits, namespace)
            return await lifecycle.update(actor, change, self._storage, self._models, self._runtime, once)

    async def read_history(
        self, namespace: str, name: str, id: str = "", external_id: str = ""
    ) -> tuple[Fragment, list[FragmentVersion], int]:
        """(fragment, its versions, the latest first, the memory's revision). Raises FragmentNotFound."""
        fragment, _, revision = await self.get(namespace, name, id, external_id)
        record = await self._registry.read_record(namespace, name)
        return fragment, await self._journal.list_versions(record.uid, fragment.id), revision

    async def restore_version(
        self,
        namespace: str,
        name: str,
        id: str,
        version: int,
        etag: str = "",
        once: Once[tuple[Fragment, int]] | None = None,
    ) -> tuple[Fragment, int]:
        """(the fragment with the content of that version, revision). Raises FragmentNotFound, EtagMismatch."""
        async with self._registry.use(namespace, name) as actor:
            await check_bytes(self._journal, self._runtime.limits, namespace)
            parts = self._storage, self._models, self._runtime
            return await lifecycle.restore_version(actor, id, version, etag, *parts, once)

    async def forget(
        self, namespace: str, name: str, which: Sequence[str] | Filter, once: Once[ChangeCount] | None = None
    ) -> ChangeCount:
        """Forget by ids or filter. Can be undone during the policy's grace period."""
        async with self._registry.use(namespace, name) as actor:
            ids = await self._select_ids(actor, which, forgotten=False)
            return await lifecycle.forget(actor, ids, self._storage, self._runtime, once)

    async def restore(
        self, namespace: str, name: str, which: Sequence[str] | Filter, once: Once[ChangeCount] | None = None
    ) -> ChangeCount:
        """Restore by ids, also those that are superseded, or by a filter of forgotten fragments. Raises ModelDown."""
        async with self._registry.use(namespace, name) as actor:
            ids = await self._select_ids(actor, which, forgotten=True)
            by_filter = isinstance(which, Filter)
            return await lifecycle.restore(
                actor, ids, self._storage, self._models, self._runtime, once, only_forgotten=by_filter
            )

    async def supersede(
        self, namespace: str, name: str, olds: Sequence[str], new: str, once: Once[ChangeCount] | None = None
    ) -> ChangeCount:
        """Mark fragments as superseded by another, all by id or external id. Raises FragmentNotFound, InvalidField."""
        async with self._registry.use(namespace, name) as actor:
            return await lifecycle.supersede(actor, olds, new, self._storage, self._runtime, once)

    async def _select_ids(self, actor: Actor, which: Sequence[str] | Filter, forgotten: bool) -> Sequence[str]:
        if isinstance(which, Filter):
            return await lifecycle.list_matching(actor.uid, which, forgotten, self._storage)
        return which

    async def clear(
        self, namespace: str, name: str, tiers: Sequence[Tier], once: Once[ChangeCount] | None = None
    ) -> ChangeCount:
        """Remove the fragments of these tiers permanently; no tiers means all."""
        async with self._registry.use(namespace, name) as actor:
            return await lifecycle.clear(actor, tiers, self._storage, once)


async def put(
    actor: Actor,
    new: NewObservation,
    etag: str | None,
    storage: Storage,
    models: EngineModels,
    runtime: Runtime,
    once: Once[Put] | None = None,
) -> Put:
    """Observe, or update the fragment with `new.external_id`. Raises EtagMismatch, QuotaExceeded.

    etag: of the fragment that is there; None: there is none, but a forgotten or expired one; empty: any.
    """
    puts = await put_together(actor, [(new, etag)], storage, models, runtime, _once_of_first(once))
    return puts[0]


async def put_together(
    actor: Actor,
    given: Sequence[tuple[NewObservation, str | None]],
    storage: Storage,
    models: EngineModels,
    runtime: Runtime,
    once: Once[Sequence[Put]] | None = None,
    join: Callable[[Sequence[Put]], JointWrites] | None = None,
) -> Sequence[Put]:
    """As `put` for several (observation, etag) with different external ids, in one decision.

    join: makes the writes to conversations that are committed with it; then also raises PreconditionFailed.
    """
    account = account_of(actor.working.record)
    observations = [new for new, _ in given]
    with admit_puts(observations, actor.working, actor.producers, runtime.limits.memory_fragments_max):
        parts = await _enrich_observations(actor, observations, models, runtime, account)

        async def decide(now: Actor) -> tuple[Decision, Callable[[int], Sequence[Put]]]:
            existing = await read_fragments(now, [now.working.id_of(new.external_id) for new, _ in given], storage)
            found = drop_expired(existing, now.working.record, runtime.clock.now_us())
            for new, etag in given:
                _check_etag(new.external_id, etag, [one for one in found if one.external_id == new.external_id])
                raise_if_refused(new, now.working, runtime.clock.now_us())
            seen = [part.in_space(now.working.embedding.name) for part in parts]
            placed = [replace(one, fragment=one.fragment.but(position=now.producers.take_position())) for one in seen]
            superseding = any(new.supersedes for new, _ in given)
            known = await read_known(now.working, placed, storage) if superseding else KnownFragments()
            known.by_key |= {fragment.external_id: fragment for fragment in existing}
            decision, outcomes = await decide_observations(now.working, (), placed, known, models, runtime)
            decision = decision.with_cost(account, Purpose.IMPORTANCE)

            def puts_at(revision: int) -> Sequence[Put]:
                return [_put_result(decision, outcomes[one.fragment.position], revision) for one in placed]

            if join is None:
                return decision, puts_at
            return replace(decision, joint=join(puts_at(now.revision + 1))), puts_at

        return await run_decision(actor, once, storage, decide)


def _once_of_first(once: Once[Put] | None) -> Once[Sequence[Put]] | None:
    if once is None or once.answer is None:
        return None
    answer = once.answer
    return Once(once.key, lambda puts: answer(puts[0]))


def _check_etag(external_id: str, etag: str | None, found: Sequence[Fragment]) -> None:
    if etag is None:
        live = [one for one in found if one.forget_time_us is None]
        if live:
            raise EtagMismatch(f"there is a fragment {external_id!r}", etag=fragment_etag(live[0]))
    elif etag and etag not in map(fragment_etag, found):
        current = fragment_etag(found[0]) if found else ""
        raise EtagMismatch(f"fragment {external_id!r} has changed since; read it again", etag=current)


async def _enrich_observations(
    actor: Actor, given: Sequence[NewObservation], models: EngineModels, runtime: Runtime, account: Account
) -> Sequence[EnrichedFragment]:
    record, now_us = actor.working.record, runtime.clock.now_us()
    fragments = [fragment_of(new, runtime.ids.next_id(), now_us, 0, record) for new in given]
    own = {fragment.id: new.vector for fragment, new in zip(fragments, given, strict=True) if new.vector is not None}
    importances, space = [new.importance for new in given], actor.working.embedding
    return await models.enricher.enrich_fragments(fragments, own, importances, record, account, space)


def _put_result(decision: Decision, outcome: Outcome, revision: int) -> Put:
    kept = None if outcome.other else _kept_fragment(decision, outcome.fragment)
    if kept is None:
        return Put(None, False, revision)
    return Put(kept.but(version=revision), outcome.type is not EventType.UPDATED, revision)


def _kept_fragment(decision: Decision, fragment_id: str) -> Fragment | None:
    puts = () if decision.transition is None else decision.transition.puts
    return next((fragment for fragment in puts if fragment.id == fragment_id), None)
