"""A decision for one memory, before it is committed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from memstream_server.core.events import Event, EventType, ModelUse, Purpose
from memstream_server.core.transition import Transition
from memstream_server.engine.memory.enrich import EnrichedFragment
from memstream_server.ports.journal.records import MemoryRecord
from memstream_server.ports.journal.writing import Effects
from memstream_server.ports.models import Account

if TYPE_CHECKING:
    from memstream_server.engine.memory.producers import Batch


@dataclass(frozen=True, slots=True, eq=False)
class Decision(Effects):
    """One transition of one memory before its commit, with the effects that the commit takes as they are."""

    transition: Transition | None = None
    gathered: Mapping[str, EnrichedFragment] = field(default_factory=dict)
    """Terms and vectors of new fragments and of changed texts, by fragment id."""
    batches: tuple[Batch, ...] = ()
    events: tuple[Event, ...] = ()
    """Events of the memory itself; they follow those of the transition."""
    time_us: int | None = None
    """Time of the decision if the answer contains it; None: the commit sets it."""

    def with_gathered(self, more: Sequence[EnrichedFragment]) -> Decision:
        """A copy with terms and vectors of merged texts. Their fragments name the model of the new vector."""
        if self.transition is None:
            return self
        found = {part.fragment.id: part for part in more}
        puts = tuple(
            put.but(model=found[put.id].fragment.model) if put.id in found else put for put in self.transition.puts
        )
        return replace(self, transition=replace(self.transition, puts=puts), gathered={**self.gathered, **found})

    def with_cost(self, account: Account, purpose: Purpose) -> Decision:
        """A copy with an event for the LLM requests and tokens that the decision cost, if there were any."""
        if not account.requests:
            return self
        use = ModelUse(purpose, account.model, account.requests, account.prompt_tokens, account.completion_tokens)
        return replace(self, events=(*self.events, Event(EventType.MODEL_ASKED, "", use=use)))


def account_of(record: MemoryRecord) -> Account:
    """A new account for the model requests of a memory."""
    return Account(record.namespace, record.uid)
