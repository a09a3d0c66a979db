"""The measure of recall quality on made-up conversations, through client and server."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime, timedelta

import pytest

import memstream
from benchmarks.quality import Retriever
from tests.support.server import ServerProcess

NOON = datetime(2024, 3, 4, 12)


@dataclass(frozen=True)
class Said:
    """A turn, as the measure defines it."""

    id: str
    text: str
    speaker: str
    timestamp: datetime
    session: int


PETS = [
    ("Mara", "My cat Biscuit broke a vase this morning."),
    ("Theo", "Oh no, was it the blue one from your grandmother?"),
    ("Mara", "Yes. I glued it together again, nobody will notice."),
    ("Theo", "I am training for the marathon in Lisbon."),
    ("Mara", "Good luck with that!"),
    ("Mara", "Good luck with that!"),
]
WORK = [
    ("Theo", "The bakery on Elm Street hired me as a night baker."),
    ("Mara", "Congratulations! When do you start?"),
    ("Theo", "On the first of April, at two in the morning."),
    ("Mara", "Good luck with that!"),
    ("Theo", ";)"),
]


def conversation() -> list[Said]:
    """Two sessions a week apart. One turn has a repeat in its session, and the same words in the other session."""
    turns = []
    for session, lines in enumerate((PETS, WORK), 1):
        start = NOON + timedelta(days=7 * session)
        for place, (speaker, text) in enumerate(lines):
            when = start + timedelta(seconds=lines.index((speaker, text)))  # a repeat has the same time
            turns.append(Said(f"D{session}:{place + 1}", text, speaker, when, session))
    return turns


NOW = NOON + timedelta(days=15)


@pytest.fixture(scope="module")
def retriever(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Retriever]:
    with ServerProcess(tmp_path_factory.mktemp("quality") / "data") as server:
        made = Retriever(server.address)
        made.ingest("friends", conversation())
        yield made
        made.close()


def test_repeat_is_counted_and_other_turns_are_kept(retriever: Retriever) -> None:
    found = retriever.check_turns("friends", conversation(), NOW)
    assert found.turns == 11
    assert found.counted_elsewhere == 1, "one repeat within a session"
    assert found.listed == 10
    assert found.complete


def test_own_words_or_time_find_every_turn(retriever: Retriever) -> None:
    found = retriever.check_turns("friends", conversation(), NOW)
    assert found.lost == 0
    assert found.first >= 10


@pytest.mark.parametrize(
    ("question", "turn"),
    [
        ("What did Biscuit break?", "D1:1"),
        ("Which marathon is Theo training for?", "D1:4"),
        ("Where did Theo get hired as a baker?", "D2:1"),
        ("When does the work at the bakery start, in the morning?", "D2:3"),
    ],
)
def test_question_finds_its_answer(retriever: Retriever, question: str, turn: str) -> None:
    assert turn in retriever.recall("friends", question, NOW, 3)


@pytest.mark.parametrize(
    ("question", "weak"), [("Which marathon is Theo training for?", False), ("Is Zoltan a violinist?", True)]
)
async def test_answer_says_whether_it_is_weak(retriever: Retriever, question: str, weak: bool) -> None:
    async with memstream.connect(retriever.target) as client:
        answer = await client.memory("quality/friends").recall_once(question, reinforce=False)
        silent = await client.memory("quality/friends").recall_once(question, reinforce=False, weak_below=0.0)
    assert (answer.weak, silent.weak) == (weak, False)


def test_ranking_has_distinct_turns_within_the_limit(retriever: Retriever) -> None:
    for limit in (1, 5, 50):
        ranked = retriever.recall("friends", "Good luck", NOW, limit)
        assert len(ranked) == len(set(ranked)) <= limit


def test_measuring_does_not_change_the_ranking(retriever: Retriever) -> None:
    def recall_vase() -> list[str]:
        return retriever.recall("friends", "vase", NOW, 50)

    assert recall_vase() == recall_vase()


def test_conversations_are_isolated(retriever: Retriever) -> None:
    alone = [Said("D1:1", "The vase is still in one piece here.", "Ines", NOON, 1)]
    retriever.ingest("stranger", alone)
    assert retriever.recall("stranger", "What happened to the vase?", NOW, 50) == ["D1:1"]
