"""The token budget of a recall: which recollections and working memory fit into a prompt.

Removal order: the companion of the lowest rank first, until there is none; then the lowest rank, down to the top hit;
then the oldest working item; finally the top hit is truncated to the budget and flagged, never removed. The answer
carries each content once, so a fragment that is both ranked and in working memory counts once, and leaves only when it
is removed from both.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from msgspec import Struct

BYTES_PER_TOKEN = 4
"""UTF-8 bytes; the common estimate, used when the client sends no token count."""


def estimated_tokens(text: str) -> int:
    """UTF-8 bytes / 4, rounded up."""
    return -(-len(text.encode()) // BYTES_PER_TOKEN)


class Item(Struct, frozen=True, gc=False):
    """A fragment as part of a prompt: its text, and the client's token count if it sent one."""

    id: str
    text: str
    tokens: int | None = None

    @property
    def cost(self) -> int:
        """Tokens."""
        return estimated_tokens(self.text) if self.tokens is None else self.tokens


@dataclass(frozen=True, slots=True)
class Fit:
    """What fits: `ranked` best first, `working` in its order, and `removed` (ids, in removal order)."""

    ranked: tuple[Item, ...]
    working: tuple[Item, ...]
    companions: frozenset[str] = frozenset()
    """Ids of those that fit."""
    removed: tuple[str, ...] = ()
    top_cut: bool = False
    """The text of the first of `ranked` was truncated."""
    tokens: int = 0
    """Cost of `ranked` and `working` together."""


def fit(ranked: Sequence[Item], working: Sequence[Item], budget: int, companions: Sequence[Item] = ()) -> Fit:
    """Fit all into `budget` tokens; 0 or less means no limit. companions: of `ranked`, in that order."""
    costs = {item.id: item.cost for item in (*ranked, *companions, *working)}
    total, beside = sum(costs.values()), [item.id for item in companions]
    removed: list[str] = []
    held_by_work = {item.id for item in working}
    while 0 < budget < total and beside:
        last = beside.pop()
        if last not in held_by_work:
            total -= costs[last]
            removed.append(last)
    if budget <= 0 or total <= budget:
        return Fit(tuple(ranked), tuple(working), frozenset(beside), tuple(removed), tokens=total)
    ranks, works = len(ranked), 0
    while total > budget and ranks > 1:
        ranks -= 1
        if ranked[ranks].id not in held_by_work:
            total -= costs[ranked[ranks].id]
            removed.append(ranked[ranks].id)
    top = ranked[0].id if ranked else None
    while total > budget and works < len(working):
        if working[works].id != top:
            total -= costs[working[works].id]
            removed.append(working[works].id)
        works += 1
    left = tuple(item for place, item in enumerate(working) if place >= works or item.id == top)
    if total <= budget or not ranked:
        return Fit(tuple(ranked[:ranks]), left, frozenset(), tuple(removed), False, total)
    cut = _truncate_item(ranked[0], budget)
    return Fit((cut,), tuple(cut for _ in left), frozenset(), tuple(removed), True, cut.cost)


def _truncate_item(item: Item, budget: int) -> Item:
    """The longest prefix of whole characters that costs at most the budget."""
    data = item.text.encode()
    room = budget * BYTES_PER_TOKEN if item.tokens is None else len(data) * budget // max(item.tokens, 1)
    text = data[:room].decode(errors="ignore")
    return Item(item.id, text, None if item.tokens is None else budget)
