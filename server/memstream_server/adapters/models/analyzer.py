"""The lexical analyzer: text to hashed Snowball stems with counts, microseconds a text."""

from __future__ import annotations

import asyncio
import struct
from hashlib import blake2b

from memstream_server.adapters.models import languages
from memstream_server.adapters.models.per_namespace import PerNamespace
from memstream_server.adapters.models.words import Stems, words
from memstream_server.core.policy import AUTO_LANGUAGE
from memstream_server.ports.journal.rows import Terms

_CACHED_WORDS = 131_072
"""Of all namespaces and languages together."""
_COUNT_MAX = 65_535
NO_TERMS = Terms(b"", b"")


def term_hash(stem: str) -> int:
    """64 bits of BLAKE2b: two of a million stems collide with probability 3e-8, and never by intent of hash()."""
    return int.from_bytes(blake2b(stem.encode(errors="surrogatepass"), digest_size=8).digest(), "little")


class _Words(dict[str, int]):
    """One language's words as term hashes, computed when first asked for; 0 for a stop word."""

    def __init__(self, stems: Stems) -> None:
        self._stem = stems.stem

    def __missing__(self, word: str) -> int:
        if len(self) >= _CACHED_WORDS:
            self.clear()
        stem = self._stem(word)
        found = self[word] = term_hash(stem) if stem else 0
        return found


class SnowballAnalyzer:
    """ports.models.Analyzer. Pure but for its caches, which are bounded and each of one namespace; thread-safe."""

    def __init__(self) -> None:
        self._stems: dict[str, Stems] = {}
        self._words = PerNamespace(self._words_of, _CACHED_WORDS)

    def terms(self, text: str, language: str = "english", namespace: str = "") -> Terms:
        """Packed terms of a text, hashes ascending. Raises ValueError for a language without a stemmer.

        AUTO_LANGUAGE: by the stemmer of the language that the text is in.
        """
        if language == AUTO_LANGUAGE:
            language = languages.stemmer_of(text)
        known = self._words.of(namespace, language)
        counts: dict[int, int] = {}
        for term in map(known.__getitem__, words(text)):
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

    def _words_of(self, language: str) -> _Words:
        stems = self._stems.get(language)
        return _Words(stems or self._stems.setdefault(language, Stems(language)))
