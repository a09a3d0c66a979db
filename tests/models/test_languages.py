"""Texts read in their own language."""

# ruff: noqa: RUF001 - other alphabets have letters that look like Latin ones

from __future__ import annotations

import sys

import numpy as np
import pytest
import Stemmer

from memstream_server.adapters.models import analyzer as detection
from memstream_server.adapters.models.analyzer import SnowballAnalyzer
from memstream_server.core.policy import AUTO_LANGUAGE
from memstream_server.ports.journal.rows import Terms

pytest.importorskip("py3langid", reason="the extra languages is not installed")

TEXTS = {
    "english": "What did your sister say about the weather?",
    "german": "Was hat deine Schwester über das Wetter gesagt?",
    "french": "Qu'est-ce que ta soeur a dit du temps qu'il fait ?",
    "spanish": "¿Qué dijo tu hermana sobre el tiempo que hace?",
    "russian": "Что твоя сестра сказала о погоде?",
    "turkish": "Kız kardeşin hava hakkında ne söyledi?",
    "greek": "Τι είπε η αδερφή σου για τον καιρό;",
    "hindi": "तुम्हारी बहन ने मौसम के बारे में क्या कहा?",
}


def hashes(terms: Terms) -> set[int]:
    return set(np.frombuffer(terms.hashes, "<u8").tolist())


@pytest.mark.parametrize("language", TEXTS)
@pytest.mark.parametrize("prefix", ["", "[8 May 2023] Ada: "])
def test_a_text_is_read_in_its_own_language_and_english(language: str, prefix: str) -> None:
    analyzer, text = SnowballAnalyzer(), prefix + TEXTS[language]
    assert detection.stemmer_of(text) == language
    both = hashes(analyzer.terms(text, language)) | hashes(analyzer.terms(text, "english"))
    assert hashes(analyzer.terms(text, AUTO_LANGUAGE)) == both


@pytest.mark.parametrize("language", TEXTS)
def test_a_question_that_tells_its_language_is_read_in_it(language: str) -> None:
    analyzer, text = SnowballAnalyzer(), TEXTS[language]
    assert analyzer.question_terms(text, AUTO_LANGUAGE) == analyzer.question_terms(text, language)


@pytest.mark.parametrize(
    ("note", "question"),
    [
        ("Allergic to peanuts", "peanut allergies?"),
        ("Anna hates mushrooms", "mushroom"),
        ("wifi password is rosebud", "passwords"),
        ("Dentist: Dr. Kim", "Which dentists do I see?"),
        ("Gate code 4711", "codes of the gates"),
        ("Loves hiking", "who hikes?"),
        ("Die Rechnungen liegen im Schrank", "Wo liegt die Rechnung?"),
        ("Les factures sont dans l'armoire", "Où est la facture ?"),
        ("Vendí los coches", "¿Dónde está el coche?"),
    ],
)
def test_a_short_note_is_found_whatever_its_language_seems(note: str, question: str) -> None:
    analyzer = SnowballAnalyzer()
    for language in ("english", AUTO_LANGUAGE):
        assert hashes(analyzer.terms(note, language)) & hashes(analyzer.question_terms(question, language))


@pytest.mark.parametrize("text", ["", ";)", "12 34", "我昨天买了一辆自行车", "Що сказала твоя сестра про погоду?"])
def test_what_has_no_stemmer_is_read_as_english(text: str) -> None:
    analyzer = SnowballAnalyzer()
    assert analyzer.terms(text, AUTO_LANGUAGE) == analyzer.terms(text, "english")


def test_detected_languages_have_stemmers() -> None:
    assert set(detection.STEMMERS.values()) <= set(Stemmer.algorithms())
    assert {*detection.STEMMERS, *detection.OTHERS} == set(detection.identifier().labels)


async def test_without_the_extra_it_is_refused_in_words(monkeypatch: pytest.MonkeyPatch) -> None:
    detection._loaded.cache_clear()
    monkeypatch.setitem(sys.modules, "py3langid.langid", None)
    analyzer = SnowballAnalyzer()
    await analyzer.prepare("english")
    with pytest.raises(ValueError, match=r"\.\[server,languages\]"):
        await analyzer.prepare(AUTO_LANGUAGE)
    with pytest.raises(ValueError, match="py3langid is not installed"):
        analyzer.terms("", AUTO_LANGUAGE)
