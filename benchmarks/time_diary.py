"""Scripted diaries with dated entries, and questions about them that name a time: the data of time_questions.py.

A diary has recurring topics, so that only the time tells their entries apart. The windows of the questions are computed
here from dates, not by the recogniser. Diaries of the halves "tune" and "held out" share no topic, no name and no seed.
"""

# ruff: noqa: RUF001 - Chinese has full-width signs

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, date, datetime, timedelta

NOW = datetime(2024, 9, 18, 12, tzinfo=UTC)
"""A Wednesday."""
DAYS = 270
EVIDENCE_MAX = 10
_TODAY = NOW.date()
_DAY = timedelta(days=1)


@dataclass(frozen=True)
class Entry:
    """One dated entry."""

    id: str
    text: str
    topic: int
    day: date


@dataclass(frozen=True)
class Asked:
    """A question, the ids that answer it, and whether it names a topic."""

    text: str
    evidence: frozenset[str]
    topical: bool


@dataclass(frozen=True)
class Diary:
    """A memory's entries and its questions."""

    name: str
    language: str
    half: str
    entries: Sequence[Entry]
    questions: Sequence[Asked]


@dataclass(frozen=True)
class _Topic:
    """Entries "{}" with a filler, and questions in which "{}" is the time."""

    entries: tuple[str, ...]
    fillers: tuple[str, ...]
    questions: tuple[str, ...]


_Period = tuple[str, date, date]


def _month(year: int, month: int) -> tuple[date, date]:
    return date(year, month, 1), date(year + month // 12, month % 12 + 1, 1)


_MONDAY = _TODAY - _TODAY.weekday() * _DAY
_PERIODS: dict[str, tuple[_Period, ...]] = {
    "english": (
        ("yesterday", _TODAY - _DAY, _TODAY),
        ("the day before yesterday", _TODAY - 2 * _DAY, _TODAY - _DAY),
        ("four days ago", _TODAY - 4 * _DAY, _TODAY - 3 * _DAY),
        ("last week", _MONDAY - 7 * _DAY, _MONDAY),
        ("two weeks ago", _TODAY - 17 * _DAY, _TODAY - 10 * _DAY),
        ("last weekend", _MONDAY - 2 * _DAY, _MONDAY),
        ("last Monday", _MONDAY, _MONDAY + _DAY),
        ("on Saturday", _MONDAY - 2 * _DAY, _MONDAY - _DAY),
        ("in the last three days", _TODAY - 3 * _DAY, _TODAY + _DAY),
        ("on March 3", date(2024, 3, 3), date(2024, 3, 4)),
        ("on the 9th of July", date(2024, 7, 9), date(2024, 7, 10)),
        ("between May 3 and May 9", date(2024, 5, 3), date(2024, 5, 10)),
        ("on 2024-06-12", date(2024, 6, 12), date(2024, 6, 13)),
        ("in the first days of this year until January 4", date(2023, 12, 20), date(2024, 1, 5)),
        ("since Sunday", date(2024, 9, 15), _TODAY + _DAY),
    ),
    "german": (
        ("gestern", _TODAY - _DAY, _TODAY),
        ("vorgestern", _TODAY - 2 * _DAY, _TODAY - _DAY),
        ("vor vier Tagen", _TODAY - 4 * _DAY, _TODAY - 3 * _DAY),
        ("letzte Woche", _MONDAY - 7 * _DAY, _MONDAY),
        ("letzten Montag", _MONDAY, _MONDAY + _DAY),
        ("am 3. März", date(2024, 3, 3), date(2024, 3, 4)),
        ("zwischen dem 3. Mai und dem 9. Mai", date(2024, 5, 3), date(2024, 5, 10)),
    ),
    "french": (
        ("hier", _TODAY - _DAY, _TODAY),
        ("avant-hier", _TODAY - 2 * _DAY, _TODAY - _DAY),
        ("il y a quatre jours", _TODAY - 4 * _DAY, _TODAY - 3 * _DAY),
        ("la semaine dernière", _MONDAY - 7 * _DAY, _MONDAY),
        ("lundi dernier", _MONDAY, _MONDAY + _DAY),
        ("le 3 mars", date(2024, 3, 3), date(2024, 3, 4)),
        ("entre le 3 mai et le 9 mai", date(2024, 5, 3), date(2024, 5, 10)),
    ),
    "chinese": (
        ("昨天", _TODAY - _DAY, _TODAY),
        ("前天", _TODAY - 2 * _DAY, _TODAY - _DAY),
        ("四天前", _TODAY - 4 * _DAY, _TODAY - 3 * _DAY),
        ("上周", _MONDAY - 7 * _DAY, _MONDAY),
        ("上周五", _MONDAY - 3 * _DAY, _MONDAY - 2 * _DAY),
        ("3月3日", date(2024, 3, 3), date(2024, 3, 4)),
        ("5月3日到5月9日", date(2024, 5, 3), date(2024, 5, 10)),
    ),
}  # fmt: skip
_OPEN: dict[str, tuple[str, ...]] = {
    "english": ("What did I do {}?", "What happened {}?"),
    "german": ("Was habe ich {} gemacht?",),
    "french": ("Qu'ai-je fait {} ?",),
    "chinese": ("我{}做了什么？",),
}
_TOPICS: dict[tuple[str, str], tuple[_Topic, ...]] = {
    ("english", "tune"): (
        _Topic(("Had {} for lunch with Anna.", "Lunch at my desk, {} again.", "We ordered {} at noon."),
               ("ramen", "a lentil salad", "two slices of pizza", "falafel", "dumplings", "a cheese sandwich"),
               ("What did I have for lunch {}?", "What did I eat {}?")),
        _Topic(("Ran {} before breakfast.", "Went running along the canal, {}.", "A slow jog of {} with Petra."),
               ("5 km", "8 km", "12 km", "6 km in the rain", "10 km in 55 minutes"),
               ("How far did I run {}?", "Did I go running {}?")),
        _Topic(("Finished reading {}.", "Read forty pages of {} in bed.", "Started {}, which Joe lent me."),
               ("a novel by Woolf", "a book about bees", "the history of maps", "a crime story from Oslo"),
               ("Which book was I reading {}?", "What did I read {}?")),
        _Topic(("Phone call with Mum: {}.", "Called my mother, {}.", "Mum rang to say that {}."),
               ("her knee is better", "the roof leaks", "Uncle Tim will visit", "she planted tomatoes"),
               ("What did Mum tell me on the phone {}?", "What did my mother say {}?")),
    ),
    ("english", "held out"): (
        _Topic(("Saw {} at the cinema.", "Film night at Omar's, {}.", "Watched {} on the sofa."),
               ("a western", "an old comedy", "a documentary on whales", "a thriller set in Rome"),
               ("Which film did I see {}?", "What did we watch {}?")),
        _Topic(("Planted {} in the back garden.", "Weeded around the {} for an hour.", "Watered the {}, it is dry."),
               ("leeks", "roses", "strawberries", "beans", "sunflowers"),
               ("What did I do in the garden {}?", "What did I plant or weed {}?")),
        _Topic(("Sent the invoice to {}.", "{} paid what they owed.", "A reminder went out to {}."),
               ("the bakery", "Harbour Cycles", "Dr Singh's practice", "the theatre"),
               ("Which customer did I bill {}?", "Who paid an invoice {}?")),
        _Topic(("Piano lesson: {}.", "Practised {} for half an hour.", "My teacher gave me {} to learn."),
               ("a waltz", "scales in D minor", "a Bach prelude", "the left hand of a rag"),
               ("What did I play in the piano lesson {}?", "What did I practise {}?")),
    ),
    ("german", "tune"): (
        _Topic(("Mittags gab es {} mit Jana.", "In der Kantine {} gegessen."),
               ("Linsensuppe", "Nudeln", "Fischbrötchen", "Salat mit Ei"),
               ("Was habe ich {} gegessen?", "Was gab es {} zu Mittag?")),
        _Topic(("Bin {} am Fluss gelaufen.", "Laufrunde mit Timo, {}."), ("5 km", "8 km", "11 km", "6 km im Regen"),
               ("Wie weit bin ich {} gelaufen?",)),
    ),
    ("german", "held out"): (
        _Topic(("Im Kino lief {}.", "Abends {} auf dem Sofa geschaut."),
               ("ein Krimi", "eine alte Komödie", "eine Doku über Wale"),
               ("Welchen Film habe ich {} gesehen?",)),
        _Topic(("Rechnung an {} geschickt.", "{} hat bezahlt."), ("die Bäckerei", "Rad Meier", "das Theater"),
               ("Wem habe ich {} eine Rechnung geschickt?",)),
    ),
    ("french", "tune"): (
        _Topic(("À midi, {} avec Léa.", "J'ai déjeuné au bureau : {}."),
               ("une salade", "des lentilles", "une quiche", "du poisson"),
               ("Qu'ai-je mangé {} ?", "Qu'est-ce que j'ai déjeuné {} ?")),
        _Topic(("Couru {} le long du canal.", "Footing avec Hugo, {}."), ("5 km", "8 km", "11 km sous la pluie"),
               ("Combien ai-je couru {} ?",)),
    ),
    ("french", "held out"): (
        _Topic(("Vu {} au cinéma.", "Soirée sur le canapé devant {}."),
               ("un polar", "une vieille comédie", "un documentaire sur les baleines"),
               ("Quel film ai-je vu {} ?",)),
        _Topic(("Facture envoyée à {}.", "{} a payé."), ("la boulangerie", "Vélos Martin", "au théâtre"),
               ("À qui ai-je envoyé une facture {} ?",)),
    ),
    ("chinese", "tune"): (
        _Topic(("中午和小丽吃了{}。", "在公司午饭吃{}。"), ("拉面", "饺子", "沙拉", "炒饭"), ("我{}午饭吃了什么？",)),
        _Topic(("早上沿着河跑了{}。", "和小王一起跑步，{}。"), ("五公里", "八公里", "十一公里"), ("我{}跑了多远？",)),
    ),
    ("chinese", "held out"): (
        _Topic(("在电影院看了{}。", "晚上在沙发上看了{}。"), ("西部片", "老喜剧", "鲸鱼纪录片"),
               ("我{}看了什么电影？",)),
        _Topic(("把发票寄给了{}。", "{}付款了。"), ("面包店", "自行车店", "剧院"), ("我{}给谁寄了发票？",)),
    ),
}  # fmt: skip
_NOISE = {
    "english": ("Answered mails all morning.", "Tidied the kitchen shelf.", "The bus was late once more.",
                "Next week will be busy.", "I should call the bank this month.", "Last year this was easier."),
    "german": ("Den ganzen Morgen Mails beantwortet.", "Der Bus kam zu spät.", "Nächste Woche wird voll."),
    "french": ("Répondu au courrier toute la matinée.", "Le bus était en retard.", "La semaine sera chargée."),
    "chinese": ("整个上午都在回邮件。", "公交车又晚点了。", "下周会很忙。"),
}  # fmt: skip


def make_diaries() -> list[Diary]:
    """All diaries: three per language and half."""
    return [
        _make_diary(language, half, topics, seed)
        for (language, half), topics in _TOPICS.items()
        for seed in ((1, 2, 3) if half == "tune" else (11, 12, 13))
    ]


def _make_diary(language: str, half: str, topics: Sequence[_Topic], seed: int) -> Diary:
    chosen = random.Random(f"{language} {half} {seed}")
    entries = list(_write_entries(chosen, language, topics))
    questions = [
        Asked(question.format(words), evidence, topical)
        for words, first, end in _PERIODS[language]
        for question, evidence, topical in _ask(chosen, language, topics, entries, first, end)
        if 0 < len(evidence) <= EVIDENCE_MAX
    ]
    return Diary(f"{language}-{half}-{seed}".replace(" ", "-"), language, half, entries, questions)


def _write_entries(chosen: random.Random, language: str, topics: Sequence[_Topic]) -> Iterator[Entry]:
    number = 0
    for back in range(DAYS, -1, -1):
        day = _TODAY - back * _DAY
        for topic, each in enumerate(topics):
            if chosen.random() < 0.4:
                number += 1
                text = chosen.choice(each.entries).format(chosen.choice(each.fillers))
                yield Entry(f"e{number}", text, topic, day)
        if chosen.random() < 0.5:
            number += 1
            yield Entry(f"e{number}", chosen.choice(_NOISE[language]), -1, day)


def _ask(
    chosen: random.Random, language: str, topics: Sequence[_Topic], entries: Sequence[Entry], first: date, end: date
) -> Iterator[tuple[str, frozenset[str], bool]]:
    inside = [entry for entry in entries if first <= entry.day < end]
    for topic, each in enumerate(topics):
        yield chosen.choice(each.questions), frozenset(one.id for one in inside if one.topic == topic), True
    yield chosen.choice(_OPEN[language]), frozenset(one.id for one in inside), False
