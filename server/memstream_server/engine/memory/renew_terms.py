"""Analyze again, while a memory is read, the fragments whose stored terms another version of the analyzer made.

The journal keeps the old terms: they are replaced when the fragment is next written with its content. A change of the
analyzer therefore needs no migration, and an older server with the same journal does the same.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from memstream_server.engine.memory.enrich import analyze_fragment
from memstream_server.ports.journal.records import MemoryRecord
from memstream_server.ports.journal.rows import Block
from memstream_server.ports.models import Analyzer


def renew_terms(block: Block, analyzer: Analyzer, record: MemoryRecord) -> Block:
    """The block with all terms in the analyzer's version; the block itself if they are. About 40 µs per fragment.

    Raises ValueError if the analyzer lacks the language of the memory.
    """
    stale = block.versions != analyzer.version
    if not stale.any():
        return block
    cuts = np.cumsum(block.sizes)[:-1]
    hashes, counts = np.split(block.hashes, cuts), np.split(block.counts, cuts)
    for place in np.flatnonzero(stale).tolist():
        terms = analyze_fragment(analyzer, block.fragments[place], record)
        hashes[place], counts[place] = np.frombuffer(terms.hashes, "<u8"), np.frombuffer(terms.counts, "<u2")
    return replace(
        block,
        hashes=np.concatenate(hashes),
        counts=np.concatenate(counts),
        sizes=np.array([len(each) for each in hashes], np.int64),
        versions=np.full(len(hashes), analyzer.version, np.uint16),
    )
