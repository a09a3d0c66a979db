"""Retention: which fragments are due to be forgotten, by age, by strength, or beyond capacity.

The initial strength depends on importance. Every access restarts the decay and raises the strength it starts from.
Pinned fragments are exempt.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import numpy as np
import numpy.typing as npt

from memstream_server.core.events import Reason
from memstream_server.core.policy import RetentionPolicy
from memstream_server.core.values import Fragment

_SECOND_US = 1_000_000


def compute_strength(fragment: Fragment, now_us: int, half_life_s: int) -> float:
    """The strength of a fragment, in [0, 1].

    S = min(1, (0.5 + importance) x (1 + ln(1 + accesses)) x 2^(-age / half life)); age is the time since the last
    access, or since creation. An average fragment (importance 0.5) that is never recalled starts at 1 and has 0.5
    after one half life. The forgetting curve that recall restarts and raises is MemoryBank's (arXiv 2305.10250,
    section 3.3, after Ebbinghaus); the factor for importance, and the logarithm, which keeps a hundred accesses from
    making a fragment immortal, are ours.
    """
    seen_us = max(fragment.access_time_us, fragment.create_time_us)
    half_lives = max(0, now_us - seen_us) / _SECOND_US / half_life_s
    raised = (0.5 + fragment.importance) * (1 + math.log1p(fragment.access_count))
    return min(1.0, raised * math.exp2(-half_lives))


def expiry_us(fragment: Fragment, policy: RetentionPolicy) -> int | None:
    """The fragment's own expiry, or creation plus the policy's ttl; None for a pinned fragment or without a ttl."""
    if fragment.pinned:
        return None
    if fragment.expire_time_us is not None:
        return fragment.expire_time_us
    return fragment.create_time_us + policy.ttl_s * _SECOND_US if policy.ttl_s > 0 else None


def is_expired(fragment: Fragment, now_us: int, policy: RetentionPolicy) -> bool:
    """Whether the expiry has passed. Recall excludes the fragment from then on, even before maintenance forgets it."""
    at_us = expiry_us(fragment, policy)
    return at_us is not None and at_us <= now_us


def is_faded(fragment: Fragment, now_us: int, policy: RetentionPolicy) -> bool:
    """Whether the strength is below the policy's minimum."""
    return compute_strength(fragment, now_us, policy.strength_half_life_s) < policy.retention_min


def find_due(fragments: Iterable[Fragment], now_us: int, policy: RetentionPolicy) -> dict[Reason, list[Fragment]]:
    """Fragments to forget by age (EXPIRED) or strength (RETENTION), each once; never pinned or forgotten ones."""
    found: dict[Reason, list[Fragment]] = {Reason.EXPIRED: [], Reason.RETENTION: []}
    for fragment in fragments:
        if fragment.pinned or fragment.forget_time_us is not None:
            continue
        if is_expired(fragment, now_us, policy):
            found[Reason.EXPIRED].append(fragment)
        elif is_faded(fragment, now_us, policy):
            found[Reason.RETENTION].append(fragment)
    return found


def select_weakest(ids: Sequence[str], strengths: Sequence[float], count: int) -> list[str]:
    """The (at most) `count` weakest ids, weakest first, ties in the order given."""
    order: npt.NDArray[np.int64] = np.argsort(np.array(strengths, np.float64), kind="stable")
    return [ids[place] for place in order[: max(count, 0)]]
