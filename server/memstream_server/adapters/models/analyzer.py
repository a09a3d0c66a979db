"""The lexical analyzer: text to hashed Snowball stems with counts, in microseconds."""

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
"""Total over namespaces and languages."""
_COUNT_MAX = 65_535
NO_TERMS = Terms(b"", b"")


def term_hash(stem: str) -> int:
    """64 bits of BLAKE2b, stable across processes: a million stems have a collision with probability 3e-8."""
    return int.from_bytes(blake2b(stem.encode(errors="surrogatepass"), digest_size=8).digest(), "little")


class _Words(dict[str, int]):
    """Term hashes of one language's words, computed on first use; 0 for a stop word."""

    def __init__(self, stems: Stems) -> None:
        self._stem = stems.stem

    def __missing__(self, word: str) -> int:
        if len(self) >= _CACHED_WORDS:
            self.clear()
        stem = self._stem(word)
        found = self[word] = term_hash(stem) if stem else 0
        return found


class SnowballAnalyzer:
    """ports.models.Analyzer. Stateless except for bounded caches per namespace; thread-safe."""

    def __init__(self) -> None:
        self._stems: dict[str, Stems] = {}
        self._words = PerNamespace(self._words_of, _CACHED_WORDS)

    def terms(self, text: str, language: str = "english", namespace: str = "") -> Terms:
        """The packed terms of a text, hashes ascending. Raises ValueError for a language without a stemmer.

        AUTO_LANGUAGE: detects the language of the text.
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
        """Load the language detector in a thread if `language` is AUTO_LANGUAGE. Raises ValueError."""
        if language == AUTO_LANGUAGE:
            await asyncio.to_thread(languages.identifier)

    def _words_of(self, language: str) -> _Words:
        stems = self._stems.get(language)
        return _Words(stems or self._stems.setdefault(language, Stems(language)))
