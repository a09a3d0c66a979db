"""A reference implementation of the lexical legs."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

NEIGHBOUR_CHARACTERS_MAX = 2_000
Bag = dict[int, float]


@dataclass
class Doc:
    """A fragment: its terms, session and length."""

    terms: Counter[int]
    session: int
    characters: int = 10
    alive: bool = True


def window(docs: Sequence[Doc], place: int) -> Bag:
    """The words of the fragment, whole, and of those that may neighbour it: two on each side whole, two more halved."""

    def beside(doc: Doc) -> bool:
        return doc.alive and doc.session == docs[place].session and doc.characters <= NEIGHBOUR_CHARACTERS_MAX

    before = [doc for doc in reversed(docs[:place]) if beside(doc)]
    after = [doc for doc in docs[place + 1 :] if beside(doc)]
    held: Bag = {term: float(count) for term, count in docs[place].terms.items()}
    for side in (before, after):
        for doc, share in zip(side, (1.0, 1.0, 0.5, 0.5), strict=False):
            for term, count in doc.terms.items():
                held[term] = held.get(term, 0.0) + share * count
    return held


def bm25(bags: Sequence[Bag | None], terms: Sequence[int], k1: float, b: float) -> tuple[list[float], float]:
    """(score of each bag, most attainable); None is a dead one."""
    live = [bag for bag in bags if bag is not None]
    mean = sum(sum(bag.values()) for bag in live) / len(live) if live else 1.0
    scores, attainable = [0.0] * len(bags), 0.0
    for term in terms:
        holding = sum(bag.get(term, 0) > 0 for bag in live)
        idf = math.log(1 + (len(live) - holding + 0.5) / (holding + 0.5))
        attainable += idf * (k1 + 1)
        for place, bag in enumerate(bags):
            if bag is not None and bag.get(term):
                norm = k1 * (1 - b + b * sum(bag.values()) / mean)
                scores[place] += idf * (k1 + 1) * bag[term] / (bag[term] + norm)
    return scores, attainable


def fragment_leg(docs: Sequence[Doc], terms: Sequence[int]) -> tuple[list[float], float]:
    return bm25([{**doc.terms} if doc.alive else None for doc in docs], terms, 0.9, 0.4)


def context_leg(docs: Sequence[Doc], terms: Sequence[int]) -> tuple[list[float], float]:
    return bm25([window(docs, place) if doc.alive else None for place, doc in enumerate(docs)], terms, 1.2, 0.75)
