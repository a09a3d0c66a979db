"""The attributes of a memory's fragments as numpy columns by slot, for filters and ranking."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

import numpy as np
import numpy.typing as npt

from memstream_server.core.arrays import Growing, Parts, add_places
from memstream_server.core.identity import fold_key
from memstream_server.core.metadata import MetadataIndex
from memstream_server.core.rendering import is_question
from memstream_server.core.speakers import fold_name, role_of_name
from memstream_server.core.values import Fragment, FragmentKind, Metadata, Role, Tier, TruthStatus

Mask = npt.NDArray[np.bool_]
Slots = npt.NDArray[np.int64]
"""Numbers of columns' entries, one a fragment."""
PINNED_US = int(np.iinfo(np.int64).max)
"""Sentinel for pinned fragments: they never expire, regardless of the policy."""
NEVER_US = PINNED_US - 1
"""Sentinel for fragments without an expiry of their own."""
GONE = ""
"""Id of a slot whose fragment was removed permanently."""
_FEW = 8
"""Fragments that are written value by value: numpy takes a microsecond for a list of a few values."""
_TIERS = tuple(Tier)
_KINDS = tuple(FragmentKind)
UNKNOWN, USER, ASSISTANT, TOOL, SYSTEM = range(5)
"""Codes of roles."""
_ROLES = (None, Role.USER, Role.ASSISTANT, Role.TOOL, Role.SYSTEM)


class Codes:
    """Interned strings: small integer codes in order of first use."""

    def __init__(self) -> None:
        self.names: list[str] = []
        self._codes: dict[str, int] = {}
        self._folded: dict[str, list[int]] = {}
        self._folded_count = 0
        """How many names `_folded` has: a memory whose speakers nobody filters by folds none."""

    def assign_code(self, name: str) -> int:
        """The code of a name; assigns the next code to a new name."""
        code = self._codes.setdefault(name, len(self.names))
        if code == len(self.names):
            self.names.append(name)
        return code

    def give_all(self, names: Sequence[str]) -> list[int]:
        """The codes of `names`, in order."""
        for name in dict.fromkeys(names):
            self.assign_code(name)
        return list(map(self._codes.__getitem__, names))

    def pack(self, codes: npt.NDArray[np.int32]) -> tuple[npt.NDArray[np.int32], list[str]]:
        """(the same as codes in order of first use, the names that they have)."""
        first = np.full(len(self.names), len(codes))
        first[codes[::-1]] = np.arange(len(codes))[::-1]  # the last write remains
        order = np.argsort(first, kind="stable")[: np.count_nonzero(first < len(codes))]
        rank = np.empty(len(self.names), np.int32)
        rank[order] = np.arange(len(order), dtype=np.int32)
        return rank[codes], [self.names[code] for code in order.tolist()]

    def match(self, values: npt.NDArray[np.int32], codes: Sequence[int]) -> npt.NDArray[np.bool_]:
        """Which of `values`, codes of this table, are among `codes`, as bool[n]."""
        chosen = np.zeros(len(self.names), np.bool_)
        chosen[list(codes)] = True
        return chosen[values]

    def code_of(self, name: str) -> int:
        """The code of a name; -1 if it has none."""
        return self._codes.get(name, -1)

    def find_codes(self, names: Sequence[str]) -> list[int]:
        """The codes of the names that have one."""
        return [self._codes[name] for name in names if name in self._codes]

    def find_spellings(self, name: str) -> list[int]:
        """The codes of all spellings of a speaker's name."""
        for code in range(self._folded_count, len(self.names)):
            self._folded.setdefault(fold_name(self.names[code]), []).append(code)
        self._folded_count = len(self.names)
        return self._folded.get(fold_name(name), [])


def _match_codes(codes: npt.NDArray[np.int8], wanted: Sequence[int]) -> Mask:
    """Mask of the codes in `wanted`. Ten times as fast as numpy.isin for a handful of values."""
    found = np.zeros(len(codes), np.bool_)
    for code in wanted:
        found |= codes == code
    return found


def _role_code(fragment: Fragment) -> int:
    """The code of the client's role, or of the role that the speaker's name says."""
    return _ROLES.index(fragment.role or role_of_name(fragment.speaker))


def _bound_us(time_us: int | None, unbounded_us: int) -> int:
    return unbounded_us if time_us is None else time_us


def _expiry_us(fragment: Fragment) -> int:
    if fragment.pinned:
        return PINNED_US
    return NEVER_US if fragment.expire_time_us is None else fragment.expire_time_us


class Columns:
    """What filters and ranking read of each fragment, by slot. Mutable, with a single owner; holds no content."""

    def __init__(self) -> None:
        self.ids: list[str] = []
        self.sessions = Codes()
        self.speakers = Codes()
        self.metadata = MetadataIndex()
        self.external_ids: list[str] = []
        self._slots: dict[str, int] = {}
        self._session = Growing(np.int32)
        self._speaker = Growing(np.int32)
        self._role = Growing(np.int8)
        self._characters = Growing(np.int32)
        self._tier = Growing(np.int8)
        self._kind = Growing(np.int8)
        self._alive = Growing(np.bool_)
        self._importance = Growing(np.float64)
        self._observe_us = Growing(np.int64)
        self._last_us = Growing(np.int64)
        self._last_position = Growing(np.int64)
        self._create_us = Growing(np.int64)
        self._expire_us = Growing(np.int64)
        self._access_us = Growing(np.int64)
        self._superseded = Growing(np.bool_)
        self._valid_from_us = Growing(np.int64)
        self._valid_until_us = Growing(np.int64)
        # In the order of `_values_of` up to here; what `extend` adds follows.
        self._position = Growing(np.int64)
        self._first_access_us = Growing(np.int64)
        """The access times with which fragments entered: later ones are counted in the journal."""
        self._words = Growing(np.int64)
        self._asks = Growing(np.bool_)
        self._growing = tuple([each for each in vars(self).values() if isinstance(each, Growing)])
        self._row_bytes = sum(each.view.itemsize for each in self._growing)
        self._has_superseded = False
        self._has_validity = False
        """Whether any fragment ever had a validity: without one, nothing is compared."""

    def __len__(self) -> int:
        return len(self.ids)

    def __contains__(self, fragment_id: object) -> bool:
        return fragment_id in self._slots

    @property
    def bytes(self) -> int:
        """Approximate RAM in bytes, for the limit on active memories."""
        return len(self.ids) * (self._row_bytes + 200)

    @property
    def alive(self) -> Mask:
        """Slots whose fragment is present and not forgotten, bool[n]."""
        return self._alive.view

    @property
    def session(self) -> npt.NDArray[np.int32]:
        """Session codes, int32[n]."""
        return self._session.view

    def linked_sessions(self, first: int = 0, end: int | None = None) -> npt.NDArray[np.int32]:
        """Session codes from a slot on; -1 for fragments without a session, which have no neighbours."""
        codes, none = self._session.view[first:end], self.sessions.code_of("")
        return codes if none < 0 else np.where(codes == none, np.int32(-1), codes)

    @property
    def speaker(self) -> npt.NDArray[np.int32]:
        """Speaker codes, int32[n]."""
        return self._speaker.view

    def speaks(self, name: str) -> bool:
        """Whether a live fragment is of that speaker: the codes keep the names of those whose fragments have left."""
        return bool(self._alive.view[self._speaker.view == self.speakers.code_of(name)].any())

    @property
    def unnamed_speaker(self) -> int:
        """The speaker code of fragments that name none; -1 if there are no such fragments."""
        return self.speakers.code_of("")

    @property
    def role(self) -> npt.NDArray[np.int8]:
        """Codes of the roles that client or speaker's name say, UNKNOWN for none, int8[n]."""
        return self._role.view

    @property
    def characters(self) -> npt.NDArray[np.int32]:
        """Characters of the contents, int32[n]."""
        return self._characters.view

    @property
    def importance(self) -> npt.NDArray[np.float64]:
        """Importances in [0, 1], float64[n]."""
        return self._importance.view

    @property
    def observe_us(self) -> npt.NDArray[np.int64]:
        """Observation times, int64[n]."""
        return self._observe_us.view

    @property
    def last_us(self) -> npt.NDArray[np.int64]:
        """When the words were observed last: observation time or last repeat (`Fragment.last_observed`), int64[n]."""
        return self._last_us.view

    @property
    def last_position(self) -> npt.NDArray[np.int64]:
        """Positions at which the words were received last, int64[n]."""
        return self._last_position.view

    @property
    def access_us(self) -> npt.NDArray[np.int64]:
        """Time of the last access, or of creation if there was none, int64[n]."""
        return self._access_us.view

    @property
    def position(self) -> npt.NDArray[np.int64]:
        """Positions in the order of receipt, int64[n]."""
        return self._position.view

    @property
    def words(self) -> npt.NDArray[np.int64]:
        """Fold keys: equal for fragments with the same words and speaker (identity.py), int64[n]."""
        return self._words.view

    @property
    def asks(self) -> Mask:
        """Slots whose content ends in a question mark, bool[n]."""
        return self._asks.view

    def slot(self, fragment_id: str) -> int | None:
        """The slot of a fragment, forgotten or not; None if it is absent."""
        return self._slots.get(fragment_id)

    def tier_of(self, fragment_id: str) -> Tier | None:
        """The tier of a fragment, forgotten or not; None if it is absent."""
        slot = self._slots.get(fragment_id)
        return None if slot is None else _TIERS[int(self._tier.view[slot])]

    def is_alive(self, fragment_id: str) -> bool:
        """Whether a fragment is present and not forgotten."""
        slot = self._slots.get(fragment_id)
        return slot is not None and bool(self._alive.view[slot])

    def live_ids(self) -> dict[str, int]:
        """Slots by id, including forgotten fragments, excluding removed ones. Read-only for the caller."""
        return self._slots

    def slots(self, fragment_ids: Sequence[str]) -> npt.NDArray[np.int64]:
        """Slots of those ids that are present, in the order given."""
        return np.array([self._slots[each] for each in fragment_ids if each in self._slots], np.int64)

    def append(self, fragment: Fragment) -> int:
        """Add a fragment at the next slot; return the slot. Raises ValueError if the id is already present."""
        return self.extend((fragment,))

    def extend(self, fragments: Sequence[Fragment]) -> int:
        """Append all; return the slot of the first. Raises ValueError and adds none if an id is already present."""
        first, ids = len(self.ids), [each.id for each in fragments]
        slots = {each: slot for slot, each in enumerate(ids, first)}
        taken = self._slots.keys() & slots.keys()
        if taken or len(slots) < len(ids):
            raise ValueError(f"fragment {min(taken, default=ids[0])} has a slot already")
        self.ids += ids
        self._slots |= slots
        self.external_ids += [each.external_id for each in fragments]
        rows: list[tuple[float, ...]] = []
        metadata: list[Metadata] = []
        for each in fragments:
            accessed_us = max(each.access_time_us, each.create_time_us)
            apart = each.position, accessed_us, fold_key(each), is_question(each.content)
            rows.append(self._values_of(each) + apart)
            metadata.append(each.metadata)
        add_places(self._growing, len(rows))
        if len(rows) < _FEW:
            for slot, row in enumerate(rows, first):
                for column, value in zip(self._growing, row, strict=True):
                    column.view[slot] = value
        else:
            for column, values in zip(self._growing, zip(*rows, strict=True), strict=True):
                column.view[first:] = values
        self._note_truth(fragments)
        self.metadata.extend(metadata)
        return first

    def update(self, fragment: Fragment, says_else: bool = True) -> int:
        """Overwrite the attributes of a fragment (tier, importance, metadata, forgotten ...); return its slot.

        says_else: its words or speaker may have changed. Raises KeyError if it is absent.
        """
        slot = self._slots[fragment.id]
        says_else = says_else or self._has_other_truth(slot, fragment)
        for column, value in zip(self._growing, self._values_of(fragment), strict=False):
            column.view[slot] = value
        self._note_truth((fragment,))
        self.metadata.write(slot, fragment.metadata)
        self.external_ids[slot] = fragment.external_id
        if says_else:
            self._words.view[slot] = fold_key(fragment)
            self._asks.view[slot] = is_question(fragment.content)
        return slot

    def touch(self, slots: npt.NDArray[np.int64], time_us: int | npt.NDArray[np.int64]) -> None:
        """Record an access; access times never move backwards."""
        self._access_us.view[slots] = np.maximum(self._access_us.view[slots], time_us)

    def set_access_times(self, times_us: Mapping[str, int]) -> None:
        """Set when these fragments were accessed last; ids that are not here are skipped."""
        for id_, time_us in times_us.items():
            if (slot := self.slot(id_)) is not None:
                self._access_us.view[slot] = time_us

    def set_accesses(self, positions: Sequence[int], times_us: Sequence[int]) -> None:
        """Record the last accesses of the fragments at these positions. Slots must be in order of position."""
        self.touch(np.searchsorted(self._position.view, np.array(positions, np.int64)), np.array(times_us, np.int64))

    def in_order(self) -> bool:
        """Whether the slots are in order of position, as after a load."""
        return bool((np.diff(self._position.view) > 0).all())

    def remove(self, slot: int) -> None:
        """Remove a fragment permanently; its slot stays allocated. Idempotent."""
        self._slots.pop(self.ids[slot], None)
        self.ids[slot] = GONE
        self.metadata.remove(slot)
        self.external_ids[slot] = ""
        self._alive.view[slot] = False

    def keep(self, slots: npt.NDArray[np.int64]) -> None:
        """Keep only these slots, renumbered in that order."""
        self.ids = [self.ids[slot] for slot in slots]
        self.metadata.keep(slots)
        self.external_ids = [self.external_ids[slot] for slot in slots]
        self._slots = {each: slot for slot, each in enumerate(self.ids) if each != GONE}
        for column in self._growing:
            column.keep(slots)

    def pack(self) -> Parts:
        """All attributes but the times of accesses that the journal counts. No slot may be GONE."""
        arrays = {name: each.view for name, each in vars(self).items() if isinstance(each, Growing)}
        del arrays["_access_us"]
        arrays["_session"], sessions = self.sessions.pack(self._session.view)
        arrays["_speaker"], speakers = self.speakers.pack(self._speaker.view)
        arrays["metadata"], kinds = self.metadata.pack()
        values = {"ids": self.ids, "sessions": sessions, "speakers": speakers, "metadata": kinds}
        values["external_ids"] = {id_: each for id_, each in zip(self.ids, self.external_ids, strict=True) if each}
        return Parts(arrays, values)

    def unpack(self, parts: Parts) -> None:
        """Become what was packed, from empty, with the access times before any access was counted. Raises KeyError and
        ValueError for parts that do not fit together.
        """
        arrays, values = dict(parts.arrays), parts.values
        self.ids = values["ids"]
        self._slots = dict(zip(self.ids, range(len(self.ids)), strict=True))
        self.sessions.give_all(values["sessions"])
        self.speakers.give_all(values["speakers"])
        self.metadata.unpack(arrays.pop("metadata"), [tuple(map(tuple, each)) for each in values["metadata"]])
        self.external_ids = [values["external_ids"].get(id_, "") for id_ in self.ids]
        arrays["_access_us"] = arrays["_first_access_us"]
        for name, column in vars(self).items():
            if isinstance(column, Growing):
                column.extend(arrays.pop(name))
                if len(column) != len(self.ids):
                    raise ValueError(f"{name} has {len(column)} of {len(self.ids)} values")
        self._has_superseded = bool(self._superseded.view.any())
        bounds = self._valid_from_us.view, self._valid_until_us.view
        self._has_validity = bool((bounds[0] != -NEVER_US).any() or (bounds[1] != NEVER_US).any())

    def external_id_begins(self, prefixes: Sequence[str]) -> Mask:
        """Slots whose external_id begins with one of these."""
        wanted = tuple(prefixes)
        return np.fromiter((each.startswith(wanted) for each in self.external_ids), np.bool_, len(self))

    def tier_is(self, tiers: Sequence[Tier]) -> Mask:
        """Slots in one of the tiers."""
        return _match_codes(self._tier.view, [_TIERS.index(tier) for tier in tiers])

    def list_ids(self, tiers: Collection[Tier]) -> list[str]:
        """Ids of the fragments in these tiers, including forgotten ones, in order of receipt."""
        return [id_ for slot in np.flatnonzero(self.tier_is(tuple(tiers))) if (id_ := self.ids[slot]) != GONE]

    def kind_is(self, kinds: Sequence[FragmentKind]) -> Mask:
        """Slots of one of the kinds."""
        return _match_codes(self._kind.view, [_KINDS.index(kind) for kind in kinds])

    def is_unexpired(self, now_us: int, ttl_s: int = 0) -> Mask:
        """Slots that have not expired; `ttl_s` (policy) applies to fragments without an expiry of their own."""
        expire_us = self._expire_us.view
        left = expire_us > now_us
        if ttl_s:
            left &= (expire_us != NEVER_US) | (self._create_us.view > now_us - ttl_s * 1_000_000)
        return left

    def is_expired_at(self, slot: int, now_us: int, ttl_s: int = 0) -> bool:
        """As `is_unexpired`, of one slot."""
        expire_us = int(self._expire_us.view[slot])
        aged = bool(ttl_s) and expire_us == NEVER_US and self._create_us.view[slot] <= now_us - ttl_s * 1_000_000
        return expire_us <= now_us or bool(aged)

    def is_current(self, now_us: int) -> Mask | None:
        """Slots that are not superseded and are within their validity; None if all are, which is usual."""
        current = ~self._superseded.view if self._has_superseded else None
        if not self._has_validity:
            return current
        valid = (self._valid_from_us.view <= now_us) & (self._valid_until_us.view > now_us)
        return valid if current is None else current & valid

    @property
    def superseded(self) -> Mask | None:
        """Slots of superseded fragments; None if there never were any."""
        return self._superseded.view if self._has_superseded else None

    def is_superseded(self, slot: int) -> bool:
        """Whether another fragment supersedes the one at a slot."""
        return bool(self._superseded.view[slot])

    def status_at(self, slot: int, now_us: int) -> TruthStatus:
        """Whether the fragment at a slot is current at that time."""
        if self._superseded.view[slot]:
            return TruthStatus.SUPERSEDED
        if now_us < self._valid_from_us.view[slot]:
            return TruthStatus.NOT_YET_VALID
        return TruthStatus.NO_LONGER_VALID if now_us >= self._valid_until_us.view[slot] else TruthStatus.CURRENT

    def next_validity_us(self, now_us: int) -> int | None:
        """The next time at which a validity begins or ends; None if there is none."""
        if not self._has_validity:
            return None
        times_us = np.concatenate([self._valid_from_us.view[self.alive], self._valid_until_us.view[self.alive]])
        later = times_us[(times_us > now_us) & (times_us < NEVER_US)]
        return int(later.min()) if len(later) else None

    @property
    def create_us(self) -> npt.NDArray[np.int64]:
        """Times of receipt, int64[n]."""
        return self._create_us.view

    def _values_of(self, fragment: Fragment) -> tuple[float, ...]:
        """What a change of the fragment may change, in the order of `_growing`, of which it is the beginning."""
        return (
            self.sessions.assign_code(fragment.session),
            self.speakers.assign_code(fragment.speaker),
            _role_code(fragment),
            len(fragment.content),
            _TIERS.index(fragment.tier),
            _KINDS.index(fragment.kind),
            fragment.forget_time_us is None,
            fragment.importance,
            fragment.observe_time_us,
            fragment.repeat_time_us or fragment.observe_time_us,
            fragment.repeat_position or fragment.position,
            fragment.create_time_us,
            _expiry_us(fragment),
            max(fragment.access_time_us, fragment.create_time_us),
            bool(fragment.superseded_by),
            _bound_us(fragment.valid_from_us, -NEVER_US),
            _bound_us(fragment.valid_until_us, NEVER_US),
        )

    def _note_truth(self, fragments: Sequence[Fragment]) -> None:
        if self._has_superseded and self._has_validity:
            return
        for each in fragments:
            if each.superseded_by:
                self._has_superseded = True
            if each.valid_from_us is not None or each.valid_until_us is not None:
                self._has_validity = True

    def _has_other_truth(self, slot: int, fragment: Fragment) -> bool:
        return bool(
            self._superseded.view[slot] != bool(fragment.superseded_by)
            or self._valid_from_us.view[slot] != _bound_us(fragment.valid_from_us, -NEVER_US)
            or self._valid_until_us.view[slot] != _bound_us(fragment.valid_until_us, NEVER_US)
        )
