"""Spellings that meet: names among stop words, case and accents, parts of words, hyphens."""

# ruff: noqa: RUF001 - other alphabets have letters that look like Latin ones

from __future__ import annotations

import re

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from memstream_server.adapters.models.analyzer import VERSION, SnowballAnalyzer, term_hash
from memstream_server.adapters.models.words import (
    STOP_WORDS,
    WORD_CHARACTERS_MAX,
    find_names,
    fold_accents,
    list_forms,
    lower_word,
    tokens,
    words,
)
from memstream_server.ports.journal.rows import Terms
from tests.support.arbitrary import UNICODE

ANALYZER = SnowballAnalyzer()
ENGLISH = STOP_WORDS["english"]


def hashes(terms: Terms) -> set[int]:
    return set(np.frombuffer(terms.hashes, "<u8").tolist())


def share_met(question: str, text: str, language: str = "english", prefix: str = "") -> float:
    """The share of a question's terms that a fragment has."""
    asked = hashes(ANALYZER.question_terms(question, language))
    return len(asked & hashes(ANALYZER.terms(text, language, prefix=prefix))) / len(asked)


@pytest.mark.parametrize(
    ("question", "text"),
    [
        ("who is Will?", "I asked Will to water the plants"),
        ("who is Will?", "Will called me on Sunday"),
        ("Where does Will live?", "My brother Will lives in Leeds"),
        ("IT", "She works in IT now"),
        ("The Who", "We saw The Who in London"),
        ("What does The Who play?", "I play The Who all day"),
        ("who am I", "Who am I?"),
    ],
)
def test_stop_words_that_are_names_count(question: str, text: str) -> None:
    assert share_met(question, text) == 1


@pytest.mark.parametrize(
    "text", ["Will you come?", "It is late. What now?", "WHAT IS IT", "What Is The Best Way", "I will, said Anna"]
)
def test_other_stop_words_do_not_count(text: str) -> None:
    assert find_names(text, ENGLISH) == []


def test_the_speaker_counts_even_if_it_is_a_stop_word() -> None:
    assert share_met("Who is Will?", "The train was late", prefix="[8 May 2023] Will: ") == 1
    assert share_met("Who is Will?", "The train was late", prefix="[8 May 2023] Ann: ") == 0


@pytest.mark.parametrize(
    ("question", "text", "language"),
    [
        ("istanbul", "İstanbul'a gittik", "turkish"),
        ("istanbul", "We went to İstanbul", "english"),
        ("ısparta", "ISPARTA", "turkish"),
        ("isparta", "Isparta", "turkish"),
        ("ha noi", "Tôi sống ở Hà Nội", "english"),
        ("strasse", "Die Straße ist lang", "german"),
        ("straße", "Die Strasse ist lang", "german"),
        ("strasse", "Die Straße ist lang", "english"),
        ("STRASSE", "Straße", "english"),
        ("munchen", "Sie wohnt in München", "german"),
        ("munchen", "Sie wohnt in München", "english"),
        ("muenchen", "Sie wohnt in München", "german"),
        ("cancion", "¡Qué canción!", "spanish"),
        ("lodz", "Łódź", "polish"),
        ("елка", "ёлка", "russian"),
        ("οδος", "ΟΔΌΣ", "greek"),
        ("malmo kobenhavn", "Malmö, København", "swedish"),
    ],
)
def test_a_question_without_accents_finds_both(question: str, text: str, language: str) -> None:
    assert share_met(question, text, language) == 1


@pytest.mark.parametrize(("question", "text"), [("má", "mà"), ("má", "ma"), ("год", "гёд"), ("кой", "кои")])
def test_a_question_with_accents_keeps_words_apart(question: str, text: str) -> None:
    assert share_met(question, text) == 0


def test_a_mark_on_a_ligature_goes_with_it() -> None:
    assert fold_accents("ǣ") == "ae"


def test_marks_that_are_vowels_stay() -> None:
    assert fold_accents("किताबें") == "किताबें"
    assert fold_accents("กำ") == "กำ"
    assert tokens("が") == words("が") == ["が"]


@pytest.mark.parametrize(
    ("token", "forms"),
    [
        ("getUserName", {"getUserName", "get", "User", "Name"}),
        ("HTTPServer", {"HTTPServer", "HTTP", "Server"}),
        ("iPhone15", {"iPhone15", "iPhone", "Phone", "15"}),
        ("GPT4", {"GPT4", "GPT", "4"}),
        ("COVID-19", {"COVID", "19", "COVID19"}),
        ("10kg", {"10kg", "10", "kg"}),
        ("naïveÉtat", {"naïveÉtat", "naïve", "État"}),
        ("DNAs", {"DNAs"}),
        ("a1b2c3d4", {"a1b2c3d4"}),
        ("Anna", {"Anna"}),
        ("don't", {"don't"}),
        ("state-of-the-art", {"state", "of", "the", "art", "stateoftheart"}),
        ("a-b-c-d-e", {"a", "b", "c", "d", "e"}),
    ],
)
def test_a_token_has_these_forms(token: str, forms: set[str]) -> None:
    assert set(list_forms(token)) == forms


@pytest.mark.parametrize(
    ("question", "text"),
    [
        ("wifi", "The Wi-Fi is down"),
        ("Wi-Fi", "The Wi-Fi is down"),
        ("WiFi", "the wi-fi is down"),
        ("email", "Send me an e-mail"),
        ("longterm", "a long-term plan"),
        ("long term", "a long-term plan"),
        ("wifi", "The Wi\u2011Fi is down"),
        ("cooperate", "co\u00adoperate"),
        ("user name", "call getUserName"),
        ("covid 19", "COVID19"),
        ("covid19", "COVID-19"),
        ("10 kg", "10kg"),
        ("GPT 4", "GPT-4 and GPT4"),
        ("iphone 15", "my iPhone15"),
    ],
)
def test_joined_and_separate_spellings_meet(question: str, text: str) -> None:
    assert share_met(question, text) == 1


@pytest.mark.parametrize(
    ("question", "text", "language"),
    [
        ("C++", "I write C++ at work", "english"),
        ("c#", "I write C# at work", "english"),
        ("who has A+", "Her blood group is A+", "english"),
        ("AI", "She studies A.I. in Leeds", "english"),
        ("A.I.", "She studies AI in Leeds", "english"),
        ("U.S.A.", "They moved to the USA", "english"),
        ("I.T.", "He works in I.T.", "english"),
        ("R&D", "She leads R&D", "english"),
        ("AT&T", "Her provider is AT&T", "english"),
        ("🎂", "The party was great 🎂🎉", "english"),
        ("👍", "👍🏽", "english"),
        ("💻", "I am a 👩\u200d💻", "english"),
        ("❤", "with ❤\ufe0f", "english"),
        ("🇩🇪", "We fly to 🇩🇪🇫🇷", "english"),
        ("12", "الغرفة ١٢", "english"),
        ("۱۲", "room 12", "english"),
        ("१२", "room 12", "hindi"),
        ("علی", "علي", "english"),
        ("کتاب", "كتاب", "english"),
        ("علی", "علي", "arabic"),
        ("کتابی", "كتابي", "persian"),
        ("مدرسه", "مدرسة", "english"),
        ("مدرسه", "مدرسة", "arabic"),
        ("أحمد", "احمد", "english"),
        ("أحمد", "احمد", "arabic"),
        ("کتابها", "کتاب\u200cها", "english"),
        ("کتاب ها", "کتاب\u200cها", "persian"),
        ("मां", "माँ घर पर है", "hindi"),
        ("माँ", "मां घर पर है", "english"),
        ("हिंदी", "वह हिन्दी बोलती है", "hindi"),
        ("हिन्दी", "वह हिंदी बोलती है", "english"),
        ("台北", "我住在臺北", "english"),
        ("臺北", "我住在台北", "english"),
        ("學習", "他在学习中文", "english"),
    ],
)
def test_what_writers_choose_freely_between_meets(question: str, text: str, language: str) -> None:
    assert share_met(question, text, language) == 1


@pytest.mark.parametrize(
    "text", ["Call me: +49 30 123-4567", "Call me: (030) 1234567", "Call me: 0301234567", "123 45 67"]
)
@pytest.mark.parametrize(
    "question", ["+49 30 1234567", "0049301234567", "030/1234567", "030.123.4567", "1234567", "٠٣٠ ١٢٣ ٤٥٦٧"]
)
def test_a_telephone_number_is_found_however_it_is_written(question: str, text: str) -> None:
    met = hashes(ANALYZER.question_terms(question)) & hashes(ANALYZER.terms(text))
    assert term_hash("1234567") in met


@pytest.mark.parametrize(
    ("question", "text"),
    [
        ("C++", "I write C and C# at work"),
        ("C", "I write C++ and C# at work"),
        ("👍", "👎"),
        ("हां", "हा"),
        ("1234567", "on 2012-34-56 7 came"),
        ("2342023", "on 12.3.2023 at 4"),
    ],
)
def test_what_differs_in_a_sign_does_not_meet(question: str, text: str) -> None:
    assert share_met(question, text) == 0


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("I saw it.I went", ["I", "saw", "it", "I", "went"]),
        ("a+b", ["a", "b"]),
        ("notepad++ #tag", ["notepad", "tag"]),
        ("x &amp; y", ["x", "amp", "y"]),
        ("● one → two", ["one", "two"]),
    ],
)
def test_other_signs_part_words(text: str, found: list[str]) -> None:
    assert tokens(text) == found


@given(st.text(UNICODE, max_size=60))
def test_folding_is_idempotent(text: str) -> None:
    for token in tokens(text):
        once = fold_accents(lower_word(token))
        assert fold_accents(once) == once


@given(st.text(UNICODE, max_size=200))
def test_no_word_is_lost(text: str) -> None:
    """Every word that the embedder sees is among the forms, but for what the analyzer removes or reads as a sign."""
    text = text.translate(dict.fromkeys(map(ord, "\u00ad\u200c\u200d"), "") | dict.fromkeys(map(ord, "+#.&"), " "))
    text = re.sub(r"[^\D0-9]", "1", text)
    forms = {lower_word(form) for token in tokens(text) for form in list_forms(token)}
    missed = {word for word in words(text) if word not in forms}
    # lower() of a whole text and of a word differ in the final sigma, and in what a combining mark joins.
    assert {fold_accents(lower_word(word)) for word in missed} <= {fold_accents(form) for form in forms}


@given(st.text(UNICODE, max_size=200), st.sampled_from(["english", "turkish", "german", "arabic"]))
def test_a_question_of_a_fragments_own_words_meets_it_whole(text: str, language: str) -> None:
    assert hashes(ANALYZER.question_terms(text, language)) <= hashes(ANALYZER.terms(text, language))


@pytest.mark.parametrize(
    "text",
    [
        "getUserName" * 6_000,
        "a-" * 30_000,
        "Wi-Fi-" * 10_000,
        "A1" * 30_000,
        "Will " * 12_000,
        "é\u0301" * 20_000,
        "İ" * 60_000,
        "-'" * 30_000,
        "\ud800aB" * 10_000,
    ],
)
def test_hostile_texts_have_a_bounded_number_of_terms(text: str) -> None:
    terms = ANALYZER.terms(text)
    assert terms.version == VERSION
    assert len(terms.hashes) // 8 <= 64
    assert all(len(form) <= len(text) for token in tokens(text) for form in list_forms(token))


def test_long_tokens_are_not_kept_in_the_cache() -> None:
    analyzer = SnowballAnalyzer()
    analyzer.terms("getUserName" * 6_000)
    assert all(len(key) <= 2 * WORD_CHARACTERS_MAX for key in analyzer._words.of("", "english"))


def test_the_whole_word_has_the_first_claim() -> None:
    assert term_hash("wifi") in hashes(ANALYZER.terms("WIFI"))
