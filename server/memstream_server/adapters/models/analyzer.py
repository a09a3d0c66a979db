"""The lexical analyzer: text to hashed Snowball stems with counts, in microseconds.

Rule 1. A token counts under each of its spellings (words.list_forms). They are computed once per token and cached.
Rule 2. A stop word counts where it is a name (words.find_names), in the prefix of a fragment, and in a text that has
no other words.
Rule 3. If the policy's language is `auto`, the detected language of a text selects its stemmer. py3langid
(BSD-3-Clause; depends on numpy only; its model is arrays, no pickle) over lingua: equally accurate, 75 MB and one
second to load against 650 MB and six, 70 microseconds a sentence against 600 (benchmarks/languages.py).
"""

from __future__ import annotations

import asyncio
import re
import struct
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from functools import cache, lru_cache
from hashlib import blake2b
from itertools import chain
from typing import Any

from memstream_server.adapters.models.words import (
    NAMES,
    WORD_CHARACTERS_MAX,
    PerNamespace,
    Stems,
    find_capitals,
    find_names,
    fold_accents,
    list_forms,
    lower_word,
    may_name,
    tokens,
    unify_letters,
)
from memstream_server.core.policy import AUTO_LANGUAGE
from memstream_server.ports.journal.rows import Terms

VERSION = 2
"""Stored with the terms. Raise it with every change of their computation: activation analyzes older rows again."""
_CACHED_WORDS = 131_072
"""Total over namespaces and languages."""
_CACHED_CHARACTERS_MAX = 2 * WORD_CHARACTERS_MAX
"""Longer tokens (encoded data, long chains of hyphens) are not cached."""
_CACHED_PREFIXES = 64
"""Prefixes of fragments, by date and speaker, per namespace and language."""
_QUESTION = "?"
"""Suffix of a language: the cache of its questions' words."""
_COUNT_MAX = 65_535
NO_TERMS = Terms(b"", b"", VERSION)
_Hashes = tuple[int, ...]


def term_hash(stem: str) -> int:
    """64 bits of BLAKE2b, stable across processes: a million stems have a collision with probability 3e-8."""
    return int.from_bytes(blake2b(stem.encode(errors="surrogatepass"), digest_size=8).digest(), "little")


_UNDECIDED = 0
"""In place of the term of a stop word with a capital: its text decides whether it is a name."""


class _Words(dict[str, _Hashes]):
    """Term hashes of one language's tokens, computed on first use; none for a stop word."""

    def __init__(self, language: str, stems: Stems, folds: bool) -> None:
        """`folds`: each word also counts without its accents."""
        self.stems = stems
        self._language = language
        self._folds = folds
        self._prefixes: dict[str, dict[int, int]] = {}

    def __missing__(self, token: str) -> _Hashes:
        if token.lower() not in self.stems.stop:
            # "I.T." is an abbreviation, whatever word it spells.
            return self._keep(token, self._hash_forms(token, frozenset() if "." in token else self.stems.stop))
        return self._keep(token, (_UNDECIDED,) if may_name(token) else ())

    def hash_all(self, token: str) -> _Hashes:
        """The terms of a token, stop words included; not cached."""
        return self._hash_forms(token, frozenset())

    def count_prefix(self, prefix: str) -> dict[int, int]:
        """The terms of a fragment's prefix with counts; all its words count. Not to be changed."""
        known = self._prefixes.get(prefix)
        if known is None:
            known = dict(Counter(term for token in tokens(prefix) for term in self.hash_all(token)))
            if len(self._prefixes) >= _CACHED_PREFIXES:
                self._prefixes.clear()
            self._prefixes[prefix] = known
        return known

    def _keep(self, key: str, found: _Hashes) -> _Hashes:
        if len(self) >= _CACHED_WORDS:
            self.clear()
        if len(key) <= _CACHED_CHARACTERS_MAX:
            self[key] = found
        return found

    def _hash_forms(self, token: str, stop: frozenset[str]) -> _Hashes:
        forms = list_forms(token)
        hashes = {form: self._hash_form(form, stop) for form in set(forms)}  # a chain of hyphens may repeat its parts
        return tuple([term for form in forms for term in hashes[form]])

    def _hash_form(self, form: str, stop: frozenset[str]) -> _Hashes:
        word = lower_word(form, self._language)
        if word in stop:
            return ()
        exact = self._hash_stem(word)
        folded = fold_accents(word) if self._folds else word
        bare = exact if folded == word else self._hash_stem(folded)
        return (exact,) if bare == exact else (exact, bare)

    def _hash_stem(self, word: str) -> int:
        return term_hash(unify_letters(self.stems.stem_any(word)))


class SnowballAnalyzer:
    """ports.models.Analyzer. Stateless except for bounded caches per namespace; thread-safe."""

    version = VERSION

    def __init__(self) -> None:
        self._stems: dict[str, Stems] = {}
        self._words = PerNamespace(self._words_of, _CACHED_WORDS)

    def terms(self, text: str, language: str = "english", namespace: str = "", prefix: str = "") -> Terms:
        """The packed terms of a text, hashes ascending. Raises ValueError for a language without a stemmer.

        AUTO_LANGUAGE: detects the language of the text, and adds the terms of the fallback language, which are those of
        a question that is too short to tell. `prefix`: a fragment's date and speaker, also terms.
        """
        if language != AUTO_LANGUAGE:
            return _pack_terms(self._count_terms(text, language, namespace, prefix))
        language = stemmer_of(prefix + text)
        counts = self._count_terms(text, language, namespace, prefix)
        if language != FALLBACK:
            for term, count in self._count_terms(text, FALLBACK, namespace, prefix).items():
                counts[term] = max(count, counts.get(term, 0))
        return _pack_terms(counts)

    def _count_terms(self, text: str, language: str, namespace: str, prefix: str) -> dict[int, int]:
        known = self._words.of(namespace, language)
        counts = known.count_prefix(prefix).copy() if prefix else {}
        for term in _list_terms(text, known):
            counts[term] = counts.get(term, 0) + 1
        return counts

    def question_terms(self, text: str, language: str = "english", namespace: str = "") -> Terms:
        """The packed terms of a question, with accents as it writes them."""
        if language == AUTO_LANGUAGE:
            language = certain_stemmer_of(text)
        return _pack_terms(Counter(_list_terms(text, self._words.of(namespace, language + _QUESTION))))

    def name_terms(self, text: str, names: Sequence[str], language: str = "english", namespace: str = "") -> Terms:
        """The terms of these names, and of the words of a question that its case shows to be names."""
        if language == AUTO_LANGUAGE:
            language = certain_stemmer_of(text)
        known = self._words.of(namespace, language + _QUESTION)
        found = [*names, *find_capitals(text, language)]
        return _pack_terms(Counter(term for name in found for token in tokens(name) for term in known.hash_all(token)))

    def language_of(self, text: str) -> str:
        """The name of the Snowball algorithm for a text's own language. Raises ValueError as `prepare` does."""
        return stemmer_of(text)

    async def prepare(self, language: str) -> None:
        """Load the language detector in a thread if `language` is AUTO_LANGUAGE. Raises ValueError."""
        if language == AUTO_LANGUAGE:
            await asyncio.to_thread(identifier)

    def _words_of(self, kind: str) -> _Words:
        language = kind.removesuffix(_QUESTION)
        stems = self._stems.get(language)
        return _Words(language, stems or self._stems.setdefault(language, Stems(language)), folds=language == kind)


def _pack_terms(counts: dict[int, int]) -> Terms:
    counts.pop(_UNDECIDED, None)
    if not counts:
        return NO_TERMS
    hashes = sorted(counts)
    numbers = map(counts.__getitem__, hashes)
    pack_hashes, pack_numbers = _packers(len(hashes))
    try:
        packed = pack_numbers(*numbers)
    except struct.error:  # rarer, and so cheaper, than a check of every text
        packed = pack_numbers(*(min(counts[term], _COUNT_MAX) for term in hashes))
    return Terms(pack_hashes(*hashes), packed, VERSION)


@lru_cache(maxsize=1_024)
def _packers(count: int) -> tuple[Callable[..., bytes], Callable[..., bytes]]:
    """Functions that pack so many hashes, and so many counts."""
    return struct.Struct(f"<{count}Q").pack, struct.Struct(f"<{count}H").pack


def _list_terms(text: str, known: _Words) -> list[int]:
    found = tokens(text)
    terms = list(chain.from_iterable(map(known.__getitem__, found)))
    undecided = terms.count(_UNDECIDED)  # its entries stay: to remove them here costs more than in the counts
    if undecided > 1 or (undecided and (known[found[0]] != (_UNDECIDED,) or found[0].lower() in NAMES)):
        names = find_names(text, known.stems.stop)
        hashes = {name: term_hash(known.stems.stem_any(name)) for name in set(names)}
        terms += map(hashes.__getitem__, names)
    if len(terms) > undecided:
        return terms
    verbatim = {token: known.hash_all(token) for token in set(found)}
    return [term for token in found for term in verbatim[token]]


FALLBACK = "english"
"""For languages without a stemmer: Latin words in them are mostly English."""
STEMMERS = {
    "ar": "arabic", "ca": "catalan", "cs": "czech", "da": "danish", "de": "german", "el": "greek", "en": "english",
    "eo": "esperanto", "es": "spanish", "et": "estonian", "eu": "basque", "fa": "persian", "fi": "finnish",
    "fr": "french", "ga": "irish", "hi": "hindi", "hu": "hungarian", "hy": "armenian", "id": "indonesian",
    "it": "italian", "lt": "lithuanian", "ne": "nepali", "nl": "dutch", "no": "norwegian", "pl": "polish",
    "pt": "portuguese", "ro": "romanian", "ru": "russian", "sr": "serbian", "sv": "swedish", "ta": "tamil",
    "tr": "turkish",
}  # fmt: skip
"""Snowball algorithm by ISO 639-1 code."""
OTHERS = ("bg", "he", "ja", "ko", "th", "uk", "vi", "zh")
"""Detected as well, so that their texts are not mistaken for related languages."""
CERTAIN = 10.0
"""Difference of the log-likelihoods of the first two languages of which a text is certain to be in the first."""
_OTHER_SCRIPT = re.compile("[\u0370-\u1dff]")
_lock = threading.Lock()


def stemmer_of(text: str) -> str:
    """The Snowball algorithm for a text. Raises ValueError if py3langid is not installed."""
    code, _ = identifier().classify(text)
    return STEMMERS.get(code, FALLBACK)


def certain_stemmer_of(text: str) -> str:
    """As stemmer_of, but FALLBACK for a text in Latin letters whose language is a guess."""
    (code, best), (_, second) = identifier().rank(text)[:2]
    certain = best - second >= CERTAIN or _OTHER_SCRIPT.search(text)
    return STEMMERS.get(code, FALLBACK) if certain else FALLBACK


def identifier() -> Any:
    """py3langid's model, loaded on first use in about a second. Raises ValueError. Thread-safe."""
    with _lock:  # prevents two threads from loading it twice
        return _loaded()


@cache
def _loaded() -> Any:
    try:
        from py3langid.langid import MODEL_FILE, LanguageIdentifier
    except ImportError as error:
        raise ValueError("py3langid is not installed: pip install '.[server,languages]'") from error
    made = LanguageIdentifier.from_model_file(MODEL_FILE)
    made.set_languages([*STEMMERS, *OTHERS])
    return made
