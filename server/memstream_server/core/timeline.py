"""A memory as of an earlier revision, from its event log and the versions that were kept.

The log up to the revision gives the place of every fragment (replay_events.py). The log after it tells which fragments
have left since, and which changes must be undone: a change is undone by the version that it replaced. Nothing is
guessed: a fragment whose version is not kept, or was erased, has no value (`find_base`).
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from enum import StrEnum

from memstream_server.core.events import Event, EventType, Reason
from memstream_server.core.replay_events import GONE, Place, fold_event, fold_known
from memstream_server.core.suspicions import ConflictDecision, ConflictReason, KnownPairs, Suspicion
from memstream_server.core.values import Fragment

_BORN = frozenset({EventType.OBSERVED, EventType.REFLECTED, EventType.IMPORTED})
_PRESENT = 0


class NotKept(Exception):
    """What this fragment was at the revision is no longer kept."""


class Loss(StrEnum):
    """Why a fragment of the past is absent."""

    ERASED = "erased"  # its content, or words in it, were erased
    REMOVED = "removed"  # it left the memory for good in another way
    VERSION_NOT_KEPT = "version_not_kept"  # it was changed since


class Timeline:
    """The log of one memory around one revision. Mutable, with a single owner: `add` takes the transitions in order."""

    def __init__(self, revision: int, *, merges: bool) -> None:
        """merges: the policy's `short_term.merge_content`: a promotion of an old log may have replaced the content."""
        self.revision = revision
        self.head = 0
        """The last transition that was added."""
        self.time_us = 0
        """When `revision` was committed."""
        self._merges = merges
        self._first = 0
        """The first transition of the log; above 1 if it was pruned."""
        self._places: dict[str, Place] = {}
        self._forgotten_us: dict[str, int] = {}
        self._superseded_us: dict[str, int] = {}
        self._supersedes: dict[str, dict[str, None]] = {}
        """The fragments that each one superseded at the revision, in order."""
        self.suspicions = KnownPairs()
        """Those open at the revision, without those of a fragment that was changed since, and the pairs kept apart."""
        self.skips_lost = False
        """Whether a fragment whose version is not kept is absent, instead of making reads raise NotKept."""
        self._versions: Mapping[str, Collection[int]] = {}
        # Of the log after `revision`:
        self._born: set[str] = set()
        self._left: dict[str, EventType] = {}
        """The event by which a fragment left for good."""
        self._restored: set[str] = set()
        self._changes: dict[str, list[tuple[int, bool]]] = {}
        """(revision, whether it surely replaced something that is not an event) by fragment."""
        self._erased: dict[str, int] = {}
        """The last revision that took erased words out of a fragment, or out of its versions."""
        self._vectored: dict[str, int] = {}
        self._expiries: dict[str, list[tuple[int, int]]] = {}
        """(revision, expiry that a repeat replaced) by fragment."""
        self._repeats: dict[str, list[tuple[int, tuple[int, int]]]] = {}
        """(revision, last repeat that a repeat replaced) by fragment."""
        self._touched: dict[str, int] = {}
        """The last change of a fragment whose beginning is not in the log."""

    # ---- reading the log
    def add(self, revision: int, time_us: int, events: Iterable[Event]) -> None:
        """Add the next transition. Raises KeyError if the log contradicts itself."""
        self._first = self._first or revision
        self.head = revision
        if revision <= self.revision:
            self.time_us = time_us
            for event in events:
                self._fold(event, time_us)
        else:
            events = tuple(events)
            rewritten = _find_rewritten(events)
            for event in events:
                self._note(event, revision)
            self._erased |= dict.fromkeys(rewritten, revision)

    def set_versions(self, versions: Mapping[str, Collection[int]]) -> None:
        """Set the revisions of the versions that are kept, by fragment id; read after the log."""
        self._versions = versions

    def _fold(self, event: Event, time_us: int) -> None:
        self._fold_links(event, time_us)
        self._fold_suspicions(event, time_us)
        if self._first == 1:
            fold_event(self._places, event)
        else:
            fold_known(self._places, event)
        if event.type is EventType.FORGOTTEN:
            self._forgotten_us[event.fragment] = time_us

    def _fold_links(self, event: Event, time_us: int) -> None:
        """Follow the links of supersession. A forgotten fragment keeps those that it superseded."""
        id_, before = event.fragment, self._places.get(event.fragment)
        if event.type in (EventType.SUPERSEDED, EventType.SUPERSESSION_UNDONE) or event.type in GONE:
            newer = self._places.get(before.superseded_by) if before is not None else None
            if before is not None and newer is not None and (event.type in GONE or not newer.forgotten):
                self._supersedes.get(before.superseded_by, {}).pop(id_, None)
        if event.type is EventType.SUPERSEDED:
            self._supersedes.setdefault(event.other, {})[id_] = None
            self._superseded_us[id_] = time_us

    def _fold_suspicions(self, event: Event, time_us: int) -> None:
        if event.type is EventType.CONFLICT_SUSPECTED:
            reason = ConflictReason(event.conflict_reason)
            self.suspicions.add(Suspicion(event.fragment, event.other, reason, time_us))
        elif event.type is EventType.CONFLICT_RESOLVED:
            self.suspicions.resolve(event.fragment, event.other, ConflictDecision(event.conflict_decision))
        elif event.type is EventType.CONFLICT_ENDED:
            self.suspicions.discard(event.fragment, event.other)
        elif event.type in (EventType.UPDATED, EventType.SUPERSEDED):  # an earlier version recorded no CONFLICT_ENDED
            self.suspicions.end_open(event.fragment)
        elif event.type in GONE:
            self.suspicions.end_all(event.fragment)

    def _note(self, event: Event, revision: int) -> None:
        """Note what must be undone."""
        id_, kind = event.fragment, event.type
        if kind in _BORN:
            self._born.add(id_)
        elif kind in GONE:
            self._left[id_] = kind
        elif kind is EventType.UPDATED:
            self._changes.setdefault(id_, []).append((revision, True))
        elif kind is EventType.PROMOTED:
            merges = self._merges and bool(event.sources) if event.merges is None else event.merges
            self._changes.setdefault(id_, []).append((revision, merges))
        elif kind is EventType.RESTORED:
            self._restored.add(id_)
        elif kind is EventType.VECTORED:
            self._vectored.setdefault(id_, revision)
        elif kind is EventType.REPEATED:
            if event.expire_time_us is not None:
                self._expiries.setdefault(id_, []).append((revision, event.expire_time_us))
            if event.last_repeat is not None:
                self._repeats.setdefault(id_, []).append((revision, event.last_repeat))
        unknown = self._first > 1 and id_ and id_ not in self._places and id_ not in self._born
        if unknown and kind is not EventType.ECHOED:
            self._touched[id_] = revision
        other_changes = kind in (EventType.MERGED, EventType.SUPERSEDED, EventType.SUPERSESSION_UNDONE)
        if other_changes and self._first > 1 and event.other not in self._places:
            self._touched[event.other] = revision

    # ---- what can be known
    def list_missing(self) -> dict[str, Loss]:
        """The fragments that were there, not forgotten, and are absent, because they or their words are gone."""
        found = {}
        for id_, place in self._places.items():
            loss = None if place.forgotten else self._find_loss(id_)
            if loss is not None:
                found[id_] = loss
        return found

    def _find_loss(self, id_: str) -> Loss | None:
        if id_ in self._left:
            return Loss.ERASED if self._left[id_] is EventType.ERASED else Loss.REMOVED
        if self._is_erased(id_):
            return Loss.ERASED
        return Loss.VERSION_NOT_KEPT if self.skips_lost and self.find_base(id_) is None else None

    def _is_erased(self, id_: str) -> bool:
        try:
            return id_ in self._erased and self.find_base(id_) is None
        except NotKept:
            return False

    def find_oldest(self, fragment: str = "") -> int:
        """The oldest revision from which on everything is kept (of one fragment, or of all); 0 if `revision` is
        kept."""
        if self.revision < self._first:
            return max(self._first, self._oldest_of({**self._changes, **self._touched}))
        ids: Collection[str] = [fragment] if fragment else {**self._changes, **self._touched}
        if not any(self._is_lost(id_) for id_ in ids):
            return 0
        return self._oldest_of(ids)

    def _is_lost(self, id_: str) -> bool:
        try:
            self.find_base(id_)
        except NotKept:
            return True
        return False

    def _oldest_of(self, ids: Iterable[str]) -> int:
        oldest = 0
        for id_ in ids:
            if id_ not in self._left:
                lost = [at for at, sure in self._changes.get(id_, ()) if sure and not self._is_kept(id_, at)]
                erased = self._erased.get(id_, 0)
                oldest = max(oldest, self._touched.get(id_, 0), *(at for at in lost if at > erased), 0)
        return oldest

    def _is_kept(self, id_: str, revision: int) -> bool:
        return revision in self._versions.get(id_, ())

    def find_base(self, id_: str) -> int | None:
        """The version that holds the fragment's content at the revision; 0: the present fragment does; None: the
        fragment is absent. Raises NotKept."""
        if id_ in self._left or id_ in self._born or (self._first == 1 and id_ not in self._places):
            return None
        if id_ in self._touched:
            raise NotKept
        for at, sure in self._changes.get(id_, ()):
            if self._is_kept(id_, at):
                return at
            if sure and (at <= self._erased.get(id_, 0) or self.skips_lost):
                return None
            if sure:
                raise NotKept
        return _PRESENT

    def rebuild(self, present: Fragment, version: Fragment | None) -> Fragment:
        """The fragment as it was: content and attributes of the version (None: the present ones), place by the log.

        Access statistics are the present ones; `version`, of which an etag is made, is 0.
        """
        base = present if version is None else version
        until = self.find_base(present.id) or self.head + 1
        expiry = next((expiry for at, expiry in self._expiries.get(base.id, ()) if at < until), base.expire_time_us)
        present_repeat = (base.repeat_time_us, base.repeat_position)
        repeat = next((last for at, last in self._repeats.get(base.id, ()) if at < until), present_repeat)
        unvectored = self._vectored.get(base.id, until) < until
        fragment = base.but(
            version=0,
            access_count=present.access_count,
            access_time_us=present.access_time_us,
            expire_time_us=expiry,
            repeat_time_us=repeat[0],
            repeat_position=repeat[1],
            model="" if unvectored else base.model,
        )
        place = self._places.get(base.id)
        return fragment if place is None else self._with_place(fragment, place)

    def _with_place(self, base: Fragment, place: Place) -> Fragment:
        forgotten_us = None
        if place.forgotten:
            known = base.forget_time_us if base.id not in self._restored else None
            forgotten_us = known or self._forgotten_us.get(base.id, self.time_us)
        superseded_us = base.supersede_time_us  # exact, if it was superseded by the same one
        if place.superseded_by != base.superseded_by:
            superseded_us = self._superseded_us.get(base.id) if place.superseded_by else None
        return base.but(
            tier=place.tier,
            importance=place.importance,
            enhancement_count=place.enhancement_count,
            duplicate_count=place.duplicate_count,
            sources=place.sources,
            forget_time_us=forgotten_us,
            superseded_by=place.superseded_by,
            supersede_time_us=superseded_us,
            supersedes=tuple(self._supersedes.get(base.id, ())),
        )

    def changed_ids(self) -> list[str]:
        """The fragments that may have another content now."""
        return list(self._changes)


def _find_rewritten(events: Sequence[Event]) -> set[str]:
    """The fragments that lost erased words in this transition, or versions that may have held them: those weakened by
    an erasure on request. Of a fragment that was gone before, the erasure shows in WEAKENED and UPDATED alone."""
    erases = any(one.type is EventType.ERASED and one.reason is Reason.REQUESTED for one in events)
    weakened = {one.fragment for one in events if one.type is EventType.WEAKENED}
    updated = {one.fragment for one in events if one.type is EventType.UPDATED}
    return weakened | updated if erases else weakened & updated
