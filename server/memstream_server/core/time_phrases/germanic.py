"""The words and phrase templates of English and German; see lexicon.py."""

from __future__ import annotations

from memstream_server.core.time_phrases.lexicon import FUTURE, PAST, PRESENT, Lexicon

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
