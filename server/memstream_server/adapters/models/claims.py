"""Reads the claims of a text (core/suspicions.py) by the word lists of claim_words.py, in microseconds.

Rule 1. A text without a verb of a state and a word of change has no claims.
Rule 2. A capital inside a sentence shows a name. German writes every noun so, and its names include them; scripts
without spaces have none.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache, partial

from memstream_server.adapters.models.claim_words import BY_LANGUAGE, CHINESE, ClaimWords
from memstream_server.adapters.models.words import WORD_CHARACTERS_MAX, tokens
from memstream_server.core.suspicions import Claim

TEXT_CHARACTERS_MAX = 600
"""A longer text is a document, not a statement about its speaker."""
TOKENS_MIN, TOKENS_MAX = 2, 60
"""Per clause; characters of a script without spaces count twice."""
_CACHED_MAX = 32_768
_CLAUSE_END = re.compile(r"(\.(?<=[^\W\d_]{3}\.)\s+|[!;,]\s+|\?\s*|\n|\u3002|\uff01|\uff0c|\uff1b|\uff1f)")
"""Ends of sentences and clauses; not the full stop of "Dr. Ito" or of "2. April". Each branch begins with a character,
which the regular expression engine looks for fast."""
_QUESTION = ("?", "\uff1f")
_ELISION = re.compile(r"(?:[cdjlmnst]|qu)'(?=.)")
_UNSPACED_START = "\u2e80"
_LABEL = re.compile(r"\s*([^\n.!?;,:\uff1a\u3002\uff0c]{1,60})(?::\s+|\uff1a\s*)")
"""What a text begins with, up to a colon: "Project Atlas: ..."."""
_QUOTED = re.compile(r"[\"\u201c\u201e\u00ab\u300c\u300e].*?(?:[\"\u201d\u201c\u00bb\u300d\u300f]|$)", re.DOTALL)
"""Words of somebody else, or words as words; a quotation without an end reaches to the end of the text."""
_QUOTE_MARK = re.compile('["\u201c\u201e\u00ab\u300c\u300e]')
"""With what a quotation begins."""
_TITLE_TOKENS_MAX = 4
"""Words of a quotation that may be a title."""
_NO_MORE = "\u4e86"
"""Ends a Chinese sentence about something new; after a negation it means "no longer"."""
_QUOTE = "\N{LEFT CORNER BRACKET}"
"""Marks where a quotation was."""
(
    NEGATION,
    CHANGE,
    STATE,
    DATE,
    NUMBER,
    OTHER,
    ADDRESSED,
    FILLER,
    TOPIC,
    PAIR,
    UNSPACED,
    OWN,
    UNSETTLED,
    RELATIVE,
    ADDITION,
    VAGUE,
    PRESENT,
) = (1 << bit for bit in range(17))
_CLAIM = CHANGE | STATE
_POINTED = CHANGE | NEGATION | DATE | NUMBER | TOPIC | UNSPACED
_INNER_CAPITAL = re.compile(r"\w (?!I\b)[A-Z\u00c0-\u00de]")
_VALUE = DATE | NUMBER | OTHER | FILLER | PAIR | TOPIC | NEGATION | CHANGE
_NO_SUBJECT = _VALUE & ~NUMBER | VAGUE
Hash = Callable[[str], int]


@dataclass(frozen=True, slots=True)
class Mark:
    """What the rules know of a token."""

    flags: int
    term: int
    """Hash of its stem, or of its number."""
    terms: tuple[int, ...]
    """Hashes under which the index may have it."""
    topics: frozenset[str]
    capital: bool


@cache
def _lists_for(language: str) -> tuple[ClaimWords, ...]:
    known = BY_LANGUAGE.get(language)
    return (known, CHINESE) if known is not None else (*BY_LANGUAGE.values(), CHINESE)


class Marks(dict[str, Mark]):
    """Marks of one language's tokens, computed on first use."""

    def __init__(self, language: str, hashes_of: Callable[[str], tuple[int, ...]], hash_word: Hash) -> None:
        """hashes_of: the index's terms of a token, stop words included. hash_word: the hash of a word as it is."""
        self._lists = _lists_for(language)
        self._hashes_of = hashes_of
        self._hash_word = hash_word
        self.topic_terms: Mapping[str, frozenset[int]] = self._hash_topics()

    def __missing__(self, token: str) -> Mark:
        if len(self) >= _CACHED_MAX:
            self.clear()
        mark = self._make_mark(token)
        if len(token) <= WORD_CHARACTERS_MAX:
            self[token] = mark
        return mark

    def _hash_topics(self) -> dict[str, frozenset[int]]:
        found: dict[str, set[int]] = {}
        for words in self._lists:
            for topic, members in words.topics.items():
                found.setdefault(topic, set()).update(*map(self._hashes_of, sorted(members)))
        return {topic: frozenset(terms) for topic, terms in found.items()}

    def _make_mark(self, token: str) -> Mark:
        lower = token.lower()
        flags = self._flags_of(lower)
        base = lower
        if not flags and (cut := _ELISION.match(lower)):
            base = lower[cut.end() :]
            flags = self._flags_of(base) | self._flags_of(cut[0][:-1]) & (NEGATION | OWN)
        named = frozenset(
            topic for words in self._lists for topic, some in words.topics.items() if {base, lower} & some
        )
        begun = {topic for words in self._lists for begin, topic in words.compounds.items() if base.startswith(begin)}
        value = next((words.numbers[base] for words in self._lists if base in words.numbers), base)
        if value.isdecimal():
            return Mark(flags | NUMBER, self._hash_word(str(int(value))), (), named, False)
        if base[0] >= _UNSPACED_START:
            flags |= UNSPACED | PAIR * (len(base) > 1)
        terms = self._hashes_of(base)
        whole = self._hashes_of(lower) if base != lower else ()
        term = terms[0] if terms else self._hash_word(base)
        flags |= TOPIC * bool(named)
        return Mark(flags, term, (*terms, *whole), named | begun, token[len(lower) - len(base)].isupper())

    def _flags_of(self, word: str) -> int:
        flags = 0
        for words in self._lists:
            flags |= (
                NEGATION * (word in words.negations)
                | CHANGE * (word in words.changes)
                | (CHANGE | PRESENT) * (word in words.presents)
                | STATE * (word in words.states)
                | DATE * (word in words.dates)
                | OTHER * (word in words.others)
                | ADDRESSED * (word in words.addressed)
                | OWN * (word in words.own)
                | UNSETTLED * (word in words.unsettled)
                | RELATIVE * (word in words.relatives)
                | ADDITION * (word in words.additions)
                | VAGUE * (word in words.vague)
                | FILLER * (word in words.fillers)
            )
        return flags


def read_claims(text: str, marks: Marks, pointed: bool = False) -> tuple[Claim, ...]:
    """The claims of a text, in order. `pointed`: none unless one of them may make the text the newer of two."""
    if not 1 < len(text) <= TEXT_CHARACTERS_MAX or (pointed and not _may_be_pointed(text, marks)):
        return ()
    label, clauses = split_text(text, marks)
    found: list[Claim] = []
    for clause in clauses:
        claim = _read_clause(clause, marks, label)
        if claim is not None:
            found.append(claim)
    return tuple(found) if not pointed or any(claim.is_pointed for claim in found) else ()


def split_text(text: str, marks: Marks) -> tuple[frozenset[int], list[str]]:
    """(the words of the label before the text, its clauses without questions)."""
    label: frozenset[int] = frozenset()
    if (":" in text or "\uff1a" in text) and (labelled := _LABEL.match(text)) is not None:
        label = frozenset(mark.term for part in tokens(labelled[1]) if not (mark := marks[part]).flags & FILLER)
        text = text[labelled.end() :]
    if _QUOTE_MARK.search(text):
        text = _QUOTED.sub(partial(_shorten_quotation, marks), text)
    split = [*_CLAUSE_END.split(text), ""]
    pairs = zip(split[::2], split[1::2], strict=True)
    return label, [clause for clause, end in pairs if clause and not end.startswith(_QUESTION)]


def _shorten_quotation(marks: Marks, found: re.Match[str]) -> str:
    """A title with a mark; of speech, which has a verb or is long, the mark only."""
    words = tokens(found[0])
    speech = len(words) > _TITLE_TOKENS_MAX or any(marks[word].flags & _CLAIM for word in words)
    return f"{_QUOTE} " if speech else f"{_QUOTE} {' '.join(words)} "


def _may_be_pointed(text: str, marks: Marks) -> bool:
    """Whether a word of the text has something that a claim needs to be pointed."""
    flags = 0
    for part in tokens(text):
        flags |= marks[part].flags
    return bool(flags & _CLAIM) and (bool(flags & _POINTED) or _INNER_CAPITAL.search(text) is not None)


def _read_clause(clause: str, marks: Marks, label: frozenset[int] = frozenset()) -> Claim | None:
    parts = tokens(clause)
    if not TOKENS_MIN <= len(parts) <= TOKENS_MAX:
        return None
    read = [marks[part] for part in parts]
    flags = 0
    for mark in read:
        flags |= mark.flags
    if not flags & _CLAIM or flags & (ADDRESSED | UNSETTLED):
        return None
    verb = _find_verb(read, flags)
    subject = frozenset(mark.term for mark in read[:verb] if not mark.flags & _NO_SUBJECT)
    if read[0].flags & RELATIVE or (flags & VAGUE and not subject and _is_vague(read[: verb + 1])):
        return None
    if flags & PAIR:
        read = _without_listed(parts, read)
        subject &= {mark.term for mark in read}
    words: set[int] = set()
    names: set[int] = set()
    terms: set[int] = set()
    topics: frozenset[str] = frozenset()
    for mark in read:
        if mark.topics:
            topics |= mark.topics
        if not mark.flags & _VALUE:
            words.add(mark.term)
            terms.update(mark.terms)
            if mark.capital and mark is not read[0]:
                names.add(mark.term)
    for topic in topics:
        terms |= marks.topic_terms[topic]
    return Claim(
        words=frozenset(words),
        names=frozenset(names),
        numbers=_terms_of(read, NUMBER) if flags & NUMBER else frozenset(),
        dates=_terms_of(read, DATE) if flags & DATE else frozenset(),
        others=_terms_of(read, OTHER) if flags & OTHER else frozenset(),
        topics=topics,
        negated=bool(flags & NEGATION),
        changed=bool(flags & CHANGE) or bool(flags & UNSPACED and flags & NEGATION and parts[-1] == _NO_MORE),
        ended=bool(flags & CHANGE) and any(mark.flags & (CHANGE | PRESENT) == CHANGE for mark in read),
        state=bool(flags & STATE),
        unspaced=bool(flags & UNSPACED),
        terms=frozenset(terms),
        own=bool(flags & OWN),
        added=bool(flags & ADDITION),
        label=label,
        subject=subject,
    )


def _find_verb(read: list[Mark], flags: int) -> int:
    """The place of the first verb of a state; without one, of the first word of change. A capital inside the clause
    shows a noun ("die Miete ist", not "ich miete").
    """
    wanted = STATE if flags & STATE else CHANGE
    places = [place for place, mark in enumerate(read) if mark.flags & wanted]
    return next((place for place in places if not (place and read[place].capital)), places[0])


def _without_listed(parts: list[str], read: list[Mark]) -> list[Mark]:
    """The marks without the single characters of pairs that a list has: together they are one word."""
    listed = {
        character
        for part, mark in zip(parts, read, strict=True)
        if mark.flags & PAIR and mark.flags != PAIR | UNSPACED
        for character in part
    }
    return [mark for part, mark in zip(parts, read, strict=True) if part not in listed]


def _terms_of(read: list[Mark], flag: int) -> frozenset[int]:
    return frozenset(mark.term for mark in read if mark.flags & flag)


def _is_vague(read: list[Mark]) -> bool:
    """Whether these words name a thing by a pronoun alone ("it is")."""
    return any(mark.flags & VAGUE for mark in read) and not any(mark.flags & OWN for mark in read)
