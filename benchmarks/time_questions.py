"""Questions that name a time, with and without interpretation: the share of the evidence among the first.

    python benchmarks/time_questions.py [--data DIR] [--model-dir MODEL]

The diaries are scripted (benchmarks/time_diary.py), half of them held out. DIR and MODEL are those of
benchmarks/quality.py; with DIR its dated questions are measured too, and the weight of the time part is fitted to them
and to the diaries that are not held out, as benchmarks/fit_ranking.py fits the other parts, which keep their weights.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np
from time_diary import NOW, Diary, make_diaries

from memstream_server.core import fitted_weights
from memstream_server.core.arrays import finish
from memstream_server.core.columns import Columns
from memstream_server.core.filters import Filter, mask
from memstream_server.core.ranking import rank
from memstream_server.core.scores import TIMED_PARTS, Weights

if TYPE_CHECKING:
    from fit_ranking import Asked, Vectors

DEPTHS = (1, 4, 10)


@dataclass(frozen=True)
class Questions:
    """The questions about one memory, ready to be ranked; with and without interpretation."""

    name: str
    columns: Columns
    timed: Sequence[Asked]
    untimed: Sequence[Asked]
    topical: Sequence[bool]


def load_diary(diary: Diary, vectors: Vectors) -> Questions:
    """Index a diary and ask its questions."""
    turns = [
        SimpleNamespace(
            id=entry.id,
            text=entry.text,
            speaker="",
            session=entry.day.isoformat(),
            timestamp=datetime(entry.day.year, entry.day.month, entry.day.day, 18) + timedelta(minutes=number % 60),
        )
        for number, entry in enumerate(diary.entries)
    ]
    talk = SimpleNamespace(fragments=turns, now=NOW.replace(tzinfo=None))
    asked = [(each.text, each.evidence) for each in diary.questions]
    return _ask_all(diary.name, talk, asked, [each.topical for each in diary.questions], vectors, diary.language)


def load_dated(talk: Any, vectors: Vectors) -> Questions:
    """The questions of a conversation of the measure that name a time."""
    from fit_ranking import to_microseconds

    from memstream_server.core.time_phrases.recognition import find_times

    now_us = to_microseconds(talk.now)
    answerable = [one for one in talk.questions if one.category != "adversarial"]
    dated = [one for one in answerable if find_times(one.text, "english", now_us, UTC)]
    asked = [(one.text, frozenset(one.evidence)) for one in dated]
    return _ask_all(talk.id, talk, asked, [True] * len(asked), vectors, "english")


def _ask_all(
    name: str, talk: Any, asked: Sequence[tuple[str, frozenset[str]]], topical: Sequence[bool], vectors: Vectors,
    language: str,
) -> Questions:  # fmt: skip
    from fit_ranking import index_talk

    stemmer = "english" if language == "chinese" else language
    memory = index_talk(talk, vectors, stemmer)
    rows = vectors.embed([text for text, _ in asked])
    timed, untimed = (
        [memory.ask(text, row, evidence, interpret) for (text, evidence), row in zip(asked, rows, strict=True)]
        for interpret in (True, False)
    )
    return Questions(name, memory.columns, timed, untimed, topical)


def fit_time(questions: Sequence[Questions], fitted: fitted_weights.FittedWeights) -> float:
    """The weight of the time part, with the present weights of the others, in hundredths."""
    from fit_ranking import fit_logistic

    w = Weights.of_fitted(fitted)
    parts = dict.fromkeys(TIMED_PARTS, 0.0) | {
        "dense": w.dense,
        "lexical": w.lexical,
        "context": w.context,
        "reply": w.context * w.reply,
        "speaker": w.speaker_bonus,
    }
    others = np.array([parts[name] for name in TIMED_PARTS])
    asked = [
        replace(each, values=np.column_stack([each.values @ others, each.values[:, -1]]))
        for one in questions
        for each in one.timed
        if each.question.windows
    ]
    scale, time = fit_logistic(asked, [0, 1])
    return round(float(time / scale), 2)


def measure(
    questions: Questions, asked: Sequence[Asked], fitted: fitted_weights.FittedWeights
) -> np.ndarray[Any, np.dtype[np.float64]]:
    """(questions, depths): share of the evidence among the first, of what the depth allows."""
    weights, allowed = Weights.of_fitted(fitted), mask(questions.columns, Filter(), 0)
    rows = []
    for each in asked:
        ranked = finish(rank(questions.columns, each.legs, each.cosines, each.question, weights, allowed)).results
        ids = [one.id for one in ranked]
        rows.append([len(each.evidence & set(ids[:depth])) / min(depth, len(each.evidence)) for depth in DEPTHS])
    return np.array(rows).reshape(-1, len(DEPTHS))


def print_group(name: str, group: Sequence[Questions], fitted: fitted_weights.FittedWeights) -> None:
    """One line of figures without and with interpretation, by kind of question."""
    topical = np.concatenate([each.topical for each in group]).astype(bool)
    recognised = np.concatenate([[bool(one.question.windows) for one in each.timed] for each in group])
    before = np.concatenate([measure(each, each.untimed, fitted) for each in group])
    after = np.concatenate([measure(each, each.timed, fitted) for each in group])
    print(f"{name}: {len(topical)} questions, a phrase recognised in {recognised.mean():.0%}")
    for kind, chosen in (("topic and time", topical), ("time alone", ~topical)):
        if chosen.any():
            figures = (" / ".join(f"{value:.3f}" for value in rows[chosen].mean(axis=0)) for rows in (before, after))
            print(f"  {kind} ({chosen.sum()}): @1 / @4 / @10 without {next(figures)}, with {next(figures)}")


def main() -> None:
    """Print the figures."""
    from fit_ranking import Vectors
    from quality import load_conversations

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, help="directory of the measure")
    parser.add_argument("--model-dir", type=Path, help="directory of a local embedding model (default: hashing)")
    arguments = parser.parse_args()
    fitted = fitted_weights.MODEL if arguments.model_dir else fitted_weights.HASHING
    vectors = Vectors(arguments.model_dir)
    diaries = make_diaries()
    tuned, held_out = (
        [load_diary(each, vectors) for each in diaries if each.half == half] for half in ("tune", "held out")
    )
    talks = load_conversations(arguments.data) if arguments.data else []
    dated = [load_dated(talk, vectors) for talk in talks]
    print(f"weight of the time part: {fitted.time} in the table; fitted {fit_time([*tuned, *dated], fitted)}")
    print_group("diaries, tuned on", tuned, fitted)
    print_group("diaries, held out", held_out, fitted)
    for language in ("english", "german", "french", "chinese"):
        print_group(f"held out, {language}", [each for each in held_out if each.name.startswith(language)], fitted)
    if dated:
        print_group("the measure's dated questions", dated, fitted)


if __name__ == "__main__":
    main()
