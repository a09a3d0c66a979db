"""A message is ranked with its reply, and the reply is its companion."""

from __future__ import annotations

import math

import numpy as np
import pytest

from memstream_server.core.filters import Filter
from memstream_server.core.ranking import Stage
from memstream_server.core.scores import ANSWER_PART, ANSWER_WEIGHT, Scored
from memstream_server.core.values import Fragment
from tests.core_recall.test_ranking import Memory, memory_of

QUERY = "which bridge shall we cross by bicycle?"


def chat(*contents: str) -> list[Fragment]:
    """Texts of a user and an assistant in turn."""
    return [
        Fragment(f"f{place}", text, speaker="assistant" if place % 2 else "user", session="s")
        for place, text in enumerate(contents)
    ]


@pytest.fixture
def memory() -> Memory:
    return memory_of(
        *chat(
            "what is the way to the harbour?",
            "take your bicycle over the iron bridge",
            "and which bridge for the tram?",
            "the stone one",
            "thanks",
            "you are welcome",
        )
    )


def part(scored: Scored, name: str) -> float:
    return {each.name: each.value for each in scored.parts}[name]


def test_reply_is_the_companion_and_takes_no_place(memory: Memory) -> None:
    found = memory.ask(QUERY)
    assert [one.id for one in found.results] == ["f0", "f2", "f4"]
    assert {id_: one.id for id_, one in found.companions.items()} == {"f0": "f1", "f2": "f3", "f4": "f5"}
    assert len(memory.ask(QUERY, limit=1).companions) == 1


def test_scores_with_replies_are_exact_sums(memory: Memory) -> None:
    found = memory.ask(QUERY)
    for one in (*found.results, *found.companions.values()):
        assert one.score == math.fsum(each.value * each.weight for each in one.parts)
        assert ANSWER_PART in one.names
    top, reply = found.results[0], found.companions["f0"]
    legs = [each.contribution for each in reply.parts if each.name in ("dense", "lexical", "context", "reply")]
    assert part(top, ANSWER_PART) == pytest.approx(sum(legs))
    assert {each.name: each.weight for each in top.parts}[ANSWER_PART] == ANSWER_WEIGHT
    assert part(reply, ANSWER_PART) == 0


def test_min_relevance_passes_both_or_neither(memory: Memory) -> None:
    found = memory.ask(QUERY)
    best = found.companions["f0"].relevance
    assert found.results[0].relevance == best, "the reply matches better than the message"
    assert [one.id for one in memory.ask(QUERY, min_relevance=best).results] == ["f0"]
    assert memory.ask(QUERY, min_relevance=best + 1e-6).results == ()


def test_filter_separates_message_and_reply(memory: Memory) -> None:
    alone = memory.ask(QUERY, chosen=Filter(speakers=("assistant",)))
    assert alone.results[0].id == "f1"
    assert not alone.companions
    asked = memory.ask(QUERY, chosen=Filter(speakers=("user",)))
    assert not asked.companions
    assert all(ANSWER_PART not in one.names for one in asked.results), "a reply that may not be seen lends nothing"


def test_reply_of_a_message_beyond_the_limit_is_a_near_miss(memory: Memory) -> None:
    missed = memory.ask(QUERY, limit=1, near_misses=10).near_misses
    assert {each.scored.id: each.stage for each in missed} == dict.fromkeys(("f2", "f3", "f4", "f5"), Stage.LIMIT)


def test_message_is_found_by_its_reply_alone() -> None:
    texts = [f"tell me about item {number}" for number in range(400)]
    replies = [f"answer number {number}" for number in range(399)] + ["a bicycle crosses the bridge"]
    memory = memory_of(*chat(*(text for pair in zip(texts, replies, strict=True) for text in pair)))
    found = memory.ask("bicycle bridge")
    assert (found.results[0].id, found.companions[found.results[0].id].id) == ("f798", "f799")


def test_notes_without_session_lend_each_other_nothing() -> None:
    notes = [
        Fragment(f"n{place}", text) for place, text in enumerate(["the train leaves at noon", "rain", "Ann sings"])
    ]
    found = memory_of(*notes).ask("when does the train leave?")
    values = [dict(zip(one.names, np.multiply(one.values, one.weights), strict=True)) for one in found.results]
    assert [each["context"] + each["reply"] for each in values] == [0.0] * 3
    assert all(one.relevance < 0.05 for one in found.results[1:])
