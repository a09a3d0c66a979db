"""Retention: which fragments are due to be forgotten, by age, by strength, or for want of room.

A fragment that was never recalled fades from the strength its importance gives it; every access starts the decay
anew and makes the next one slower to reach the minimum. Pinned fragments are exempt from all of it.
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


def strength(fragment: Fragment, now_us: int, half_life_s: int) -> float:
    """How well a fragment is kept, in [0, 1].

    S = min(1, (0.5 + importance) x (1 + ln(1 + accesses)) x 2^(-age / half life)), age being the time since the last
    access, or since creation. So an average fragment (importance 0.5) that was never recalled begins at 1 and is at
    0.5 after one half life. The exponential forgetting curve restarted and raised by recall is MemoryBank's
    (arXiv 2305.10250, section 3.3, after Ebbinghaus); that importance raises it, and that the logarithm keeps a
    hundred accesses from making it immortal, is ours.
    """
    seen_us = max(fragment.access_time_us, fragment.create_time_us)
    half_lives = max(0, now_us - seen_us) / _SECOND_US / half_life_s
    raised = (0.5 + fragment.importance) * (1 + math.log1p(fragment.access_count))
    return min(1.0, raised * math.exp2(-half_lives))


def expiry_us(fragment: Fragment, policy: RetentionPolicy) -> int | None:
    """When it expires: its own expiry or, where it has none, the policy's ttl from creation. Never when pinned."""
    if fragment.pinned:
        return None
    if fragment.expire_time_us is not None:
        return fragment.expire_time_us
    return fragment.create_time_us + policy.ttl_s * _SECOND_US if policy.ttl_s > 0 else None


def expired(fragment: Fragment, now_us: int, policy: RetentionPolicy) -> bool:
    """Whether its expiry has come: from then on it is not found, whether or not maintenance has forgotten it."""
    at_us = expiry_us(fragment, policy)
    return at_us is not None and at_us <= now_us


def faded(fragment: Fragment, now_us: int, policy: RetentionPolicy) -> bool:
    """Whether its strength is below the policy's minimum."""
    return strength(fragment, now_us, policy.strength_half_life_s) < policy.retention_min


def due(fragments: Iterable[Fragment], now_us: int, policy: RetentionPolicy) -> dict[Reason, list[Fragment]]:
    """Those to be forgotten by age (EXPIRED) or strength (RETENTION), each once; pinned and forgotten ones never."""
    found: dict[Reason, list[Fragment]] = {Reason.EXPIRED: [], Reason.RETENTION: []}
    for fragment in fragments:
        if fragment.pinned or fragment.forget_time_us is not None:
            continue
        if expired(fragment, now_us, policy):
            found[Reason.EXPIRED].append(fragment)
        elif faded(fragment, now_us, policy):
            found[Reason.RETENTION].append(fragment)
    return found


def weakest(ids: Sequence[str], strengths: Sequence[float], count: int) -> list[str]:
    """The `count` ids of the least strength, the weakest first, ties in the order given; all when there are fewer."""
    order: npt.NDArray[np.int64] = np.argsort(np.array(strengths, np.float64), kind="stable")
    return [ids[place] for place in order[: max(count, 0)]]
