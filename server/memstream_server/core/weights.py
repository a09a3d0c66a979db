"""The weights of the score, and the values of the dense leg that they need."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from memstream_server.core.fitted_weights import MODEL, FittedWeights
from memstream_server.core.lexical import Floats


@dataclass(frozen=True, slots=True)
class Weights:
    """The formula's tunables, from policy, embedding model and query. Leg weights are not normalised."""

    alpha: float = 0.005
    beta: float = 1.0
    gamma: float = 0.1
    decay_per_hour: float = 0.01
    dense: float = MODEL.dense
    lexical: float = MODEL.lexical
    context: float = MODEL.context
    reply: float = MODEL.reply
    """Weight of the reply part, as a multiple of the context weight."""
    speaker_bonus: float = 0.1
    time: float = MODEL.time
    cosine_low: float = 0.0
    cosine_high: float = 1.0
    """Cosines that map to 0 and 1 on the dense leg; clipped outside."""

    @classmethod
    def of_fitted(cls, fitted: FittedWeights) -> Weights:
        """The formula with the fitted values, each in the field of its name, and the other defaults."""
        return cls(**{name: getattr(fitted, name) for name in FittedWeights.__slots__ if name in cls.__slots__})


def scale_cosines(cosines: Floats, w: Weights) -> Floats:
    """The dense leg, [0, 1]; NaN where the cosine is."""
    scaled: Floats = (cosines - w.cosine_low) / np.float32(max(w.cosine_high - w.cosine_low, 1e-6))
    np.minimum(np.maximum(scaled, 0.0, out=scaled), 1.0, out=scaled)
    return scaled


def mean_with_dense(shares: Floats, cosines: Floats, w: Weights) -> Floats:
    """The mean of the lexical and dense legs; the lexical leg alone where the cosine is unknown or has no weight."""
    if not w.dense:
        return shares
    means: Floats = (shares + scale_cosines(cosines, w)) / np.float32(2)
    unknown = np.isnan(means)
    return np.where(unknown, shares, means) if unknown.any() else means


def share_out(w: Weights, dense: float, lexical: float, context: float) -> npt.NDArray[np.float64]:
    """Weights of the parts of relevance, in the order of PARTS, from the weights of the three legs."""
    return np.array([dense, lexical, context, context * w.reply, w.speaker_bonus])


def limit_context(legs: npt.NDArray[np.float64], context_share: npt.NDArray[np.floating]) -> npt.NDArray[np.float64]:
    """Weights per fragment, (5, n): of the context only a share counts, the other two legs take the rest in proportion.

    legs: as from `share_out`, (5, 1) or (5, n).
    """
    dense, lexical, context, reply, bonus = legs
    own = dense + lexical
    closeness = dense / np.where(own > 0, own, 1)
    freed = (1 - context_share) * context
    found = np.empty((len(legs), max(len(context_share), legs.shape[1])))
    found[0], found[1] = dense + freed * closeness, lexical + freed * (1 - closeness)
    found[2], found[3], found[4] = context - freed, context_share * reply, bonus
    return found


def without_dense(w: Weights) -> npt.NDArray[np.float64]:
    """The same without a cosine: the lexical legs take over the dense weight in proportion."""
    both = w.lexical + w.context
    # Divide first: (dense + lexical + context) / (lexical + context) overflows for tiny lexical weights.
    words, around = (w.lexical / both, w.context / both) if both else (0.0, 0.0)
    return share_out(w, 0.0, words * (both + w.dense), around * (both + w.dense))
