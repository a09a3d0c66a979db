"""Roles, the share of context and replies, against a plain computation of the same rules."""

from __future__ import annotations

import random
from collections.abc import Sequence

import numpy as np
import pytest

from memstream_server.core.columns import Columns
from memstream_server.core.dialogue import SHORT_SESSION, Dialogue, find_dialogue
from memstream_server.core.neighbours import NOBODY, Neighbours
from memstream_server.core.values import Fragment, Role


def turns_of(fragments: Sequence[Fragment], removed: Sequence[int] = ()) -> Dialogue:
    columns, neighbours = Columns(), Neighbours()
    columns.extend(fragments)
    for slot, one in enumerate(fragments):
        neighbours.append(int(columns.linked_sessions(slot)[0]), len(one.content) <= 2_000, 1)
    for slot in removed:
        columns.update(fragments[slot].but(forget_time_us=1))
        neighbours.set_alive(slot, False)
    return find_dialogue(columns, neighbours)


def said(number: int, speaker: str = "", session: str = "s", role: Role | None = None, words: int = 3) -> Fragment:
    return Fragment(f"{number:05}", "word " * words, speaker=speaker, session=session, role=role)


def talk(*speakers: str, session: str = "s", words: int = 3) -> list[Fragment]:
    return [said(number, speaker, session, words=words) for number, speaker in enumerate(speakers)]


def test_context_counts_fully_where_two_people_talk() -> None:
    assert turns_of(talk(*["Ann", "Bob"] * 30)).context.tolist() == [1.0] * 60
    apart = turns_of(talk(*["Ann"] * 30, "Bob")).context
    assert apart[-5:].tolist() == [1.0] * 5, "Bob is in the windows of the last four"
    assert (apart[:-5] < 0.2).all()


def test_context_of_one_voice_shrinks_with_the_session() -> None:
    shares = [float(turns_of(talk(*["Ann"] * size)).context[0]) for size in (1, SHORT_SESSION, 2 * SHORT_SESSION, 120)]
    assert shares == pytest.approx([1, 1, 0.25, 0.01])


def test_fragment_without_session_has_no_context_and_no_reply() -> None:
    alone = turns_of(talk("user", "assistant", "Ann", "Bob", session=""))
    assert alone.context.tolist() == [0.0] * 4
    assert alone.messages.tolist() == alone.replies.tolist() == [NOBODY] * 4


@pytest.mark.parametrize(
    ("names", "messages"),
    [
        (("user", "assistant", "user", "AI"), [-1, 0, -1, 2]),
        (("Ann", "tool", "tool", "bot", "bot"), [-1, -1, -1, 0, -1]),
        (("assistant", "system", "assistant", "Ann"), [-1, -1, -1, -1]),
        (("Ann", "Agent Smith"), [-1, -1]),
    ],
)
def test_reply_answers_the_message_right_before_it(names: tuple[str, ...], messages: list[int]) -> None:
    assert turns_of(talk(*names)).messages.tolist() == messages


def test_given_role_outweighs_the_name() -> None:
    turns = turns_of([said(0, "assistant", role=Role.USER), said(1, "Ann", role=Role.ASSISTANT)])
    assert turns.messages.tolist() == [NOBODY, 0]
    assert turns.replies.tolist() == [1, NOBODY]


def test_wordy_one_of_two_speakers_is_an_assistant() -> None:
    long = [said(number, "Lex" if number % 2 else "Ann", words=30 if number % 2 else 10) for number in range(40)]
    assert turns_of(long).messages[1::2].tolist() == list(range(0, 40, 2))
    even = [said(number, "Lex" if number % 2 else "Ann", words=22 if number % 2 else 10) for number in range(40)]
    assert (turns_of(even).messages == NOBODY).all()
    third = turns_of([*long, said(40, "Cid")])
    assert (third.messages == NOBODY).all(), "with three speakers, length says nothing"


def test_ten_thousand_replies_in_a_row_answer_one_message() -> None:
    turns = turns_of([said(0, "user"), *(said(number, "assistant") for number in range(1, 10_001))])
    assert np.flatnonzero(turns.messages != NOBODY).tolist() == [1]
    assert np.flatnonzero(turns.replies != NOBODY).tolist() == [0]


def _plain_turns(given: Sequence[Fragment], removed: Sequence[int]) -> tuple[list[float], list[int]]:
    """For fragments whose names all say a role, or are people."""
    kinds = ["assistant" if one.speaker == "AI" else "tool" if one.speaker == "tool" else "person" for one in given]
    shares, messages = [0.0] * len(given), [NOBODY] * len(given)
    for session in {one.session for one in given} - {""}:
        live = [slot for slot, one in enumerate(given) if one.session == session and slot not in removed]
        short = [slot for slot in live if len(given[slot].content) <= 2_000]
        for place, slot in enumerate(live):
            near = [each for each in short if each < slot][-4:] + [each for each in short if each > slot][:4]
            others = {given[each].speaker for each in near if kinds[each] == "person"} - {given[slot].speaker}
            shares[slot] = 1.0 if kinds[slot] == "person" and others else min(1.0, (SHORT_SESSION / len(live)) ** 2)
            back = place - 1
            while back >= 0 and kinds[live[back]] == "tool":
                back -= 1
            if kinds[slot] == "assistant" and back >= 0 and kinds[live[back]] == "person":
                messages[slot] = live[back]
    return shares, messages


@pytest.mark.parametrize("seed", range(20))
def test_turns_follow_the_rules_after_any_removal(seed: int) -> None:
    chance = random.Random(seed)
    given = [
        said(
            number,
            chance.choice(["Ann", "Ann", "Bob", "AI", "AI", "tool"]),
            chance.choice(["", "a", "a", "b"]),
            words=chance.choice([1, 500]),
        )
        for number in range(120)
    ]
    removed = chance.sample(range(120), 20)
    turns, (shares, messages) = turns_of(given, removed), _plain_turns(given, removed)
    live = [slot for slot in range(120) if slot not in removed]
    assert turns.context[live].tolist() == pytest.approx([shares[slot] for slot in live])
    assert turns.messages.tolist() == messages


def test_moved_fragment_counts_in_its_new_session() -> None:
    columns, moved = Columns(), Neighbours()
    fragments = [
        said(number, name, session) for number, (name, session) in enumerate(zip("AABBAB", "ssttsu", strict=True))
    ]
    columns.extend(fragments)
    for slot, one in enumerate(fragments):
        moved.append(int(columns.linked_sessions(slot)[0]), len(one.content) <= 2_000, 1)
    find_dialogue(columns, moved)
    for slot in (5, 1):  # the only one of its session, and one of three
        columns.update(fragments[slot].but(session="t"))
        moved.move(slot, int(columns.linked_sessions(slot)[0]))
    moved.move(0, int(columns.linked_sessions(0)[0]))  # where it is
    other = [one.but(session="t") if slot in (5, 1) else one for slot, one in enumerate(fragments)]
    expected = turns_of(other)
    found = find_dialogue(columns, moved)
    assert found.context.tolist() == expected.context.tolist()
    assert (found.messages.tolist(), found.replies.tolist()) == (expected.messages.tolist(), expected.replies.tolist())
