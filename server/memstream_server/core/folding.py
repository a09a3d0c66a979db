"""Folding: fragments that say the same take one place in an answer, the best of them, which names the others.

Rule 1. The same is: the same words in the same order by the same speaker, whatever their case, spaces, commas, quotes
and final stops. A question is not its statement.
Rule 2. Closeness of vectors is not asked: without a model "does like" and "doesn't like", "from Berlin" and "to Berlin"
have a cosine of 1.00, and two long texts of which one number differs 0.99.
"""

from __future__ import annotations

import unicodedata
from collections import Counter
from collections.abc import Collection, Iterable, Sequence

from memstream_server.core.values import Fragment


def normalise_words(text: str) -> str:
    """The words that count, to be compared."""
    if not text.isascii():
        text = unicodedata.normalize("NFKC", text).replace("\u201c", "").replace("\u201d", "")
    text = text.casefold().replace('"', "").replace(", ", " ").replace("; ", " ")
    if "  " in text or "\n" in text or "\t" in text:  # to split and join takes longer than all of the rest
        text = " ".join(text.split())
    return text.strip(" .!\u3002")


def fold_key(fragment: Fragment) -> int:
    """Equal for fragments that say the same; of this process alone."""
    if fragment.structured is None:
        return hash((normalise_words(fragment.content), fragment.speaker))
    parts = tuple((name, normalise_words(value)) for name, value in fragment.structured.parts().items())
    return hash((parts, fragment.speaker))


def fold_places(keys: Sequence[int], preferred: Collection[int] = ()) -> tuple[list[int], dict[int, list[int]]]:
    """Of `keys`, best first: (places of those that stay, in their order; places folded into each that has any).

    A `preferred` place is kept for its key where there is one, else the best place is.
    """
    stays: dict[int, int] = {}
    groups: dict[int, list[int]] = {}
    for place, key in enumerate(keys):
        first = stays.setdefault(key, place)
        if first != place:
            groups.setdefault(key, []).append(place)
    folded: dict[int, list[int]] = {}
    for key, others in groups.items():
        members = [stays[key], *others]
        chosen = next((place for place in members if place in preferred), members[0])
        stays[key] = chosen
        folded[chosen] = [place for place in members if place != chosen]
    return sorted(stays.values()), folded


def find_crowded(keys: Iterable[int]) -> list[int]:
    """Keys that occur more than once."""
    return [key for key, count in Counter(keys).items() if count > 1]
