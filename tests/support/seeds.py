"""Seeds and numbers of rounds of tests that draw for themselves.

The seed is the same in every run, unless the caller asks for others. A test that draws, kills or fails many times has
two sizes: `make test` takes the small one, `make test-all` sets MEMSTREAM_THOROUGH and runs every test with the mark
`drawn` in its full size.
"""

from __future__ import annotations

import os
import random

THOROUGH = bool(os.environ.get("MEMSTREAM_THOROUGH"))
"""Whether tests with the mark `drawn` run in their full size."""
SEEDS = (1, 2) if THOROUGH else (1,)
"""Seeds of histories that a test draws."""


def seed_of(variable: str) -> int:
    """The seed in an environment variable, 1 without the variable; for 0 one is drawn."""
    return int(os.environ.get(variable, "1")) or random.SystemRandom().randrange(2, 2**31)


def rounds(full: int, small: int) -> int:
    """The number of examples, calls or rounds of this run: `full` if it is thorough."""
    return full if THOROUGH else small
