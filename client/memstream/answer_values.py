"""The answer to a query: recollections with their scores, near misses and what else the answer says."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import overload

from memstream.conflict_values import Suspicion
from memstream.values import Fragment, TruthStatus


@dataclass(frozen=True, slots=True)
class ScorePart:
    """One part of a score: value x weight = contribution."""

    name: str
    value: float
    weight: float
    contribution: float
    details: Mapping[str, float]


@dataclass(frozen=True, slots=True)
class Explanation:
    """The parts of a score; the contributions sum to it."""

    parts: tuple[ScorePart, ...]
    formula: str


@dataclass(frozen=True, slots=True)
class ChainLink:
    """A fragment in a chain of supersessions."""

    fragment_id: str
    observe_time: datetime | None
    status: TruthStatus


@dataclass(frozen=True, slots=True)
class Recollection:
    """A recalled fragment and its scores; `explanation` is None unless requested.
    `folded_ids`: fragments with the same content, which are not ranked separately. `chain`: the current end of
    its chain of supersessions and what it supersedes, older before newer, at most 20; empty without one. `suspicions`:
    open suspicions about the fragment, as the newer or the older of two. `later_id`: of an earlier statement, the
    later one, of better rank, that may replace it. `companion`: the assistant's reply to a user's message, of rank 0.
    `memory`: in an answer of several memories, the path of the one that holds it.
    """

    fragment: Fragment
    score: float
    relevance: float
    rank: int
    truncated: bool
    explanation: Explanation | None
    folded_ids: tuple[str, ...] = ()
    status: TruthStatus = TruthStatus.UNKNOWN
    chain: tuple[ChainLink, ...] = ()
    suspicions: tuple[Suspicion, ...] = ()
    later_id: str = ""
    companion: Recollection | None = None
    memory: str = ""

    @property
    def fragments(self) -> tuple[Fragment, ...]:
        """The fragment, and that of its companion if there is one."""
        return (self.fragment,) if self.companion is None else (self.fragment, self.companion.fragment)


@dataclass(frozen=True, slots=True)
class NearMiss:
    """A fragment that was nearly returned, and the stage that removed it; after "superseded" by `superseded_by`.
    `memory`: as in Recollection."""

    fragment_id: str
    stage: str
    score: float | None
    relevance: float | None
    superseded_by: str = ""
    memory: str = ""


@dataclass(frozen=True, slots=True)
class InterpretedTime:
    """A phrase of time in a query, and the time it was taken for: from `from_time` up to, not including, `to_time`.
    None is an open side: "before Christmas" has no `from_time`."""

    phrase: str
    from_time: datetime | None
    to_time: datetime | None


@dataclass(frozen=True, slots=True)
class Unmatched:
    """A part of a filter that nothing can match, because no fragment of the memory has it: `field` is "speakers",
    "sessions" or "metadata", `value` the name or the metadata's key."""

    field: str
    value: str

    def __str__(self) -> str:
        """A sentence, such as 'no fragment has the speaker "Bobb"'."""
        noun = {"speakers": "speaker", "sessions": "session", "metadata": "metadata key"}.get(self.field, self.field)
        return f'no fragment has the {noun} "{self.value}"'


class FragmentCount(int):
    """How many fragments a call changed. `unmatched`: the speakers, sessions and metadata keys of its filter that the
    memory does not have."""

    unmatched: tuple[Unmatched, ...] = ()


@dataclass(frozen=True, slots=True)
class MemoryAnswer:
    """What one of several memories contributed to an answer: the number of its `recollections`, and the rest as in
    Answer, of this memory alone. `degraded`: also why it did not answer."""

    memory: str
    revision: int
    eligible: int
    considered: int
    best_relevance: float
    weak: bool
    degraded: str
    recollections: int
    working_memory_ids: tuple[str, ...] = ()
    receipt_id: str = ""
    as_of_revision: int = 0
    unmatched: tuple[Unmatched, ...] = ()


@dataclass(frozen=True, slots=True)
class Answer(Sequence[Recollection]):
    """The answer to a query: a sequence of recollections, best first, with working memory and statistics.

    `working_memory`: the short-term tier in order. `timings`: seconds by step. `degraded`: empty unless the answer is
    incomplete (a search leg or importances are missing). `best_relevance`: the maximum over all candidates, returned or
    not. `weak`: the best shares no word with the query other than names, so memory probably knows nothing about it.
    `interpreted`: the phrases of time in the query, in order.
    `as_of_revision`: of a query with `as_of`, the revision that was ranked; else 0. `receipt_id`: the receipt that was
    kept; empty without `receipt`, and if the policy keeps none. `unmatched`: the speakers, sessions and metadata keys
    of the filter that the memory does not have. `memories`: of a recall over several memories, what each contributed;
    `revision`, `as_of_revision` and `receipt_id` are then there.
    """

    recollections: tuple[Recollection, ...]
    working_memory: tuple[Fragment, ...]
    revision: int
    eligible: int
    considered: int
    best_relevance: float
    degraded: str
    near_misses: tuple[NearMiss, ...]
    timings: Mapping[str, float]
    tokens: int
    weak: bool = False
    interpreted: tuple[InterpretedTime, ...] = ()
    as_of_revision: int = 0
    receipt_id: str = ""
    unmatched: tuple[Unmatched, ...] = ()
    memories: tuple[MemoryAnswer, ...] = ()

    @overload
    def __getitem__(self, index: int) -> Recollection: ...
    @overload
    def __getitem__(self, index: slice) -> tuple[Recollection, ...]: ...
    def __getitem__(self, index: int | slice) -> Recollection | tuple[Recollection, ...]:
        return self.recollections[index]

    def __len__(self) -> int:
        return len(self.recollections)

    def __iter__(self) -> Iterator[Recollection]:
        return iter(self.recollections)
