"""Names of speakers: which are equal, the one that a query names, and those that customarily name a role."""

from __future__ import annotations

import unicodedata
from collections.abc import Sequence
from functools import lru_cache

from memstream_server.core.values import Role

_CJK_START = "\u2e80"
"""From this code point on, scripts are written without spaces, and a name may be inside a run of letters."""

_KNOWN_NAMES_MAX = 4_096
_CUSTOMARY = {
    name: role
    for role, names in {
        Role.USER: ("user", "human"),
        Role.ASSISTANT: ("assistant", "ai", "bot", "chatbot", "agent", "model"),
        Role.TOOL: ("tool", "function"),
        Role.SYSTEM: ("system", "developer"),
    }.items()
    for name in names
}


def fold_name(name: str) -> str:
    """Equal for spellings of one name: case, blanks and Unicode form do not count ("Ann  LEE" and "ann lee")."""
    if not name.isascii():
        # Folding may decompose again, so the form is made twice, as Unicode's caseless matching does.
        name = unicodedata.normalize("NFKC", unicodedata.normalize("NFKC", name).casefold())
    return " ".join(name.casefold().split())


def role_of_name(speaker: str) -> Role | None:
    """The role that a speaker's name says, ignoring case: "assistant", "AI", "user". None for any other name."""
    return _CUSTOMARY.get(speaker.casefold()) if len(speaker) <= len("assistant") else None


def named_speaker(text: str, speakers: Sequence[str]) -> int | None:
    """Index of the one speaker that the text names, spelled as `fold_name` allows; None for none or several.

    A full name ("Ann Lee") or one of its words ("Ann") matches; a word that is part of a full name in the text does
    not also match other speakers with that word ("Joe Lee").
    """
    folded = fold_name(text)
    names: dict[int, tuple[str, ...]] = {}
    for code, name in enumerate(speakers):
        words = _name_words(name)
        for word in words:
            if word in folded:
                names[code] = words
                break
    if not names:
        return None
    whole = {code for code, words in names.items() if _contains_name(folded, " ".join(words))}
    covered = {word for code in whole for word in names[code]}
    found = whole | {code for code, words in names.items() if any(_is_part_named(folded, w, covered) for w in words)}
    return found.pop() if len(found) == 1 else None


def list_named(text: str, speakers: Sequence[str]) -> list[str]:
    """The names of which the text has a word, spelled as `fold_name` allows."""
    folded = fold_name(text)
    return [name for name in speakers if any(part in folded for part in _name_words(name))]


@lru_cache(_KNOWN_NAMES_MAX)
def _name_words(name: str) -> tuple[str, ...]:
    return tuple(fold_name(name).split())


def _is_part_named(text: str, word: str, covered: set[str]) -> bool:
    # Very short words match too much: "van" is distinctive, the "1" of "Agent 1" is not.
    return word not in covered and (len(word) > 2 or word[0] >= _CJK_START) and _contains_name(text, word)


def _contains_name(text: str, name: str) -> bool:
    """Whether the text contains the name as a word, or anywhere in scripts without spaces."""
    start = text.find(name) if name else -1
    while start >= 0:
        end = start + len(name)
        if not (_is_joined(text[start - 1 : start], name[0]) or _is_joined(name[-1], text[end : end + 1])):
            return True
        start = text.find(name, start + 1)
    return False


def _is_joined(left: str, right: str) -> bool:
    return left.isalnum() and right.isalnum() and left < _CJK_START and right < _CJK_START
