"""The lexical analyzer: text to hashed Snowball stems with counts, microseconds a text."""

from __future__ import annotations

import asyncio
import struct
from functools import lru_cache
from hashlib import blake2b

from memstream_server.adapters.models import languages
from memstream_server.adapters.models.words import Stems, words
from memstream_server.core.policy import AUTO_LANGUAGE
from memstream_server.ports.journal.rows import Terms

_CACHED_WORDS = 65_536
_COUNT_MAX = 65_535
NO_TERMS = Terms(b"", b"")


def term_hash(stem: str) -> int:
    """64 bits of BLAKE2b: two of a million stems collide with probability 3e-8, and never by intent of hash()."""
    return int.from_bytes(blake2b(stem.encode(errors="surrogatepass"), digest_size=8).digest(), "little")


class _Language:
    """One language's words as term hashes, cached; 0 for a stop word."""

    def __init__(self, language: str) -> None:
        self._stem = Stems(language).stem
        self.hash_of = lru_cache(_CACHED_WORDS)(self._hash)

    def _hash(self, word: str) -> int:
        stem = self._stem(word)
        return term_hash(stem) if stem else 0


class SnowballAnalyzer:
    """ports.models.Analyzer. Pure but for its caches, which are bounded; thread-safe."""

    def __init__(self) -> None:
        self._languages: dict[str, _Language] = {}

    def terms(self, text: str, language: str = "english") -> Terms:
        """Packed terms of a text, hashes ascending. Raises ValueError for a language without a stemmer.

        AUTO_LANGUAGE: by the stemmer of the language that the text is in.
        """
        known = self._languages.get(language) or self._known(language, text)
        counts: dict[int, int] = {}
        for term in map(known.hash_of, words(text)):
            counts[term] = counts.get(term, 0) + 1
        counts.pop(0, None)
        if not counts:
            return NO_TERMS
        hashes = sorted(counts)
        numbers = [min(counts[term], _COUNT_MAX) for term in hashes]
        return Terms(struct.pack(f"<{len(hashes)}Q", *hashes), struct.pack(f"<{len(hashes)}H", *numbers))

    async def prepare(self, language: str) -> None:
        """Loads what tells languages apart, in a thread, where `language` asks for it. Raises ValueError."""
        if language == AUTO_LANGUAGE:
            await asyncio.to_thread(languages.identifier)

    def _known(self, language: str, text: str) -> _Language:
        if language == AUTO_LANGUAGE:
            language = languages.stemmer_of(text)
        known = self._languages.get(language)
        return known or self._languages.setdefault(language, _Language(language))
