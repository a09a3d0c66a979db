"""What was decided for one memory, before it is committed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from memstream_server.core.events import Event, EventType, ModelUse, Purpose
from memstream_server.core.policy import Policy
from memstream_server.core.transition import Transition
from memstream_server.engine.memory.enrich import Gathered
from memstream_server.ports.journal.records import Answer, Job, MemoryRecord
from memstream_server.ports.journal.writing import Outcomes
from memstream_server.ports.models import Account

if TYPE_CHECKING:
    from memstream_server.engine.memory.receipts import Batch


@dataclass(frozen=True, slots=True, eq=False)
class Decision:
    """One transition of one memory before it is committed. Fields left alone change nothing."""

    transition: Transition | None = None
    gathered: Mapping[str, Gathered] = field(default_factory=dict)
    """Terms and vectors of the fragments that are new or say something else now, by id."""
    batches: tuple[Batch, ...] = ()
    events: tuple[Event, ...] = ()
    """Events of the memory itself, after the transition's."""
    policy: Policy | None = None
    labels: tuple[tuple[str, str], ...] | None = None
    name: tuple[str, str] | None = None
    """(namespace, name) to go by from now on."""
    namespace_max: int = 0
    """Memories that namespace may hold with it, 0: no limit."""
    answer: Answer | None = None
    answers: tuple[Answer, ...] = ()
    """Of the calls whose batches are decided, and what is kept of those batches' outcomes: see Commit."""
    outcomes: tuple[Outcomes, ...] = ()
    erased: tuple[str, ...] = ()
    """Ids of which nothing they said before is to be kept, see Commit."""
    jobs: tuple[Job, ...] = ()
    finish_jobs: tuple[str, ...] = ()
    time_us: int | None = None
    """When it was decided, where the answer tells it; else it is the commit's own."""

    def with_gathered(self, more: Sequence[Gathered]) -> Decision:
        """The same with terms and vectors of merged texts; their fragments name the model of the new vector."""
        if self.transition is None:
            return self
        found = {part.fragment.id: part for part in more}
        puts = tuple(
            put.but(model=found[put.id].fragment.model) if put.id in found else put for put in self.transition.puts
        )
        return replace(self, transition=replace(self.transition, puts=puts), gathered={**self.gathered, **found})

    def costing(self, account: Account, purpose: Purpose) -> Decision:
        """The same with what asking an LLM for it took, if one was asked."""
        if not account.requests:
            return self
        use = ModelUse(purpose, account.model, account.requests, account.prompt_tokens, account.completion_tokens)
        return replace(self, events=(*self.events, Event(EventType.MODEL_ASKED, "", use=use)))


def account_of(record: MemoryRecord) -> Account:
    """A new account of what is asked on behalf of a memory."""
    return Account(record.namespace, record.uid)
