"""Secrets by their shape: what a turn contains of keys, tokens and passwords is replaced before it is stored.

Pure, and linear in the text. A shape is a guess: it misses a secret that looks like a word, and may take a random text
for one. The replacement names the kind, so that a reader knows that something was there.
"""

from __future__ import annotations

import math
import re
from collections import Counter

ENTROPY_MIN_BITS = 2.5
"""For each character of a value that a name such as `password` is given: words have less, random texts more."""
VALUE_CHARS_MIN = 6
PLACEHOLDER_CHARS_MAX = 32

_SHAPES = {
    "private key": r"-----BEGIN [A-Z0-9 ]{0,40}PRIVATE KEY(?: BLOCK)?-----(?:(?!-----END)[\s\S])*(?:-----END[^\n]*)?",
    "AWS key": r"\b(?:AKIA|ASIA|ABIA|ACCA)[0-9A-Z]{16}\b",
    "GitHub token": r"\b(?:gh[pousr]_[A-Za-z0-9]{36,255}|github_pat_[A-Za-z0-9_]{22,255})",
    "GitLab token": r"\bgl[a-z]{2,8}-[A-Za-z0-9_-]{20,255}",
    "API key": r"\b(?:sk|rk|pk)[-_](?:[a-z0-9]{2,12}[-_]){0,3}[A-Za-z0-9_-]{20,255}",
    "Slack token": r"\bx(?:ox[a-z]|app)-[A-Za-z0-9-]{10,255}",
    "Google key": r"\bAIza[0-9A-Za-z_-]{35}|\bya29\.[0-9A-Za-z_-]{20,1024}",
    "package registry token": r"\b(?:npm_[A-Za-z0-9]{36}|pypi-[A-Za-z0-9_-]{16,1024}|hf_[A-Za-z0-9]{30,255})",
    "memstream key": r"\bmsk_[A-Za-z0-9_-]{16,255}",
    "JWT": r"\beyJ[A-Za-z0-9_-]{8,4096}\.[A-Za-z0-9_-]{4,8192}\.[A-Za-z0-9_-]{0,4096}",
    "authorization": r"(?i:\b(?:bearer|basic)) +(?=[A-Za-z0-9+/._~=-]*[0-9=_-])[A-Za-z0-9+/._~=-]{16,4096}",
}
_URL_PASSWORD = re.compile(
    r"(?P<before>\b[a-z][a-z0-9+.-]{1,20}://[^\s:/@]{0,100}:)(?P<value>[^\s/@]{1,200})(?=@)", re.I
)
_ASSIGNED = re.compile(
    r"(?P<before>(?<![\[\w.-])[\w.-]{0,60}(?:password|passwd|passphrase|pwd|secret|api[_-]?key|access[_-]?key|auth[_-]?token|"
    r"access[_-]?token|token|credential)s?[\"']?\s{0,3}(?:=>|:=|=|:|\bis\b)\s{0,3}[\"']?)(?P<value>[^\s\"',;<>]{1,500})",
    re.I,
)
_ALL = re.compile("|".join(f"(?P<s{number}>{shape})" for number, shape in enumerate(_SHAPES.values())))
_KINDS = tuple(_SHAPES)
_PLACEHOLDER = re.compile(
    r"[$<{%]|\*{3}|x{4}|\.\.\.|(?:os\.|process\.|env\b|getenv|your|example|placeholder|changeme)", re.I
)


def redact(text: str) -> str:
    """The text with each secret replaced by `[secret: KIND]`."""
    text = _ALL.sub(lambda found: f"[secret: {_KINDS[int((found.lastgroup or 's0')[1:])]}]", text)
    text = _URL_PASSWORD.sub(lambda found: f"{found['before']}[secret: password]", text)
    return _ASSIGNED.sub(_hide_value, text)


def _hide_value(found: re.Match[str]) -> str:
    value = found["value"]
    if (
        len(value) < VALUE_CHARS_MIN
        or (len(value) < PLACEHOLDER_CHARS_MAX and _PLACEHOLDER.search(value))
        or value.startswith("[secret")
    ):
        return found[0]
    return (
        f"{found['before']}[secret: value]" if _entropy_bits(value) >= ENTROPY_MIN_BITS and _mixed(value) else found[0]
    )


def _mixed(value: str) -> bool:
    """Whether it is more than a word: letters with digits or signs, or of both cases within."""
    return not value.isalpha() or (value.lower() != value and value[1:].lower() != value[1:] and not value.isupper())


def _entropy_bits(value: str) -> float:
    counts = Counter(value).values()
    return -sum(count / len(value) * math.log2(count / len(value)) for count in counts)
