"""JSON schemas of LLM answers, and their strict readers: an answer that deviates is malformed."""

from __future__ import annotations

from typing import Any

from memstream_server.adapters.models.openai_chat import Form
from memstream_server.adapters.models.openai_errors import MalformedError
from memstream_server.core.printable import escape_unprintable
from memstream_server.core.suspicions import ConflictDecision
from memstream_server.ports.models import Judgement

TEXT_CHARACTERS_MAX = 4_000
"""Limit of an insight or a question, which are single sentences."""
REASON_CHARACTERS_MAX = 300
"""Length at which the reason of a decision is cut."""
_UNCLEAR = "unclear"


def _object_schema(name: str, item: dict[str, Any]) -> dict[str, Any]:
    return _record_schema(**{name: {"type": "array", "items": item}})


def _record_schema(**properties: dict[str, Any]) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": properties,
        "required": list(properties),
        "additionalProperties": False,
    }


_TEXT = {"type": "string"}
_NUMBER = {"type": "integer"}
SCORES = Form(
    "scores",
    _object_schema("scores", _record_schema(number=_NUMBER, score=_NUMBER)),
    '{"scores": [{"number": <a text\'s number>, "score": <1 to 10>}, ...]} with every text once',
)
INSIGHTS = Form(
    "insights",
    _object_schema("insights", _TEXT),
    '{"insights": ["<an insight>", ...]}; {"insights": []} if there is none',
)
QUESTIONS = Form("questions", _object_schema("questions", _TEXT), '{"questions": ["<a question>", ...]}')
CITED = Form(
    "cited_insights",
    _object_schema("insights", _record_schema(insight=_TEXT, evidence={"type": "array", "items": _NUMBER})),
    '{"insights": [{"insight": "<an insight>", "evidence": [<numbers of texts>]}, ...]}; '
    '{"insights": []} if there is none',
)
STATEMENTS = Form(
    "cited_statements",
    _object_schema("statements", _record_schema(statement=_TEXT, evidence={"type": "array", "items": _NUMBER})),
    '{"statements": [{"statement": "<a statement>", "evidence": [<numbers of texts>]}, ...]}; '
    '{"statements": []} if the texts answer nothing',
)
CONFLICT = Form(
    "conflict",
    _record_schema(reason=_TEXT, decision={"type": "string", "enum": [*ConflictDecision, _UNCLEAR]}),
    '{"reason": "<one short sentence>", "decision": "<newer, older, both, neither or unclear>"}',
)


def parse_scores(answer: Any, count: int) -> list[float]:
    """Importances of texts 1 to `count`, n/10 for a score of n (1 to 10). Raises MalformedError."""
    found: dict[int, float] = {}
    for item in _read_items(answer, "scores"):
        number, score = _read_whole(item, "number", count), _read_whole(item, "score", 10)
        if number in found:
            raise MalformedError(f"two scores for text {number}")
        found[number] = score / 10
    if len(found) != count:
        raise MalformedError(f"{len(found)} scores for {count} texts")
    return [found[number] for number in range(1, count + 1)]


def parse_texts(answer: Any, name: str) -> list[str]:
    """The list of sentences in the field `name`; may be empty. Raises MalformedError."""
    return [_read_text(item) for item in _read_items(answer, name)]


def parse_cited(answer: Any, count: int, name: str = "insight") -> list[tuple[str, tuple[int, ...]]]:
    """Insights, or statements, with the 0-based indices (at least one) of their evidence among `count` texts. Raises
    MalformedError."""
    return [
        (_read_text(_read_field(item, name)), _read_evidence(item, count)) for item in _read_items(answer, f"{name}s")
    ]


def parse_judgement(answer: Any) -> Judgement | None:
    """A decision with its reason on one line; None if the model finds it unclear. Raises MalformedError."""
    said = _read_field(answer, "decision")
    if said == _UNCLEAR:
        return None
    if said not in list(ConflictDecision):
        raise MalformedError("'decision' is none of the decisions")  # without its words, which may quote a memory
    reason = answer.get("reason")
    words = " ".join(reason.split()) if isinstance(reason, str) else ""
    return Judgement(ConflictDecision(said), escape_unprintable(words[:REASON_CHARACTERS_MAX])[:REASON_CHARACTERS_MAX])


def _read_evidence(item: Any, count: int) -> tuple[int, ...]:
    numbers = _read_field(item, "evidence")
    if not isinstance(numbers, list) or not numbers:
        raise MalformedError("an insight cites no evidence")
    return tuple(dict.fromkeys(_check_bounds(number, "evidence", count) - 1 for number in numbers))


def _read_items(answer: Any, name: str) -> list[Any]:
    items = _read_field(answer, name)
    if not isinstance(items, list):
        raise MalformedError(f"{name!r} is no list")
    return items


def _read_field(item: Any, name: str) -> Any:
    if not isinstance(item, dict) or name not in item:
        raise MalformedError(f"no {name!r} where there must be one")
    return item[name]


def _read_whole(item: Any, name: str, most: int) -> int:
    return _check_bounds(_read_field(item, name), name, most)


def _check_bounds(value: Any, name: str, most: int) -> int:
    # A bool is an int to Python; 7.0 is a whole number to JSON.
    if isinstance(value, bool) or not isinstance(value, int | float) or not 1 <= value <= most or value != int(value):
        # Show numbers only: other values may contain a memory's words, which must not reach a log.
        told = value if isinstance(value, int | float) else type(value).__name__
        raise MalformedError(f"{name!r} must be a whole number of 1 to {most}, is {told!s:.50}")
    return int(value)


def _read_text(value: Any) -> str:
    if not isinstance(value, str) or not value.strip() or len(value) > TEXT_CHARACTERS_MAX:
        raise MalformedError(f"a text must be a string of 1 to {TEXT_CHARACTERS_MAX} characters")
    return value.strip()
