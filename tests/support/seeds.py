"""Seeds of tests that draw for themselves: the same in every run, unless the caller asks for others."""

from __future__ import annotations

import os
import random


def seed_of(variable: str) -> int:
    """The seed in an environment variable, 1 without the variable; for 0 one is drawn."""
    return int(os.environ.get(variable, "1")) or random.SystemRandom().randrange(2, 2**31)
