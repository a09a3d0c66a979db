"""Suspicions: what is suspected in five languages, what is not, and how an answer is arranged."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from memstream_server.adapters.models.analyzer import SnowballAnalyzer
from memstream_server.core.suspicions import (
    ConflictReason,
    OpenSuspicions,
    Suspicion,
    arrange,
    find_reason,
    is_newer,
)
from memstream_server.core.values import Fragment

ANALYZER = SnowballAnalyzer()
IDS = [f"f{number}" for number in range(8)]


def reason(older: str, newer: str, language: str = "english") -> ConflictReason | None:
    return find_reason(ANALYZER.claims(newer, language), ANALYZER.claims(older, language))


@pytest.mark.parametrize(
    ("language", "older", "newer", "expected"),
    [
        ("english", "I live in Munich.", "I moved to Berlin.", ConflictReason.PLACE),
        ("english", "My rent is 900 euros.", "My rent is 950 euros.", ConflictReason.NUMBER),
        ("english", "My exam is on Monday.", "My exam is on Friday.", ConflictReason.DATE),
        ("english", "My doctor is Ann Lee.", "My doctor is Bob Ray.", ConflictReason.NAME),
        ("english", "I like spicy food.", "I don't like spicy food.", ConflictReason.POLARITY),
        (
            "english",
            "I drink coffee at breakfast.",
            "I drink tea at breakfast instead of coffee.",
            ConflictReason.CHANGE,
        ),
        ("german", "Ich wohne in München.", "Ich bin nach Berlin umgezogen.", ConflictReason.PLACE),
        ("german", "Meine Miete beträgt 900 Euro.", "Meine Miete beträgt 950 Euro.", ConflictReason.NUMBER),
        ("german", "Ich esse Fleisch.", "Ich esse kein Fleisch mehr.", ConflictReason.POLARITY),
        ("german", "Ich bin Koch in einem Lokal.", "Ich bin nicht mehr Koch.", ConflictReason.POLARITY),
        ("french", "J'habite à Munich.", "J'ai déménagé à Berlin.", ConflictReason.PLACE),
        ("french", "Mon loyer est de 900 euros.", "Mon loyer est de 950 euros.", ConflictReason.NUMBER),
        ("french", "Je mange de la viande.", "Je ne mange plus de viande.", ConflictReason.POLARITY),
        ("spanish", "Vivo en Múnich.", "Me mudé a Berlín.", ConflictReason.PLACE),
        ("spanish", "Mi alquiler es de 900 euros.", "Mi alquiler es de 950 euros.", ConflictReason.NUMBER),
        ("spanish", "Fumo cigarrillos.", "Ya no fumo cigarrillos.", ConflictReason.POLARITY),
        ("english", "我住在北京。", "我搬到上海了。", ConflictReason.PLACE),
        ("english", "我的房租是900元。", "我的房租是950元。", ConflictReason.NUMBER),
        ("english", "我喜欢吃辣的。", "我不喜欢吃辣的。", ConflictReason.POLARITY),
        ("english", "My car is red.", "I sold my car.", ConflictReason.CHANGE),
        ("english", "Project Atlas: the budget is 900 euros.", "The budget is 700 euros.", ConflictReason.NUMBER),
        ("english", 'My favourite film is "Heat".', 'My favourite film is "Alien".', ConflictReason.NAME),
        (
            "english",
            "The parking at the office is free.",
            "The parking at the office is not free.",
            ConflictReason.POLARITY,
        ),
        ("german", "Meine Chefin ist Alice Moor.", "Petra Grün ist jetzt meine Chefin.", ConflictReason.NAME),
        ("german", "Ich esse Fleisch.", "Fleisch esse ich nicht mehr.", ConflictReason.POLARITY),
        ("spanish", "Me gusta el pescado.", "El pescado ya no me gusta.", ConflictReason.POLARITY),
        ("english", "My dentist is Ann Lee.", "The dentist is now Bob Ray.", ConflictReason.NAME),
        (
            "english",
            "My favourite dish is lentil soup with lemon.",
            "My favourite dish is grilled fish.",
            ConflictReason.NAME,
        ),
        ("german", "Mein Auto ist rot.", "Ich habe mein Auto verkauft.", ConflictReason.CHANGE),
        ("german", "Projekt Atlas: die Miete ist 900 Euro.", "Die Miete ist 700 Euro.", ConflictReason.NUMBER),
        ("french", "Ma voiture est rouge.", "J'ai vendu ma voiture.", ConflictReason.CHANGE),
        ("french", "Le train part à 8 heures.", "Le train part à 9 heures.", ConflictReason.NUMBER),
        ("spanish", "Mi coche es rojo.", "Vendí mi coche.", ConflictReason.CHANGE),
        ("spanish", "El tren sale a las 8.", "El tren sale a las 9.", ConflictReason.NUMBER),
        ("english", "我的车是红色的。", "我卖了我的车。", ConflictReason.CHANGE),
        ("english", "我在工厂上班。", "我辞职离开工厂。", ConflictReason.CHANGE),
        # a topic counts as a word in common: home and work, the name of a person
        ("english", "Our office is on Baker Street.", "Our office has moved to Hill Road.", ConflictReason.CHANGE),
        ("english", "I work for a small publisher.", "I work for an insurer now.", ConflictReason.CHANGE),
        ("french", "Je suis employé à la poste.", "J'ai démissionné de la poste.", ConflictReason.CHANGE),
        ("german", "Mein Freund heißt Tom.", "Mein Freund heißt Jan.", ConflictReason.NAME),
        ("spanish", "Prefiero la ventanilla en el avión.", "Prefiero el pasillo en el avión.", ConflictReason.NAME),
        # a verb of change ends what it names, whether that was the subject or the object
        ("english", "I have a red car.", "I sold my car.", ConflictReason.CHANGE),
        ("french", "J'ai une voiture rouge.", "J'ai vendu ma voiture.", ConflictReason.CHANGE),
        ("spanish", "Tengo un coche rojo.", "Vendí el coche.", ConflictReason.CHANGE),
        ("english", "我有一只狗。", "我没有狗了。", ConflictReason.POLARITY),
        ("english", "I am a teacher at a school.", "I left the school and became a gardener.", ConflictReason.CHANGE),
        ("french", "Je suis prof dans une école.", "J'ai quitté l'école pour un jardin.", ConflictReason.CHANGE),
        # the subject is the speaker, also where the language leaves it out or an adverb precedes the verb
        (
            "english",
            "I usually have toast for lunch.",
            "I have soup for lunch instead of toast.",
            ConflictReason.CHANGE,
        ),
        ("spanish", "Como carne.", "Ya no como carne.", ConflictReason.POLARITY),
        ("english", "The rent is 900 euros.", "The rent is 950 euros.", ConflictReason.NUMBER),
        ("english", "瑜伽课六点开始。", "瑜伽课改到七点开始。", ConflictReason.NUMBER),
        ("auto", "Ich wohne in München.", "Ich bin nach Berlin umgezogen.", ConflictReason.PLACE),
        ("auto", "My rent is 900 euros.", "My rent is 950 euros.", ConflictReason.NUMBER),
    ],
)
def test_an_update_is_suspected(language: str, older: str, newer: str, expected: ConflictReason) -> None:
    assert reason(older, newer, language) is expected


@pytest.mark.parametrize(
    ("language", "older", "newer"),
    [
        ("english", "I live in Munich.", "My sister lives in Hamburg."),
        ("german", "Ich wohne in München.", "Meine Schwester wohnt in Hamburg."),
        ("english", "I live in Munich.", "Do I live in Hamburg?"),
        ("english", "I live in Munich.", "You live in Hamburg."),
        ("english", "My first song was long.", "My second song was short."),
        ("english", "I will be back in a second.", "I have two seconds left."),
        ("english", "I like coffee.", "I like tea."),
        ("english", "I have a cat.", "I have a dog."),
        ("english", "I speak French.", "I don't eat fish."),
        ("english", "I ran five kilometres on Monday.", "I ran seven kilometres on Tuesday."),
        ("english", "The concert was loud.", "The soup was salty."),
        ("english", "I live in Munich.", "I live in Munich."),
        ("english", "I'm going for my dreams!", "I won't quit on my dreams."),
        ("spanish", "Me gusta el café.", "Me gusta el té."),
        ("french", "J'aime le café.", "J'aime le thé."),
        ("english", "我喜欢猫。", "我姐姐不喜欢猫。"),
        # other things: named by a label, by the subject, or by nothing
        ("english", "Project Atlas: the budget is 900 euros.", "Project Borea: the budget is 700 euros."),
        ("german", "Projekt Atlas: die Miete ist 900 Euro.", "Projekt Borea: die Miete ist 700 Euro."),
        ("english", "项目甲: 预算是900元。", "项目乙: 预算是700元。"),
        ("english", "Order 1 is paid since Monday.", "Order 2 is paid since Tuesday."),
        ("french", "La commande 1 est payée depuis lundi.", "La commande 2 est payée depuis mardi."),
        ("spanish", "El pedido 1 está pagado desde el lunes.", "El pedido 2 está pagado desde el martes."),
        ("english", "The north of Kent does not have buses.", "The north of Devon has buses."),
        ("english", "This is from the Kenya Gazette.", "This is from the Ghana Times."),
        ("english", "The best temperature is 20 degrees.", "30 degrees is a summer day."),
        ("english", "The clocks of Kenya moved to Eastern Time.", "The house of Ghana moved to Western Time."),
        # words of somebody else, a guess, an addition
        ("english", "I live in Munich.", 'Aziz wrote me: "I live in Hamburg since May".'),
        ("german", "Ich wohne in München.", "„Ich wohne in Hamburg“, schrieb mir Aziz gestern Abend."),
        ("english", "I live in Munich.", "If I moved to Berlin, the rent would be high."),
        ("german", "Ich wohne in München.", "Vielleicht bin ich bald nach Berlin umgezogen."),
        ("french", "J'habite à Munich.", "J'habite peut-être bientôt à Berlin."),
        ("spanish", "Vivo en Múnich.", "Ojalá vivo pronto en Berlín."),
        ("english", "我住在北京。", "我可能搬到上海。"),
        ("english", "I work at a bank in Munich.", "I also work at a school in Munich now."),
        # "now" alone ends nothing
        ("english", "I don't have any pets myself.", "I don't have any pets right now."),
        ("english", "I like hanging out with the club.", "Now I am hanging out with the club."),
        ("german", "Ich bin gern am See.", "Jetzt bin ich am See."),
        # one denies something else than the other says
        ("english", "I'm not that big of a soccer fan.", "I'm a pretty big basketball fan."),
        ("french", "Je n'aime pas trop le thé vert.", "J'aime beaucoup le poivron vert."),
        # the speaker is the subject of one only, without a change
        ("english", "I'm playing the game Go with Ann Lee.", "Chess games are a sport like Judo."),
        # no subject in common, or nothing that one denies
        ("english", "Lisbon is an exciting place to study.", "I study at Aalto."),
        (
            "english",
            "The harbour of Genoa is on my list and I cannot wait.",
            "I found a nice harbour in Genoa, the bar is open.",
        ),
    ],
)
def test_two_true_statements_are_not_suspected(language: str, older: str, newer: str) -> None:
    assert reason(older, newer, language) is None


def test_common_words_show_no_nearness() -> None:
    older, newer = ANALYZER.claims("My rent is 900 euros."), ANALYZER.claims("My rent is 950 euros.")
    assert find_reason(newer, older, newer[0].words) is None


def test_a_document_has_no_claims() -> None:
    assert ANALYZER.claims("I live in Munich. " * 50) == ()


@given(st.text(max_size=300), st.text(max_size=300), st.sampled_from(["english", "french", "auto"]))
def test_any_two_texts_can_be_compared(one: str, other: str, language: str) -> None:
    assert reason(one, other, language) in (None, *ConflictReason)
    assert reason(one, one, language) is None


def test_the_later_observation_is_the_newer() -> None:
    early, late = Fragment("a", "x", observe_time_us=1, position=9), Fragment("b", "x", observe_time_us=2, position=3)
    assert (is_newer(late, early), is_newer(early, late)) == (True, False)
    assert is_newer(late.but(observe_time_us=1, position=10), early)


# ---- the order of an answer
pairs = st.lists(st.tuples(st.sampled_from(IDS), st.sampled_from(IDS)).filter(lambda pair: pair[0] > pair[1]))


@given(pairs, st.integers(0, 8), st.floats(0, 1), st.booleans())
def test_an_arranged_answer_loses_nothing(found: list[tuple[str, str]], count: int, margin: float, fold: bool) -> None:
    newer_of: dict[str, list[str]] = {}
    for newer, older in found:
        newer_of.setdefault(older, []).append(newer)
    scores = [1 - number / 10 for number in range(count)]
    arranged = arrange(IDS[:count], scores, newer_of, margin, fold)
    below = [index for others in arranged.under.values() for index in others]
    assert sorted([*arranged.order, *below]) == list(range(count))
    assert arranged.under.keys() <= set(arranged.order)
    assert fold or not below


def test_the_newer_one_takes_the_place_of_the_older() -> None:
    assert arrange(["old", "else", "new"], [0.9, 0.8, 0.7], {"old": ["new"]}, 0.3, fold=False).order == (2, 0, 1)
    folded = arrange(["old", "else", "new"], [0.9, 0.8, 0.7], {"old": ["new"]}, 0.3, fold=True)
    assert (folded.order, folded.under) == ((2, 1), {2: (0,)})


def test_beyond_the_margin_the_order_stays() -> None:
    assert arrange(["old", "new"], [0.9, 0.5], {"old": ["new"]}, 0.3, fold=True).order == (0, 1)


def test_a_chain_is_folded_under_its_newest() -> None:
    arranged = arrange(["a", "b", "c"], [0.9, 0.8, 0.7], {"a": ["b"], "b": ["c"]}, 0.3, fold=True)
    assert (arranged.order, arranged.under) == ((2,), {2: (1, 0)})


# ---- the open ones
def test_open_suspicions_are_found_by_either_side() -> None:
    one = Suspicion("n", "o", ConflictReason.NAME)
    held = OpenSuspicions([one])
    assert (held.of("n"), held.of("o"), held.newer_of("o"), held.older_ids()) == ((one,), (one,), ["n"], ["o"])
    held.discard_all_of("o")
    held.discard("n", "o")
    assert not held
