"""Weights of the parts of relevance, by kind of embedding. Written by benchmarks/fit_ranking.py."""

from __future__ import annotations

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
    weak_below: float
    """Best relevance, without the speaker bonus, that 5 % of the answerable questions miss: below it, memory probably
    has no answer."""


HASHING = FittedWeights(dense=0.05, lexical=0.34, context=0.61, reply=0.44, time=0.1, weak_below=0.16)
MODEL = FittedWeights(dense=0.22, lexical=0.23, context=0.55, reply=0.33, time=0.1, weak_below=0.22)
