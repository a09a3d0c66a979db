"""Words, spellings and stems of a text, for the analyzer and the hashing embedder.

Words are runs of letters and digits with their combining marks, lowercased, with inner apostrophes for the stemmer.
The analyzer also has words of signs: "C++", "A.I.", emoji, and the ends of telephone numbers.
Scripts without spaces (Chinese, Japanese, Thai, Lao, Khmer, Burmese), and Korean, whose words take many endings, are
split into characters and character pairs. English has a stop list. Other languages have none: the available lists are
unmaintained or have unclear licences, and idf already gives frequent words little weight.

A token is indexed under its spellings: its parts, its joined form, and each without accents.

Rule 1. A hyphenated token counts as its parts and as one word: "Wi-Fi" as wi, fi and wifi.
Rule 2. A word of mixed case, or of letters next to digits, counts as a whole and as its parts: "getUserName" also as
get, user and name; "iPhone15" also as iphone, phone and 15.
Rule 3. A word of a fragment counts as written and without its accents, a word of a question only as written: "ha noi"
finds "Hà Nội", and a question about "má" does not find "mà".
Rule 4. Nothing is lost: the words of `words` are among the forms, but for single letters of words with signs: "C++" is
no "C", and "A.I." counts as "AI".
Rule 5. Letters that writers choose freely between are one letter, in fragments and questions (unify_letters): Arabic
and Persian yeh, kaf, alef and heh; Devanagari nasals; traditional and simplified Chinese.
Rule 6. Namespaces share no cache of words (PerNamespace): a cached word is faster, recall reports its steps in
microseconds, and so would tell which words other tenants use.
"""

# ruff: noqa: RUF001 - other alphabets have letters that look like Latin ones

from __future__ import annotations

import re
import threading
import unicodedata
from collections import OrderedDict
from collections.abc import Callable
from functools import cache
from typing import Generic, Protocol, TypeVar

import opencc
import Stemmer

WORD_CHARACTERS_MAX = 64
"""Longer words (encoded data) are truncated, to bound the caches."""

_UNSPACED = "\u0e01-\u0e4e\u0e81-\u0ecd\u1000-\u103f\u1050-\u109f\u1780-\u17d3"
_CJK = "\u3005\u3007\u3040-\u30ff\u31f0-\u31ff\u3400-\u4dbf\u4e00-\u9fff\uac00-\ud7a3\uf900-\ufaff\U00020000-\U0003ffff"
_PIECED = _UNSPACED + _CJK
_MARKS = "".join(mark for mark in map(chr, range(0x300, 0x2000)) if unicodedata.category(mark)[0] == "M")
"""Combining marks, which \\w excludes: without vowel signs, Hindi words would break into single consonants."""
_ASCII_WORD = re.compile(r"[a-z0-9]++(?:'[a-z0-9]++)*+")
_LETTERS = rf"[^\W_{_PIECED}]+(?:[{_MARKS}]+[^\W_{_PIECED}]*)*"
_HAS_PIECES = re.compile(rf"[{_PIECED}]")
_ASCII_TOKEN = re.compile(r"[A-Za-z0-9]++(?:['-][A-Za-z0-9]++)*+")
_TOKEN = re.compile(rf"[{_PIECED}]+|{_LETTERS}(?:['-]{_LETTERS})*")
_LETTER = rf"[^\W\d_{_PIECED}]"
_EMOJI = (
    "[\U0001f1e6-\U0001f1ff]{2}|[\u231a\u231b\u23e9-\u23ff\u2600-\u27bf\u2b50\u2b55\U0001f000-\U0001f1e5"
    "\U0001f200-\U0001f3fa\U0001f400-\U0001faff]"
)
"""A flag, or a pictograph; of a sequence, each of its own. Skin tones (U+1F3FB to 1F3FF) and variation selectors are no
words."""
_SIGNED = re.compile(
    rf"((?<![\w+#]){_LETTER}(?:\+\+?|#)(?![^\W\d_]|[+#])"
    rf"|(?<![\w.]){_LETTER}(?:\.{_LETTER}){{1,7}}(?!\w)"
    rf"|(?<![\w&]){_LETTER}{{1,2}}(?:&{_LETTER}{{1,2}}){{1,3}}(?![\w&])"
    rf"|{_EMOJI})"
)
"""Words whose signs count: "C++", "C#" and "A+"; "A.I."; "R&D"; emoji."""
_HAS_DOTTED = re.compile(r"\.\w(?<=\b\w\.\w)")
_HAS_EMOJI = re.compile(_EMOJI)
_NUMBER = re.compile(r"[0-9](?<![0-9][0-9])(?:[ ()./-]{0,2}[0-9]){6,14}(?![0-9])")
_DATE = re.compile(r"[0-9]{4}[./-][0-9]{1,2}[./-][0-9]|[0-9]{1,2}([./-])[0-9]{1,2}\1[0-9]{2}")
NUMBER_END = 7
"""Digits of a telephone number that people write in the same way with and without area and country; Android compares
numbers by as many."""
_OTHER_DIGIT = re.compile(r"[^\D0-9]")
_JOINER = re.compile("(?<=[\u0600-\u06ff])\u200c(?=[\u0600-\u06ff])")

STOP_WORDS = {
    "english": frozenset(
        """
        a about above after again against all am an and any are aren't as at be because been before being below
        between both but by can can't cannot could couldn't d did didn't do does doesn't doing don't down during
        each few for from further had hadn't has hasn't have haven't having he he'd he'll he's her here here's
        hers herself him himself his how how's i i'd i'll i'm i've if in into is isn't it it'd it'll it's its
        itself just let's ll m me more most mustn't my myself no nor not now o of off on once only or other ought
        our ours ourselves out over own re s same shan't she she'd she'll she's should shouldn't so some such t
        than that that's the their theirs them themselves then there there's these they they'd they'll they're
        they've this those through to too under until up ve very was wasn't we we'd we'll we're we've were weren't
        what what's when when's where where's which while who who's whom why why's will with won't would wouldn't
        you you'd you'll you're you've your yours yourself yourselves
        """.split()  # noqa: SIM905 - read as prose, a list of 200 quoted words hides what is missing
    )
}


def words(text: str) -> list[str]:
    """The words in order, lowercased; in scripts without spaces, characters, each followed by the pair it starts."""
    if text.isascii():
        return _ASCII_WORD.findall(text.lower())
    folded = unicodedata.normalize("NFKC", text).lower().replace("\u2019", "'")
    return [word for token in _find_tokens(folded) for word in token.split("-")]


def tokens(text: str) -> list[str]:
    """The words in order as written, with inner hyphens and apostrophes; pieces of scripts without spaces as `words`.

    A word whose signs count (_SIGNED) keeps them. After the words, the ends of long numbers. The analyzer's input;
    `words` is the hashing embedder's, whose vectors are stored and must not change.
    """
    plain = text if text.isascii() else _normalise_signs(text)
    # Looking for signs takes a tenth of the time of looking for signed words.
    may_be_signed = "+" in plain or "#" in plain or "&" in plain or _HAS_DOTTED.search(plain)
    if may_be_signed or (not plain.isascii() and _HAS_EMOJI.search(plain)):
        parts = _SIGNED.split(plain)
        found = [word for at, part in enumerate(parts) for word in ((part,) if at % 2 else _find_tokens(part))]
    else:
        found = _find_tokens(plain)
    if _NUMBER.search(plain):
        found += _number_ends(plain, found)
    return found


def _number_ends(plain: str, found: list[str]) -> list[str]:
    """The last digits of each telephone number, without those that are words already."""
    numbers = [match[0] for match in _NUMBER.finditer(plain) if not _DATE.match(match[0])]
    ends = ["".join(filter(str.isdecimal, number))[-NUMBER_END:] for number in numbers]
    return [end for end in ends if end not in found]


def _find_tokens(plain: str) -> list[str]:
    if plain.isascii():
        return _ASCII_TOKEN.findall(plain)
    found = _TOKEN.findall(plain)
    if not _HAS_PIECES.search(plain):
        return found
    return [piece for token in found for piece in (_split_pieces(token) if _HAS_PIECES.match(token) else (token,))]


def _normalise_signs(text: str) -> str:
    """The text in NFKC with plain apostrophes, hyphens and digits, and without soft hyphens and joiners.

    The joiner inside a Persian word is a hyphen: writers leave it out, or write a space.
    """
    # NFKC makes a hyphen of the non-breaking one. Three scans take a fiftieth of the time of str.translate.
    plain = unicodedata.normalize("NFKC", text)
    plain = plain.replace("\u2019", "'").replace("\u2010", "-").replace("\xad", "")
    if "\u200c" in plain or "\u200d" in plain:
        plain = _JOINER.sub("-", plain).replace("\u200c", "").replace("\u200d", "")
    return _OTHER_DIGIT.sub(lambda digit: str(unicodedata.decimal(digit[0])), plain)


def _split_pieces(run: str) -> list[str]:
    found: list[str] = []
    for place, character in enumerate(run):
        found.append(character)
        if place + 1 < len(run):
            found.append(run[place : place + 2])
    return found


NAMES = frozenset({"will"})
"""Stop words that are also given names: with a capital they count even where a sentence begins."""
_NAME = re.compile(r"[A-Z](?:(?<=[a-zA-Z0-9,&] [A-Z])[a-z]+|(?<![^\W_][A-Z])(?:[A-Z]+|ill))(?![\w'\u2019])")
"""A capital inside a sentence, or capitals only, or one of NAMES."""
_LOWER_START = re.compile(r"[a-z](?<![^\W_][a-z])(?<!['\u2019][a-z])")
_SUBJECT = re.compile(
    r" (?:i|a|an|any|he|her|his|it|its|my|one|our|she|some|that|the|their|there|these|they|this|those|we|you|your)\b",
    re.IGNORECASE,
)
"""What follows an auxiliary verb at the start of a question, and no name: "Will you come?"."""


_INNER_CAPITAL = re.compile(r"(?<=[^\W\d_,&] )[A-Z\u00c0-\u00de][\w'\u2019]*|\b[A-Z]{2,}\b")
_NOUNS_WITH_CAPITAL = frozenset({"german"})


def find_capitals(text: str, language: str) -> list[str]:
    """The words that case shows to be names: with a capital inside a sentence, or of capitals only.

    None in a text without a lowercase word, and in German, which writes all nouns with a capital.
    """
    if language in _NOUNS_WITH_CAPITAL or not _LOWER_START.search(text):
        return []
    return _INNER_CAPITAL.findall(text)


def may_name(token: str) -> bool:
    """Whether a stop word with this spelling can be a name: it has a capital, and is neither "I" nor a contraction."""
    return token.isalpha() and not token.islower() and token != "I"


def find_names(text: str, stop: frozenset[str]) -> list[str]:
    """The stop words of an English text that its case shows to be names, lowercased, each as often as it occurs.

    Evidence: a capital inside a sentence ("ask Will", "The Who"), capitals only ("IT"), or a capital at the start of a
    sentence for a stop word that is a given name. A text without a lowercase word has no evidence.
    """
    if stop.isdisjoint(map(str.lower, _NAME.findall(text))) or not _LOWER_START.search(text):
        return []
    found = [match for match in _NAME.finditer(text) if match[0].lower() in stop]
    return [match[0].lower() for match in found if not _is_auxiliary(text, match)]


def _is_auxiliary(text: str, match: re.Match[str]) -> bool:
    before = text[max(0, match.start() - 2) : match.start()]
    inside = before.endswith(" ") and (before[0].isalnum() or before[0] in ",&")
    return not inside and not match[0].isupper() and _SUBJECT.match(text, match.end()) is not None


class Stems:
    """Stems of words in one language; "" for stop words. Thread-safe; callers do their own caching.

    The stemmer's own cache is disabled, because it would be shared by all namespaces.
    """

    def __init__(self, language: str) -> None:
        """`language`: the name of a Snowball algorithm. Raises ValueError for an unknown name."""
        try:
            self._stemmer = Stemmer.Stemmer(language, 0)
        except KeyError as error:
            raise ValueError(f"no stemmer for {language!r}; there are {', '.join(languages())}") from error
        self.stop = STOP_WORDS.get(language, frozenset())
        self._lock = threading.Lock()

    def stem(self, word: str) -> str:
        """The stem of a lowercase word; empty for a stop word."""
        return "" if word in self.stop else self.stem_any(word)

    def stem_any(self, word: str) -> str:
        """The stem of a lowercase word, stop words included."""
        with self._lock:  # Snowball stemmers are not thread-safe
            stem: str = self._stemmer.stemWord(word[:WORD_CHARACTERS_MAX])
        return stem


def languages() -> list[str]:
    """The names of the available stemmers, ascending."""
    return sorted(Stemmer.algorithms())


JOINED_PARTS_MAX = 4
"""A token with more hyphens is a chain, such as a UUID; nobody writes it as one word."""
RUNS_MAX = 4
"""A word that alternates more often between letters and digits is an encoded value; its parts mean nothing."""
CASED_PARTS_MAX = 16
"""Parts of a word of mixed case that are indexed."""
_PARTED_CHARACTERS_MAX = 128
"""A longer word is encoded data and has no parts."""
_SIGNS = frozenset("+#.&")
_RUN = re.compile(r"d+|[Ul]+")
_PART = re.compile(r"U+(?!l)|U?l+")
_DROPPED_MARKS = frozenset(
    chr(code)
    for first, last in (
        (0x300, 0x36F),  # Latin, Greek
        (0x591, 0x5BD),  # Hebrew points
        (0x5BF, 0x5C7),
        (0x640, 0x640),  # Arabic tatweel
        (0x64B, 0x65F),  # Arabic vowel signs and hamza
        (0x670, 0x670),
        (0x93C, 0x93C),  # Devanagari nukta
    )
    for code in range(first, last + 1)
)
"""Marks that writers leave out. The vowel signs of Indic scripts are not among them."""
_WITHOUT_DECOMPOSITION = {
    "ß": "ss", "æ": "ae", "œ": "oe", "ø": "o", "đ": "d", "ð": "d", "þ": "th", "ł": "l", "ħ": "h", "ı": "i", "ς": "σ",
}  # fmt: skip
_LETTERS_WITH_MARKS = frozenset("йїў")
"""Letters of their own that no writer replaces by the letter without the mark."""


_ARABIC = str.maketrans("ىیېےکڪأإآٱةۀہە", "ييييككااااهههه")
"""As Lucene's normalisers of Arabic and Persian."""
_FOR_STEMMER = {"arabic": str.maketrans("یک", "يك"), "persian": str.maketrans("يك", "یک")}
_NASAL = re.compile("ङ्(?=[क-घ])|ञ्(?=[च-झ])|ण्(?=[ट-ढ])|न्(?=[त-ध])|म्(?=[प-भ])|ँ")
_HAN = re.compile("[\u3400-\u9fff\U00020000-\U0003ffff]")


class _Folds(dict[int, str]):
    """Lowercase letters without their marks, computed on first use; as `str.translate` takes it."""

    def __missing__(self, code: int) -> str:
        letter = chr(code)
        folded = _WITHOUT_DECOMPOSITION.get(letter, letter)
        if letter in _DROPPED_MARKS:
            folded = ""
        elif letter not in _LETTERS_WITH_MARKS:
            bare = unicodedata.normalize("NFD", letter)
            if bare[1:] and _DROPPED_MARKS.issuperset(bare[1:]):
                folded = _WITHOUT_DECOMPOSITION.get(bare[0], bare[0])  # "ǣ" is "æ" with a mark
        self[code] = folded
        return folded


_FOLDS = _Folds()


class _Simplified(dict[int, str]):
    """Chinese characters in their simplified form, by OpenCC's table of characters, computed on first use."""

    def __missing__(self, code: int) -> str:
        self[code] = _converter().convert(chr(code))
        return self[code]


@cache
def _converter() -> opencc.OpenCC:
    return opencc.OpenCC("t2s")


_SIMPLIFIED = _Simplified()


def unify_letters(stem: str) -> str:
    """A stem with one letter for those that writers choose freely between; idempotent."""
    if stem.isascii():
        return stem
    stem = stem.translate(_ARABIC)
    return stem.translate(_SIMPLIFIED) if _HAN.search(stem) else stem


def fold_accents(word: str) -> str:
    """A lowercase word without accents; idempotent. The word itself if nothing else is left of it."""
    return word if word.isascii() else word.translate(_FOLDS) or word


def lower_word(word: str, language: str = "") -> str:
    """Lowercase, in Turkish with the dotless i; the dot that lower() leaves behind the i of "İ" is removed.

    Persian, Arabic and Devanagari with the letters that the stemmer of the language knows.
    """
    if word.isascii() and language != "turkish":
        return word.lower()
    if language == "turkish":
        word = word.replace("I", "ı")
    elif language in _FOR_STEMMER:
        word = word.translate(_FOR_STEMMER[language])
    return _NASAL.sub("\u0902", word.lower().replace("i\u0307", "i"))


def list_forms(token: str) -> list[str]:
    """The forms of a token as written: words, their parts, and the joined form; without folding case or accents."""
    if not _SIGNS.isdisjoint(token):
        return [token.replace(".", "")]
    words = token.split("-")
    forms = [form for word in words for form in (word, *_list_parts(word))]
    if 1 < len(words) <= JOINED_PARTS_MAX:
        forms.append("".join(words))
    return forms


def _list_parts(word: str) -> list[str]:
    if word.isalpha() and (word[1:].islower() or word.islower() or word.isupper()):
        return []
    if word[:-1].isupper() and word[-1] == "s":  # the plural of an abbreviation: "DNAs"
        return []
    if word.isdecimal() or len(word) > _PARTED_CHARACTERS_MAX:
        return []
    kinds = "".join(map(_kind_of, word))
    runs = [match.span() for match in _RUN.finditer(kinds)]
    if len(runs) > RUNS_MAX:
        return []
    parts = [word[start:end] for start, end in runs] if len(runs) > 1 else []
    for start, end in runs:
        spans = [match.span() for match in _PART.finditer(kinds, start, end)]
        if len(spans) > 1:
            parts += [word[first:last] for first, last in spans[:CASED_PARTS_MAX]]
    bare = (part.strip("'") for part in parts)
    return [part for part in bare if len(part) > 1 or part.isdecimal()]


def _kind_of(character: str) -> str:
    if character.isdecimal():
        return "d"
    return "U" if character.isupper() else "l"


class _Sized(Protocol):
    def __len__(self) -> int: ...


Cache = TypeVar("Cache", bound=_Sized)


class PerNamespace(Generic[Cache]):
    """Creates a cache on first use. All caches together hold about `entries_max` entries at most; beyond that, the
    least recently used caches are dropped. Thread-safe."""

    def __init__(self, make: Callable[[str], Cache], entries_max: int) -> None:
        """`make` is called with the `kind`."""
        self._make = make
        self._entries_max = entries_max
        self._caches: OrderedDict[tuple[str, str], Cache] = OrderedDict()
        self._counted: dict[tuple[str, str], int] = {}
        self._entries = 0
        self._last: tuple[str, str] | None = None
        self._lock = threading.Lock()

    def of(self, namespace: str, kind: str = "") -> Cache:
        """The cache of a namespace and kind. Raises what `make` raises."""
        key = (namespace, kind)
        with self._lock:
            if self._last is not None:  # it may have grown since its last count
                size = len(self._caches[self._last])
                self._entries += size - self._counted[self._last]
                self._counted[self._last] = size
            while self._entries > self._entries_max:
                self._drop_oldest()
            cache = self._caches.get(key)
            if cache is None:
                cache = self._caches[key] = self._make(kind)
                self._counted[key] = 0
            self._caches.move_to_end(key)
            self._last = key
            return cache

    def _drop_oldest(self) -> None:
        key, _ = self._caches.popitem(last=False)
        self._entries -= self._counted.pop(key)
        if key == self._last:
            self._last = None
