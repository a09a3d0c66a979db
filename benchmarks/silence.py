"""Measures how well the mark `weak` tells questions that a memory cannot answer from those that it can.

    python benchmarks/silence.py --data DIR [--model-dir MODEL]

DIR and MODEL are those of benchmarks/quality.py. Unanswerable are the questions that the measure calls adversarial
(about something in the conversation that did not happen so), and all answerable questions put to each other
conversation (foreign). The figures are the AUC of the best relevance, and the shares that are marked: with the floor of
the server's table, and with floors that are set on the other conversations at 5 % of their answerable questions.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

Best = npt.NDArray[np.float64]
"""The best relevance of each question."""


@dataclass(frozen=True)
class Kinds:
    """The best relevances of one conversation's memory, by kind of question."""

    answerable: Best
    adversarial: Best
    foreign: Best


def area_under_curve(answerable: Best, others: Best) -> float:
    """The probability that an answerable question has a higher best relevance than another; ties count half."""
    below = np.searchsorted(np.sort(others), answerable, "left")
    upto = np.searchsorted(np.sort(others), answerable, "right")
    return float((below + upto).sum() / 2 / len(answerable) / len(others))


def format_share(kinds: Sequence[Kinds], floors: Sequence[float]) -> str:
    """The shares that are marked, each conversation with its floor."""
    names = ("answerable", "adversarial", "foreign")
    marked = {
        name: np.concatenate([getattr(each, name) < floor for each, floor in zip(kinds, floors, strict=True)])
        for name in names
    }
    return ", ".join(f"{name} {values.mean():.1%}" for name, values in marked.items())


def main() -> None:
    """Print the figures."""
    from fit_ranking import WEAK_SHARE, Vectors, best_of, index_talk  # siblings, on the path of a program
    from quality import load_conversations

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="directory of the measure")
    parser.add_argument("--model-dir", type=Path, help="directory of a local embedding model (default: hashing)")
    arguments = parser.parse_args()
    vectors = Vectors(arguments.model_dir)
    fitted = vectors.present
    talks = load_conversations(arguments.data)
    memories = [index_talk(talk, vectors) for talk in talks]
    texts = [[question.text for question in talk.questions] for talk in talks]
    rows = [dict(zip(each, vectors.embed(each), strict=True)) for each in texts]
    kinds = []
    for place, memory in enumerate(memories):

        def ask_all(asked: int, adversarial: bool) -> list[float]:
            wanted = [one.text for one in talks[asked].questions if (one.category == "adversarial") is adversarial]
            return [best_of(memory.ask(text, rows[asked][text]), memory.columns, fitted) for text in wanted]  # noqa: B023

        foreign = [value for other in range(len(talks)) if other != place for value in ask_all(other, False)]
        kinds.append(Kinds(*map(np.array, (ask_all(place, False), ask_all(place, True), foreign))))
    answerable = np.concatenate([each.answerable for each in kinds])
    for name in ("adversarial", "foreign"):
        others = np.concatenate([getattr(each, name) for each in kinds])
        print(f"{name}: {len(others)} questions, AUC {area_under_curve(answerable, others):.3f}")
    floors = [
        float(np.quantile(np.concatenate([each.answerable for each in kinds if each is not left_out]), WEAK_SHARE))
        for left_out in kinds
    ]
    print(f"marked at {fitted.weak_below}: {format_share(kinds, [fitted.weak_below] * len(kinds))}")
    print(
        f"marked, floors of the others {', '.join(f'{floor:.3f}' for floor in floors)}: {format_share(kinds, floors)}"
    )


if __name__ == "__main__":
    sys.exit(main())
