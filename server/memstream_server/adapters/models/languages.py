"""Which language a text is in, and with it the stemmer that reads it, where a policy leaves that to the text.

py3langid (BSD-3-Clause; needs numpy alone; its model is arrays, no pickle) over lingua: as often right, with 75 MB and
a second to load against 650 MB and six, and 70 microseconds a sentence against 600. benchmarks/languages.py measures.
"""

from __future__ import annotations

import threading
from functools import cache
from typing import Any

FALLBACK = "english"
"""For languages without a stemmer: what they hold of Latin words is most often English."""
STEMMERS = {
    "ar": "arabic", "ca": "catalan", "cs": "czech", "da": "danish", "de": "german", "el": "greek", "en": "english",
    "eo": "esperanto", "es": "spanish", "et": "estonian", "eu": "basque", "fa": "persian", "fi": "finnish",
    "fr": "french", "ga": "irish", "hi": "hindi", "hu": "hungarian", "hy": "armenian", "id": "indonesian",
    "it": "italian", "lt": "lithuanian", "ne": "nepali", "nl": "dutch", "no": "norwegian", "pl": "polish",
    "pt": "portuguese", "ro": "romanian", "ru": "russian", "sr": "serbian", "sv": "swedish", "ta": "tamil",
    "tr": "turkish",
}  # fmt: skip
"""Snowball's algorithm by ISO 639-1 code."""
OTHERS = ("bg", "he", "ja", "ko", "th", "uk", "vi", "zh")
"""Known as well, so that their texts are not taken for their neighbours'."""
_lock = threading.Lock()


def stemmer_of(text: str) -> str:
    """The Snowball algorithm for a text. Raises ValueError where py3langid is not installed."""
    code, _ = identifier().classify(text)
    return STEMMERS.get(code, FALLBACK)


def identifier() -> Any:
    """py3langid's model, loaded when first asked for: about a second. Raises ValueError. Thread-safe."""
    with _lock:  # two threads at once would load it twice
        return _loaded()


@cache
def _loaded() -> Any:
    try:
        from py3langid.langid import MODEL_FILE, LanguageIdentifier
    except ImportError as error:
        raise ValueError("py3langid is not installed: pip install 'memstream[server,languages]'") from error
    made = LanguageIdentifier.from_model_file(MODEL_FILE)
    made.set_languages([*STEMMERS, *OTHERS])
    return made
