"""Recall in eleven languages by stemmer, detected language, and dense weight, on the same questions and texts.

    python benchmarks/languages.py [--data DIR] [--model-dir MODEL] [--language CODE ...]

The texts are XQuAD's (Artetxe, Ruder and Yogatama, 2020, CC BY-SA 4.0): 240 paragraphs and 1,190 questions, translated
by people. DIR is a clone of it; without --data it is cloned into .cache/. Every sentence is a fragment, a paragraph is
a session, and the evidence of a question is the sentence in which its answer begins. Ranked by the core alone with the
hashing embedder; with MODEL (benchmarks/quality.py) by own stemmer, with the model's weights and with its dense weight
at 0.05. No part of the formula was chosen by these figures.
"""

from __future__ import annotations

import argparse
import itertools
import json
import re
import subprocess
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from memstream_server.adapters.models import analyzer
from memstream_server.adapters.models.analyzer import SnowballAnalyzer, term_hash
from memstream_server.adapters.models.hashing import MODEL, HashingEmbedder
from memstream_server.adapters.models.words import words
from memstream_server.core.arrays import finish
from memstream_server.core.columns import Columns
from memstream_server.core.dense import DenseMatrix
from memstream_server.core.filters import Filter, mask
from memstream_server.core.lexical import LexicalIndex, query_terms
from memstream_server.core.policy import AUTO_LANGUAGE
from memstream_server.core.ranking import RankingQuery, rank
from memstream_server.core.rendering import indexed_text
from memstream_server.core.scores import Weights
from memstream_server.core.values import Fragment
from memstream_server.ports.journal.rows import Terms

REPOSITORY = "https://github.com/google-deepmind/xquad"
COMMIT = "7d30520c717524000f0d9d2f9c10a069acd9d285"
STEMMERS = {
    code: analyzer.STEMMERS.get(code, "") for code in ["en", "de", "es", "ro", "ru", "tr", "el", "ar", "hi", "vi", "zh"]
}
"""Stemmer by XQuAD's language code; empty: none exists. Thai is left out: it does not mark the end of a sentence."""
DENSE = (0.0, 0.1, 0.2, 0.3)
LOW_DENSE = 0.05
DEPTHS = (4, 10, 20)
NOW_US = 1_700_000_000_000_000
_END = re.compile(r"(?<=[.!?؟।])[\"”»')\]]*\s+(?=[^\W_a-z]|[\"“«(\[])|(?<=[。！？])")  # noqa: RUF001 - intended characters
USUAL = Weights.of_fitted(MODEL.fitted)
ANALYZER, EMBEDDER = SnowballAnalyzer(), HashingEmbedder()
Analyze = Callable[[str, bool], Terms]
"""The terms of a text; True: of a question."""


@dataclass(frozen=True)
class EvidenceQuestion:
    """A question, its vector, and the id of the fragment with its answer."""

    text: str
    vector: np.ndarray
    evidence: str


@dataclass(frozen=True)
class Texts:
    """The fragments and questions of one language."""

    fragments: Sequence[Fragment]
    vectors: np.ndarray
    questions: Sequence[EvidenceQuestion]


def split_sentences(text: str) -> list[tuple[int, str]]:
    """(start, sentence) pairs."""
    cuts = [0, *(end.end() for end in _END.finditer(text)), len(text)]
    return [(start, text[start:end].strip()) for start, end in itertools.pairwise(cuts) if text[start:end]]


def read_texts(file: Path) -> Texts:
    """The sentences and questions of an XQuAD file."""
    fragments: list[Fragment] = []
    asked: list[tuple[str, str]] = []
    articles = json.loads(file.read_text("utf-8"))["data"]
    for number, paragraph in enumerate(each for article in articles for each in article["paragraphs"]):
        spans = split_sentences(paragraph["context"])
        for place, (_, sentence) in enumerate(spans):
            fragments.append(Fragment(f"{number}.{place}", sentence, session=f"{number}", observe_time_us=NOW_US))
        for each in paragraph["qas"]:
            begins = each["answers"][0]["answer_start"]
            place = max(place for place, (start, _) in enumerate(spans) if start <= begins)
            asked.append((each["question"], f"{number}.{place}"))
    vectors = EMBEDDER.vectors([question for question, _ in asked])
    questions = [
        EvidenceQuestion(text, vector, evidence) for (text, evidence), vector in zip(asked, vectors, strict=True)
    ]
    return Texts(fragments, EMBEDDER.vectors([indexed_text(fragment) for fragment in fragments]), questions)


def measure_recall(texts: Texts, analyze: Analyze, weights: Weights = USUAL) -> str:
    """Percent of the questions with their evidence among the first 4 / 10 / 20."""
    columns, lexical, dense = Columns(), LexicalIndex(), DenseMatrix(texts.vectors.shape[1])
    for fragment, vector in zip(texts.fragments, texts.vectors, strict=True):
        slot, terms = columns.append(fragment), analyze(indexed_text(fragment), False)
        lexical.append(terms.hashes, terms.counts, int(columns.session[slot]), len(fragment.content))
        dense.append(vector)
    allowed, places = mask(columns, Filter(), NOW_US), []
    for asked in texts.questions:
        hashes = query_terms(analyze(asked.text, True).hashes)
        question = RankingQuery(asked.text, hashes, asked.vector, NOW_US, limit=max(DEPTHS))
        legs, cosines = lexical.legs(hashes), dense.cosines(asked.vector)
        ids = [scored.id for scored in finish(rank(columns, legs, cosines, question, weights, allowed)).results]
        places.append(ids.index(asked.evidence) if asked.evidence in ids else max(DEPTHS))
    return " / ".join(f"{np.mean(np.array(places) < depth):.1%}".rstrip("%") for depth in DEPTHS)


def make_analyzer(language: str) -> Analyze:
    """Analyze all texts with one stemmer, or each with its detected language's."""
    return lambda text, asks: ANALYZER.question_terms(text, language) if asks else ANALYZER.terms(text, language)


def make_piece_analyzer(size: int) -> Analyze:
    """For unspaced scripts, keep only pieces of `size` characters; other words stay whole."""

    def analyze(text: str, asks: bool) -> Terms:
        counts = Counter(term_hash(word) for word in words(text) if word.isascii() or len(word) == size)
        hashes = sorted(counts)
        numbers = [counts[each] for each in hashes]
        return Terms(np.array(hashes, "<u8").tobytes(), np.array(numbers, "<u2").tobytes())

    return analyze


def measure_detection(texts: Texts, stemmer: str) -> str:
    """Share of fragments and of questions whose language is detected correctly, and microseconds for one."""
    shares = []
    for each in ([fragment.content for fragment in texts.fragments], [asked.text for asked in texts.questions]):
        began = time.perf_counter()
        right = np.mean([analyzer.stemmer_of(text) == (stemmer or analyzer.FALLBACK) for text in each])
        shares.append(f"{right:.1%} ({(time.perf_counter() - began) / len(each) * 1e6:.0f} µs)")
    return ", ".join(shares)


def weights_with_dense(dense: float) -> Weights:
    """The default weights with another dense weight; the lexical legs share the rest proportionally."""
    share = (1 - dense) / (USUAL.lexical + USUAL.context)
    return replace(USUAL, dense=dense, lexical=USUAL.lexical * share, context=USUAL.context * share)


def print_model(directory: Path, codes: Sequence[str], model_dir: Path) -> None:
    """The recall with a model's vectors and weights, and with the dense weight that a policy may lower."""
    from fit_ranking import Vectors  # a sibling, on the path of a program

    vectors = Vectors(model_dir)
    usual = Weights.of_fitted(vectors.present)
    print(f"| | words | {model_dir.parent.name} | dense {LOW_DENSE:g} |\n|---|---|---|---|")
    for code in codes:
        texts, analyze = (
            read_texts(directory / f"xquad.{code}.json"),
            make_analyzer(STEMMERS[code] or analyzer.FALLBACK),
        )
        rows = vectors.embed([asked.text for asked in texts.questions])
        embedded = Texts(
            texts.fragments,
            vectors.embed([indexed_text(fragment) for fragment in texts.fragments]),
            [replace(asked, vector=row) for asked, row in zip(texts.questions, rows, strict=True)],
        )
        low = replace(usual, dense=LOW_DENSE)
        figures = [measure_recall(texts, analyze), *(measure_recall(embedded, analyze, each) for each in (usual, low))]
        print(f"| {code} | " + " | ".join(figures) + " |", flush=True)


def clone_texts(directory: Path) -> Path:
    """XQuAD at COMMIT in `directory`, fetched if missing."""
    if not (directory / "xquad.en.json").exists():
        directory.mkdir(parents=True, exist_ok=True)
        for command in (
            ["init", "-q"],
            ["fetch", "-q", "--depth", "1", REPOSITORY, COMMIT],
            ["checkout", "-q", COMMIT],
        ):
            subprocess.run(["git", "-C", str(directory), *command], check=True)
    return directory


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, help="directory with xquad.en.json etc.; cloned by default")
    parser.add_argument("--model-dir", type=Path, help="directory of a local embedding model (default: hashing)")
    parser.add_argument("--language", nargs="*", choices=STEMMERS, default=list(STEMMERS), help="default: all")
    arguments = parser.parse_args()
    directory = arguments.data or clone_texts(Path(__file__).parents[1] / ".cache" / "xquad")
    if arguments.model_dir:
        print_model(directory, arguments.language, arguments.model_dir)
        return
    dense = [f"dense {each:g}" for each in DENSE]
    print("| | English stemmer | own stemmer | `auto` | detected: sentences, questions | " + " | ".join(dense) + " |")
    print("|---|" + "---|" * (4 + len(DENSE)))
    for code in arguments.language:
        stemmer = STEMMERS[code]
        texts, own = read_texts(directory / f"xquad.{code}.json"), stemmer or analyzer.FALLBACK
        figures = [measure_recall(texts, make_analyzer(each)) for each in ("english", own, AUTO_LANGUAGE)]
        figures += [
            measure_detection(texts, stemmer),
            *(measure_recall(texts, make_analyzer(own), weights_with_dense(each)) for each in DENSE),
        ]
        print(f"| {code} | " + " | ".join(figures) + " |", flush=True)
        if code == "zh":
            both = measure_recall(texts, make_analyzer(own))
            alone, pairs = (measure_recall(texts, make_piece_analyzer(size)) for size in (1, 2))
            print(f"\nzh: characters {alone}, pairs {pairs}, both {both}")


if __name__ == "__main__":
    main()
