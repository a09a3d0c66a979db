"""Each fixed number of the ranking, chosen again with each kind of memory left out in turn.

    python benchmarks/leave_one_kind_out.py --data DIR --beam GIT --realmem GIT [--sets locomo,notes,...]
                                            [--model-dir DIR] [--numbers dense,SHARE_MIN,...]

DIR holds the measure (`genres.py`), whose sets are the kinds; GIT are git directories of the repositories that it
names. None of them is part of this project. One more kind are the updates of truth_cases/tuned.txt, each statement in
its own session. Ranked by the search structures of the server, without a model or with that of --model-dir, twins in
order; a number is varied alone. The value for a kind is the one with the best mean recall at 1, 4 and 10 over the other
kinds; printed are these values and what they would change in the kind that was left out.

With a model, `previous` is a choice that does not ship: the characters of the end of the turn before, in the same
session, that are embedded with a turn; `previous_talk` does so only where that turn is another person's. The last table
has the share of answers that are marked `weak`, with and without the cosine of `related_min`.
"""

from __future__ import annotations

import argparse
import asyncio
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
import numpy.typing as npt
from truth import STEMMERS, load_cases

from memstream_server.adapters.models.analyzer import SnowballAnalyzer
from memstream_server.adapters.models.hashing import HashingEmbedder
from memstream_server.core import dialogue, ranking, scores, twins
from memstream_server.core.arrays import finish
from memstream_server.core.columns import UNKNOWN, USER
from memstream_server.core.filters import Filter, mask
from memstream_server.core.lexical import Legs, query_terms
from memstream_server.core.ranking import RankingQuery, rank
from memstream_server.core.rendering import clip_for_index, indexed_text, text_prefix
from memstream_server.core.scores import Weights
from memstream_server.core.speakers import list_named
from memstream_server.core.time_phrases.recognition import asks_only_time, find_times
from memstream_server.core.values import Fragment
from memstream_server.engine.memory.search_structures import SearchStructures
from memstream_server.ports.journal.rows import Row, RowBlock

Floats = npt.NDArray[np.float32]
DEPTHS = (1, 4, 10)
LIMIT = 60
GRID: Mapping[str, Sequence[float]] = {
    "alpha": (0.0, 0.0025, 0.005, 0.01, 0.02),
    "dense": (0.0, 0.025, 0.05, 0.1, 0.15, 0.22, 0.29, 0.35, 0.45),
    "context": (0.35, 0.41, 0.49, 0.55, 0.61, 0.71, 0.81),
    "reply": (0.0, 0.15, 0.22, 0.33, 0.37, 0.44, 0.66),
    "speaker_bonus": (0.0, 0.05, 0.1, 0.2),
    "time": (0.0, 0.05, 0.1, 0.15),
    "ANSWER_WEIGHT": (0.0, 0.4, 0.6, 0.8, 1.0),
    "SHORT_SESSION": (6, 8, 12, 16, 24),
    "SHARE_MIN": (0.3, 0.35, 0.4, 0.45, 0.5, 0.6, 2.0),
    "MARGIN": (0.02, 0.05, 0.1, 0.15, 0.2),
    "AMONG": (5, 10, 20),
    "CHARACTERS_MAX": (100, 150, 200, 300, 1_000),
    "previous": (0, 200),
    "previous_talk": (0, 200),
}
"""The values that are tried; the shipped one is among them. `context` takes from, or gives to, `lexical`. With a
SHARE_MIN of 2 there are no twins."""
_MODULES: Mapping[str, Sequence[Any]] = {
    "ANSWER_WEIGHT": (scores, ranking),
    "SHORT_SESSION": (dialogue,),
    "SHARE_MIN": (twins,),
    "MARGIN": (twins,),
    "AMONG": (twins,),
    "CHARACTERS_MAX": (twins,),
}
RELATED = (0.3, 0.35, 0.4, 0.45, 0.5, 0.55, 0.6, 0.64, 0.68, 0.72, 0.76)
"""Cosines that are tried for `related_min`."""
UPDATES = "updates"
ANALYZER = SnowballAnalyzer()
Variant = tuple[str, float]
Recalls = dict[Variant, list[list[float]]]
"""The recall at DEPTHS of each question."""


class Vectors:
    """The vectors of a model, and the weights that it ships with."""

    def __init__(self, directory: Path | None) -> None:
        self._known: dict[str, Floats] = {}
        if directory is None:
            self._embedder: Any = HashingEmbedder()
        else:
            from memstream_server.adapters.models.onnx_models import OnnxEmbedder

            self._embedder = OnnxEmbedder(directory)
        self.model = asyncio.run(self._embedder.model())
        self.usual = Weights.of_fitted(self.model.fitted)

    def of(self, texts: Sequence[str]) -> Floats:
        """(texts, dimension)."""
        new = list(dict.fromkeys(text for text in texts if text not in self._known))
        if new:
            self._known.update(zip(new, asyncio.run(self._embedder.embed(new)), strict=True))
        return np.array([self._known[text] for text in texts])


def shipped_value(name: str, usual: Weights) -> float:
    """The value in force."""
    if name in _MODULES:
        return float(getattr(_MODULES[name][0], name))
    return 0.0 if name.startswith("previous") else float(getattr(usual, name))


@contextmanager
def varied(name: str, value: float, usual: Weights, structures: SearchStructures) -> Iterator[Weights]:
    """The weights with one number changed; a constant is changed in its module meanwhile."""
    if name == "context":
        yield replace(usual, context=value, lexical=usual.lexical + usual.context - value)
    elif name == "dense":
        share = (1 - value) / (usual.lexical + usual.context)
        yield replace(usual, dense=value, lexical=usual.lexical * share, context=usual.context * share)
    elif name.startswith("previous"):
        yield usual
    elif name.islower():
        yield replace(usual, **{name: value})
    else:
        former = getattr(_MODULES[name][0], name)
        for each in _MODULES[name]:
            setattr(each, name, value)
        structures._dialogue = None  # found again
        try:
            yield usual
        finally:
            for each in _MODULES[name]:
                setattr(each, name, former)
            structures._dialogue = None  # found again


@dataclass(frozen=True)
class Marked:
    """What decides about the mark `weak` of an answer."""

    absent: bool
    by_words: bool
    nearness: float


class Memory:
    """A memory of the measure in the server's search structures."""

    def __init__(self, vectors: Vectors, language: str = "english") -> None:
        self._vectors = vectors
        self._language = language
        self._structures = SearchStructures(vectors.model.dimension, all_vectors=True)
        self._fragments: list[Fragment] = []
        self._words: dict[str, frozenset[int]] = {}
        self.marked: list[Marked] = []

    def say(self, said: Any) -> None:
        """Add a fragment of the measure."""
        moment = int(said.timestamp.replace(tzinfo=UTC).timestamp() * 1e6)
        session, slot = f"s{said.session}" if said.session >= 0 else "", len(self._fragments)
        self._fragments.append(
            Fragment(
                f"{slot}:{said.id}",
                said.text or "-",
                speaker=said.speaker,
                session=session,
                observe_time_us=moment,
                position=slot,
            )
        )

    def _settle(self) -> None:
        """Index what was said since the last question."""
        new = self._fragments[len(self._structures.columns) :]
        if not new:
            return
        vectors = self._vectors.of([indexed_text(each) for each in new])
        rows = [
            Row(
                each,
                ANALYZER.terms(clip_for_index(each.content), self._language, "", text_prefix(each)),
                np.asarray(vector, "<f4").tobytes(),
            )
            for each, vector in zip(new, vectors, strict=True)
        ]
        self._structures.extend(RowBlock.from_rows(rows))

    def _cosines(self, vector: Floats, previous: int, talk: bool) -> Floats:
        """float32[n], of turns that are embedded with as many characters of the turn before them."""
        dense = self._structures.dense
        assert dense is not None
        found = dense.cosines(vector)
        if not previous:
            return found
        before = self._structures.lexical.neighbours.before()
        pairs = [(slot, int(last)) for slot, last in enumerate(before) if last >= 0]
        if talk:
            pairs = [(slot, last) for slot, last in pairs if self._are_two_people(slot, last)]
        texts = [
            f"{self._fragments[last].content[-previous:]}\n{indexed_text(self._fragments[slot])}"
            for slot, last in pairs
        ]
        if texts:
            found[[slot for slot, _ in pairs]] = self._vectors.of(texts) @ vector
        return found

    def _are_two_people(self, slot: int, other: int) -> bool:
        columns = self._structures.columns
        people = columns.role[slot] in (UNKNOWN, USER) and columns.role[other] in (UNKNOWN, USER)
        return people and bool(columns.speaker[slot] != columns.speaker[other])

    def _words_of(self, fragment: Fragment) -> frozenset[int]:
        if fragment.id not in self._words:
            terms = ANALYZER.terms(fragment.content, self._language)
            self._words[fragment.id] = frozenset(query_terms(terms.hashes).tolist())
        return self._words[fragment.id]

    def _order_twins(self, found: ranking.Ranking) -> list[str]:
        fragments = [self._fragments[one.slot] for one in found.results]
        order, _ = twins.put_later_first(
            fragments,
            [one.score for one in found.results],
            lambda one: one.last_observed,
            self._words_of,
            lambda *_: False,
        )
        return [fragments[place].id.split(":", 1)[1] for place in order]

    def _mark(self, text: str, absent: bool, found: ranking.Ranking, legs: Legs, terms: Any) -> None:
        best = found.results[0]
        shown = [best, *[found.companions[one.id] for one in (best,) if one.id in found.companions]]
        shared = set(terms[legs.terms_of([one.slot for one in shown])].tolist())
        named = list_named(text, self._structures.columns.speakers.names)
        names = set(query_terms(ANALYZER.name_terms(text, named, self._language).hashes).tolist())
        self.marked.append(Marked(absent, shared <= names, max(one.cosine or 0.0 for one in shown)))

    def ask(self, asked: Any, now: datetime, variants: Sequence[Variant]) -> Iterator[tuple[Variant, list[str]]]:
        """The ids of the measure for each variant, best first."""
        self._settle()
        now_us, text, usual = int(now.replace(tzinfo=UTC).timestamp() * 1e6), asked.text, self._vectors.usual
        times = find_times(text, self._language, now_us, UTC)
        terms = query_terms(ANALYZER.question_terms(text, self._language).hashes)
        vector = self._vectors.of([text])[0]
        question = RankingQuery(
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
        structures = self._structures
        allowed, legs = mask(structures.columns, Filter(), now_us), structures.legs(terms)
        plain = self._cosines(vector, 0, False)
        shipped = finish(rank(structures.columns, legs, plain, question, usual, allowed))
        self._mark(text, not asked.evidence, shipped, legs, terms)
        for name, value in variants if asked.evidence else ():
            with varied(name, value, usual, structures) as weights:
                given = structures.legs(terms) if name == "SHORT_SESSION" else legs
                previous = name.startswith("previous") and value
                cosines = self._cosines(vector, int(value), name.endswith("talk")) if previous else plain
                found = finish(rank(structures.columns, given, cosines, question, weights, allowed))
                yield (name, value), self._order_twins(found)


@dataclass(frozen=True)
class Said:
    """A statement of an update, as the measure has fragments."""

    id: str
    text: str
    speaker: str
    timestamp: datetime
    session: int


@dataclass(frozen=True)
class Asked:
    """A question, as the measure has them."""

    text: str
    evidence: tuple[str, ...]


def load_updates() -> Iterator[tuple[str, Sequence[Any]]]:
    """(language, steps) of each tuned update: the evidence is the newer statement."""
    for case in load_cases("tuned"):
        said = [
            ("say", Said(text, text, case.speaker, when.replace(tzinfo=None), number))
            for number, (text, when) in enumerate(case.timeline())
        ]
        yield case.language, [*said, ("ask", Asked(case.question, (case.newer,)), case.now.replace(tzinfo=None))]


def measure_kind(
    name: str, steps_of: Sequence[tuple[str, Sequence[Any]]], vectors: Vectors, variants: Sequence[Variant]
) -> tuple[Recalls, list[Marked]]:
    """The recalls of one kind, and what decides about the mark `weak`."""
    recalls: Recalls = defaultdict(list)
    marked: list[Marked] = []
    for label, steps in steps_of:
        memory = Memory(vectors, STEMMERS[label] if name == UPDATES else "english")
        for step in steps:
            if step[0] == "say":
                memory.say(step[1])
                continue
            _, question, now = step
            gold = set(question.evidence)
            for variant, ids in memory.ask(question, now, variants):
                got = list(dict.fromkeys(id_.rsplit(":", 1)[0] for id_ in ids)) if name == "realmem" else ids
                recalls[variant].append([len(gold & set(got[:depth])) / len(gold) for depth in DEPTHS])
        marked += memory.marked
    return recalls, marked


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
        UPDATES: lambda: list(load_updates()),
    }


def print_number(name: str, by_kind: Mapping[str, Recalls], values: Sequence[float], usual: float) -> None:
    """The value that the other kinds choose, by the kind left out, and what it changes there, at 1 / 4 / 10."""
    means = {
        kind: {value: np.mean(recalls[name, value], axis=0) for value in values} for kind, recalls in by_kind.items()
    }
    cells = []
    for kind, mean in means.items():
        others = [each for other, each in means.items() if other != kind]
        chosen = max(values, key=lambda value: (np.mean([each[value] for each in others]), value == usual))
        change = " / ".join(f"{100 * each:+.1f}" for each in mean[chosen] - mean[usual])
        cells.append(f"{chosen:g}: {change}")
    print(f"| {name} {usual:g} | " + " | ".join(cells) + " |", flush=True)


def print_weak(marks: Mapping[str, list[Marked]]) -> None:
    """Percent marked of the answerable / absent questions of each kind: by words, unless a cosine reaches a value."""

    def show(kind: str, related_min: float) -> str:
        groups = ([one for one in marks[kind] if one.absent is absent] for absent in (False, True))
        shares = ([one.by_words and one.nearness < related_min for one in group] for group in groups)
        return " / ".join(f"{100 * np.mean(each):.1f}" if each else "-" for each in shares)

    print("\n| related_min | " + " | ".join(marks) + " |\n" + "|---" * (len(marks) + 1) + "|")
    for value in (2.0, *RELATED):
        name = "none" if value > 1 else f"{value:g}"
        print(f"| {name} | " + " | ".join(show(kind, value) for kind in marks) + " |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="directory of the measure")
    parser.add_argument("--beam", default="", help="git directory of BEAM")
    parser.add_argument("--realmem", default="", help="git directory of RealMem")
    parser.add_argument(
        "--sets", default=f"locomo,beam-user,beam-all,realmem,notes,{UPDATES}", help="kinds, with commas"
    )
    parser.add_argument("--model-dir", type=Path, help="directory of a local embedding model (default: hashing)")
    parser.add_argument("--numbers", default="", help="the numbers to vary, with commas (default: all)")
    arguments = parser.parse_args()
    vectors = Vectors(arguments.model_dir)
    names = arguments.numbers.split(",") if arguments.numbers else list(GRID)
    names = [name for name in names if arguments.model_dir is not None or not name.startswith("previous")]
    usual = {name: shipped_value(name, vectors.usual) for name in names}
    assert all(usual[name] in GRID[name] for name in names), "the shipped value is in the grid"
    variants = [(name, value) for name in names for value in GRID[name]]
    sets = load_sets(arguments.data, arguments.beam, arguments.realmem)
    kinds = arguments.sets.split(",")
    measured = {kind: measure_kind(kind, sets[kind](), vectors, variants) for kind in kinds}
    by_kind = {kind: recalls for kind, (recalls, _) in measured.items()}
    print("| number, as shipped | " + " | ".join(kinds) + " |\n" + "|---" * (len(kinds) + 1) + "|")
    first = (names[0], usual[names[0]])
    shown = (" / ".join(f"{100 * each:.1f}" for each in np.mean(by_kind[kind][first], axis=0)) for kind in kinds)
    print("| as shipped | " + " | ".join(shown) + " |")
    for name in names:
        print_number(name, by_kind, GRID[name], usual[name])
    print_weak({kind: marked for kind, (_, marked) in measured.items()})


if __name__ == "__main__":
    main()
