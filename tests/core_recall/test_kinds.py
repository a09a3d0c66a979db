"""No kind of memory is ranked below plain BM25: five small ones, written for this test.

The floor is BM25 with k1 1.2 and b 0.75 over the same words, without sessions, roles, vectors and times.
"""

from __future__ import annotations

import math
import tomllib
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from memstream_server.adapters.models.analyzer import SnowballAnalyzer
from memstream_server.core.fitted_weights import HASHING
from memstream_server.core.lexical import query_terms
from memstream_server.core.scores import Weights
from memstream_server.core.values import Fragment
from tests.core_recall.test_ranking import memory_of

KINDS = tomllib.loads(Path(__file__).with_name("kinds.toml").read_text("utf-8"))["kind"]
WEIGHTS = Weights(dense=HASHING.dense, lexical=HASHING.lexical, context=HASHING.context, reply=HASHING.reply)
DEPTHS = (1, 2, 4)
ANALYZER = SnowballAnalyzer()


def rank_by_bm25(texts: Sequence[str], question: str) -> list[int]:
    """Places of the texts, best first."""
    bags = [Counter(query_terms(ANALYZER.terms(text).hashes).tolist()) for text in texts]
    mean = sum(bag.total() for bag in bags) / len(bags)
    scores = [0.0] * len(bags)
    for term in query_terms(ANALYZER.question_terms(question).hashes).tolist():
        holding = sum(term in bag for bag in bags)
        idf = math.log1p((len(bags) - holding + 0.5) / (holding + 0.5))
        for place, bag in enumerate(bags):
            scores[place] += idf * bag[term] * 2.2 / (bag[term] + 1.2 * (0.25 + 0.75 * bag.total() / mean))
    return sorted(range(len(bags)), key=lambda place: -scores[place])


def count_found(rankings: Sequence[tuple[list[int], int]]) -> list[int]:
    """How many questions have their answer among the first, by depth."""
    return [sum(answer in ranking[:depth] for ranking, answer in rankings) for depth in DEPTHS]


@pytest.mark.parametrize("kind", KINDS, ids=[kind["name"] for kind in KINDS])
def test_no_kind_is_ranked_below_plain_bm25(kind: Mapping[str, Any]) -> None:
    said, asked = kind["said"], kind["asked"]
    memory = memory_of(
        *(
            Fragment(f"f{place:03}", text, speaker=speaker, session=session, observe_time_us=place * 1_000_000)
            for place, (speaker, session, text) in enumerate(said)
        )
    )
    plain = count_found([(rank_by_bm25([text for _, _, text in said], text), answer) for text, answer in asked])
    found = count_found(
        [([int(one.id[1:]) for one in memory.ask(text, WEIGHTS).results], answer) for text, answer in asked]
    )
    assert all(mine >= its for mine, its in zip(found, plain, strict=True)), (found, plain)
