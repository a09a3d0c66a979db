"""What European languages have words for: their words and phrase templates of time, lowercase and without accents.

A template is a regular expression. "~" is a gap between words, and a name in angle brackets is a group: <month>
<weekday> <season> <holiday> <unit> <n> (a number) <which> (last, this, next) <beyond> (the one before or after that)
<many> (Fridays, summers) <nth> (of four) <word> (a day such as "yesterday") <day> <year>; <ordinal> is not a group.
recognition.py chooses the window by the groups that matched. A lexicon is compiled with the words that must be present,
and what may precede or join two times.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from functools import cache

PAST, PRESENT, FUTURE = -1, 0, 1


@dataclass(frozen=True)
class Lexicon:
    """The phrases of one language."""

    months: Mapping[str, int]
    weekdays: Mapping[str, int]
    seasons: Mapping[str, str]
    holidays: Mapping[str, str]
    units: Mapping[str, str]
    days: Mapping[str, int]
    """Days relative to today, such as "yesterday"."""
    numbers: Mapping[str, int]
    vague: Mapping[str, tuple[int, int]]
    """Vague numbers: from the first to the second number of units ago."""
    which: Mapping[str, int]
    templates: tuple[str, ...]
    """Phrases that mean a time wherever they are."""
    weak: Mapping[str, str]
    """What precedes a month, weekday, season, holiday or year that means a time only then, by group."""
    modifiers: Mapping[str, str]
    """What precedes a time that is the limit of a window, by "before", "after", "since" and "until"."""
    joins: tuple[str, str, str]
    """What opens a span ("between"), and what joins its two times: after an opener, and without one."""
    offsets: tuple[str, ...] = ()
    """ "two days before": with <n>, <unit> and <offset>."""
    offset_words: Mapping[str, int] = field(default_factory=dict)
    beyond: Mapping[str, int] = field(default_factory=dict)
    many: Mapping[str, int | str] = field(default_factory=dict)
    """Plurals of weekdays and seasons."""
    nth: Mapping[str, int] = field(default_factory=dict)
    day_alone: str = ""
    """A day without a month, which counts after the words of `weak` for "day"."""
    week_of: str = ""
    """What precedes a day that names its week."""
    ordinal: str = ""
    ambiguous: frozenset[str] = frozenset()
    """Months and seasons that are also other words: they count only after the words of `weak`, with a day or a year."""
    month_first: bool = False
    """Whether 5/7/2023 is the seventh of May."""
    rejected_before: str = ""
    """A phrase after these words is no time: "every Monday"."""


ENGLISH = Lexicon(
    months={
        "january": 1, "february": 2, "march": 3, "april": 4, "may": 5, "june": 6, "july": 7, "august": 8,
        "september": 9, "october": 10, "november": 11, "december": 12, "jan": 1, "feb": 2, "mar": 3, "apr": 4,
        "jun": 6, "jul": 7, "aug": 8, "sept": 9, "sep": 9, "oct": 10, "nov": 11, "dec": 12,
    },
    weekdays={
        "monday": 0, "tuesday": 1, "wednesday": 2, "thursday": 3, "friday": 4, "saturday": 5, "sunday": 6,
    },
    seasons={"spring": "spring", "summer": "summer", "autumn": "autumn", "fall": "autumn", "winter": "winter"},
    holidays={
        "christmas eve": "christmas eve", "christmas": "christmas", "xmas": "christmas", "new year's eve":
        "new year's eve", "new year's day": "new year", "new year's": "new year", "easter": "easter", "halloween":
        "halloween", "thanksgiving": "thanksgiving", "valentine's day": "valentine",
    },
    units={
        "minute": "minute", "minutes": "minute", "hour": "hour", "hours": "hour", "day": "day", "days": "day",
        "week": "week", "weeks": "week", "weekend": "weekend", "weekends": "weekend", "fortnight": "fortnight",
        "fortnights": "fortnight", "month": "month", "months": "month", "quarter": "quarter", "quarters": "quarter",
        "year": "year", "years": "year",
    },
    days={
        "the day before yesterday": -2, "day before yesterday": -2, "yesterday": -1, "today": 0, "tonight": 0,
        "this morning": 0, "this afternoon": 0, "this evening": 0, "the day after tomorrow": 2, "tomorrow": 1,
    },
    numbers={
        "a": 1, "an": 1, "one": 1, "two": 2, "three": 3, "four": 4, "five": 5, "six": 6, "seven": 7, "eight": 8,
        "nine": 9, "ten": 10, "eleven": 11, "twelve": 12, "thirteen": 13, "fourteen": 14, "fifteen": 15, "twenty": 20,
        "thirty": 30, "half a dozen": 6, "a dozen": 12,
    },
    vague={"a couple of": (3, 1), "a few": (6, 2), "few": (6, 2), "several": (8, 2), "some": (8, 2)},
    which={"last": PAST, "previous": PAST, "past": PAST, "this": PRESENT, "current": PRESENT, "next": FUTURE,
           "coming": FUTURE},
    templates=(
        "<word>",
        "last~night(?P<night>)",
        "<n>~<unit>~(?:ago|back)(?P<ago>)",
        "<n>~<many>~(?:ago|back)",
        "(?:the~)?<unit>~<beyond>",
        "(?:the~)?<weekday>~<beyond>",
        "(?:the~)?<nth>~quarter~(?:of~)?<year>",
        "(?:the~)?<nth>~quarter~(?:of~)?<which>~year",
        "(?:the~)?<day><ordinal>~of~<which>~month",
        "(?:the~)?(?:last|past|previous)~<n>~<unit>(?P<within>)",
        "the~past~<unit>(?P<within>)",
        "<which>~<unit>",
        "<which>~<weekday>",
        "(?<!the )(?<!a )<which>~<month>",
        "<which>~<season>",
        "<which>~<holiday>",
        "<month>,?~(?:of~)?<year>",
        "<month>~<day><ordinal>?(?:,?~<year>)?",
        "(?:the~)?<day><ordinal>?~(?:of~)?<month>(?:,?~<year>)?",
        "<month>~<day><ordinal>?(?:\\s?-\\s?|~(?:to|until|through|and)~)<day2><ordinal>?(?:,?~<year>)?",
        "(?:the~)?<day><ordinal>?(?:\\s?-\\s?|~(?:to|until|and)~)(?:the~)?<day2><ordinal>?~(?:of~)?<month>(?:,?~<year>)?",
        "<season>~(?:of~)?<year>",
        "<holiday>~(?:of~)?<year>",
        "<weekday>~(?:morning|afternoon|evening|night)",
        "(?<!the )(?<!a )(?<!and )(?<!or )<weekday>(?=\\s{0,3}\\??\\s{0,3}$)",
    ),
    weak={
        "month": "in|during|throughout|of|around|early|late|mid|early~in|late~in|back~in|end~of|beginning~of",
        "year": "in|during|throughout|of|around|early|late|mid|from|back~in",
        "season": "(?:in|during|over|throughout|of|early|late|mid)(?:~the)?",
        "weekday": "on|from",
        "holiday": "(?:at|on|over|for|during|around|this)(?:~the)?",
        "day": "on|from|around",
    },
    modifiers={
        "before": "(?:before|prior~to)(?:~the)?",
        "after": "after(?:~the)?",
        "since": "since(?:~the)?",
        "until": "(?:until|till|up~to|by)(?:~the~end~of)?(?:~the)?",
    },
    joins=("between|from", "and|to|until|till|through", "to|until|till|through"),
    offsets=("<n>~<unit>~<offset>", "the~<unit>~<offset>"),
    offset_words={"before": -1, "after": 1},
    ordinal="(?:st|nd|rd|th)",
    ambiguous=frozenset(
        ("march", "april", "may", "june", "august", "jan", "feb", "mar", "apr", "jun", "jul", "aug", "sep", "sept",
         "oct", "nov", "dec", "spring", "fall")
    ),
    month_first=True,
    rejected_before="every|each|any|most|usual",
    beyond={"before last": -2, "after next": 2},
    many={
        "mondays": 0, "tuesdays": 1, "wednesdays": 2, "thursdays": 3, "fridays": 4, "saturdays": 5, "sundays": 6,
        "summers": "summer", "winters": "winter", "autumns": "autumn", "falls": "autumn", "springs": "spring",
    },
    nth={"first": 1, "1st": 1, "second": 2, "2nd": 2, "third": 3, "3rd": 3, "fourth": 4, "4th": 4, "last": 4},
    day_alone="the~<day><ordinal>(?=\\s{0,3}(?:[?.!,;]|$)|~(?:and|or|to|until|till|through|with|at|about|for|by|in)\\b)",
    week_of="week~(?:of|from|starting|beginning|commencing)(?:~on)?(?:~the)?",
)  # fmt: skip

GERMAN = Lexicon(
    months={
        "januar": 1, "janner": 1, "februar": 2, "feber": 2, "marz": 3, "maerz": 3, "april": 4, "mai": 5, "juni": 6,
        "juli": 7, "august": 8, "september": 9, "oktober": 10, "november": 11, "dezember": 12,
    },
    weekdays={
        "montag": 0, "dienstag": 1, "mittwoch": 2, "donnerstag": 3, "freitag": 4, "samstag": 5, "sonnabend": 5,
        "sonntag": 6,
    },
    seasons={"fruhling": "spring", "fruhjahr": "spring", "sommer": "summer", "herbst": "autumn", "winter": "winter"},
    holidays={
        "heiligabend": "christmas eve", "weihnachten": "christmas", "ostern": "easter", "silvester":
        "new year's eve", "neujahr": "new year", "halloween": "halloween", "valentinstag": "valentine",
    },
    units={
        "minute": "minute", "minuten": "minute", "stunde": "hour", "stunden": "hour", "tag": "day", "tage": "day",
        "tagen": "day", "woche": "week", "wochen": "week", "wochenende": "weekend", "monat": "month", "monats":
        "month", "monate": "month", "monaten": "month", "quartal": "quarter", "jahr": "year", "jahres": "year",
        "jahre": "year", "jahren": "year",
    },
    days={
        "vorgestern": -2, "gestern": -1, "heute": 0, "morgen": 1, "ubermorgen": 2, "uebermorgen": 2,
    },
    numbers={
        "ein": 1, "einem": 1, "einer": 1, "eine": 1, "zwei": 2, "drei": 3, "vier": 4, "funf": 5, "fuenf": 5,
        "sechs": 6, "sieben": 7, "acht": 8, "neun": 9, "zehn": 10, "elf": 11, "zwolf": 12, "zwoelf": 12, "vierzehn": 14,
        "zwanzig": 20,
    },
    vague={"ein paar": (6, 2), "paar": (6, 2), "einigen": (8, 2), "wenigen": (6, 2), "mehreren": (8, 2)},
    which={
        word + ending: offset
        for word, offset in (
            ("letzt", PAST), ("vorig", PAST), ("vergangen", PAST), ("dies", PRESENT), ("nachst", FUTURE),
            ("naechst", FUTURE), ("kommend", FUTURE),
        )
        for ending in ("e", "en", "es", "er", "em")
    },
    templates=(
        "(?<!am )(?<!guten )(?<!jeden )(?<!heute )(?<!gestern )<word>",
        "(?:letzte|vergangene)~nacht(?P<night>)",
        "vor~<n>~<unit>(?P<ago>)",
        "vor~<n>~<many>",
        "(?:die~|den~|das~)?<beyond>~<unit>",
        "(?:den~|am~)?<beyond>~<weekday>",
        "(?:im~)?<nth>~quartal~(?:des~jahres~)?<year>",
        "(?:den~)?(?:letzten|vergangenen)~<n>~<unit>(?P<within>)",
        "<which>~<unit>",
        "<which>~<weekday>",
        "<which>~<month>",
        "<which>~<season>",
        "<which>~<holiday>",
        "<month>~(?:des~jahres~)?<year>",
        "<day>\\.~<month>(?:~<year>)?",
        "<day>\\.?(?:\\s?-\\s?|~(?:bis|und)~)(?:zum~|dem~)?<day2>\\.~<month>(?:~<year>)?",
        "<season>~<year>",
        "<holiday>~<year>",
        "(?:am|vom|zum|dem)~<day>\\.<monthnum>\\.(?!\\d)",
        "am~<unit>(?P<weekend>)",
    ),
    weak={
        "month": "im|anfang|ende|mitte|seit|vom",
        "year": "(?:im~jahr|im~jahre|in|anfang|ende|mitte|aus|von|aus~dem~jahr)",
        "season": "im",
        "weekday": "am|vom",
        "holiday": "an|zu|uber|am",
        "day": "am|vom|zum|dem",
    },
    modifiers={
        "before": "vor(?:~dem|~der)?",
        "after": "nach(?:~dem|~der)?",
        "since": "(?:seit|ab)(?:~dem|~der)?",
        "until": "(?:bis|bis~zum|bis~zu)(?:~dem|~der)?",
    },
    joins=("zwischen(?:~dem)?|von|vom", "(?:und|bis)(?:~dem)?|bis~zum|bis~zu", "bis|bis~zum"),
    offsets=("<n>~<unit>~<offset>", "(?:der|am)~<unit>~<offset>", "(?:die)~<unit>~<offset>"),
    offset_words={"vor": -1, "nach": 1},
    rejected_before="jeden|jede|jedes|guten",
    beyond={
        word + ending: offset
        for word, offset in (("vorletzt", -2), ("vorvorig", -2), ("ubernachst", 2), ("uebernaechst", 2))
        for ending in ("e", "en", "es", "er", "em")
    },
    many={
        "montagen": 0, "dienstagen": 1, "mittwochen": 2, "donnerstagen": 3, "freitagen": 4, "samstagen": 5,
        "sonntagen": 6, "sommern": "summer", "wintern": "winter",
    },
    nth={
        "1.": 1, "2.": 2, "3.": 3, "4.": 4, "erstes": 1, "ersten": 1, "zweites": 2, "zweiten": 2, "drittes": 3,
        "dritten": 3, "viertes": 4, "vierten": 4,
    },
    day_alone="<day>\\.(?=\\s{0,3}(?:[?!,;]|$)|~(?:und|oder|bis|mit|in|bei|um)\\b)",
    week_of="woche~(?:vom|ab~dem|ab)",
)  # fmt: skip
FRENCH = Lexicon(
    months={
        "janvier": 1, "fevrier": 2, "mars": 3, "avril": 4, "mai": 5, "juin": 6, "juillet": 7, "aout": 8,
        "septembre": 9, "octobre": 10, "novembre": 11, "decembre": 12,
    },
    weekdays={"lundi": 0, "mardi": 1, "mercredi": 2, "jeudi": 3, "vendredi": 4, "samedi": 5, "dimanche": 6},
    seasons={"printemps": "spring", "ete": "summer", "automne": "autumn", "hiver": "winter"},
    holidays={
        "noel": "christmas", "paques": "easter", "nouvel an": "new year", "saint-sylvestre": "new year's eve",
        "halloween": "halloween", "saint-valentin": "valentine",
    },
    units={
        "minute": "minute", "minutes": "minute", "heure": "hour", "heures": "hour", "jour": "day", "jours": "day",
        "semaine": "week", "semaines": "week", "week-end": "weekend", "weekend": "weekend", "mois": "month",
        "mois-ci": "month", "trimestre": "quarter", "an": "year", "ans": "year", "annee": "year", "annees": "year",
    },
    days={
        "avant-hier": -2, "hier": -1, "aujourd'hui": 0, "ce matin": 0, "ce soir": 0, "demain": 1,
        "apres-demain": 2,
    },
    numbers={
        "un": 1, "une": 1, "deux": 2, "trois": 3, "quatre": 4, "cinq": 5, "six": 6, "sept": 7, "huit": 8, "neuf": 9,
        "dix": 10, "onze": 11, "douze": 12, "quinze": 15, "vingt": 20, "trente": 30,
    },
    vague={"quelques": (6, 2), "plusieurs": (8, 2)},
    which={
        "dernier": PAST, "derniere": PAST, "passe": PAST, "passee": PAST, "precedent": PAST, "precedente": PAST,
        "ce": PRESENT, "cet": PRESENT, "cette": PRESENT, "prochain": FUTURE, "prochaine": FUTURE,
    },
    templates=(
        "<word>",
        "la~nuit~derniere(?P<night>)",
        "il~y~a~<n>~<unit>(?P<ago>)",
        "il~y~a~<n>~<many>",
        "(?:l')?<beyond>~<unit>",
        "(?:au~|le~)?<nth>~trimestre~(?:de~)?<year>",
        "(?:les|ces)~<n>~derni(?:ers|eres)~<unit>(?P<within>)",
        "(?:les|ces)~derni(?:ers|eres)~<n>~<unit>(?P<within>)",
        "(?:la~|le~|l')?<unit>~(?P<which>derniere?|passee?|precedente?|prochaine?)",
        "(?P<which>ce|cet|cette)~<unit>(?:-ci)?",
        "<weekday>~(?P<which>dernier|passe|prochain)",
        "(?P<which>ce)~<weekday>",
        "<month>~(?P<which>dernier|passe|prochain)",
        "(?:l'|le~)?<season>~(?P<which>dernier|passe|prochain)",
        "(?P<which>ce|cet)~<season>",
        "<holiday>~(?P<which>dernier|passe|prochain)",
        "<month>~<year>",
        "(?:le~)?<day><ordinal>?~<month>(?:~<year>)?",
        "(?:le~)?<day><ordinal>?(?:\\s?-\\s?|~(?:au|et|et~le)~)<day2><ordinal>?~<month>(?:~<year>)?",
        "<season>~(?:de~)?<year>",
        "<holiday>~<year>",
        "<weekday>~(?:matin|soir|apres-midi)",
    ),
    weak={
        "month": "en|au~mois~de|au~mois~d'|debut|fin|mi-|courant",
        "year": "en|de|debut|fin|l'annee|l'an",
        "season": "en|au|pendant~l'|a~l'|durant~l'",
        "weekday": "(?:ce|de~ce)",
        "holiday": "a|pour|pendant|le|au",
        "day": "le|du|au",
    },
    modifiers={
        "before": "(?:avant)(?:~le|~la|~l')?",
        "after": "(?:apres)(?:~le|~la|~l')?",
        "since": "(?:depuis|a~partir~de|a~partir~du)(?:~le|~la|~l')?",
        "until": "(?:jusqu'a|jusqu'en|jusqu'au)(?:~le|~la|~l')?",
    },
    joins=("entre(?:~le)?|de|du", "et|et~le|a|au", "a|au|jusqu'au"),
    offsets=("<n>~<unit>~<offset>", "(?:le|la)~<unit>~<offset>"),
    offset_words={"avant": -1, "apres": 1},
    ordinal="(?:er)",
    ambiguous=frozenset(("mars", "ete")),
    rejected_before="chaque|tous~les|toutes~les",
    beyond={"avant-dernier": -2, "avant-derniere": -2},
    many={"lundis": 0, "mardis": 1, "mercredis": 2, "jeudis": 3, "vendredis": 4, "samedis": 5, "dimanches": 6,
          "etes": "summer", "hivers": "winter"},
    nth={"premier": 1, "1er": 1, "deuxieme": 2, "second": 2, "2e": 2, "troisieme": 3, "3e": 3, "quatrieme": 4, "4e": 4},
    day_alone="<day>(?=\\s{0,3}(?:[?!,;]|$)|~(?:et|ou|au|avec|chez|pour)\\b)",
    week_of="semaine~du",
)  # fmt: skip

SPANISH = Lexicon(
    months={
        "enero": 1, "febrero": 2, "marzo": 3, "abril": 4, "mayo": 5, "junio": 6, "julio": 7, "agosto": 8,
        "septiembre": 9, "setiembre": 9, "octubre": 10, "noviembre": 11, "diciembre": 12,
    },
    weekdays={
        "lunes": 0, "martes": 1, "miercoles": 2, "jueves": 3, "viernes": 4, "sabado": 5, "domingo": 6,
    },
    seasons={"primavera": "spring", "verano": "summer", "otono": "autumn", "invierno": "winter"},
    holidays={
        "nochebuena": "christmas eve", "navidad": "christmas", "navidades": "christmas", "pascua": "easter",
        "semana santa": "easter", "nochevieja": "new year's eve", "ano nuevo": "new year", "halloween": "halloween",
        "san valentin": "valentine",
    },
    units={
        "minuto": "minute", "minutos": "minute", "hora": "hour", "horas": "hour", "dia": "day", "dias": "day",
        "semana": "week", "semanas": "week", "fin de semana": "weekend", "mes": "month", "meses": "month",
        "trimestre": "quarter", "ano": "year", "anos": "year",
    },
    days={
        "anteayer": -2, "antier": -2, "ayer": -1, "hoy": 0, "manana": 1, "pasado manana": 2,
    },
    numbers={
        "un": 1, "una": 1, "dos": 2, "tres": 3, "cuatro": 4, "cinco": 5, "seis": 6, "siete": 7, "ocho": 8, "nueve": 9,
        "diez": 10, "once": 11, "doce": 12, "quince": 15, "veinte": 20, "treinta": 30,
    },
    vague={"unos": (8, 2), "unas": (8, 2), "algunos": (8, 2), "algunas": (8, 2), "varios": (8, 2), "varias": (8, 2),
           "unos pocos": (6, 2)},
    which={
        "pasado": PAST, "pasada": PAST, "ultimo": PAST, "ultima": PAST, "anterior": PAST, "este": PRESENT,
        "esta": PRESENT, "proximo": FUTURE, "proxima": FUTURE, "que viene": FUTURE,
    },
    templates=(
        "(?<!la )(?<!esta )(?<!cada )(?<!una )(?<!pasado )<word>",
        "(?P<night>anoche)",
        "hace~<n>~<unit>(?P<ago>)",
        "hace~<n>~<many>",
        "(?:la~|el~)?<unit>~<beyond>",
        "(?:el~|en~el~)?<nth>~trimestre~(?:de~|del~)?<year>",
        "(?:los|las)~<n>~ultim[oa]s~<unit>(?P<within>)",
        "(?:los|las)~ultim[oa]s~<n>~<unit>(?P<within>)",
        "(?:la~|el~)?<unit>~(?P<which>pasad[oa]|ultim[oa]|anterior|que~viene)",
        "(?P<which>este|esta|proxim[oa]|ultim[oa]|pasad[oa])~<unit>",
        "<weekday>~(?P<which>pasado|que~viene)",
        "(?P<which>este|proximo|pasado)~<weekday>",
        "<month>~(?P<which>pasado)",
        "<season>~(?P<which>pasad[oa])",
        "(?P<which>este|esta)~<season>",
        "<holiday>~(?P<which>pasad[oa])",
        "<month>~(?:de~|del~)?<year>",
        "(?:el~)?<day><ordinal>?~de~<month>(?:~(?:de~|del~)?<year>)?",
        "(?:el~)?<day>(?:\\s?-\\s?|~(?:al|y|y~el)~)<day2>~de~<month>(?:~(?:de~|del~)?<year>)?",
        "<season>~(?:de~|del~)?<year>",
        "<holiday>~(?:de~|del~)?<year>",
    ),
    weak={
        "month": "en|en~el~mes~de|a~principios~de|a~finales~de|a~mediados~de|durante",
        "year": "en|de|del|durante|en~el~ano",
        "season": "(?:en|durante)(?:~el|~la)?",
        "weekday": "el|del",
        "holiday": "en|por|durante",
        "day": "(?:el|del)(?:~dia)?",
    },
    modifiers={
        "before": "antes~(?:de|del)(?:~la|~el)?",
        "after": "(?:despues~(?:de|del)|tras)(?:~la|~el)?",
        "since": "(?:desde|a~partir~de|a~partir~del)(?:~la|~el)?",
        "until": "hasta(?:~la|~el)?",
    },
    joins=("entre(?:~el)?|desde(?:~el)?|del?", "y|y~el|a|al|hasta|hasta~el", "al|hasta|hasta~el"),
    offsets=("<n>~<unit>~<offset>~(?:de|del)", "(?:el|la)~<unit>~<offset>~(?:de|del)"),
    offset_words={"antes": -1, "despues": 1},
    ordinal="(?:º|ro)",
    rejected_before="cada|todos~los|todas~las|los",
    beyond={"antepasado": -2, "antepasada": -2},
    many={"lunes": 0, "martes": 1, "miercoles": 2, "jueves": 3, "viernes": 4, "sabados": 5, "domingos": 6,
          "veranos": "summer", "inviernos": "winter"},
    nth={"primer": 1, "segundo": 2, "tercer": 3, "cuarto": 4},
    day_alone="<day>(?=\\s{0,3}(?:[?!,;]|$)|~(?:y|o|al|con|por)\\b)",
    week_of="semana~(?:del|de)",
)  # fmt: skip

PORTUGUESE = Lexicon(
    months={
        "janeiro": 1, "fevereiro": 2, "marco": 3, "abril": 4, "maio": 5, "junho": 6, "julho": 7, "agosto": 8,
        "setembro": 9, "outubro": 10, "novembro": 11, "dezembro": 12,
    },
    weekdays={
        "segunda-feira": 0, "terca-feira": 1, "quarta-feira": 2, "quinta-feira": 3, "sexta-feira": 4, "segunda": 0,
        "terca": 1, "quarta": 2, "quinta": 3, "sexta": 4, "sabado": 5, "domingo": 6,
    },
    seasons={"primavera": "spring", "verao": "summer", "outono": "autumn", "inverno": "winter"},
    holidays={
        "vespera de natal": "christmas eve", "natal": "christmas", "pascoa": "easter", "reveillon": "new year's eve",
        "ano novo": "new year", "halloween": "halloween",
    },
    units={
        "minuto": "minute", "minutos": "minute", "hora": "hour", "horas": "hour", "dia": "day", "dias": "day",
        "semana": "week", "semanas": "week", "fim de semana": "weekend", "mes": "month", "meses": "month",
        "trimestre": "quarter", "ano": "year", "anos": "year",
    },
    days={
        "anteontem": -2, "ontem": -1, "hoje": 0, "amanha": 1, "depois de amanha": 2,
    },
    numbers={
        "um": 1, "uma": 1, "dois": 2, "duas": 2, "tres": 3, "quatro": 4, "cinco": 5, "seis": 6, "sete": 7, "oito": 8,
        "nove": 9, "dez": 10, "onze": 11, "doze": 12, "quinze": 15, "vinte": 20, "trinta": 30,
    },
    vague={"alguns": (8, 2), "algumas": (8, 2), "poucos": (6, 2), "poucas": (6, 2), "varios": (8, 2),
           "varias": (8, 2)},
    which={
        "passado": PAST, "passada": PAST, "ultimo": PAST, "ultima": PAST, "anterior": PAST, "este": PRESENT,
        "esta": PRESENT, "neste": PRESENT, "nesta": PRESENT, "proximo": FUTURE, "proxima": FUTURE,
        "que vem": FUTURE,
    },
    templates=(
        "<word>",
        "(?:ha|faz)~<n>~<unit>(?P<ago>)",
        "(?:ha|faz)~<n>~<many>",
        "(?:na~|no~|a~|o~)?<unit>~<beyond>",
        "(?:no~|o~)?<nth>~trimestre~(?:de~)?<year>",
        "<n>~<unit>~atras(?P<ago>)",
        "(?:nos|nas|os|as)~<n>~ultim[oa]s~<unit>(?P<within>)",
        "(?:nos|nas|os|as)~ultim[oa]s~<n>~<unit>(?P<within>)",
        "(?:na~|no~|a~|o~)?<unit>~(?P<which>passad[oa]|anterior|que~vem)",
        "(?P<which>n?este|n?esta|proxim[oa]|ultim[oa])~<unit>",
        "(?:na~|no~)?<weekday>~(?P<which>passad[oa]|que~vem)",
        "(?P<which>n?este|n?esta|proxim[oa]|ultim[oa])~<weekday>",
        "<month>~(?P<which>passado)",
        "<season>~(?P<which>passad[oa])",
        "(?P<which>n?este|n?esta)~<season>",
        "<holiday>~(?P<which>passad[oa])",
        "<month>~(?:de~)?<year>",
        "(?:no~dia~|em~|o~dia~)?<day><ordinal>?~de~<month>(?:~(?:de~)?<year>)?",
        "<day>(?:\\s?-\\s?|~(?:a|e)~)<day2>~de~<month>(?:~(?:de~)?<year>)?",
        "<season>~(?:de~)?<year>",
        "<holiday>~(?:de~)?<year>",
    ),
    weak={
        "month": "em|no~mes~de|no~inicio~de|no~final~de|no~fim~de|em~meados~de|durante",
        "year": "em|de|no~ano~de|durante",
        "season": "(?:no|na|durante)(?:~o|~a)?",
        "weekday": "na|no|da|do",
        "holiday": "no|na|durante~o|durante~a",
        "day": "(?:(?:no|o|do|ao|ate|desde)~)?(?:o~)?dia",
    },
    modifiers={
        "before": "antes~(?:de|do|da)",
        "after": "(?:depois~(?:de|do|da)|apos(?:~[oa])?)",
        "since": "(?:desde|a~partir~de|a~partir~do)(?:~[oa])?",
        "until": "ate(?:~[oa])?",
    },
    joins=("entre(?:~[oa])?|de|do|desde", "e|a|ate|ate~[oa]|e~[oa]", "ate|ate~[oa]"),
    offsets=("<n>~<unit>~<offset>~(?:de|do|da)", "(?:[oa]|no|na)~<unit>~<offset>~(?:de|do|da)"),
    offset_words={"antes": -1, "depois": 1},
    ordinal="º",
    ambiguous=frozenset(("marco", "segunda", "terca", "quarta", "quinta", "sexta")),
    rejected_before="cada|toda|todo|todas~as|todos~os",
    beyond={"retrasado": -2, "retrasada": -2, "antepassado": -2, "antepassada": -2},
    many={"segundas": 0, "tercas": 1, "quartas": 2, "quintas": 3, "sextas": 4, "sabados": 5, "domingos": 6,
          "veroes": "summer", "invernos": "winter"},
    nth={"primeiro": 1, "segundo": 2, "terceiro": 3, "quarto": 4},
    day_alone="<day>(?=\\s{0,3}(?:[?!,;]|$)|~(?:e|ou|a|com|em)\\b)",
    week_of="semana~(?:de|do)(?:~dia)?",
)  # fmt: skip


LEXICONS: Mapping[str, Lexicon] = {
    "english": ENGLISH,
    "german": GERMAN,
    "french": FRENCH,
    "spanish": SPANISH,
    "portuguese": PORTUGUESE,
}
"""By the name of the Snowball stemmer, as in a policy."""

GAP = r"\s{1,4}"
"""Between two words of a phrase; bounded, so that a flood of spaces costs nothing."""
_BEGIN = r"(?<![\w$€£#@/\\])(?<!\d[.,:-])(?<!\w-)"
_END = r"(?![\w%€£$/\\]|-\w|\.\w|[,:]\d)"
"""No part of a number, price, path, identifier or compound."""
_NIGHTS = frozenset(("night", "nacht", "nuit", "anoche"))
_DIGITS = {"day": r"[0-3]?\d", "day2": r"[0-3]?\d", "monthnum": r"[01]?\d", "year": r"(?:1[89]|20|21)\d\d"}
DIGIT, NIGHT = "digit", "night"
_GROUP = re.compile(r"(?<!\(\?P)<(\w+)>")
"""A group of a template that is not one of its own."""
WORD = re.compile(r"[^\W_]+")


@dataclass(frozen=True, slots=True)
class Pattern:
    """One form of phrase. `needs`: kinds of word that the text must have for it."""

    regex: re.Pattern[str]
    needs: frozenset[str]
    weak: str = ""
    """The kind of a time that counts only after the right words; empty if it always does."""


@dataclass(frozen=True, slots=True)
class Compiled:
    """A lexicon, compiled."""

    lexicon: Lexicon
    kinds: dict[str, frozenset[str]]
    """Kinds of a word, by the word: the cheap test."""
    patterns: tuple[Pattern, ...]
    weak: dict[str, re.Pattern[str]]
    modifiers: dict[str, re.Pattern[str]]
    opener: re.Pattern[str]
    opened_join: re.Pattern[str]
    join: re.Pattern[str]
    offsets: re.Pattern[str] | None
    rejected_before: re.Pattern[str]
    week_of: re.Pattern[str]


@cache
def compiled(language: str) -> Compiled | None:
    """The compiled lexicon of a language; None without one."""
    lexicon = LEXICONS.get(language)
    return None if lexicon is None else _compile(lexicon)


def _compile(lexicon: Lexicon) -> Compiled:
    groups = {
        "month": _one_of(lexicon.months),
        "weekday": _one_of(lexicon.weekdays),
        "season": _one_of(lexicon.seasons),
        "holiday": _one_of(lexicon.holidays),
        "unit": _one_of(lexicon.units),
        "word": _one_of(lexicon.days),
        "which": _one_of(lexicon.which),
        "n": rf"\d{{1,7}}|{_one_of([*lexicon.vague, *lexicon.numbers])}",
        "offset": _one_of(lexicon.offset_words),
        "beyond": _one_of(lexicon.beyond),
        "many": _one_of(lexicon.many),
        "nth": _one_of(lexicon.nth),
        **_DIGITS,
    }
    patterns = [_compile_template(template, groups, lexicon.ordinal) for template in lexicon.templates]
    alone = {"day": lexicon.day_alone}
    patterns += [
        _compile_template(alone.get(kind, f"<{kind}>"), groups, lexicon.ordinal, kind) for kind in lexicon.weak
    ]
    opener, opened, join = lexicon.joins
    dash = r"\s?-\s?"
    return Compiled(
        lexicon,
        _kinds_of_words(lexicon),
        tuple(patterns),
        {kind: _at_end(words) for kind, words in lexicon.weak.items()},
        {kind: _at_end(words) for kind, words in lexicon.modifiers.items()},
        _at_end(opener),
        re.compile(rf"{GAP}(?:{_expand(opened)}){GAP}|{dash}"),
        re.compile(rf"{GAP}(?:{_expand(join)}){GAP}|{dash}"),
        _at_end("|".join(_fill(each, groups, "", count) for count, each in enumerate(lexicon.offsets)))
        if lexicon.offsets
        else None,
        _at_end(lexicon.rejected_before),
        _at_end(rf"(?:{lexicon.week_of})(?:~(?:{groups['weekday']}),?)?"),
    )


def _compile_template(template: str, groups: dict[str, str], ordinal: str, weak: str = "") -> Pattern:
    names = set(_GROUP.findall(template))
    needs = names & {"month", "weekday", "season", "holiday", "unit", "word", "many"}
    if names & _DIGITS.keys():
        needs |= set() if needs else {DIGIT}
    if "(?P<night>" in template:
        needs.add(NIGHT)
    if "<year>" in template and not template.endswith("?"):
        needs.add(DIGIT)
    return Pattern(re.compile(_BEGIN + f"(?:{_fill(template, groups, ordinal)})" + _END), frozenset(needs), weak)


def _fill(template: str, groups: dict[str, str], ordinal: str, number: int = 0) -> str:
    suffix = str(number) if number else ""
    named = {name: f"(?P<{name}{suffix}>{words})" for name, words in groups.items()}
    return _GROUP.sub(lambda match: ordinal if match[1] == "ordinal" else named[match[1]], _expand(template))


def _expand(template: str) -> str:
    return template.replace("~", GAP)


def _at_end(words: str) -> re.Pattern[str]:
    """The words at the end of what precedes a time, with a gap after them unless they end in an elision or hyphen."""
    if not words:
        return re.compile(r"(?!)")
    return re.compile(rf"(?<!\w)(?:{_expand(words)})(?:{GAP}|(?<=['-]))$")


def _one_of(words: Iterable[str]) -> str:
    longest_first = sorted(words, key=lambda word: (-len(word), word))
    return "|".join(GAP.join(map(re.escape, word.split(" "))) for word in longest_first)


def _kinds_of_words(lexicon: Lexicon) -> dict[str, frozenset[str]]:
    """Kinds by the last word of each entry: the others are frequent words, such as "the" of a phrase."""
    kinds: dict[str, set[str]] = {}

    def add(words: Collection[str], kind: str) -> None:
        for word in words:
            kinds.setdefault(WORD.findall(word)[-1], set()).add(kind)

    add(lexicon.months, "month")
    add(lexicon.weekdays, "weekday")
    add(lexicon.seasons, "season")
    add(lexicon.holidays, "holiday")
    add(lexicon.units, "unit")
    add(lexicon.days, "word")
    add(lexicon.many, "many")
    add(_NIGHTS, NIGHT)
    return {word: frozenset(found) for word, found in kinds.items()}
