"""The layout of a turn's context: which parts, in which order, within which budget.

Rule 1. The order is blocks, the summary of what is cut, messages with the memories of earlier turns before the message
of their turn, new memories, question. Memories are in the order of time; their score only decides which of them are in.
Rule 2. What an earlier turn showed stays as it is, at its place. A supersession adds a correction to the new memories;
what the caller may not read any more is removed.
Rule 3. The tail is cut between turns, to half of its room, and a tool call stays with its results. The summary stands
before it, within its room, and changes at a cut only, unless its version may not be shown any more.
Rule 4. The sum of the parts' tokens is at most the budget. A block is cut after everything else.
Rule 5. The same input makes the same bytes.

The new memories of a turn are chosen here, too, and the corrections of memories that earlier turns showed.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from itertools import accumulate, takewhile

from msgspec.structs import replace

from memstream_server.core.context.position import POSITION_BYTES_MAX, pack_position
from memstream_server.core.context.texts import CONTAINED_MIN, Texts, is_said, may_be_said, normalize
from memstream_server.core.context.values import (
    FORMAT,
    BudgetTooSmall,
    Built,
    ContextBlock,
    ContextPart,
    Entry,
    FoundMemory,
    Inputs,
    Omission,
    Omitted,
    PartKind,
    Position,
    Said,
    Seen,
    Turn,
)
from memstream_server.core.rendering import escape_marks
from memstream_server.core.values import Fragment

LEFT_OUT_MAX = 100
_MANY = 9_999
"""A number that has not less tokens than the real one."""


def build_context(inputs: Inputs) -> Built:
    """The text of a turn. Raises BudgetTooSmall."""
    return _Layout(inputs).build()


@dataclass(slots=True, eq=False)
class _Unit:
    """A message with the turns before it, or one turn after the last message."""

    said: Said | None
    turns: list[Turn] = field(default_factory=list)
    parts: list[ContextPart] = field(default_factory=list)
    may_start: bool = True
    """Whether the tail may begin here,"""
    starts_turn: bool = True
    """and whether the user speaks."""

    @property
    def tokens(self) -> int:
        return sum(part.tokens for part in self.parts)


class _Layout:
    """One text."""

    def __init__(self, inputs: Inputs) -> None:
        self._inputs = inputs
        self._texts = Texts(inputs)
        self._after = inputs.after or Position(FORMAT, inputs.conversation, 0, 1)
        self._left_out = list(inputs.left_out)
        self._gone: list[Omission] = []
        """Of what earlier turns showed."""
        self._cut_summary: list[Omission] = []
        self._version = 0
        """Of the summary in the text."""
        messages = list(inputs.messages)
        last = messages[-1].number if messages else max(inputs.before, self._find_last())
        self._anchor = last + 1 if inputs.conversation else 0
        if messages and _is_question(messages[-1], inputs.question):
            self._anchor = messages.pop().number
        self._messages = [each for each in messages if each.text]

    def _find_last(self) -> int:
        """The last message of the last text."""
        seen = [int(one.key.split()[1]) for one in self._after.seen if one.kind is PartKind.MESSAGE]
        return max([self._after.tail_start - 1, 0, *seen])

    def build(self) -> Built:
        """See build_context."""
        inputs = self._inputs
        question = self._texts.write_question()
        room = inputs.budget - question.tokens
        least = inputs.tail_bounds.minimum + inputs.evidence_bounds.minimum
        if room < least + inputs.block_bounds.minimum:
            raise BudgetTooSmall(
                f"is {inputs.budget} tokens: the question has {question.tokens}, and the minima of the parts are "
                f"{least + inputs.block_bounds.minimum}"
            )
        blocks = self._fit_blocks(inputs.block_bounds.limit(room - least))
        evidence = inputs.evidence_bounds
        most = max(evidence.minimum, room // 4) if evidence.maximum is None else evidence.maximum
        room -= sum(part.tokens for part in blocks)
        most = min(most, room - inputs.tail_bounds.minimum)
        tail_room = inputs.tail_bounds.limit(room - most)
        head, units = self._begin(inputs.last_summary or inputs.summary if self._after.is_cut else None, tail_room)
        tokens = sum(part.tokens for part in head) + sum(unit.tokens for unit in units)
        if tokens <= inputs.tail_bounds.limit(room) and self._is_whole(units):
            built = self._finish(blocks, head, units, most, question)  # new memories may need less than their room
            fits = built.tokens <= inputs.budget and (tokens <= tail_room or not _lacks_memories(built))
            if fits and _may_return(built):
                return built
        head, units = self._begin(inputs.summary, tail_room)
        while True:
            tail = self._cut_tail(units, tail_room - sum(part.tokens for part in head))
            built = self._finish(blocks, head, tail, most, question)
            if not tail_room or _may_return(built):
                return built
            tail_room //= 2

    def _begin(self, summary: ContextBlock | None, room: int) -> tuple[list[ContextPart], list[_Unit]]:
        """The summary if there is one that fits, and all messages, without what the blocks and it say."""
        inputs = self._inputs
        self._gone, self._cut_summary, self._version = [], [], 0
        part = None
        if summary is not None and summary.text:
            # bounds that are the same in all turns: else the text would change with the question
            most = inputs.tail_bounds.limit(inputs.budget // 2) // 2
            part, whole = self._texts.write_block(summary, most, PartKind.SUMMARY)
            part = part if part is not None and part.tokens <= room // 2 else None
            if part is None or not whole:
                self._cut_summary = [Omission(PartKind.SUMMARY, Omitted.BUDGET, summary.memory, summary.name)]
        said = [*inputs.blocks]
        if part is not None and summary is not None:
            said.append(summary)
            self._version = summary.version
        self._block_text = "\0".join(normalize(block.text) for block in said)
        return [] if part is None else [part], self._make_units()

    def _fit_blocks(self, room: int) -> list[ContextPart]:
        parts: list[ContextPart] = []
        for block in self._inputs.blocks:
            part, whole = self._texts.write_block(block, room)
            if part is not None:
                room -= part.tokens
                parts.append(part)
            if not whole:
                self._left_out.append(Omission(PartKind.BLOCK, Omitted.BUDGET, block.memory, block.name))
        return parts

    # ---- the conversation and what earlier turns showed
    def _make_units(self) -> list[_Unit]:
        units = [_Unit(said) for said in self._messages]
        numbers = [said.number for said in self._messages]
        anchors: Counter[int] = Counter()
        for turn in self._after.turns:
            place = bisect_left(numbers, turn.anchor) if turn.anchor else len(numbers)
            if place < len(numbers):
                unit = units[place]
            else:
                unit = _Unit(None)
                units.append(unit)
            same = anchors[turn.anchor]
            anchors[turn.anchor] += 1
            if (shown := self._show_turn(turn, same)) is not None:
                unit.turns.append(shown[0])
                unit.parts.append(shown[1])
        for unit in units:
            if unit.said is not None:
                unit.parts.append(self._texts.write_message(unit.said))
                unit.starts_turn = unit.said.role == "user" and not unit.said.is_result
        _keep_calls_whole([unit for unit in units if unit.said is not None])
        return units

    def _show_turn(self, turn: Turn, place: int) -> tuple[Turn, ContextPart] | None:
        """The turn as it is shown now, without what is gone; None: nothing is left."""
        entries: list[Entry] = []
        lines: list[str] = []
        for entry in turn.entries:
            memory = self._after.memories[entry.memory]
            fragment = self._inputs.known.get((memory, entry.id))
            if fragment is None or (not entry.again and self._in_blocks(fragment.content)):
                reason = Omitted.UNAVAILABLE if fragment is None else Omitted.REPEATS
                self._gone.append(Omission(PartKind.EVIDENCE, reason, memory, ids=(entry.id,)))
                continue
            entries.append(entry)
            lines.append(self._texts.write_entry(entry, fragment))
        if not (lines or turn.unknown or turn.day):
            return None
        shown = replace(turn, entries=tuple(entries))
        return shown, self._write_turn(shown, lines, place)

    def _write_turn(self, turn: Turn, lines: Sequence[str], place: int, names: Sequence[str] = ()) -> ContextPart:
        names = names or self._after.memories
        memories = {names[entry.memory] for entry in turn.entries}
        ids = tuple([entry.id for entry in turn.entries if not entry.again])
        key = f"evidence {turn.anchor} {place}"
        return self._texts.write_turn(turn, lines, key, memories.pop() if len(memories) == 1 else "", ids)

    def _cut_tail(self, units: list[_Unit], room: int) -> list[_Unit]:
        left = [*accumulate(reversed([unit.tokens for unit in units]))][::-1]
        first = 0 if self._inputs.before else 1  # something is cut
        places = [place for place, unit in enumerate(units) if unit.may_start and place >= first]
        turns = [place for place in places if units[place].starts_turn]
        for starts, most in ((turns, room // 2), (turns, room), (places, room // 2), (places, room)):
            start = next((place for place in starts if left[place] <= most), None)
            if start is not None:
                return units[start:]
        return []

    def _is_whole(self, units: Sequence[_Unit]) -> bool:
        return not units or (units[0].may_start and not self._inputs.before)

    # ---- new memories
    def _finish(
        self, blocks: list[ContextPart], head: list[ContextPart], tail: list[_Unit], room: int, question: ContextPart
    ) -> Built:
        left_out = [*self._left_out, *self._cut_summary]
        kept = {unit.said.number for unit in tail if unit.said is not None}
        cut = [said.number for said in self._messages if said.number not in kept]
        if cut or self._inputs.before:
            first = self._after.tail_start or 1 if self._inputs.before else cut[0]
            count = len(cut) or 1
            left_out.append(Omission(PartKind.MESSAGE, Omitted.BUDGET, number=first, count=count))
        turns = [turn for unit in tail for turn in unit.turns]
        said = [unit.said.text for unit in tail if unit.said is not None]
        start = next((unit.said.number for unit in tail if unit.said is not None), self._anchor)
        parts = [*blocks, *(replace(part, number=start) for part in head)]
        parts += [part for unit in tail for part in unit.parts]
        shown = "\0".join(part.text for part in parts if part.kind is PartKind.EVIDENCE)
        fresh = Fresh(self._inputs, self._texts, self._after, turns, said, shown, self._block_text, left_out)
        turn, lines = fresh.choose(self._anchor, room)
        if turn is not None:
            place = sum(each.anchor == turn.anchor for each in turns)
            parts.append(self._write_turn(turn, lines, place, fresh.memories))
            turns.append(turn)
        parts.append(replace(question, number=self._anchor))
        seen = tuple([Seen(part.kind, part.key, blake2b(part.text.encode(), digest_size=8).digest()) for part in parts])
        same = self._count_same(seen)
        if self._inputs.tail_failed:
            start = self._after.tail_start
        is_cut = self._after.is_cut or bool(cut or self._inputs.before or head)
        position = self._make_position(seen, turns, start, fresh, is_cut)
        return Built(
            parts=tuple([replace(part, fresh=place >= same) for place, part in enumerate(parts)]),
            tokens=sum(part.tokens for part in parts),
            unchanged_tokens=sum(part.tokens for part in parts[:same]),
            broken_by=tuple(self._find_broken(parts, seen, same)),
            left_out=tuple(left_out[:LEFT_OUT_MAX]),
            citations=tuple(
                [
                    (entry.number, fresh.memories[entry.memory], entry.id)
                    for each in turns
                    for entry in each.entries
                    if not entry.again
                ]
            ),
            corrections=tuple(fresh.corrections),
            position=position,
        )

    def _make_position(
        self, seen: tuple[Seen, ...], turns: list[Turn], start: int, fresh: Fresh, is_cut: bool
    ) -> Position:
        used = sorted({entry.memory for turn in turns for entry in turn.entries})
        places = {old: new for new, old in enumerate(used)}
        return Position(
            FORMAT,
            self._inputs.conversation,
            start,
            fresh.next_number,
            tuple([fresh.memories[old] for old in used]),
            tuple(
                [
                    replace(turn, entries=tuple([replace(each, memory=places[each.memory]) for each in turn.entries]))
                    for turn in turns
                ]
            ),
            seen,
            is_cut,
            self._version,
        )

    # ---- what changed
    def _count_same(self, parts: Sequence[Seen]) -> int:
        """How many parts at the beginning are as in the last text."""
        pairs = zip(parts, self._after.seen, strict=False)
        return sum(1 for _ in takewhile(lambda pair: pair[0].digest == pair[1].digest, pairs))

    def _find_broken(self, parts: list[ContextPart], now: Sequence[Seen], same: int) -> Iterable[Omission]:
        seen = self._after.seen
        if same >= len(seen):
            return
        yield from self._gone
        digests = {one.key: one.digest for one in now}
        there = frozenset(digests.values())
        first = next((part.number for part in parts if part.kind is PartKind.MESSAGE), self._anchor)
        cut: list[int] = []
        named = bool(self._gone)
        for one in seen[same:]:
            broken = self._explain(one, digests, there, first)
            if broken is None or (broken.kind is PartKind.EVIDENCE and self._gone):
                continue
            named = True
            if broken.reason is Omitted.BUDGET and broken.kind is PartKind.MESSAGE:
                cut.append(broken.number)
            else:
                yield broken
        if cut:
            yield Omission(PartKind.MESSAGE, Omitted.BUDGET, number=cut[0], count=len(cut))
        if not named:  # something new stands between
            part = parts[min(same, len(parts) - 1)]
            yield Omission(part.kind, Omitted.CHANGED, part.memory, part.name, part.ids, part.number)

    def _explain(
        self, seen: Seen, digests: Mapping[str, bytes], there: frozenset[bytes], first: int
    ) -> Omission | None:
        """Why a part of the last text is not in this one; None if it is."""
        if digests.get(seen.key) == seen.digest:
            return None
        if seen.kind is PartKind.QUESTION:
            return None if seen.digest in there else Omission(PartKind.QUESTION, Omitted.QUESTION_NOT_RECORDED)
        reason = Omitted.CHANGED if seen.key in digests else Omitted.UNAVAILABLE
        _, _, name = seen.key.partition(" ")
        if seen.kind in (PartKind.BLOCK, PartKind.SUMMARY):
            memory, _, name = name.partition("#")
            if seen.key not in digests:
                left_out = [one for one in (*self._left_out, *self._cut_summary) if one.kind is seen.kind]
                named = (one.reason for one in left_out if (one.memory, one.name) == (memory, name))
                reason = next(named, reason)
            return Omission(seen.kind, reason, memory, name)
        number = int(name.split()[0])
        if seen.key not in digests:
            if self._inputs.tail_failed:
                reason = Omitted.FAILED
            elif number < first:
                reason = Omitted.BUDGET
        return Omission(seen.kind, reason, number=number)

    def _in_blocks(self, content: str) -> bool:
        said = self._block_text
        return bool(said) and may_be_said(content, said) and is_said(normalize(content), said)


def _may_return(built: Built) -> bool:
    return len(pack_position(built.position)) <= POSITION_BYTES_MAX


def _lacks_memories(built: Built) -> bool:
    """Whether the budget has left out new memories."""
    known = len(built.left_out) < LEFT_OUT_MAX
    return not known or any(one.kind is PartKind.EVIDENCE and one.reason is Omitted.BUDGET for one in built.left_out)


def _is_question(said: Said, question: str) -> bool:
    return said.role == "user" and not said.is_result and said.text.strip() == question.strip()


def _keep_calls_whole(units: Sequence[_Unit]) -> None:
    """Let no tail begin between a tool call and its results."""
    calls: dict[str, int] = {}
    spoken = -1  # the last message that is no result
    for place, unit in enumerate(units):
        said = unit.said
        assert said is not None
        for call in said.calls:
            calls[call] = place
        if said.is_result:
            starts = [calls.get(answer, -1 if said.calls else spoken) for answer in said.answers] or [spoken]
            for between in units[max(0, min(starts) + 1) : place + 1]:
                between.may_start = False
        else:
            spoken = place


def newest_of(known: Mapping[tuple[str, str], Fragment], memory: str, id: str) -> Fragment | None:
    """The end of the fragment's chain of supersessions, as far as it is known; None if nothing supersedes it."""
    newest, seen, here = None, {id}, known.get((memory, id))
    while here is not None and here.superseded_by and here.superseded_by not in seen:
        seen.add(here.superseded_by)
        here = known.get((memory, here.superseded_by))
        newest = here or newest
    return newest


class Fresh:
    """Chooses the new memories of a turn."""

    def __init__(
        self,
        inputs: Inputs,
        texts: Texts,
        after: Position,
        turns: Sequence[Turn],
        messages: Sequence[str],
        shown_text: str,
        block_text: str,
        left_out: list[Omission],
    ) -> None:
        self._inputs = inputs
        self._texts = texts
        self._left_out = left_out
        self._block_text = block_text
        self.memories = list(after.memories)
        self.next_number = self._first_number = after.next_number
        self.corrections: list[tuple[str, str, int, str, int]] = []
        self.turn: Turn | None = None
        self._day = next((turn.day for turn in reversed(turns) if turn.day), "")
        shown = [entry for turn in turns for entry in turn.entries]
        self._corrected = {entry.corrects for entry in shown}
        self._shown = {(self.memories[entry.memory], entry.id): entry for entry in shown if not entry.again}
        self._ids = {id for _, id in self._shown}
        self._shown_text = normalize(shown_text)
        self._tail_text = "\0".join(map(normalize, [*messages, inputs.question]))

    def choose(self, anchor: int, room: int) -> tuple[Turn | None, list[str]]:
        """The turn with its lines, within `room` tokens; None: it has none."""
        day = self._texts.write_day(self._inputs.now_us)
        frame = self._texts.count(self._texts.write_turn(Turn(anchor, day, (), True), ["", ""], "", "", ()).text)
        if frame > room:
            self._left_out += [leave_out(found, Omitted.BUDGET) for found in self._inputs.found][:LEFT_OUT_MAX]
            return None, []
        chosen = self._choose(room - frame)
        while True:
            turn, lines = self._write(anchor, day, chosen)
            if turn is None or self._texts.count(self._texts.write_turn(turn, lines, "", "", ()).text) <= room:
                break
            _, gone, memory = chosen.pop()  # a tokenizer that counts lines apart as less
            self._left_out.append(leave_out(FoundMemory(memory, gone), Omitted.BUDGET))
        self.turn = turn
        return turn, lines

    def _choose(self, room: int) -> list[tuple[Entry, Fragment, str]]:
        """(entry, fragment, memory), the most important first. Numbers are set later."""
        chosen: list[tuple[Entry, Fragment, str]] = []
        for entry, fragment, memory in [*self._find_corrections(), *self._find_new()]:
            cost = self._texts.count(f"{self._texts.write_entry(entry, fragment)}\n")
            if cost <= room:
                room -= cost
                chosen.append((entry, fragment, memory))
            else:
                self._left_out.append(leave_out(FoundMemory(memory, fragment), Omitted.BUDGET))
        return chosen

    def _find_corrections(self) -> list[tuple[Entry, Fragment, str]]:
        found: list[tuple[Entry, Fragment, str]] = []
        for (memory, id), entry in self._shown.items():
            old = self._inputs.known[memory, id]
            if not old.superseded_by or entry.number in self._corrected:
                continue
            newest = newest_of(self._inputs.known, memory, id)
            if newest is None:
                found.append((Entry(0, self._place(memory), id, entry.number, again=True), old, memory))
            elif (there := self._shown.get((memory, newest.id))) is not None:
                again = Entry(there.number, there.memory, newest.id, entry.number, again=True)
                found.append((again, newest, memory))
            else:
                excerpt = self._texts.find_excerpt(FoundMemory(memory, newest))
                corrected = Entry(_MANY, self._place(memory), newest.id, entry.number, excerpt=excerpt)
                found.append((corrected, newest, memory))
                self._ids.add(newest.id)
        return found

    def _find_new(self) -> Iterable[tuple[Entry, Fragment, str]]:
        """Lazily: what is chosen counts for what follows."""
        said: list[str] = []
        for found in self._inputs.found:
            fragment = found.fragment
            if fragment.id in self._ids:
                self._left_out.append(leave_out(found, Omitted.REPEATS))
                continue
            text = normalize(fragment.content)
            if text in said or self._is_shown(text):
                reason = Omitted.REPEATS
            elif is_said(text, self._tail_text):
                reason = Omitted.IN_TAIL
            elif is_said(text, self._block_text):
                reason = Omitted.REPEATS
            else:
                said.append(text)
                self._ids.add(fragment.id)
                excerpt = self._texts.find_excerpt(found)
                yield Entry(_MANY, self._place(found.memory), fragment.id, excerpt=excerpt), fragment, found.memory
                continue
            self._left_out.append(leave_out(found, reason))

    def _is_shown(self, text: str) -> bool:
        """Whether the memories of earlier turns say it."""
        if len(text) >= CONTAINED_MIN:  # as they are written
            return is_said(escape_marks(text), self._shown_text)
        return any(normalize(self._inputs.known[key].content) == text for key in self._shown)

    def _place(self, memory: str) -> int:
        if memory not in self.memories:
            self.memories.append(memory)
        return self.memories.index(memory)

    def _write(
        self, anchor: int, day: str, chosen: Sequence[tuple[Entry, Fragment, str]]
    ) -> tuple[Turn | None, list[str]]:
        """The turn in the order of time, with numbers."""
        self.next_number, self.corrections = self._first_number, []
        numbers: dict[str, int] = {}
        entries: list[Entry] = []
        lines: list[str] = []
        olds = {entry.number: id for (_, id), entry in self._shown.items()}
        for entry, fragment, memory in sorted(chosen, key=lambda one: (one[1].observe_time_us, one[1].id)):
            if not entry.again:
                again = fragment.id in numbers
                number = numbers.setdefault(fragment.id, self.next_number)
                self.next_number += not again
                entry = replace(entry, number=number, again=again)
            entries.append(entry)
            lines.append(self._texts.write_entry(entry, fragment))
            if entry.corrects:
                newer = entry.id if entry.number else ""
                self.corrections.append((memory, olds[entry.corrects], entry.corrects, newer, entry.number))
        unknown = self._inputs.unknown and not entries
        if not entries and not unknown and day == self._day:
            return None, []
        return Turn(anchor, day, tuple(entries), unknown), lines


def leave_out(found: FoundMemory, reason: Omitted) -> Omission:
    return Omission(PartKind.EVIDENCE, reason, found.memory, ids=(found.fragment.id,))
