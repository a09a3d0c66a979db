"""Folding: fragments with the same words share one place in an answer; the best represents the others.

Rule 1. Two fragments are the same if the same speaker says the same words in the same order, ignoring case, spaces,
commas, quotes and final punctuation. A question and its statement differ. A superseded fragment and a current one
differ, and so do fragments of different validity.
Rule 2. Vectors are not compared: with the hashing embedder "does like" and "doesn't like", or "from Berlin" and "to
Berlin", have a cosine of 1.00, and two long texts that differ in one number 0.99.
"""

from __future__ import annotations

import unicodedata
from collections import Counter
from collections.abc import Collection, Iterable, Sequence

from memstream_server.core.identity import stable_hash
from memstream_server.core.values import Fragment


def normalise_words(text: str) -> str:
    """The text as folding compares it."""
    if not text.isascii():
        text = unicodedata.normalize("NFKC", text).replace("\u201c", "").replace("\u201d", "")
    text = text.casefold().replace('"', "").replace(", ", " ").replace("; ", " ")
    if "  " in text or "\n" in text or "\t" in text:  # split and join cost more than the rest of the function
        text = " ".join(text.split())
    return text.strip(" .!\u3002")


def fold_key(fragment: Fragment) -> int:
    """Equal for fragments with the same words, speaker, role and truth."""
    voice = fragment.speaker, fragment.role
    if fragment.superseded_by or fragment.has_validity:  # a current one must not hide behind it
        truth = (bool(fragment.superseded_by), fragment.valid_from_us, fragment.valid_until_us)
        return stable_hash((truth, normalise_words(fragment.content), fragment.structured, *voice))
    if fragment.structured is None:
        return stable_hash((normalise_words(fragment.content), *voice))
    parts = tuple((name, normalise_words(value)) for name, value in fragment.structured.parts().items())
    return stable_hash((parts, *voice))


def fold_places(keys: Sequence[int], preferred: Collection[int] = ()) -> tuple[list[int], dict[int, list[int]]]:
    """Fold equal `keys`, best first: (indices that stay, in order; indices folded into each of them, if any).

    A `preferred` index represents its key; without one, the best index does.
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
    """The keys that occur more than once."""
    return [key for key, count in Counter(keys).items() if count > 1]
