"""Chooses the new memories of a turn, and the corrections of memories that earlier turns showed."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from msgspec.structs import replace

from memstream_server.core.context.texts import Texts, is_said, normalize
from memstream_server.core.context.values import Entry, Found, Inputs, Omission, Omitted, PartKind, Position, Turn
from memstream_server.core.values import Fragment

LEFT_OUT_MAX = 100
_MANY = 9_999
"""A number that has not less tokens than the real one."""


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
        known = [normalize(inputs.known[key].content) for key in self._shown]
        self._shown_text = "\0".join(known)
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
            self._left_out.append(leave_out(Found(memory, gone), Omitted.BUDGET))
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
                self._left_out.append(leave_out(Found(memory, fragment), Omitted.BUDGET))
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
                found.append((Entry(_MANY, self._place(memory), newest.id, entry.number), newest, memory))
                self._ids.add(newest.id)
        return found

    def _find_new(self) -> Iterable[tuple[Entry, Fragment, str]]:
        """Lazily: what is chosen counts for what follows."""
        said: list[str] = []
        for found in self._inputs.found:
            fragment = found.fragment
            text = normalize(fragment.content)
            if fragment.id in self._ids or text in said or is_said(text, self._shown_text):
                reason = Omitted.REPEATS
            elif is_said(text, self._tail_text):
                reason = Omitted.IN_TAIL
            elif is_said(text, self._block_text):
                reason = Omitted.REPEATS
            else:
                said.append(text)
                self._ids.add(fragment.id)
                yield Entry(_MANY, self._place(found.memory), fragment.id), fragment, found.memory
                continue
            self._left_out.append(leave_out(found, reason))

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


def leave_out(found: Found, reason: Omitted) -> Omission:
    return Omission(PartKind.EVIDENCE, reason, found.memory, ids=(found.fragment.id,))
