"""Recall in languages that are written without spaces, with combining marks, or with endings."""

from __future__ import annotations

import pytest

from memstream_server.adapters.models.analyzer import SnowballAnalyzer
from memstream_server.adapters.models.hashing import MODEL, HashingEmbedder
from memstream_server.core.arrays import finish
from memstream_server.core.columns import Columns
from memstream_server.core.dense import DenseMatrix
from memstream_server.core.filters import Filter, mask
from memstream_server.core.lexical import LexicalIndex, query_terms
from memstream_server.core.ranking import RankingQuery, rank
from memstream_server.core.rendering import text_prefix
from memstream_server.core.scores import Weights
from memstream_server.core.values import Fragment

ANALYZER, EMBEDDER = SnowballAnalyzer(), HashingEmbedder()
WEIGHTS = Weights.of_fitted(MODEL.fitted)
CHINESE = [
    "我昨天买了一辆自行车",
    "我妹妹在上海学习音乐",
    "周末我们去山上看日出",
    "他的生日是三月五号",
    "音乐会下个月开始",
]
JAPANESE = [
    "昨日自転車を買いました",
    "妹は大阪で音楽を勉強しています",
    "週末に山で日の出を見た",
    "彼の誕生日は三月です",
]
KOREAN = [
    "어제 자전거를 샀어요",
    "여동생은 부산에서 음악을 공부해요",
    "주말에 산에서 해돋이를 봤어요",
    "그의 생일은 삼월이에요",
]
THAI = ["เมื่อวานฉันซื้อจักรยาน", "น้องสาวเรียนดนตรีที่เชียงใหม่", "สุดสัปดาห์เราไปดูพระอาทิตย์ขึ้นบนภูเขา", "วันเกิดของเขาคือเดือนมีนาคม"]
HINDI = ["मैंने कल साइकिल खरीदी", "मेरी बहन दिल्ली में संगीत सीखती है", "हमने पहाड़ पर सूर्योदय देखा", "उसका जन्मदिन मार्च में है"]
RUSSIAN = [
    "Вчера я купил велосипед",
    "Моя сестра учится музыке в Казани",
    "Мы встретили рассвет на скалах",
    "День рождения брата в марте",
]
GERMAN = ["Gestern kaufte ich ein Fahrrad", "Meine Schwester lernt Geige in Köln", "Wir sahen die Häuser am Hafen"]


@pytest.mark.parametrize(
    ("texts", "language", "question", "best"),
    [
        (CHINESE, "english", "妹妹学什么", 1),
        (CHINESE, "english", "谁的生日在三月", 3),
        (JAPANESE, "english", "自転車はいつ買ったの", 0),
        (JAPANESE, "english", "妹の勉強", 1),
        (KOREAN, "english", "자전거는 언제", 0),
        (KOREAN, "english", "생일이 언제예요", 3),
        (THAI, "english", "ใครเรียนดนตรี", 1),
        (THAI, "english", "จักรยาน", 0),
        (HINDI, "hindi", "साइकिल कब खरीदी", 0),
        (HINDI, "english", "जन्मदिन कब है", 3),
        (RUSSIAN, "russian", "сестры музыка", 1),
        (RUSSIAN, "russian", "какие были скалы", 2),
        (GERMAN, "german", "Welches Haus?", 2),
    ],
)
def test_a_question_finds_its_answer_first(texts: list[str], language: str, question: str, best: int) -> None:
    columns, lexical, dense = Columns(), LexicalIndex(), DenseMatrix(MODEL.dimension)
    for place, text in enumerate(texts):
        fragment = Fragment(f"f{place}", text, session=f"s{place}")
        terms = ANALYZER.terms(fragment.content, language, prefix=text_prefix(fragment))
        columns.append(fragment)
        lexical.append(terms.hashes, terms.counts, place, len(text))
        dense.append(EMBEDDER.vectors([text])[0])
    vector = EMBEDDER.vectors([question])[0]
    asked = RankingQuery(question, query_terms(ANALYZER.question_terms(question, language).hashes), vector, now_us=0)
    legs, cosines = lexical.legs(asked.terms), dense.cosines(vector)
    top, second = finish(rank(columns, legs, cosines, asked, WEIGHTS, mask(columns, Filter(), 0))).results[:2]
    assert top.slot == best
    assert top.relevance > second.relevance
    lexical_part = next(part for part in top.parts if part.name == "lexical")
    assert lexical_part.value > 0, "by its words, not by the order of arrival"
