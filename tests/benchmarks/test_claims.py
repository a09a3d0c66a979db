"""Claims: the median of the per-round ratios, and whether the aim is met."""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))  # the benchmarks import each other by bare name

from claims import CPU, Aim, Claim, at_least, at_most, format_table, make_claim
from report import Report

P50 = "p50 ms"


def make_report(ours: list[float], others: list[float]) -> Report:
    found = Report((P50, CPU))
    for value in ours:
        found.add_round("memstream", **{P50: value, CPU: 70.0})
    for value in others:
        found.add_round("bare", **{P50: value})
    return found


def test_ratio_is_the_median_of_round_ratios() -> None:
    claim = make_claim(make_report([10.0, 40.0, 12.0], [5.0, 40.0, 8.0]), "recall", "memstream", P50, "bare")
    assert (claim.ours, claim.other, claim.ratio) == (12.0, 8.0, 1.5)
    assert (claim.unit, claim.cpu_us) == ("ms", 70.0)
    assert math.isnan(claim.other_cpu_us)


def test_ratio_of_medians_if_rounds_do_not_pair() -> None:
    assert make_claim(make_report([10.0, 20.0, 30.0], [5.0]), "recall", "memstream", P50, "bare").ratio == 4.0


@pytest.mark.parametrize(
    ("aim", "met"),
    [
        (at_most(2), "yes"),
        (at_most(1.9), "no"),
        (at_least(2), "yes"),
        (at_least(2.1), "no"),
        (at_most(10, "ms"), "yes"),
        (at_most(9, "ms"), "no"),
        (None, "-"),
    ],
)
def test_aim_bounds_the_ratio_or_our_figure(aim: Aim | None, met: str) -> None:
    assert make_claim(make_report([10.0], [5.0]), "recall", "memstream", P50, "bare", aim).met == met


def test_missing_figure_meets_no_aim() -> None:
    claim = make_claim(make_report([10.0], []), "recall", "memstream", P50, "bare", at_most(1_000))
    assert math.isnan(claim.ratio)
    assert claim.met == "no"


def test_claim_survives_json() -> None:
    claim = make_claim(make_report([10.0], []), "recall", "memstream", P50, "bare", at_most(2))
    again = Claim.from_record(json.loads(json.dumps(claim.to_record(), allow_nan=False)))
    assert again.table_cells() == claim.table_cells()
    assert format_table([again]).count("\n") == 2
