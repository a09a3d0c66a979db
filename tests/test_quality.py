"""The measure of recall quality, on conversations made up here, through client and server."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime, timedelta

import pytest

from benchmarks.quality import Retriever
from tests.support.server import ServerProcess

NOON = datetime(2024, 3, 4, 12)


@dataclass(frozen=True)
class Said:
    """A turn, as the measure gives it."""

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
    """Two sessions a week apart; one turn is said twice in a row, and once more in the other session."""
    turns = []
    for session, lines in enumerate((PETS, WORK), 1):
        start = NOON + timedelta(days=7 * session)
        for place, (speaker, text) in enumerate(lines):
            turns.append(Said(f"D{session}:{place + 1}", text, speaker, start + timedelta(seconds=place), session))
    return turns


NOW = NOON + timedelta(days=15)


@pytest.fixture(scope="module")
def retriever(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Retriever]:
    with ServerProcess(tmp_path_factory.mktemp("quality") / "data") as server:
        made = Retriever(server.address)
        made.ingest("friends", conversation())
        yield made
        made.close()


def test_a_repeat_within_a_session_is_counted_and_everything_else_is_kept(retriever: Retriever) -> None:
    found = retriever.check_turns("friends", conversation(), NOW)
    assert found.turns == 11
    assert found.counted_elsewhere == 1, "said twice in a row in one session"
    assert found.listed == 10
    assert found.complete


def test_every_turn_is_found_by_its_own_words_or_its_time(retriever: Retriever) -> None:
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
def test_a_question_finds_the_turn_that_answers_it(retriever: Retriever, question: str, turn: str) -> None:
    assert turn in retriever.recall("friends", question, NOW, 3)


def test_the_ranking_has_no_turn_twice_and_no_more_than_asked_for(retriever: Retriever) -> None:
    for limit in (1, 5, 50):
        ranked = retriever.recall("friends", "Good luck", NOW, limit)
        assert len(ranked) == len(set(ranked)) <= limit


def test_measuring_changes_nothing(retriever: Retriever) -> None:
    def ask() -> list[str]:
        return retriever.recall("friends", "vase", NOW, 50)

    assert ask() == ask()


def test_conversations_do_not_see_each_other(retriever: Retriever) -> None:
    alone = [Said("D1:1", "The vase is still in one piece here.", "Ines", NOON, 1)]
    retriever.ingest("stranger", alone)
    assert retriever.recall("stranger", "What happened to the vase?", NOW, 50) == ["D1:1"]
