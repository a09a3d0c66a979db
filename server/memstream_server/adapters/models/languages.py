"""Language detection, which selects the stemmer of a text if the policy's language is `auto`.

py3langid (BSD-3-Clause; depends on numpy only; its model is arrays, no pickle) over lingua: equally accurate, 75 MB
and one second to load against 650 MB and six, 70 microseconds a sentence against 600 (benchmarks/languages.py).
"""

from __future__ import annotations

import re
import threading
from functools import cache
from typing import Any

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
