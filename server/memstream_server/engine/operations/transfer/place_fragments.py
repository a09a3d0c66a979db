"""Makes the transition that puts imported fragments into their tiers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
from msgspec.structs import asdict

from memstream_server.core.events import Event, EventType, Imported
from memstream_server.core.transition import Transition
from memstream_server.core.values import Enhancement, Fragment, Held, MemoryKind, State, Tier, Vector
from memstream_server.engine.memory.decision import account_of
from memstream_server.engine.memory.enrich import EnrichedFragment, compares_content
from memstream_server.engine.operations.transfer.check_lines import values_of
from memstream_server.engine.operations.transfer.lines import FragmentLine

if TYPE_CHECKING:
    from memstream_server.engine.runtime.dependencies import EngineModels
    from memstream_server.ports.journal.records import MemoryRecord

_OF_LINES_ALONE = ("model", "version", "vector", "content_vector", "enhancements", "conflicts")
"""What a fragment does not take from its line: an import gives it a version and the space of its vector."""


def is_held(line: FragmentLine) -> bool:
    """Whether the sensory or short-term tier holds it."""
    return line.tier is not Tier.LONG_TERM and line.forget_time_us is None


def fragment_of(line: FragmentLine, model: str) -> Fragment:
    """The fragment of a line. Ignores a client's vector if it is in another space than `model`."""
    given = asdict(line)
    for name in _OF_LINES_ALONE:
        del given[name]
    given["structured"] = None if line.structured is None else values_of(line.structured)
    given["sources"] = tuple(line.sources)
    given["metadata"] = tuple(sorted(line.metadata.items()))
    given["own_vector"] = line.own_vector and line.model == model
    given["superseded_by"] = line.superseded_by or ""
    given["supersedes"] = tuple(line.supersedes)
    return Fragment(**given)


async def enrich_lines(
    batch: Sequence[FragmentLine], record: MemoryRecord, models: EngineModels
) -> list[EnrichedFragment]:
    """Terms and vectors of a batch, in order. Waits while the model is down."""
    patient = replace(record, policy=replace(record.policy, wait_for_models=True))
    found: dict[str, EnrichedFragment] = {}
    for held in (False, True):
        part = [line for line in batch if is_held(line) is held]
        # Only held fragments are compared by content.
        asking = patient if held else replace(patient, kind=MemoryKind.LONG_TERM)
        content = held and compares_content(record.kind, record.policy)
        exported = {line.id: vector for line in part if (vector := _given_vector(line, content, models)) is not None}
        # In a computed space the text gives most of them, and what it gives need not be stored.
        computed = models.embedding_model.computed
        given = {
            line.id: exported[line.id] for line in part if line.id in exported and (line.own_vector or not computed)
        }
        fragments = [fragment_of(line, models.embedding_model.name) for line in part]
        importances = [line.importance for line in part]
        for line, one in zip(
            part,
            await models.enricher.enrich_fragments(fragments, given, importances, asking, account_of(record)),
            strict=True,
        ):
            found[line.id] = _with_exported(one, line, exported[line.id], content) if line.id in exported else one
    return [found[line.id] for line in batch]


def _with_exported(one: EnrichedFragment, line: FragmentLine, vector: Vector, content: bool) -> EnrichedFragment:
    """With the exported vectors where they differ from those that it has: these follow from the text."""
    embedded = one.embedded
    if not np.array_equal(embedded.vector, vector):  # type: ignore[arg-type]  # None is equal to no vector
        compared = embedded.content_vector if content else vector
        embedded = replace(embedded, vector=vector, content_vector=compared, computed=False)
    if content and line.content_vector is not None:
        compared = _unpack_vector(line.content_vector)
        if not np.array_equal(embedded.content_vector, compared):  # type: ignore[arg-type]  # as above
            embedded = replace(embedded, content_vector=compared, computed=False)
    return one if embedded is one.embedded else replace(one, embedded=embedded)


def _given_vector(line: FragmentLine, content: bool, models: EngineModels) -> Vector | None:
    """The exported vector, if it is in the server's space and the content needs no vector of its own."""
    if line.vector is None or line.model != models.embedding_model.name:
        return None
    if content and line.content_vector is None and not line.own_vector:
        return None
    return _unpack_vector(line.vector)


def _unpack_vector(packed: bytes) -> Vector:
    return np.frombuffer(packed, "<f4")


def transition_of(
    state: State, batch: Sequence[FragmentLine], parts: Sequence[EnrichedFragment], compares: bool
) -> Transition:
    """The transition that adds the batch after the fragments of `state`; `compares`: short-term compares vectors."""
    sensory, short_term = list(state.sensory), list(state.short_term)
    events = []
    for line, part in zip(batch, parts, strict=True):
        enhancements = tuple(
            Enhancement(one.id, one.text, one.recollection, values_of(one.structured) if one.structured else None)
            for one in line.enhancements
        )
        if is_held(line):
            tier = sensory if line.tier is Tier.SENSORY else short_term
            tier.append(Held(part.fragment, part.content_vector if compares else None, enhancements))
        events.append(
            Event(
                EventType.IMPORTED,
                line.id,
                to_tier=line.tier,
                importance=line.importance,
                sources=tuple(line.sources),
                imported=Imported(
                    kind=line.kind,
                    enhancements=tuple(one.id for one in enhancements),
                    enhancement_count=line.enhancement_count,
                    duplicate_count=line.duplicate_count,
                    forgotten=line.forget_time_us is not None,
                ),
            )
        )
        if line.superseded_by:
            events.append(Event(EventType.SUPERSEDED, line.id, other=line.superseded_by))
    return Transition(
        state=replace(state, sensory=tuple(sensory), short_term=tuple(short_term)),
        events=tuple(events),
        puts=tuple(part.fragment for part in parts),
    )
