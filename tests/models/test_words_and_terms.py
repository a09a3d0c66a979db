"""The analyzer: words, stop words, stems, CJK, and the packed form."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from memstream_server.adapters.models.analyzer import NO_TERMS, SnowballAnalyzer, term_hash
from memstream_server.adapters.models.words import WORD_CHARACTERS_MAX, languages, words
from memstream_server.ports.journal.rows import Terms
from tests.support.arbitrary import UNICODE

ANALYZER = SnowballAnalyzer()


def unpacked(terms: Terms) -> dict[int, int]:
    hashes, counts = np.frombuffer(terms.hashes, "<u8").tolist(), np.frombuffer(terms.counts, "<u2").tolist()
    return dict(zip(hashes, counts, strict=True))


def test_stems_are_counted_and_stop_words_left_out() -> None:
    terms = unpacked(ANALYZER.terms("The dogs ran; a DOG's running, and the dog ran."))
    assert terms == {term_hash("dog"): 3, term_hash("ran"): 2, term_hash("run"): 1}


def test_a_typographic_apostrophe_is_an_apostrophe() -> None:
    assert words("Don\u2019t") == ["don't"]
    assert ANALYZER.terms("I don\u2019t see") == ANALYZER.terms("I don't see") == ANALYZER.terms("see")


def test_cjk_becomes_characters_and_pairs() -> None:
    assert words("我喜欢cats") == ["我", "我喜", "喜", "喜欢", "欢", "cats"]


def test_other_scripts_without_spaces_do_so_too() -> None:
    assert words("ดีมาก 5") == ["ด", "ดี", "ี", "ีม", "ม", "มา", "า", "าก", "ก", "5"]


def test_combining_marks_belong_to_their_words() -> None:
    assert words("किताबें अच्छी हैं") == ["किताबें", "अच्छी", "हैं"]
    assert words("العالَم q\u0323uo") == ["العالَم", "q\u0323uo"]
    assert words("\u0301 a") == ["a"]


def test_full_width_letters_are_letters() -> None:
    assert words("\uff21\uff42\uff43\uff11") == ["abc1"]


def test_other_scripts_keep_their_words() -> None:
    assert words("Привет, мир! naïve_café") == ["привет", "мир", "naïve", "café"]


def test_languages_stem_their_own_way() -> None:
    german = unpacked(ANALYZER.terms("die Häuser", "german"))
    assert term_hash("haus") in german
    assert term_hash("die") in german  # no stop list but the English one


def test_unknown_language_error_lists_known_ones() -> None:
    with pytest.raises(ValueError, match=r"klingon.*english"):
        ANALYZER.terms("x", "klingon")
    assert "english" in languages()


def test_a_text_of_signs_has_no_terms() -> None:
    assert ANALYZER.terms("") == ANALYZER.terms("!?… → ●") == NO_TERMS


def test_a_long_word_is_cut_and_a_frequent_one_saturates() -> None:
    assert unpacked(ANALYZER.terms("x" * 500)) == {term_hash("x" * WORD_CHARACTERS_MAX): 1}
    assert unpacked(ANALYZER.terms("dog " * 70_000)) == {term_hash("dog"): 65_535}


@given(st.text(UNICODE, max_size=200))
def test_every_text_gives_ascending_distinct_hashes_with_counts(text: str) -> None:
    terms = ANALYZER.terms(text)
    hashes, counts = np.frombuffer(terms.hashes, "<u8"), np.frombuffer(terms.counts, "<u2")
    assert len(hashes) == len(counts)
    assert (hashes[1:] > hashes[:-1]).all()
    assert (counts > 0).all()
    assert terms == SnowballAnalyzer().terms(text)
