"""Whether a question asks for a time and names nothing else: "What did I do yesterday?".

Only such a question is answered by any fragment of the time; of others a fragment of the right week may say nothing.
"""

from __future__ import annotations

from collections.abc import Sequence

from memstream_server.core.time_phrases.patterns import WORD
from memstream_server.core.time_phrases.recognition import TimePhrase, fold_text

_WORDS = {
    "english": """
        what whats who whom which when where how did do does done doing have has had was were is are be been i we you he
        she they it me us my our the a an there that this about of on in at to from and so up all any happen happened
        happening go going went new say said tell told talk talked talking anything something everything thing things
        s d ve t please remember
        """,
    "german": """
        was wer wen wem wann wo wie habe hast hat haben habt hatte hatten war waren ist sind bin ich du er sie es wir
        ihr mir mich uns mein unser der die das den dem ein eine einen denn alles so los passiert geschehen gemacht
        getan gesagt erzahlt erlebt gab gibt an in im am um auf und etwas eigentlich
        """,
    "french": """
        que qu quoi qui quand ou comment est ce c a ai as avons avez ont etait etaient suis j je tu il elle on nous vous
        ils elles me m moi le la les l un une des de d y en et s t se passe fait dit raconte arrive quel quelle
        """,
    "spanish": """
        que quien cuando donde como he has ha hemos han hice hiciste hizo hicimos hicieron paso pasado dije dijo dijimos
        yo tu el ella nosotros me se lo la los las un una de en a y hubo hay fue era hecho
        """,
    "portuguese": """
        o que quem quando onde como eu tu ele ela nos voce fiz fez fizemos fizeram feito aconteceu houve ha foi era
        disse me se a os as um uma de em no na e
        """,
}
_ASKING = frozenset(word for words in _WORDS.values() for word in words.split())
"""Of all languages: hardly one of these words names something in another."""
_ASIAN = frozenset(
    "我你您他她它们們的地得做干了什么甚麼怎样樣吗嗎呢有发發生事情过過是在都何誰をしたてはがあっのにとでますか私"
)


def asks_only_time(text: str, phrases: Sequence[TimePhrase]) -> bool:
    """Whether there are phrases, and all words outside them only ask."""
    if not phrases:
        return False
    rest = fold_text(text)
    for each in reversed(phrases):
        rest = f"{rest[: each.start]} {rest[each.end :]}"
    return all(word in _ASKING or _ASIAN.issuperset(word) for word in WORD.findall(rest))
