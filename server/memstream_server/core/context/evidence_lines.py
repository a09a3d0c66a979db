"""The lines of a standing answer: what a recall found, in the order of time, within a number of tokens."""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import blake2b

from memstream_server.core.budget import estimated_tokens
from memstream_server.core.context.texts import Texts
from memstream_server.core.context.values import Inputs
from memstream_server.core.values import Fragment

_DIGEST_BYTES = 16


def write_lines(
    question: str, found: Sequence[Fragment], tokens: int, memory_tokens: int = 0
) -> list[tuple[Fragment, str]]:
    """Those of the memories, best first, that fit into so many tokens, each with its line. memory_tokens: most of one
    of them; 0: as in a context."""
    inputs = Inputs(question=question, now_us=0, budget=tokens, count=estimated_tokens, memory_tokens=memory_tokens)
    texts = Texts(inputs)
    kept: list[tuple[Fragment, str]] = []
    room = tokens
    for fragment in found:
        line = texts.write_line(fragment)
        cost = estimated_tokens(f"{line}\n")
        if cost <= room:
            kept.append((fragment, line))
            room -= cost
    return sorted(kept, key=lambda one: (one[0].observe_time_us, one[0].id))


def digest_of(*texts: str) -> bytes:
    """16 bytes that differ if one of the texts does."""
    digest = blake2b(digest_size=_DIGEST_BYTES)
    for text in texts:
        encoded = text.encode()
        digest.update(len(encoded).to_bytes(8))
        digest.update(encoded)
    return digest.digest()
