"""Generated observations: the same in every run, with the word statistics of conversation.

Words are drawn by Zipf's law from a made-up vocabulary, so posting lists have realistic lengths. Neighbouring sentences
are rarely similar, as in real conversation under the hashing model, so the tiers do their usual work.
"""

from __future__ import annotations

import random
from datetime import UTC, datetime, timedelta
from itertools import accumulate, product

from memstream import Observation

START = datetime(2025, 1, 6, 9, tzinfo=UTC)
WORDS = 6_000
_WORDS_MIN, _WORDS_MAX = 6, 30
_SYLLABLES = [a + b for a, b in product("bdfgklmnprstvz", ("a", "e", "i", "o", "u", "an", "or"))]


class SentenceSource:
    """Generates sentences. Another `seed` gives other sentences of the same kind."""

    def __init__(self, seed: int = 1) -> None:
        self._random = random.Random(seed)
        shuffled = list(product(_SYLLABLES, repeat=2))
        random.Random(0).shuffle(shuffled)  # the vocabulary is the same for all
        self._words = ["".join(pair) for pair in shuffled[:WORDS]]
        self._weights = list(accumulate(1 / rank for rank in range(3, WORDS + 3)))

    def make_sentence(self) -> str:
        """6 to 30 words, about 90 characters."""
        count = self._random.randint(_WORDS_MIN, _WORDS_MAX)
        return " ".join(self._random.choices(self._words, cum_weights=self._weights, k=count))

    def make_observations(self, count: int) -> list[Observation]:
        """Two speakers, sessions of 50, one observation a minute."""
        return [
            Observation(
                self.make_sentence(),
                speaker=("Ada", "Grace")[number % 2],
                session=f"session-{number // 50}",
                observe_time=START + timedelta(minutes=number),
            )
            for number in range(count)
        ]

    def draw_question(self, text: str) -> str:
        """Four words of a sentence, as a user who remembers it would ask."""
        words = text.split()
        return " ".join(self._random.sample(words, min(4, len(words))))
