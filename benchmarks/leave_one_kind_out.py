"""Each fixed number of the ranking, chosen again with each kind of memory left out in turn.

    python benchmarks/leave_one_kind_out.py --data DIR --beam GIT --realmem GIT [--sets locomo,notes,...]

DIR holds the measure (`genres.py`), whose sets are the kinds; GIT are git directories of the repositories that it
names. None of them is part of this project. Ranked by the search structures of the server, without a model; a number is
varied alone. The value for a kind is the one with the best mean recall at 1, 4 and 10 over the other kinds; printed are
these values and what they would change in the kind that was left out.
"""

from __future__ import annotations

import argparse
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np

from memstream_server.adapters.models.analyzer import SnowballAnalyzer
from memstream_server.adapters.models.hashing import DIMENSION, MODEL, HashingEmbedder
from memstream_server.core import ranking, scores, turns
from memstream_server.core.filters import Filter, mask
from memstream_server.core.lexical import query_terms
from memstream_server.core.ranking import Question, finish, rank
from memstream_server.core.rendering import clip_for_index, indexed_text, text_prefix
from memstream_server.core.time_phrases.asking import asks_only_time
from memstream_server.core.time_phrases.recognition import find_times
from memstream_server.core.values import Fragment
from memstream_server.core.weights import Weights
from memstream_server.engine.memory.search_structures import SearchStructures
from memstream_server.ports.journal.rows import Block, Row

DEPTHS = (1, 4, 10)
LIMIT = 60
USUAL = Weights(
    dense=MODEL.dense_weight,
    lexical=MODEL.lexical_weight,
    context=MODEL.context_weight,
    reply=MODEL.reply_factor,
    time=MODEL.time_weight,
)
GRID: Mapping[str, Sequence[float]] = {
    "alpha": (0.0, 0.0025, 0.005, 0.01, 0.02),
    "dense": (0.0, 0.025, 0.05, 0.1, 0.2),
    "context": (0.41, 0.51, 0.61, 0.71, 0.81),
    "reply": (0.0, 0.22, 0.44, 0.66),
    "speaker_bonus": (0.0, 0.05, 0.1, 0.2),
    "time": (0.0, 0.05, 0.1, 0.15),
    "ANSWER_WEIGHT": (0.0, 0.4, 0.6, 0.8, 1.0),
    "SHORT_SESSION": (6, 8, 12, 16, 24),
}
"""The values that are tried; the shipped one is among them. `context` takes from, or gives to, `lexical`."""
ANALYZER, EMBEDDER = SnowballAnalyzer(), HashingEmbedder()
Variant = tuple[str, float]
Recalls = dict[Variant, list[list[float]]]
"""The recall at DEPTHS of each question."""


def shipped_value(name: str) -> float:
    """The value in force."""
    if name == "SHORT_SESSION":
        return turns.SHORT_SESSION
    return scores.ANSWER_WEIGHT if name == "ANSWER_WEIGHT" else float(getattr(USUAL, name))


@contextmanager
def varied(name: str, value: float, structures: SearchStructures) -> Iterator[Weights]:
    """The weights with one number changed; a constant is changed in its module meanwhile."""
    if name == "context":
        yield replace(USUAL, context=value, lexical=USUAL.lexical + USUAL.context - value)
    elif name == "dense":
        share = (1 - value) / (USUAL.lexical + USUAL.context)
        yield replace(USUAL, dense=value, lexical=USUAL.lexical * share, context=USUAL.context * share)
    elif name.islower():
        yield replace(USUAL, **{name: value})
    else:
        modules: Sequence[Any] = (turns,) if name == "SHORT_SESSION" else (scores, ranking)
        usual = getattr(modules[0], name)
        for each in modules:
            setattr(each, name, value)
        structures._turns = None  # found again
        try:
            yield USUAL
        finally:
            for each in modules:
                setattr(each, name, usual)
            structures._turns = None  # found again


@dataclass
class Memory:
    """A memory of the measure in the server's search structures."""

    structures: SearchStructures
    waiting: list[Fragment]

    def say(self, said: Any) -> None:
        """Add a fragment of the measure."""
        moment = int(said.timestamp.replace(tzinfo=UTC).timestamp() * 1e6)
        session = f"s{said.session}" if said.session >= 0 else ""
        id_ = f"{len(self.structures.columns) + len(self.waiting)}:{said.id}"
        self.waiting.append(
            Fragment(id_, said.text or "-", speaker=said.speaker, session=session, observe_time_us=moment)
        )

    def settle(self) -> None:
        """Index what was said since the last question."""
        if not self.waiting:
            return
        vectors = EMBEDDER.vectors([indexed_text(each) for each in self.waiting])
        rows = [
            Row(each, ANALYZER.terms(clip_for_index(each.content), "english", "", text_prefix(each)), vector.tobytes())
            for each, vector in zip(self.waiting, vectors, strict=True)
        ]
        self.structures.extend(Block.from_rows(rows))
        self.waiting.clear()

    def ask(self, text: str, now: datetime, variants: Sequence[Variant]) -> Iterator[tuple[Variant, list[str]]]:
        """The ids of the measure for each variant, best first."""
        self.settle()
        now_us = int(now.replace(tzinfo=UTC).timestamp() * 1e6)
        times = find_times(text, "english", now_us, UTC)
        terms = query_terms(ANALYZER.question_terms(text).hashes)
        vector = EMBEDDER.vectors([text])[0]
        question = Question(
            text,
            terms,
            vector,
            now_us,
            limit=LIMIT,
            per_leg=LIMIT,
            fold=True,
            windows=tuple(each.window for each in times),
            only_time=asks_only_time(text, times),
        )
        columns, dense = self.structures.columns, self.structures.dense
        assert dense is not None
        allowed, cosines, legs = mask(columns, Filter(), now_us), dense.cosines(vector), self.structures.legs(terms)
        for name, value in variants:
            with varied(name, value, self.structures) as weights:
                given = self.structures.legs(terms) if name == "SHORT_SESSION" else legs
                found = finish(rank(columns, given, cosines, question, weights, allowed))
            yield (name, value), [one.id.split(":", 1)[1] for one in found.results]


def measure_kind(
    steps_of: Sequence[tuple[str, Sequence[Any]]], by_session: bool, variants: Sequence[Variant]
) -> Recalls:
    """The recalls of one kind."""
    recalls: Recalls = defaultdict(list)
    for _, steps in steps_of:
        memory = Memory(SearchStructures(DIMENSION, all_vectors=True), [])
        for step in steps:
            if step[0] == "say":
                memory.say(step[1])
                continue
            _, question, now = step
            if not question.evidence:
                continue
            gold = set(question.evidence)
            for variant, ids in memory.ask(question.text, now, variants):
                got = list(dict.fromkeys(id_.rsplit(":", 1)[0] for id_ in ids)) if by_session else ids
                recalls[variant].append([len(gold & set(got[:depth])) / len(gold) for depth in DEPTHS])
    return recalls


def load_sets(directory: Path, beam: str, realmem: str) -> Mapping[str, Callable[[], Sequence[Any]]]:
    """The kinds of the measure."""
    sys.path.insert(0, str(directory))
    genres: ModuleType = __import__("genres")
    talks = directory / "locomo6.json"
    return {
        "locomo": lambda: [(each.id, genres.all_then_ask(each)) for each in genres.load_locomo(str(talks))],
        "beam-user": lambda: list(genres.load_beam(beam, ("user",))),
        "beam-all": lambda: list(genres.load_beam(beam, ("user", "assistant"))),
        "realmem": lambda: list(genres.load_realmem(realmem)),
        "notes": lambda: list(genres.load_notes()),
    }


def print_number(name: str, by_kind: Mapping[str, Recalls]) -> None:
    """The value that the other kinds choose, by the kind left out, and what it changes there, at 1 / 4 / 10."""
    means = {
        kind: {value: np.mean(recalls[name, value], axis=0) for value in GRID[name]}
        for kind, recalls in by_kind.items()
    }
    usual, cells = shipped_value(name), []
    for kind, mean in means.items():
        others = [each for other, each in means.items() if other != kind]
        chosen = max(GRID[name], key=lambda value: (np.mean([each[value] for each in others]), value == usual))
        change = " / ".join(f"{100 * each:+.1f}" for each in mean[chosen] - mean[usual])
        cells.append(f"{chosen:g}: {change}")
    print(f"| {name} {usual:g} | " + " | ".join(cells) + " |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="directory of the measure")
    parser.add_argument("--beam", default="", help="git directory of BEAM")
    parser.add_argument("--realmem", default="", help="git directory of RealMem")
    parser.add_argument("--sets", default="locomo,beam-user,beam-all,realmem,notes", help="kinds, with commas")
    arguments = parser.parse_args()
    sets = load_sets(arguments.data, arguments.beam, arguments.realmem)
    variants = [(name, value) for name, values in GRID.items() for value in values]
    assert all(shipped_value(name) in values for name, values in GRID.items()), "the shipped value is in the grid"
    names = arguments.sets.split(",")
    by_kind = {name: measure_kind(sets[name](), name == "realmem", variants) for name in names}
    print("| number, as shipped | " + " | ".join(names) + " |\n" + "|---" * (len(names) + 1) + "|")
    usual = ("alpha", USUAL.alpha)
    shown = (" / ".join(f"{100 * each:.1f}" for each in np.mean(by_kind[name][usual], axis=0)) for name in names)
    print("| as shipped | " + " | ".join(shown) + " |")
    for name in GRID:
        print_number(name, by_kind)


if __name__ == "__main__":
    main()
