"""Phrases of time in Chinese and Japanese, which are found in any text that has their characters.

Both have no spaces, share most words, and put "before", "since" and "until" after the time. Words of one language that
are part of a name or another word in the other are excluded by what follows them.
"""

# ruff: noqa: RUF001 - full-width signs are what these texts have

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from datetime import date

from memstream_server.core.time_phrases.calendar import Calendar, NoSuchTime, Window

_DIGITS = {"〇": 0, "零": 0, "一": 1, "二": 2, "两": 2, "兩": 2, "三": 3, "四": 4, "五": 5, "六": 6, "七": 7, "八": 8,
           "九": 9}  # fmt: skip
_UNITS = {
    "分钟": "minute", "分鐘": "minute", "分": "minute", "小时": "hour", "小時": "hour", "时间": "hour", "時間": "hour",
    "天": "day", "日": "day", "周": "week", "週": "week", "週間": "week", "星期": "week", "礼拜": "week", "年": "year",
}  # fmt: skip
_WEEKDAYS = {"一": 0, "二": 1, "三": 2, "四": 3, "五": 4, "六": 5, "日": 6, "天": 6, "月": 0, "火": 1, "水": 2, "木": 3,
             "金": 4, "土": 5}  # fmt: skip
_SEASONS = {"春": "spring", "夏": "summer", "秋": "autumn", "冬": "winter"}
_HOLIDAYS = {
    "圣诞节": "christmas", "聖誕節": "christmas", "圣诞": "christmas", "クリスマス": "christmas", "元旦": "new year",
    "お正月": "new year", "正月": "new year", "大晦日": "new year's eve", "万圣节": "halloween",
    "ハロウィン": "halloween",    "平安夜": "christmas eve", "クリスマスイブ": "christmas eve",
}  # fmt: skip
_DAYS = {
    "大前天": -3, "前天": -2, "一昨日": -2, "おととい": -2, "昨天": -1, "昨日": -1, "きのう": -1,
    "今天": 0, "今日": 0, "きょう": 0, "今早": 0, "今晚": 0, "今朝": 0, "今晩": 0,
    "明天": 1, "明日": 1, "あした": 1, "后天": 2, "後天": 2, "明後日": 2, "あさって": 2,
}  # fmt: skip
_YEARS = {"一昨年": -2, "前年": -2, "去年": -1, "昨年": -1, "今年": 0, "明年": 1, "来年": 1, "來年": 1}
_OFFSETS = {"上上": -2, "先々": -2, "上": -1, "先": -1, "本": 0, "这": 0, "這": 0, "今": 0, "下": 1, "来": 1, "來": 1}


def _one_of(words: dict[str, int] | dict[str, str]) -> str:
    return "|".join(sorted(words, key=len, reverse=True))


_N = "[0-9０-９]{1,7}|[〇零一二两兩三四五六七八九十]{1,3}|几|幾|数"
_SMALL = "[0-9０-９]{1,2}|[一二三四五六七八九十]{1,3}"
_YEAR = "(?:1[89]|20|21)[0-9]{2}"
_RELATIVE_YEAR = _one_of(_YEARS)
_WHICH = _one_of(_OFFSETS)
_LENGTHS = _one_of(_UNITS)
_MONTH_END = "(?![0-9一二两三四五六七八九十個个]|[ヶかカ]月|球|亮|饼|光|食|薪|票|租)"


def _value(words: str) -> int:
    if words.isdecimal():
        return int(words)
    if "十" in words:
        tens, _, ones = words.partition("十")
        return (_DIGITS[tens] if tens else 1) * 10 + (_DIGITS[ones] if ones else 0)
    value = 0
    for each in words:
        value = value * 10 + _DIGITS[each]
    return value


def _year(groups: dict[str, str], calendar: Calendar) -> int | None:
    if "year" in groups:
        return int(groups["year"])
    return calendar.today.year + _YEARS[groups["ryear"]] if "ryear" in groups else None


def _date(groups: dict[str, str], calendar: Calendar) -> Window:
    return calendar.day(_value(groups["month"]), _value(groups["day"]), _year(groups, calendar))


def _month(groups: dict[str, str], calendar: Calendar) -> Window:
    return calendar.month(_value(groups["month"]), _year(groups, calendar))


def _quarter(groups: dict[str, str], calendar: Calendar) -> Window:
    year = _year(groups, calendar)
    return calendar.part_of_year(calendar.today.year if year is None else year, _value(groups["quarter"]), 3)


def _whole_year(groups: dict[str, str], calendar: Calendar) -> Window:
    year = _year(groups, calendar)
    if year is None:
        raise NoSuchTime
    return calendar.months(date(year, 1, 1), 12)


def _ago(groups: dict[str, str], calendar: Calendar) -> Window:
    unit = _UNITS.get(groups.get("unit", ""), "month")  # a month has a counter: without one it is a month's name
    if groups["n"] in "几幾数":
        return calendar.ago(unit, 8, 2)
    return calendar.ago(unit, _value(groups["n"]))


def _within(groups: dict[str, str], calendar: Calendar) -> Window:
    unit = _UNITS.get(groups.get("unit", ""), "month")
    return calendar.within(unit, 8 if groups["n"] in "几幾数" else _value(groups["n"]))


def _weekday(groups: dict[str, str], calendar: Calendar) -> Window:
    """The weekday of the week `which` weeks from the present; without one, the latest before today."""
    weekday = _WEEKDAYS[groups["weekday"]]
    if "which" not in groups:
        return calendar.weekday(weekday, -1)
    week = calendar.unit("week", _OFFSETS[groups["which"]])
    if week.start_us is None:
        raise NoSuchTime
    return calendar.days(calendar.shifted("day", weekday, calendar.local(week.start_us).date()))


def _season(groups: dict[str, str], calendar: Calendar) -> Window:
    season = _SEASONS[groups["season"]]
    return calendar.season(season, _year(groups, calendar))


_Match = tuple[int, int, Window]
"""(start, end, window)."""
_Builder = Callable[[dict[str, str], Calendar], Window]
_BUILDERS: tuple[tuple[str, _Builder], ...] = (
    # The same order as alternatives of length: the longest match at a place wins.
    (f"(?:(?P<year>{_YEAR})年|(?P<ryear>{_RELATIVE_YEAR})の?)?(?P<month>{_SMALL})月(?P<day>{_SMALL})[日号號]", _date),
    (f"(?:(?P<year>{_YEAR})年|(?P<ryear>{_RELATIVE_YEAR})の?)の?(?P<month>{_SMALL})月份?{_MONTH_END}", _month),
    (f"(?<![0-9第一二三四五六七八九十])(?P<month>{_SMALL})月份?{_MONTH_END}", _month),
    (
        f"(?:(?P<year>{_YEAR})年|(?P<ryear>{_RELATIVE_YEAR})の?)の?(?:第(?P<quarter>[一二三四1-4])(?:季度|季|四半期))",
        _quarter,
    ),
    (
        f"(?<![0-9第一二三四五六七八九十月周星期])(?P<day>{_SMALL})[号號](?![楼樓线線门門房机機院店码碼])",
        lambda groups, calendar: calendar.day_of_month(_value(groups["day"])),
    ),
    (f"(?:(?P<year>{_YEAR})年|(?P<ryear>{_RELATIVE_YEAR}))の?(?P<season>[春夏秋冬])(?:天|季|休み)?", _season),
    ("(?<![\u4e00-\u9fff])(?:在|这个|這個|この)?(?P<season>[春夏秋冬])[天季](?!竞赛)", _season),
    (f"(?<![0-9])(?P<year>{_YEAR})年(?![级代前間])", _whole_year),
    (f"(?P<ryear>{_RELATIVE_YEAR})", _whole_year),
    (f"(?P<n>{_N})(?:[个個ヶかカヵ箇](?P<months>月)|[个個]?(?P<unit>{_LENGTHS}))(?:之前|以前|前)(?!後|后)", _ago),
    (
        f"(?:最近|过去|過去|近|この|ここ)の?(?P<n>{_N})(?:[个個ヶかカヵ箇](?P<months>月)|[个個]?(?P<unit>{_LENGTHS}))"
        "(?:间|間|里|内|以来|来)?",
        _within,
    ),
    (
        f"(?P<which>{_WHICH})[个個]?(?:周|週|星期|礼拜|禮拜)の?(?:星期|周|週)?(?P<weekday>[一二三四五六日天月火水木金土])"
        "(?:曜日?)?(?!期|本|常|记|間)",
        _weekday,
    ),
    (
        f"(?P<which>{_WHICH})[个個]?(?:周|週|星期|礼拜|禮拜)(?!期|末|围|边|到|年|转|身|密)",
        lambda groups, calendar: calendar.unit("week", _OFFSETS[groups["which"]]),
    ),
    (
        f"(?P<which>{_WHICH})[个個]?(?:周末|週末)",
        lambda groups, calendar: calendar.unit("weekend", _OFFSETS[groups["which"]]),
    ),
    (
        f"(?P<which>{_WHICH})[个個]?月(?![0-9一二三四五六七八九十球亮饼光食薪票])",
        lambda groups, calendar: calendar.unit("month", _OFFSETS[groups["which"]]),
    ),
    ("(?<![每毎这下上])(?:星期|礼拜|禮拜|周|週)(?P<weekday>[一二三四五六日天])(?!期|本|常|记|間|年|到)", _weekday),
    ("(?<![毎次])(?P<weekday>[月火水木金土日])曜日?", _weekday),
    ("昨晚|昨夜|ゆうべ", lambda _, calendar: calendar.last_night()),
    (
        f"(?P<word>{_one_of(_DAYS)})(?!香|头条|頭條|子|奈|葉|報|报|之)",
        lambda groups, calendar: calendar.day_offset(_DAYS[groups["word"]]),
    ),
    (
        f"(?P<holiday>{_one_of(_HOLIDAYS)})(?!树|樹|ツリー|老人|卡|カード|プレゼント|ケーキ)",
        lambda groups, calendar: calendar.holiday(_HOLIDAYS[groups["holiday"]]),
    ),
)
_PATTERNS = tuple((re.compile(regex), build) for regex, build in _BUILDERS)
_HINT = re.compile(
    "[号號月日年周週天春夏秋冬节節昨今明分时時]|星期|礼拜|禮拜|クリスマス|元旦|おととい|きのう|ゆうべ|きょう|あした|あさって|ハロウィン"
)
_AFTER = (
    (re.compile(r"\s?(?:之前|以前|より前|の前|前)(?!后|後|天|日|面|提)"), "before"),
    (re.compile(r"\s?(?:之后|之後|以后|以後|以降|の後|过后)"), "after"),
    (re.compile(r"\s?(?:以来|以來|からずっと|起|开始)"), "since"),
    (re.compile(r"\s?(?:为止|為止|まで)"), "until"),
)
_ITS_WEEK = re.compile("(?:那一?|这一?|這一?|の)(?:周|週|星期)(?!末|[一二三四五六日天])")
_SINCE = re.compile("(?:自从|自從|自)$")
_JOIN = re.compile(r"\s?(?:到|至|から|和|与|〜|~|-|–)\s?")
_FULL_WIDTH = str.maketrans("０１２３４５６７８９", "0123456789")


def find_windows(low: str, calendar: Calendar) -> Iterator[_Match]:
    """Each phrase in order."""
    if not _HINT.search(low):
        return
    found = _find_matches(low.translate(_FULL_WIDTH), calendar)
    number = 0
    while number < len(found):
        start, end, window = found[number]
        following = found[number + 1] if number + 1 < len(found) else None
        number += 1
        if following is not None and _JOIN.fullmatch(low[end : following[0]]):
            begin, finish = window.start_us, following[2].end_us
            if begin is not None and finish is not None and begin < finish:
                yield start, following[1], Window(begin, finish)
                number += 1
                continue
        yield _apply_around(low, start, end, window, calendar)


def _find_matches(low: str, calendar: Calendar) -> list[_Match]:
    matches: list[_Match] = []
    for pattern, build in _PATTERNS:
        for match in pattern.finditer(low):
            groups = {name: words for name, words in match.groupdict().items() if words is not None}
            try:
                matches.append((*match.span(), build(groups, calendar)))
            except (ValueError, OverflowError, KeyError):
                continue
    kept: list[_Match] = []
    for each in sorted(matches, key=lambda each: (each[0], -each[1])):
        if not kept or each[0] >= kept[-1][1]:
            kept.append(each)
    return kept


def _apply_around(low: str, start: int, end: int, window: Window, calendar: Calendar) -> _Match:
    if match := _ITS_WEEK.match(low, end):
        return start, match.end(), calendar.week_of(window)
    for pattern, kind in _AFTER:
        match = pattern.match(low, end)
        if match is None:
            continue
        limited = {
            "before": Window(None, window.start_us),
            "after": Window(window.end_us, None),
            "since": Window(window.start_us, None),
            "until": Window(None, window.end_us),
        }[kind]
        return start, match.end(), limited
    if match := _SINCE.search(low[:start]):
        return match.start(), end, Window(window.start_us, None)
    return start, end, window
