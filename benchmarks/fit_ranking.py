"""Fits the weights of the ranking's parts to questions with known evidence, and measures them on what was not fitted.

    python benchmarks/fit_ranking.py --data DIR [--model-dir MODEL] [--drop PART ...] [--write]

DIR is that of benchmarks/quality.py. Without MODEL it fits the weights for hashed vectors, with it those for the model:
its own row of the table if it has one, else that of every other real model. `--drop` fits without a part, which shows
what the part brings. `--write` writes the weights to server/memstream_server/core/fitted_weights.py.

Method: conditional logistic regression (the likelihood that the evidence of a question comes before its other
candidates), with an L2 penalty and without negative weights: a part that would get one is left out. The measured
figures are leave-one-conversation-out: each conversation is ranked with weights that were fitted to the others.
"""

from __future__ import annotations

import argparse
import asyncio
import re
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from memstream_server.adapters.models import onnx_models
from memstream_server.adapters.models.analyzer import SnowballAnalyzer
from memstream_server.adapters.models.hashing import HashingEmbedder
from memstream_server.adapters.models.onnx_models import OnnxEmbedder
from memstream_server.core import fitted_weights
from memstream_server.core.arrays import finish
from memstream_server.core.columns import Columns
from memstream_server.core.dense import DenseMatrix
from memstream_server.core.filters import Filter, mask
from memstream_server.core.lexical import Legs, LexicalIndex, query_terms
from memstream_server.core.ranking import RankingQuery, add_timely, assess_candidates, best, candidates, rank
from memstream_server.core.rendering import indexed_text, lexical_text
from memstream_server.core.scores import TIMED_PARTS, Weights
from memstream_server.core.signals import Signals
from memstream_server.core.time_phrases.recognition import asks_only_time, find_times
from memstream_server.core.values import Fragment

DEPTHS = (4, 10, 20)
PENALTY = 1e-3
"""L2, per question, on parts scaled to unit variance."""
HASHING_DENSE = 0.05
"""Not fitted: hashed vectors repeat the words, so the fit gives them nothing, but they find misspelt words."""
_PARTS = {
    "hashing": ("lexical", "context", "reply", "speaker", "time"),
    "model": ("dense", "lexical", "context", "reply", "speaker", "time"),
}
"""Those that leave-one-conversation-out supports, by kind of embedding (docs/decisions.md)."""
_TABLE = Path(fitted_weights.__file__)
_BATCH = 32
Matrix = npt.NDArray[np.float64]
ANALYZER = SnowballAnalyzer()


@dataclass(frozen=True)
class Asked:
    """A question with its evidence, ready to be ranked."""

    question: RankingQuery
    legs: Legs
    cosines: npt.NDArray[np.float32]
    evidence: frozenset[str]
    values: Matrix
    """(candidates, parts), the order of TIMED_PARTS."""
    gold: npt.NDArray[np.bool_]
    """The candidates that are evidence."""


@dataclass(frozen=True)
class Talk:
    """A conversation's memory and its answerable questions."""

    columns: Columns
    asked: Sequence[Asked]


class Vectors:
    """Vectors of texts: hashed, or of a local model. `row` is the name of the model's weights in the server's table."""

    def __init__(self, directory: Path | None) -> None:
        self._model = OnnxEmbedder(directory) if directory else None
        self._hashing = HashingEmbedder()
        self.present = (
            fitted_weights.of_model(onnx_models.known_model(directory)) if directory else fitted_weights.HASHING
        )
        self.row = next(name for name, value in vars(fitted_weights).items() if value is self.present)

    def embed(self, texts: Sequence[str]) -> npt.NDArray[np.float32]:
        """One row per text."""
        if self._model is None:
            return self._hashing.vectors(texts)
        return np.array(asyncio.run(self._embed_all(self._model, texts)))

    async def _embed_all(self, model: OnnxEmbedder, texts: Sequence[str]) -> list[npt.NDArray[np.float32]]:
        batches = [texts[start : start + _BATCH] for start in range(0, len(texts), _BATCH)]
        return [vector for batch in batches for vector in await model.embed(batch, "fit")]


@dataclass(frozen=True)
class Memory:
    """A conversation as the server indexes it."""

    columns: Columns
    lexical: LexicalIndex
    dense: DenseMatrix
    now_us: int
    language: str = "english"
    cosine_low: float = 0.0

    def ask(
        self,
        text: str,
        vector: npt.NDArray[np.float32],
        evidence: frozenset[str] = frozenset(),
        interpret: bool = True,
    ) -> Asked:
        """The candidates of a question with the values of their parts. `interpret`: its phrases of time."""
        times = find_times(text, self.language, self.now_us, UTC) if interpret else ()
        terms = query_terms(ANALYZER.question_terms(text, self.language).hashes)
        windows = tuple(each.window for each in times)
        only = asks_only_time(text, times)
        question = RankingQuery(text, terms, vector, self.now_us, limit=max(DEPTHS), windows=windows, only_time=only)
        legs, cosines = self.lexical.legs(terms), self.dense.cosines(vector)
        allowed = mask(self.columns, Filter(), self.now_us)
        words, around, close = legs.alone.shares, legs.around.shares, best(cosines, allowed, question.per_leg)
        slots = candidates(words, around, close, allowed, question.per_leg)
        slots = add_timely(self.columns, words, around, slots, question, allowed)
        signals = Signals.of(self.columns, legs, cosines, slots)
        values = assess_candidates(self.columns, signals, question, Weights(cosine_low=self.cosine_low)).values.T
        if not windows:
            values = np.column_stack([values, np.zeros(len(values))])
        gold = np.array([self.columns.ids[slot] in evidence for slot in slots], np.bool_)
        return Asked(question, legs, cosines, evidence, values, gold)


def index_talk(talk: Any, vectors: Vectors, language: str = "english") -> Memory:
    """Index the turns of a conversation."""
    fragments = [
        Fragment(
            turn.id,
            turn.text,
            speaker=turn.speaker,
            session=str(turn.session),
            observe_time_us=to_microseconds(turn.timestamp),
        )
        for turn in talk.fragments
    ]
    columns, lexical = Columns(), LexicalIndex()
    for fragment in fragments:
        slot, terms = columns.append(fragment), ANALYZER.terms(lexical_text(fragment), language)
        lexical.append(terms.hashes, terms.counts, int(columns.session[slot]), len(fragment.content))
    rows = vectors.embed([indexed_text(fragment) for fragment in fragments])
    dense = DenseMatrix(rows.shape[1])
    dense.extend(rows)
    return Memory(columns, lexical, dense, to_microseconds(talk.now), language, vectors.present.cosine_low)


def load_talk(talk: Any, vectors: Vectors) -> Talk:
    """Index a conversation and assess the candidates of its answerable questions."""
    memory = index_talk(talk, vectors)
    questions = [question for question in talk.questions if question.category != "adversarial"]
    queries = vectors.embed([question.text for question in questions])
    asked = [
        memory.ask(one.text, vector, frozenset(one.evidence)) for one, vector in zip(questions, queries, strict=True)
    ]
    return Talk(memory.columns, asked)


def fit_parts(asked: Sequence[Asked], names: Sequence[str]) -> dict[str, float]:
    """The coefficients of these parts; those that would be negative are left out."""
    while True:
        fitted = fit_logistic(asked, [TIMED_PARTS.index(name) for name in names]).tolist()
        found: dict[str, float] = dict(zip(names, fitted, strict=True))
        kept = [name for name, value in found.items() if value > 0]
        if len(kept) == len(names):
            return found
        names = kept


def fit_logistic(asked: Sequence[Asked], columns: Sequence[int]) -> Matrix:
    """Conditional logistic regression by damped Newton steps: one coefficient per column of the values."""
    known = [each for each in asked if each.gold.any()]
    values = np.concatenate([each.values[:, columns] for each in known])
    spread = values.std(axis=0) + 1e-9
    values = (values - values.mean(axis=0)) / spread
    shares = np.concatenate([each.gold / each.gold.sum() for each in known])
    sizes = [len(each.gold) for each in known]
    starts, owner = np.cumsum([0, *sizes[:-1]]), np.repeat(np.arange(len(known)), sizes)
    penalty = PENALTY * len(known)

    def likelihood(weights: Matrix) -> tuple[float, Matrix]:
        scores = values @ weights
        top = np.maximum.reduceat(scores, starts)
        raised = np.exp(scores - top[owner])
        total = np.add.reduceat(raised, starts)
        found = shares @ scores - (top + np.log(total)).sum() - penalty * weights @ weights / 2
        return float(found), raised / total[owner]

    weights = np.zeros(len(columns))
    reached, chances = likelihood(weights)
    for _ in range(50):
        weighed = values * chances[:, None]
        means = np.add.reduceat(weighed, starts)
        gradient = shares @ values - means.sum(axis=0) - penalty * weights
        step = np.linalg.solve(weighed.T @ values - means.T @ means + penalty * np.eye(len(columns)), gradient)
        length = 1.0
        while (after := likelihood(weights + length * step))[0] < reached and length > 1e-6:
            length /= 2
        weights, before = weights + length * step, reached
        reached, chances = after
        if reached - before < 1e-6:
            break
    found: npt.NDArray[np.float64] = weights / spread
    return found


def share_out(found: dict[str, float], present: fitted_weights.FittedWeights) -> fitted_weights.FittedWeights:
    """The coefficients scaled so that the legs' weights sum to 1, with what is not fitted of `present`."""
    part = {name: found.get(name, 0.0) for name in TIMED_PARTS}
    held = HASHING_DENSE if present is fitted_weights.HASHING else 0.0
    total = (part["dense"] + part["lexical"] + part["context"]) / (1 - held)
    lexical = round(part["lexical"] / total, 2)
    dense = held or round(part["dense"] / total, 2)
    return replace(
        present,
        dense=dense,
        lexical=lexical,
        context=round(1 - dense - lexical, 2),
        reply=round(part["reply"] / part["context"], 2),
        time=round(part["time"] / total, 2),
    )


def measure_recall(talks: Sequence[Talk], fitted: fitted_weights.FittedWeights) -> Matrix:
    """(questions, depths): share of the evidence among the first, as the server ranks."""
    weights, rows = Weights.of_fitted(fitted), []
    for talk in talks:
        allowed = mask(talk.columns, Filter(), 0)
        for each in talk.asked:
            ranked = finish(rank(talk.columns, each.legs, each.cosines, each.question, weights, allowed)).results
            ids = [one.id for one in ranked]
            rows.append([len(each.evidence & set(ids[:depth])) / len(each.evidence) for depth in DEPTHS])
    return np.array(rows)


def measure_left_out(talks: Sequence[Talk], names: Sequence[str], present: fitted_weights.FittedWeights) -> Matrix:
    """Like `measure_recall`, each conversation with the weights fitted to the others."""
    rows = []
    for left_out in talks:
        others = [each for talk in talks if talk is not left_out for each in talk.asked]
        rows.append(measure_recall([left_out], share_out(fit_parts(others, names), present)))
    return np.concatenate(rows)


def write_table(row: str, fitted: fitted_weights.FittedWeights) -> None:
    """Replace a row of the table."""
    given = ", ".join(f"{each.name}={getattr(fitted, each.name)!r}" for each in fields(fitted))
    pattern = rf"^{row} = FittedWeights\([^)]*\)$"
    text, count = re.subn(pattern, f"{row} = FittedWeights({given})", _TABLE.read_text("utf-8"), flags=re.MULTILINE)
    assert count == 1, f"{_TABLE} has no row {row}"
    _TABLE.write_text(text, encoding="utf-8")


def to_microseconds(moment: datetime) -> int:
    """Microseconds since the epoch of a naive UTC time."""
    return int(moment.replace(tzinfo=UTC).timestamp() * 1_000_000)


def _format_recall(rows: Matrix) -> str:
    return " / ".join(f"{value:.1%}".rstrip("%") for value in rows.mean(axis=0))


def main() -> None:
    """Fit, measure, and write the table if asked to."""
    from quality import load_conversations  # a sibling, on the path when this file runs as a program

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="directory of the measure")
    parser.add_argument("--model-dir", type=Path, help="directory of a local embedding model (default: hashing)")
    parser.add_argument("--drop", nargs="*", default=[], choices=TIMED_PARTS, help="parts to fit without")
    parser.add_argument("--write", action="store_true", help="write the weights to the server's table")
    arguments = parser.parse_args()
    vectors = Vectors(arguments.model_dir)
    kind = "hashing" if vectors.present is fitted_weights.HASHING else "model"
    names = [name for name in _PARTS[kind] if name not in arguments.drop]
    talks = [load_talk(talk, vectors) for talk in load_conversations(arguments.data)]
    every = [each for talk in talks for each in talk.asked]
    fitted = share_out(fit_parts(every, names), vectors.present)
    print(f"{len(every)} questions of {len(talks)} conversations, {vectors.row}, parts {', '.join(names)}")
    print(f"fitted to all: {fitted}")
    print(f"  @4 / @10 / @20 on the same questions   {_format_recall(measure_recall(talks, fitted))}")
    print(f"  leave-one-conversation-out             {_format_recall(measure_left_out(talks, names, vectors.present))}")
    print(f"in the table: {vectors.present}")
    print(f"  @4 / @10 / @20                         {_format_recall(measure_recall(talks, vectors.present))}")
    if arguments.write:
        write_table(vectors.row, fitted)


if __name__ == "__main__":
    main()
