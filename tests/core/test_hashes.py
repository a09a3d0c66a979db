"""Hashes that images keep are the same in every process."""

from __future__ import annotations

import subprocess
import sys

from memstream_server.core.identity import fold_key, identity_hash, stable_hash
from memstream_server.core.values import Fragment, Structured

SAID = Fragment(id="a", content="Wir trinken Tee.", speaker="joy", metadata=(("paid", True), ("sum", 1.0)))
STEP = Fragment(id="b", content="think", structured=Structured(thought="think"), valid_until_us=9)
SCRIPT = "from tests.core.test_hashes import compute_all; print(compute_all())"


def compute_all() -> list[int]:
    """Both hashes of both fragments."""
    return [of(each) for each in (SAID, STEP) for of in (fold_key, identity_hash)]


def test_another_process_computes_the_same_hashes() -> None:
    other = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, check=True)
    assert other.stdout.strip() == str(compute_all())
    assert len(set(compute_all())) == 4


def test_values_of_different_types_have_different_hashes() -> None:
    assert len({stable_hash((value,)) for value in (True, 1, 1.0, "1", None)}) == 5
