"""Texts read in their own language."""

# ruff: noqa: RUF001 - other alphabets have letters that look like Latin ones

from __future__ import annotations

import sys

import pytest
import Stemmer

from memstream_server.adapters.models import languages
from memstream_server.adapters.models.analyzer import SnowballAnalyzer
from memstream_server.core.policy import AUTO_LANGUAGE

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


@pytest.mark.parametrize("language", TEXTS)
def test_a_text_is_read_in_its_own_language(language: str) -> None:
    analyzer, text = SnowballAnalyzer(), TEXTS[language]
    assert languages.stemmer_of(text) == language
    assert analyzer.terms(text, AUTO_LANGUAGE) == analyzer.terms(text, language)
    assert analyzer.terms(f"[8 May 2023] Ada: {text}", AUTO_LANGUAGE) == analyzer.terms(
        f"[8 May 2023] Ada: {text}", language
    )


@pytest.mark.parametrize("text", ["", ";)", "12 34", "我昨天买了一辆自行车", "Що сказала твоя сестра про погоду?"])
def test_what_has_no_stemmer_is_read_as_english(text: str) -> None:
    analyzer = SnowballAnalyzer()
    assert analyzer.terms(text, AUTO_LANGUAGE) == analyzer.terms(text, "english")


def test_detected_languages_have_stemmers() -> None:
    assert set(languages.STEMMERS.values()) <= set(Stemmer.algorithms())
    assert {*languages.STEMMERS, *languages.OTHERS} == set(languages.identifier().labels)


async def test_without_the_extra_it_is_refused_in_words(monkeypatch: pytest.MonkeyPatch) -> None:
    languages._loaded.cache_clear()
    monkeypatch.setitem(sys.modules, "py3langid.langid", None)
    analyzer = SnowballAnalyzer()
    await analyzer.prepare("english")
    with pytest.raises(ValueError, match=r"memstream\[server,languages\]"):
        await analyzer.prepare(AUTO_LANGUAGE)
    with pytest.raises(ValueError, match="py3langid is not installed"):
        analyzer.terms("", AUTO_LANGUAGE)
