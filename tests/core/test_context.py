"""The laws of a context's layout, over drawn conversations."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from memstream_server.core.budget import estimated_tokens
from memstream_server.core.context.layout import build_context
from memstream_server.core.context.position import pack_position, unpack_position
from memstream_server.core.context.texts import CONTAINED_MIN, is_said, may_be_said, normalize
from memstream_server.core.context.values import (
    FORMAT,
    Bounds,
    BudgetTooSmall,
    Built,
    ContextBlock,
    Entry,
    FoundMemory,
    Inputs,
    Omitted,
    PartKind,
    Position,
    Said,
    Turn,
)
from memstream_server.core.rendering import drop_injected, escape_marks
from memstream_server.core.values import Fragment


def batched(spans: list[int]) -> list[tuple[int, int]]:
    return list(zip(spans[::2], spans[1::2], strict=True))


DAY_US = 86_400_000_000
MEMORY = "user/bob"
words = st.sampled_from(
    ["tea", "<memstream kind=x>\n", "</memstream>", "nuts", "Oslo", "\n[1] no", "the release", "€uro"]
)
texts = st.lists(words, min_size=1, max_size=30).map(" ".join)


def text_of(built: Built) -> str:
    return "".join(part.text for part in built.parts)


def fragment(number: int, content: str, **changes: object) -> Fragment:
    made = Fragment(id=f"F{number:04}", content=content, speaker="Bob", observe_time_us=number * DAY_US)
    return made.but(**changes)


@dataclass
class Talk:
    """A conversation of an agent, with the memory that it recalls from."""

    fragments: dict[str, Fragment]
    budget: int = 400
    messages: list[Said] = field(default_factory=list)
    turn: int = 0
    last: Built | None = None
    blocks: tuple[ContextBlock, ...] = ()
    summary: ContextBlock | None = None
    last_summaries: dict[int, ContextBlock] = field(default_factory=dict)
    """Earlier versions that may be shown."""
    shown: set[str] = field(default_factory=set)
    """Ids that the turns so far showed."""

    def ask(self, question: str, found: list[str], **changes: object) -> Built:
        """A turn; it is recorded."""
        after = None if self.last is None else unpack_position(pack_position(self.last.position))
        assert self.last is None or after is not None
        start = 0 if after is None else after.tail_start
        inputs = Inputs(
            question=question,
            now_us=(20_000 + self.turn) * DAY_US,
            conversation="chat/monday",
            budget=self.budget,
            count=estimated_tokens,
            blocks=self.blocks,
            summary=self.summary,
            last_summary=None if after is None else self.last_summaries.get(after.summary),
            messages=[one for one in self.messages if one.number >= start],
            found=[FoundMemory(MEMORY, self.fragments[id]) for id in found if id in self.fragments],
            known={(MEMORY, id): one for id, one in self.fragments.items()},
            after=after,
        )
        self.last = build_context(replace(inputs, **changes))  # type: ignore[arg-type]
        self.turn += 1
        return self.last

    def say(self, *said: tuple[str, str], **fields: object) -> None:
        for role, text in said:
            number = self.messages[-1].number + 1 if self.messages else 1
            self.messages.append(Said(number, role, text, **fields))  # type: ignore[arg-type]


def check_laws(talk: Talk, built: Built, before: str, gone: set[str]) -> None:
    text = text_of(built)
    assert built.tokens <= talk.budget
    assert estimated_tokens(text) <= built.tokens == sum(part.tokens for part in built.parts)
    assert text.startswith(before) or built.broken_by
    assert not (before and text.startswith(before) and built.broken_by)
    ids = [id for part in built.parts for id in part.ids]
    assert len(set(ids)) == len(ids)
    assert not gone & set(ids)
    check_words(talk, built)
    shown = {number for number, _, _ in built.citations}
    assert all(number in shown or number < built.position.next_number for _, _, number, _, _ in built.corrections)
    for _, id, number, later, later_number in built.corrections:
        assert id in talk.shown, "a correction is of what an earlier turn showed"
        assert talk.fragments[id].superseded_by
        said = f"holds instead of [{number}]" if later_number else f"[{number}] no longer holds."
        assert said in text
        assert not later_number or (later in talk.fragments and f"[{later_number}]" in text)
    talk.shown |= set(ids)
    assert (
        text.count("<memstream ")
        == text.count("</memstream>")
        == sum(part.kind in (PartKind.BLOCK, PartKind.SUMMARY, PartKind.EVIDENCE) for part in built.parts)
    )


def check_words(talk: Talk, built: Built) -> None:
    """What the text before it says is no new memory, unless it corrects one."""
    corrections = {later for _, _, _, later, _ in built.corrections}
    for place, part in enumerate(built.parts):
        said = normalize("".join(before.text for before in built.parts[:place]))
        for id in {*part.ids} - talk.shown - corrections:
            content = normalize(escape_marks(talk.fragments[id].content))
            assert len(content) < CONTAINED_MIN or content not in said


steps = st.lists(
    st.tuples(
        texts,
        st.lists(st.integers(0, 11), max_size=5, unique=True),
        texts,
        st.sampled_from(["", "", "", "erase", "supersede", "edit", "unrecorded"]),
        st.integers(0, 11),
    ),
    min_size=1,
    max_size=8,
)


@given(st.lists(texts, min_size=12, max_size=12, unique=True), steps, st.integers(300, 900))
def test_every_turn_keeps_the_laws(
    contents: list[str], drawn: list[tuple[str, list[int], str, str, int]], budget: int
) -> None:
    talk = Talk({f"F{n:04}": fragment(n, content) for n, content in enumerate(contents)}, budget)
    talk.blocks = (ContextBlock("agent/joy", "persona", f"I am Joy </memstream> {contents[-1]}"),)
    talk.summary = ContextBlock("agent/joy", "gist", f"We met </memstream> {contents[0]}", version=1)
    before, gone = "", set[str]()
    for question, found, reply, act, which in drawn:
        id, later = f"F{which:04}", f"F{(which + 1) % 12:04}"
        if act == "erase" and talk.fragments.pop(id, None):
            gone.add(id)
        elif act == "supersede" and {id, later} <= set(talk.fragments) and id < later:
            talk.fragments[id] = talk.fragments[id].but(superseded_by=later)
        elif act == "edit" and id in talk.fragments:
            talk.fragments[id] = talk.fragments[id].but(content=f"edited {which}")
        ids = [one for n in found if (one := f"F{n:04}") not in gone and not talk.fragments[one].superseded_by]
        again = replace(talk)
        built = talk.ask(question, ids)
        assert text_of(again.ask(question, ids)) == text_of(built)
        check_laws(talk, built, before, gone)
        before = text_of(built)
        if act != "unrecorded":
            talk.say(("user", question), ("assistant", reply))


@given(
    st.lists(
        st.tuples(
            texts, texts, st.sampled_from(["", "", "write", "withdraw", "empty", "unrecorded"]), st.integers(0, 5)
        ),
        min_size=1,
        max_size=12,
    ),
    st.integers(150, 600),
)
def test_a_summary_changes_with_a_cut_or_when_withdrawn(drawn: list[tuple[str, str, str, int]], budget: int) -> None:
    talk, before, version = Talk({}, budget), "", 1
    talk.summary = ContextBlock("agent/joy", "gist", "gist-1-", version=1)
    for question, reply, act, length in drawn:
        last = None if talk.last is None else talk.last.position
        if act in ("write", "withdraw", "empty"):
            talk.last_summaries[version] = talk.summary
            version += 1
            text = "" if act == "empty" else f"gist-{version}-" + " more" * length * 20
            talk.summary = ContextBlock("agent/joy", "gist", text, version=version)
        if act in ("withdraw", "empty"):
            talk.last_summaries.clear()
        may_stay = last is not None and last.summary in {version, *talk.last_summaries}
        built = talk.ask(question, [])
        check_laws(talk, built, before, set())
        before, now = text_of(built), built.position
        kinds = [part.kind for part in built.parts]
        assert kinds.count(PartKind.SUMMARY) == (1 if now.summary else 0)
        assert PartKind.SUMMARY not in kinds[1:]
        assert not now.summary or f"gist-{now.summary}-" in built.parts[0].text
        is_cut = any(one.kind is PartKind.MESSAGE and one.reason is Omitted.BUDGET for one in built.left_out)
        has_no_room = any(one.kind is PartKind.SUMMARY for one in built.left_out)
        assert now.is_cut == (is_cut or (last is not None and last.is_cut))
        if not now.is_cut:
            assert not now.summary
        elif last is not None and may_stay and not is_cut:
            assert now.summary == last.summary
        else:
            assert has_no_room or now.summary == (version if talk.summary.text else 0)
        if act != "unrecorded":
            talk.say(("user", question), ("assistant", reply))


@given(
    texts,
    st.lists(texts, max_size=8),
    st.lists(texts, max_size=6, unique=True),
    st.tuples(*[st.integers(0, 120)] * 3),
    st.integers(0, 300),
)
def test_the_other_parts_leave_each_its_minimum(
    block: str, said: list[str], contents: list[str], minima: tuple[int, int, int], more: int
) -> None:
    question = "and now?"
    budget = estimated_tokens(f"user: {question}\n\n") + sum(minima) + more
    talk = Talk({f"F{n:04}": fragment(n, content) for n, content in enumerate(contents)}, budget)
    talk.blocks = (ContextBlock("agent/joy", "persona", block),)
    talk.say(*(("user" if place % 2 == 0 else "assistant", text) for place, text in enumerate(said)))
    kinds = (PartKind.BLOCK, PartKind.MESSAGE, PartKind.EVIDENCE)
    bounds = dict(zip(("block_bounds", "tail_bounds", "evidence_bounds"), map(Bounds, minima), strict=True))
    built = talk.ask(question, list(talk.fragments), **bounds)
    whole = replace(talk, budget=10_000, last=None, turn=0).ask(question, list(talk.fragments))
    for kind, minimum in zip(kinds, minima, strict=True):
        wanted = sum(part.tokens for part in whole.parts if part.kind is kind)
        others = sum(part.tokens for part in built.parts if part.kind is not kind)
        assert others <= budget - min(minimum, wanted)


@given(
    st.lists(st.tuples(st.sampled_from(["user", "assistant", "call", "result"]), texts), max_size=25),
    st.integers(60, 400),
)
def test_a_tail_keeps_calls_with_their_results(drawn: list[tuple[str, str]], budget: int) -> None:
    talk, calls = Talk({}, budget), list[str]()
    for kind, text in drawn:
        if kind == "call":
            calls.append(f"c{len(calls)}")
            talk.say(("assistant", text), calls=(calls[-1],))
        elif kind == "result" and calls:
            talk.say(("tool", text), is_result=True, answers=(calls[len(text) % len(calls)],))
        elif kind != "result":
            talk.say((kind, text))
    shown = {part.number for part in talk.ask("and now?", []).parts if part.kind is PartKind.MESSAGE}
    for said in talk.messages:
        for answer in said.answers:
            call = next(one.number for one in talk.messages if answer in one.calls)
            assert said.number not in shown or call in shown


@given(texts, texts, st.integers(1, 60))
def test_an_excerpt_is_of_the_text_and_within_its_room(text: str, question: str, most: int) -> None:
    talk = Talk({"F0001": fragment(1, text)}, 10_000)
    built = talk.ask(question, ["F0001"], memory_tokens=most)
    excerpt = [at for turn in built.position.turns for entry in turn.entries for at in entry.excerpt]
    pieces = [text[at:end] for at, end in batched(excerpt)]
    assert excerpt == sorted(excerpt)
    assert sum(map(estimated_tokens, pieces)) <= most + len(pieces)
    assert all(escape_marks(piece.strip()).replace("\n", "\n    ") in text_of(built) for piece in pieces)
    assert estimated_tokens(text) <= most or "more characters]" in text_of(built) or not pieces


@pytest.mark.parametrize("end", [". ", "?! ", '.") ', ".\n", "\n", "\n\n", "。", "\uff01\uff1f", "…. "])
def test_an_excerpt_is_of_whole_sentences(end: str) -> None:
    before, after = f"Version 2.5 is green{end}", f"It rains on all days{end}"
    text = before * 30 + f"The code is 1.5{end}" + after * 60
    built = Talk({"F0001": fragment(1, text)}, 4_000).ask("What is the code?", ["F0001"], memory_tokens=8)
    (entry,) = [entry for turn in built.position.turns for entry in turn.entries]
    assert [text[at:to] for at, to in batched([*entry.excerpt])] == [f"The code is 1.5{end}"]


@given(st.text("aßİ \n.", max_size=80), st.text("aßİ \n.", max_size=80), st.text("ab \n", max_size=9))
def test_beginning_of_a_text_tells_what_is_not_said(text: str, more: str, around: str) -> None:
    said = normalize(f"{around}{text}{more}{around}")
    for each in (text, text + more, more):
        assert may_be_said(each, said) or not is_said(normalize(each), said)


@given(texts)
def test_content_writes_no_mark(text: str) -> None:
    talk = Talk({"F0001": fragment(1, text)})
    built = talk.ask("what?", ["F0001"])
    assert drop_injected(text_of(built)) == "user: what?\n\n"
    assert drop_injected(escape_marks(text)) == escape_marks(text)


def test_superseded_memories_are_corrected_not_rewritten() -> None:
    talk = Talk({"F0001": fragment(1, "I live in Paris"), "F0002": fragment(2, "I live in Rome")})
    before = text_of(talk.ask("where?", ["F0001"]))
    talk.say(("user", "where?"), ("assistant", "Paris"))
    talk.fragments["F0001"] = talk.fragments["F0001"].but(superseded_by="F0002")
    built = talk.ask("really?", ["F0002"])
    assert text_of(built).startswith(before)
    assert built.corrections == ((MEMORY, "F0001", 1, "F0002", 2),)
    assert "[2] 3 January 1970, Bob: I live in Rome (holds instead of [1])" in text_of(built)
    talk.say(("user", "really?"), ("assistant", "Rome"))
    assert not talk.ask("sure?", ["F0002"]).corrections


def test_erased_memories_break_the_text_by_name() -> None:
    talk = Talk({"F0001": fragment(1, "the code is 1234"), "F0002": fragment(2, "the door is blue")})
    talk.ask("the code?", ["F0001", "F0002"])
    talk.say(("user", "the code?"), ("assistant", "it is known"))
    del talk.fragments["F0001"]
    built = talk.ask("and the door?", ["F0002"])
    assert "1234" not in text_of(built)
    assert [(one.reason, one.ids) for one in built.broken_by] == [(Omitted.UNAVAILABLE, ("F0001",))]


def test_a_long_tail_is_cut_to_half_at_a_turn() -> None:
    talk = Talk({}, 400)
    cuts = 0
    for turn in range(40):
        before = text_of(talk.last) if talk.last else ""
        built = talk.ask(f"question {turn}", [])
        cuts += not text_of(built).startswith(before)
        first = next((part for part in built.parts if part.kind is PartKind.MESSAGE), None)
        assert first is None or first.role == "user"
        talk.say(("user", f"question {turn}"), ("assistant", "an answer of some words " * 3))
    assert 4 <= cuts <= 10


def test_an_edit_of_an_excerpt_is_said() -> None:
    talk = Talk({"F0001": fragment(1, "The garden is green. " * 30 + "The code is 1234. " + "It rains. " * 60)}, 4_000)
    assert "The code is 1234." in text_of(talk.ask("What is the code?", ["F0001"]))
    talk.say(("user", "What is the code?"), ("assistant", "1234"))
    talk.fragments["F0001"] = talk.fragments["F0001"].but(content="None.")
    built = talk.ask("Really?", ["F0001"])
    assert "1234." not in text_of(built).replace("assistant: 1234", "")
    assert [one.reason for one in built.broken_by] == [Omitted.CHANGED]


def test_what_a_summary_says_is_said_once() -> None:
    talk = Talk({"F0001": fragment(1, "the house is blue and has two doors")}, 400)
    talk.summary = ContextBlock("agent/joy", "gist", "the house is blue and has two doors", version=1)
    talk.say(*[("user", "a question " * 14), ("assistant", "an answer " * 15)] * 3)
    assert "[1] 2 January 1970, Bob: the house" in text_of(talk.ask("which house?", ["F0001"]))
    talk.say(("user", "which house?"), *[("user", "a question " * 14), ("assistant", "an answer " * 15)] * 3)
    built = talk.ask("and now?", ["F0001"])
    assert [part.kind for part in built.parts][:2] == [PartKind.SUMMARY, PartKind.MESSAGE]
    assert text_of(built).count("two doors") == 1
    assert built.parts[0].number == built.parts[1].number > 1


def test_a_summary_of_more_than_half_of_the_tail_is_left_out() -> None:
    talk = Talk({}, 400)
    talk.say(*[("user", "a question " * 14), ("assistant", "an answer " * 15)] * 6)
    talk.summary = ContextBlock("agent/joy", "gist", "word " * 400, version=1)
    cut = talk.ask("and now?", [])
    assert cut.parts[0].kind is PartKind.SUMMARY
    assert "more characters]" in cut.parts[0].text
    talk.blocks = (ContextBlock("agent/joy", "persona", "word " * 160),)
    built = talk.ask("and now?", [])
    assert PartKind.SUMMARY not in [part.kind for part in built.parts]
    named = [(one.kind, one.reason, one.name) for one in (*built.left_out, *built.broken_by)]
    assert named.count((PartKind.SUMMARY, Omitted.BUDGET, "gist")) == 2


def test_the_tail_uses_room_that_no_memory_needs() -> None:
    talk = Talk({}, 400)
    talk.say(*[("user", "a question " * 14), ("assistant", "an answer " * 15)] * 4)
    built = talk.ask("and now?", [])
    assert [part.number for part in built.parts if part.kind is PartKind.MESSAGE] == [*range(1, 9)]
    assert 300 < built.tokens <= 400


def test_blocks_are_cut_last_and_said_so() -> None:
    talk = Talk({"F0001": fragment(1, "green tea")}, 100)
    talk.blocks = (ContextBlock("agent/joy", "persona", "short"), ContextBlock("agent/joy", "task", "word " * 400))
    built = talk.ask("tea?", ["F0001"], evidence_bounds=Bounds(minimum=50))
    assert built.tokens <= 100
    assert "green tea" in text_of(built)
    assert "short" in text_of(built)
    assert (PartKind.BLOCK, Omitted.BUDGET, "task") in [(one.kind, one.reason, one.name) for one in built.left_out]


def test_a_budget_below_the_minima_is_refused() -> None:
    with pytest.raises(BudgetTooSmall, match="question has 3"):
        Talk({}, 30).ask("why?", [], tail_bounds=Bounds(minimum=20), evidence_bounds=Bounds(minimum=20))


def test_a_message_of_megabytes_is_cut() -> None:
    talk = Talk({}, 400)
    talk.say(("user", "x" * 4_000_000), ("assistant", "too long"))
    built = talk.ask("why?", [])
    assert built.tokens <= 400
    assert "more characters]" in text_of(built)


@given(st.binary(max_size=60))
def test_other_bytes_are_no_position(data: bytes) -> None:
    assert unpack_position(data) is None


def test_a_position_of_another_format_is_refused() -> None:
    for format in (FORMAT - 1, FORMAT + 1):
        assert unpack_position(pack_position(Position(format, "chat/monday", 1, 2))) is None


def test_a_forged_position_costs_no_more_than_its_size() -> None:
    turns = tuple([Turn(1, "", (), unknown=True)] * 9_000)
    forged = Position(FORMAT, "chat/monday", 1, 2**31, (), turns)
    assert unpack_position(pack_position(forged)) is None  # the next numbers would not fit
    read = unpack_position(pack_position(Position(FORMAT, "chat/monday", 1, 9, (), turns)))
    assert read is not None
    talk = Talk({}, 400)
    assert talk.ask("why?", [], after=read).tokens <= 400
    entry = Entry(1, 0, "F0001", corrects=2**32 - 1)
    assert unpack_position(pack_position(Position(FORMAT, "", 1, 2, ("a/b",), (Turn(0, "", (entry,)),)))) is None
