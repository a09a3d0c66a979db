"""Weights of the parts of relevance, by kind of embedding. Written by benchmarks/fit_ranking.py."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class FittedWeights:
    """Weights of the legs, which sum to 1, and the reply part's factor."""

    dense: float
    lexical: float
    context: float
    reply: float
    """Weight of the reply part, as a multiple of the context weight."""
    time: float
    """Weight of the time part, by benchmarks/time_questions.py."""
    cosine_low: float = 0.0
    """Not fitted: the cosine of texts without relation, which maps to 0 on the dense leg,"""
    cosine_high: float = 1.0
    """and of the same text, which maps to 1."""
    similarity_min: float = 0.75
    """Not fitted: the cosine that counts as a hit of the enhancement rule."""
    related_min: float | None = None
    """The cosine from which an answer is not weak though it shares no word with the question, by
    benchmarks/leave_one_kind_out.py; None: not measured, and cosines count for nothing there."""


HASHING = FittedWeights(dense=0.05, lexical=0.34, context=0.61, reply=0.44, time=0.1, similarity_min=0.5)
MODEL = FittedWeights(dense=0.22, lexical=0.23, context=0.55, reply=0.33, time=0.1)
ALL_MINILM_L6_V2 = FittedWeights(dense=0.22, lexical=0.23, context=0.55, reply=0.33, time=0.1, related_min=0.4)
BGE_SMALL_EN_V1_5 = FittedWeights(
    dense=0.29, lexical=0.22, context=0.49, reply=0.37, time=0.1, cosine_low=0.4, similarity_min=0.9, related_min=0.65
)

_BY_MODEL: Mapping[str, FittedWeights] = {"all-minilm-l6-v2": ALL_MINILM_L6_V2, "bge-small-en-v1.5": BGE_SMALL_EN_V1_5}


def of_model(name: str) -> FittedWeights:
    """The weights for a local model by its name in the table of `memstream models`; MODEL for any other one."""
    return _BY_MODEL.get(name, MODEL)
