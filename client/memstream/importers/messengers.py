"""Chats between people: exports of Slack, Telegram and WhatsApp."""

from __future__ import annotations

import html
import re
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime
from itertools import islice
from pathlib import PurePosixPath
from typing import Any

from memstream.importers.records import InvalidSource, Options, Record, Report, digest_of, plain_metadata, time_of
from memstream.importers.sources import Entries, Source
from memstream.times import read_zone

# Slack.

_SLACK_DAY = re.compile(r"(?:.*/)?([^/]+)/\d{4}-\d\d-\d\d\.json")
_MENTION = re.compile(r"<@([A-Z0-9]+)(?:\|[^>]*)?>")
_LINK = re.compile(r"<([^|>@#!]+)(?:\|([^>]*))?>")
_CHANNEL = re.compile(r"<#[A-Z0-9]+\|([^>]*)>")
_SLACK_TALK = {None, "bot_message", "me_message", "thread_broadcast", "file_share", "file_comment"}
"""Subtypes of messages that someone wrote; others are notices, such as channel_join."""


def is_slack(source: Source) -> bool:
    """An archive or directory with users.json, and files of days in directories of channels."""
    return source.find("users.json") is not None and any(map(_SLACK_DAY.fullmatch, source.names))


def read_slack(source: Source, options: Options, report: Report) -> Iterator[Record]:
    """Channels in order, each by day. A thread is a session of its own."""
    users = _slack_users(source)
    days = [(found[1], name) for name in source.names if (found := _SLACK_DAY.fullmatch(name))]
    for channel in dict.fromkeys(channel for channel, _ in sorted(days)):
        report.keep("channels")
        for _, name in sorted(one for one in days if one[0] == channel):
            with source.open(name) as entries:
                for number, message in entries.items("item"):
                    if isinstance(message, dict):
                        place = f"{name}: message {number}"
                        yield from _read_slack_message(channel, message, users, report, place)


def _slack_users(source: Source) -> dict[str, str]:
    name = source.find("users.json")
    users: dict[str, str] = {}
    if name is not None:
        with source.open(name) as entries:
            for _, user in entries.items("item"):
                profile = user.get("profile") or {}
                shown = profile.get("display_name") or user.get("real_name") or profile.get("real_name")
                users[str(user.get("id"))] = str(shown or user.get("name") or user.get("id"))
    return users


def _read_slack_message(
    channel: str, message: Mapping[str, Any], users: Mapping[str, str], report: Report, place: str
) -> Iterator[Record]:
    if message.get("subtype") not in _SLACK_TALK:
        report.lose("notices (joins, topics, pins)")
        return
    report.lose("files", len(message.get("files") or ()))
    report.lose("reactions", sum(int(one.get("count") or 1) for one in message.get("reactions") or ()))
    report.lose("earlier words of edited messages", bool(message.get("edited")))
    text = _slack_text(str(message.get("text") or ""), users)
    if not text.strip():
        report.skip("has no text", place)
        return
    stamp = str(message.get("ts") or "")
    begins_thread = message.get("reply_count") or message.get(
        "replies"
    )  # exports of old threads have no thread_ts there
    thread = message.get("thread_ts") or (stamp if begins_thread else None)
    seconds = float(stamp) if re.fullmatch(r"\d{9,11}(\.\d+)?", stamp) else stamp or None
    user = str(message.get("user") or message.get("bot_id") or "")
    yield Record(
        id=f"{channel}/{stamp or digest_of(place)}",
        text=text,
        session=f"{channel}/{thread}" if thread else channel,
        speaker=users.get(user) or str(message.get("username") or user),
        time=time_of(seconds),
        metadata=plain_metadata({"channel": channel}),
        place=place,
    )


def _slack_text(text: str, users: Mapping[str, str]) -> str:
    text = _MENTION.sub(lambda found: f"@{users.get(found[1], found[1])}", text)
    text = _CHANNEL.sub(r"#\1", text)
    text = _LINK.sub(lambda found: f"{found[2]} ({found[1]})" if found[2] else found[1], text)
    return html.unescape(text)


# Telegram.

_TELEGRAM_HEADS = ("name", "id", "type")


def read_telegram(source: Source, options: Options, report: Report) -> Iterator[Record]:
    """One chat, or all chats of an account (`chats.list`)."""
    name = source.find("result.json") or source.names[0]
    with source.open(name) as entries:
        for number, (chat, message) in enumerate(_telegram_messages(entries, report), 1):
            yield from _read_telegram_message(chat, message, options, report, f"{name}: message {number}")


def _telegram_messages(entries: Entries, report: Report) -> Iterator[tuple[dict[str, Any], dict[str, Any]]]:
    """Each message with the name, id and type of its chat, which precede its messages."""
    import ijson

    chat: dict[str, Any] = {}
    builder: Any = None
    within = ""
    for prefix, event, value in entries.events():
        if builder is not None:
            builder.event(event, value)
            if event == "end_map" and prefix == within:
                yield chat, builder.value
                builder = None
                entries.begin_entry()
        elif event == "start_map" and prefix in ("messages.item", "chats.list.item.messages.item"):
            builder, within = ijson.ObjectBuilder(), prefix
            builder.event(event, value)
        elif event == "start_map" and prefix in ("", "chats.list.item"):
            chat = {}
        elif prefix.rpartition(".")[2] in _TELEGRAM_HEADS and prefix.rpartition(".")[0] in ("", "chats.list.item"):
            chat[prefix.rpartition(".")[2]] = value
        elif event == "start_array" and prefix in ("messages", "chats.list.item.messages"):
            report.keep("chats")


def _read_telegram_message(
    chat: Mapping[str, Any], message: Mapping[str, Any], options: Options, report: Report, place: str
) -> Iterator[Record]:
    if message.get("type", "message") != "message":
        report.lose("notices (joins, calls, pins)")
        return
    report.lose("photos, files and stickers", any(key in message for key in ("photo", "file", "media_type")))
    report.lose("reactions", sum(int(one.get("count") or 1) for one in message.get("reactions") or ()))
    report.lose("earlier words of edited messages", "edited" in message)
    text = _telegram_text(message.get("text"))
    if not text.strip():
        report.skip("has no text", place)
        return
    unix = message.get("date_unixtime")
    session = str(chat.get("id") or chat.get("name") or "telegram")
    yield Record(
        id=f"{session}/{message.get('id', digest_of(place))}",
        text=text,
        session=session,
        speaker=str(message.get("from") or message.get("from_id") or ""),
        time=time_of(unix if unix else message.get("date"), options.time_zone),
        metadata=plain_metadata(
            {
                "title": chat.get("name"),
                "reply_to": message.get("reply_to_message_id"),
                "forwarded_from": message.get("forwarded_from"),
            }
        ),
        place=place,
    )


def _telegram_text(text: object) -> str:
    """A text, or the joined texts of its entities."""
    if isinstance(text, list):
        return "".join(one if isinstance(one, str) else str(one.get("text", "")) for one in text)
    return text if isinstance(text, str) else ""


# WhatsApp.

_LINE = re.compile(
    r"\[?(?P<date>\d{1,4}[./-]\d{1,2}[./-]\d{1,4}),?\s+(?:klo\s)?"
    r"(?P<hour>\d{1,2})[:.](?P<minute>\d\d)(?:[:.](?P<second>\d\d))?\s?(?P<half>[AaPp]\.?\s?[Mm]\.?)?"
    r"(?:\]\s?|\s[-\u2013]\s)(?P<rest>.*)"
)
"""iPhone: `[08.05.23, 14:03:21] Bob: words`. Android: `5/8/23, 2:03 PM - Bob: words`."""
_BY_PHONE = "\u200e"
"""An iPhone writes this mark before words that are its own: notices, and `image omitted`."""
_MARKS = re.compile("[\u200e\u200f\u202a-\u202e\ufeff]")
_LEADING = "\u200e\u200f\u202a\ufeff"
_FIRST = "[0123456789" + _LEADING
_SPACES = re.compile("[\u00a0\u202f]")
_OMITTED = re.compile(
    r"<[^>]*(?:omit|weggelassen|ausgeschlossen)[^>]*>|<(?:attached|Anhang): .*>|.*\(file attached\)|"
    r"(?:image|video|audio|sticker|GIF|document|Contact card) omitted",
    re.IGNORECASE,
)
_EDITED = re.compile(r"\s*<This message was edited>\s*$")
DATE_ORDERS = ("dmy", "mdy", "ymd")


def whatsapp_file(source: Source) -> str | None:
    """The member that has a chat: `_chat.txt`, or the only text that begins with a line of one."""
    texts = [one for one in source.names if one.endswith(".txt")]
    named = [one for one in texts if PurePosixPath(one).name == "_chat.txt"] or texts
    return next((one for one in named[:20] if _begins_a_chat(source, one)), None)


def _begins_a_chat(source: Source, name: str) -> bool:
    with source.open(name) as entries:
        first = [_SPACES.sub(" ", line.lstrip(_LEADING)) for _, line in islice(entries.lines(), 5)]
        return any(_LINE.match(line) for line in first)


def read_whatsapp(source: Source, options: Options, report: Report) -> Iterator[Record]:
    """One chat; a line without a time continues the message before it."""
    name = whatsapp_file(source)
    if name is None:
        raise InvalidSource(f"{source.shown}: has no WhatsApp chat: no line begins with a date and a time")
    order = options.date_order or _find_date_order(source, name)
    chat = _chat_name(source, name)
    report.keep("chats")
    same: dict[str, int] = {}
    second: object = None
    for number, found, text in _whatsapp_messages(source, name):
        place = f"{name}:{number}"
        speaker, colon, words = found["rest"].partition(": ")
        by_phone = words.startswith(_BY_PHONE)
        words, text = _MARKS.sub("", words), [_MARKS.sub("", line) for line in text]
        body = _EDITED.sub("", "\n".join((words, *text)))
        report.lose("earlier words of edited messages", body != "\n".join((words, *text)))
        if colon and _OMITTED.fullmatch(body.strip()):
            report.lose("photos, files and stickers")
            continue
        if not colon or (by_phone and not body.startswith("<")):
            report.lose("notices (encryption, joins, calls)")
            continue
        if not body.strip():
            report.skip("has no text", place)
            continue
        time = _whatsapp_time(found, order, options.time_zone, place)
        if time != second:  # exports have no ids: the same words at the same second are numbered
            same.clear()
            second = time
        key = digest_of(f"{chat}\n{time.isoformat()}\n{speaker}\n{body}")
        same[key] = same.get(key, 0) + 1
        yield Record(id=f"{key}-{same[key]}", text=body, session=chat, speaker=speaker.strip(), time=time, place=place)


def _whatsapp_messages(source: Source, name: str) -> Iterator[tuple[int, re.Match[str], list[str]]]:
    """The line's number, its first line, and the lines that continue it."""
    begun: tuple[int, re.Match[str]] | None = None
    rest: list[str] = []
    size = 0
    with source.open(name) as entries:
        for number, line in entries.lines():
            found = _LINE.match(_SPACES.sub(" ", line.lstrip(_LEADING))) if line[:1] in _FIRST else None
            if found is None:
                rest.append(line)
                size += len(line)
                if size > 16 << 20:
                    raise InvalidSource(f"{name}:{number}: no message has begun for 16 million characters")
                continue
            if begun is not None:
                yield *begun, rest
            begun, rest, size = (number, found), [], 0
    if begun is not None:
        yield *begun, rest


def _find_date_order(source: Source, name: str) -> str:
    """The order of day, month and year that fits every line. Raises InvalidSource if two do, or none."""
    fits = set(DATE_ORDERS)
    ordered = {"dmy": True, "mdy": True}
    last: dict[str, tuple[int, ...]] = {}
    for number, found, _ in _whatsapp_messages(source, name):
        one = {order: _date_parts(found["date"], order) for order in fits}
        fits = {order for order in fits if _is_date(one[order])}
        if not fits:
            raise InvalidSource(f"{name}:{number}: {found['date']} fits no order of day, month and year with the rest")
        for order in fits & set(ordered):
            ordered[order] &= one[order] >= last.get(order, one[order])
            last[order] = one[order]
    if len(fits) > 1:  # a chat is in order of time
        fits = {order for order in fits if ordered.get(order, False)} or fits
    if len(fits) != 1:
        raise InvalidSource(
            f"{name}: its dates fit two orders of day and month: pass --date-order dmy (8 May is 08/05) or mdy"
        )
    return fits.pop()


def _date_parts(date: str, order: str) -> tuple[int, int, int]:
    """Year, month and day as numbers of an order; a year of four digits counts as one in any place."""
    parts = [int(one) for one in re.split(r"[./-]", date)]
    by = dict(zip(order, parts, strict=True))
    lengths = dict(zip(order, map(len, re.split(r"[./-]", date)), strict=True))
    year = by["y"] if lengths["y"] == 4 else 2000 + by["y"] if lengths["y"] == 2 else -1
    return year, by["m"], by["d"]


def _is_date(parts: tuple[int, int, int]) -> bool:
    try:
        datetime(*parts, tzinfo=UTC)
    except ValueError:
        return False
    return parts[0] > 2000


def _whatsapp_time(found: re.Match[str], order: str, zone: str, place: str) -> datetime:
    hour = int(found["hour"])
    if half := found["half"]:
        hour = hour % 12 + (12 if half[0] in "pP" else 0)
    try:
        local = datetime(*_date_parts(found["date"], order), hour, int(found["minute"]), int(found["second"] or 0))
    except ValueError as error:
        raise InvalidSource(f"{place}: {found['date']} is no date in the order {order}: {error}") from error
    return local.replace(tzinfo=read_zone(zone)).astimezone(UTC)


def _chat_name(source: Source, name: str) -> str:
    """The name of a chat: `WhatsApp Chat with Bob.txt`, or that of the archive of a `_chat.txt`."""
    own = PurePosixPath(name).stem
    shown = source.title if own == "_chat" else own
    return re.sub(r"^WhatsApp Chat (?:with|-) ", "", shown).strip() or "WhatsApp"
