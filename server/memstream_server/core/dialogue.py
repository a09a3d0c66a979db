"""Who speaks, and what that means for ranking: how much of a fragment's context counts, and which reply is whose.

Rule 1. The role of a fragment is the client's, else that of its speaker's customary name. Of two other speakers, where
no assistant is known, the one whose median content is RATIO_MIN times as long as the other's is an assistant. All
others are people.
Rule 2. The context counts fully where two people talk: in whose window another person speaks. Elsewhere, with one voice
or a person and an assistant, a short session is about one thing and a long one a series of requests: the context counts
min(1, (SHORT_SESSION / fragments in the session)^2). A fragment without a session has no context.
Rule 3. An assistant's fragment is the reply to a person's right before it in the session; the output of tools may be
between them. A message has one reply at most.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from memstream_server.core.arrays import sort_distinct
from memstream_server.core.columns import ASSISTANT, TOOL, UNKNOWN, USER, Columns, Mask, Slots
from memstream_server.core.neighbours import NOBODY, Neighbours

SHORT_SESSION = 12
"""Fragments in a session."""
RATIO_MIN = 2.5
_TOOLS_MAX = 8
"""Tool outputs between a message and its reply."""
Shares = npt.NDArray[np.float32]
_Codes = npt.NDArray[np.int32]


@dataclass(frozen=True, slots=True, eq=False)
class Dialogue:
    """By slot; valid until the next change of the memory."""

    context: Shares
    """How much of the context counts, in [0, 1]."""
    replies: _Codes
    """The slot of the reply to a message, NOBODY for none."""
    messages: _Codes
    """The slot of the message that a reply answers, NOBODY for none."""

    def complete(self, slots: Slots, allowed: Mask) -> Slots:
        """The slots, ascending, with the allowed messages of replies among them, and the allowed replies to all."""
        chosen = np.zeros(len(allowed), np.bool_)
        for others in (self.messages, self.replies):
            found = others[slots]
            found = found[found != NOBODY]
            if len(found := found[allowed[found]]):
                chosen[slots] = chosen[found] = True
                slots = np.flatnonzero(chosen)
        return slots


def find_dialogue(columns: Columns, neighbours: Neighbours) -> Dialogue:
    """The turns of a memory. O(fragments)."""
    roles = _complete_roles(columns)
    session, alive = neighbours.session_of, neighbours.alive
    people = (roles == USER) | (roles == UNKNOWN)
    voices = np.where(people & (columns.speaker != columns.unnamed_speaker), columns.speaker, NOBODY)
    held = np.bincount(session[alive] + 1, minlength=int(session.max(initial=NOBODY)) + 2)
    by_session = np.minimum(1.0, (SHORT_SESSION / np.maximum(held, 1)) ** 2)
    by_session[0] = 0.0  # without a session
    context = by_session.astype(np.float32)[session + 1]
    context[_find_talk(voices, neighbours)] = 1.0
    messages = _find_messages(roles, people, neighbours)
    replies = np.full(len(messages), NOBODY, np.int32)
    answering = np.flatnonzero(messages != NOBODY)
    replies[messages[answering]] = answering
    return Dialogue(context, replies, messages)


def _complete_roles(columns: Columns) -> npt.NDArray[np.int8]:
    roles, alive, speaker = columns.role, columns.alive, columns.speaker
    named = alive & (roles == UNKNOWN) & (speaker != columns.unnamed_speaker)
    speakers = sort_distinct(speaker[named])
    if len(speakers) != 2 or (roles[alive] == ASSISTANT).any():
        return roles
    characters = columns.characters
    medians = [_median(characters[named & (speaker == each)]) for each in speakers]
    if max(medians) < RATIO_MIN * min(medians):
        return roles
    wordy = speaker == speakers[int(np.argmax(medians))]
    return np.where(wordy & (roles == UNKNOWN), np.int8(ASSISTANT), roles)


def _median(values: npt.NDArray[np.int32]) -> float:
    ordered, middle = np.sort(values), (len(values) - 1) // 2
    return float(ordered[middle : len(values) // 2 + 1].mean())


def _find_talk(voices: _Codes, neighbours: Neighbours) -> Slots:
    """Slots of people in whose window another person speaks."""
    mine = np.flatnonzero(voices != NOBODY)
    if not len(mine) or (voices[mine] == voices[mine[0]]).all():
        return np.empty(0, np.int64)
    around = np.append(voices, NOBODY)[neighbours.windows()[mine]]  # NOBODY indexes the last entry
    talks: Mask = ((around != NOBODY) & (around != voices[mine, None])).any(axis=1)
    return mine[talks]


def _find_messages(roles: npt.NDArray[np.int8], people: Mask, neighbours: Neighbours) -> _Codes:
    before = neighbours.before()
    messages = np.where(roles == ASSISTANT, before, np.int32(NOBODY))
    for _ in range(_TOOLS_MAX):
        tools = np.flatnonzero((messages != NOBODY) & (roles[messages] == TOOL))
        if not len(tools):
            break
        messages[tools] = before[messages[tools]]
    return np.where((messages != NOBODY) & people[messages], messages, np.int32(NOBODY))
