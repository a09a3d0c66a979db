"""Twins: statements of one speaker that share so many words that the later one may replace the earlier one.

Rule 1. Two short statements of one person are twins if they share SHARE_MIN of the words of the one with fewer words.
Neither meaning nor language counts. A question, a long text and the text of an assistant are no statements.
Rule 2. Of twins among the best AMONG results the one that was said last takes the best place, and the others follow it
at once, the latest first. None is hidden, and no score changes.
Rule 3. A result that scores more than MARGIN below the best twin keeps its place: no guess outranks clearer evidence.
Rule 4. A statement that was said again counts at the time when it was said last.

The values were chosen over five kinds of memories: see docs/decisions.md.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

from memstream_server.core.rendering import is_question
from memstream_server.core.speakers import role_of_name
from memstream_server.core.suspicions import may_be_suspected
from memstream_server.core.values import Fragment, Role

SHARE_MIN = 0.4
"""Of the words of the shorter statement."""
MARGIN = 0.1
"""Score."""
AMONG = 10
"""Results of an answer."""
CHARACTERS_MAX = 200
Words = frozenset[int]
KnownWords = dict[str, tuple[int, Words]]
"""Words of fragments by id, with the version of the fragment."""


def may_have_twins(fragment: Fragment) -> bool:
    """Whether it is a statement of a person, whose truth its sender left open (Rule 1)."""
    return (
        len(fragment.content) <= CHARACTERS_MAX
        and (fragment.role or role_of_name(fragment.speaker)) in (None, Role.USER)
        and may_be_suspected(fragment)
        and not is_question(fragment.content)
    )


def share_of(one: Words, other: Words) -> float:
    """Share of the words of the shorter statement that the other one has, in [0, 1]; 0 if one has no words."""
    fewer = min(len(one), len(other))
    return len(one & other) / fewer if fewer else 0.0


def put_later_first(
    found: Sequence[Fragment],
    scores: Sequence[float],
    observed: Callable[[Fragment], tuple[int, int]],
    words_of: Callable[[Fragment], Words],
    are_apart: Callable[[str, str], bool],
) -> tuple[list[int], dict[int, int]]:
    """(an order of the results by Rules 2 and 3, as indices; the index of the latest twin by that of an earlier one).

    found: results, best first; scores: theirs; observed: when one was said last, as Fragment.last_observed. are_apart:
    whether two ids are no twins by decision.
    """
    count = min(len(found), AMONG)

    @functools.cache
    def read_words(at: int) -> Words | None:
        """The words of a result; None if it has no twins."""
        return words_of(found[at]) if may_have_twins(found[at]) else None

    order: list[int] = []
    later: dict[int, int] = {}
    left = list(range(count))
    while left:
        best = left.pop(0)
        group = [best]
        for at in left:
            if (
                scores[best] - scores[at] <= MARGIN
                and found[best].speaker == found[at].speaker
                and (one := read_words(best)) is not None
                and (other := read_words(at)) is not None
                and (shared := len(one & other))
                and shared >= SHARE_MIN * min(len(one), len(other))
                and not are_apart(found[best].id, found[at].id)
            ):
                group.append(at)
        if len(group) > 1:
            group.sort(key=lambda at: observed(found[at]), reverse=True)
            later |= dict.fromkeys(group[1:], group[0])
            left = [at for at in left if at not in group]
        order += group
    return [*order, *range(count, len(found))], later
