"""Edits of JSON texts, also with comments and trailing commas, that change no other byte.

A text is parsed into nodes with their places; an edit is a list of insertions or of cuts. Inserting and then cutting
the same places gives the text as it was.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

_TOKEN = re.compile(
    r"(?P<space>[ \t\r\n]+|//[^\n]*|/\*[\s\S]*?\*/)|(?P<string>\"(?:[^\"\\\x00-\x1f]|\\.)*\")|(?P<mark>[{}\[\],:])"
    r"|(?P<plain>[^\s{}\[\],:\"/]+)"
)
DEPTH_MAX = 100
Path = Sequence[str]


class Malformed(ValueError):
    """The text is no JSON, or has no place for what is to be added; the message says why."""


@dataclass(slots=True)
class Part:
    """A member of an object or an item of a list. `start`: of its key or value; `comma`: of the one after it, or -1."""

    key: str
    start: int
    node: Node
    comma: int = -1


@dataclass(slots=True)
class Node:
    """A value and its place. `parts`: of an object (`{`) or a list (`[`); `scalar`: another value."""

    start: int
    end: int = 0
    mark: str = ""
    parts: list[Part] = field(default_factory=list)
    scalar: Any = None

    @property
    def value(self) -> Any:
        """The value as Python has it."""
        if self.mark == "{":
            return {part.key: part.node.value for part in self.parts}
        return [part.node.value for part in self.parts] if self.mark == "[" else self.scalar

    def find(self, key: str) -> Node | None:
        """The value of a key."""
        return next((part.node for part in self.parts if part.key == key), None) if self.mark == "{" else None


class _Parser:
    def __init__(self, text: str) -> None:
        self.text, self.place = text, 1 if text.startswith("\ufeff") else 0

    def parse(self) -> Node:
        root = self._value(0)
        if self._peek() is not None:
            raise self._error("something follows the end")
        return root

    def _peek(self) -> re.Match[str] | None:
        while self.place < len(self.text):
            found = _TOKEN.match(self.text, self.place)
            if found is None:
                raise self._error("not JSON")
            if found.lastgroup != "space":
                return found
            self.place = found.end()
        return None

    def _next(self) -> re.Match[str]:
        found = self._peek()
        if found is None:
            raise self._error("it ends too early")
        self.place = found.end()
        return found

    def _value(self, depth: int) -> Node:
        if depth > DEPTH_MAX:
            raise self._error("nested too deep")
        token = self._next()
        node = Node(token.start(), token.end())
        if token[0] in ("{", "["):
            node.mark = token[0]
            self._parts(node, depth)
            return node
        try:
            node.scalar = json.loads(token[0])
        except ValueError:
            self.place = token.start()
            raise self._error("not JSON") from None
        return node

    def _parts(self, node: Node, depth: int) -> None:
        closing = {"{": "}", "[": "]"}[node.mark]
        while True:
            token = self._peek()
            if token is not None and token[0] == closing:
                break
            if node.parts and node.parts[-1].comma < 0:
                raise self._error("a comma is missing")
            key = self._key() if node.mark == "{" else ""
            part = Part(key, token.start() if token is not None else self.place, self._value(depth + 1))
            node.parts.append(part)
            comma = self._peek()
            if comma is not None and comma[0] == ",":
                part.comma = self._next().start()
        node.end = self._next().end()

    def _key(self) -> str:
        token = self._next()
        if token.lastgroup != "string" or self._next()[0] != ":":
            raise self._error("a key is missing")
        key: str = json.loads(token[0])
        return key

    def _error(self, what: str) -> Malformed:
        line = self.text.count("\n", 0, self.place) + 1
        return Malformed(f"line {line}: {what}")


def parse(text: str) -> Node:
    """The root of a text. Raises Malformed."""
    return _Parser(text).parse()


def insert(text: str, path: Path, value: Any, *, item: bool) -> list[tuple[int, str]]:
    """Insertions (place, text), in the order in which they are made, that put `value` at the path: as a new member of
    the last key's name, or with `item` as the last item of the list there. Missing objects and lists are made.

    Raises Malformed if something else is in the way.
    """
    node = parse(text)
    for depth, key in enumerate(path):
        if node.mark != "{":
            raise Malformed(f"{'.'.join(path[:depth]) or 'the file'} is not an object")
        last = depth == len(path) - 1
        found = node.find(key)
        if found is None:
            return _insert_part(text, node, key, _wrap(path[depth + 1 :], [value] if item else value), depth + 1)
        if last and not item:
            raise Malformed(f"{'.'.join(path)} exists already")
        node = found
    if node.mark != "[":
        raise Malformed(f"{'.'.join(path)} is not a list")
    return _insert_part(text, node, "", value, len(path) + 1)


def _wrap(path: Path, value: Any) -> Any:
    for key in reversed(path):
        value = {key: value}
    return value


def _insert_part(text: str, node: Node, key: str, value: Any, depth: int) -> list[tuple[int, str]]:
    newline = "\r\n" if "\r\n" in text else "\n"
    step = _indent_step(text)
    inner = _indent_at(text, node.parts[-1].start) if node.parts else step * depth
    body = json.dumps(value, indent=None if inner is None else step, ensure_ascii=False)
    body = body.replace("\n", newline + (inner or ""))
    part = f"{json.dumps(key)}: {body}" if node.mark == "{" else body
    if not node.parts:
        end = "" if text[node.start + 1] in "\r\n" else newline + step * (depth - 1)
        return [(node.start + 1, f"{newline}{inner}{part}{end}")]
    if inner is None:  # all on one line
        return (
            [(node.parts[-1].node.end, f", {part}")]
            if node.parts[-1].comma < 0
            else [(node.parts[-1].comma + 1, f" {part}")]
        )
    place = len(text[: node.end - 1].rstrip(" \t\r\n"))  # after the last comment
    made = [(place, f"{newline}{inner}{part}")]
    return made if node.parts[-1].comma >= 0 else [*made, (node.parts[-1].node.end, ",")]


def _indent_at(text: str, place: int) -> str | None:
    """The blanks before a place on its line; None if something else is before it."""
    line = text[text.rfind("\n", 0, place) + 1 : place]
    return None if line.strip() else line


def _indent_step(text: str) -> str:
    found = re.search(r"^[ \t]+(?=[\"{\[])", text, re.M)
    return found[0] if found else "  "


def cut(text: str, path: Path, value: Any, *, item: bool) -> list[tuple[int, int]]:
    """Cuts (start, end), the last one first, that take the member or item with that value away; none if it is not
    there. Comments stay, but for those inside of the value."""
    node: Node | None = parse(text)
    for key in path if item else path[:-1]:
        node = node.find(key) if node is not None else None
    if node is None:
        return []
    for number, part in enumerate(node.parts):
        if part.key == ("" if item else path[-1]) and part.node.value == value:
            return _cut_part(text, node, number)
    return []


def _cut_part(text: str, node: Node, number: int) -> list[tuple[int, int]]:
    part = node.parts[number]
    start = len(text[: part.start].rstrip(" \t\r\n"))
    if part.comma >= 0:
        return [(part.comma, part.comma + 1), (start, part.node.end)]
    if number and (comma := node.parts[number - 1].comma) >= 0:
        return [(start, part.node.end), (comma, comma + 1)]
    return [(start, part.node.end)]
