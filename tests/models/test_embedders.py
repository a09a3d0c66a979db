"""The registry of embedders."""

from __future__ import annotations

from memstream_server.app.embedders import EMBEDDERS
from memstream_server.settings import EmbeddingKind


def test_every_embedding_kind_has_a_builder() -> None:
    assert set(EMBEDDERS) == set(EmbeddingKind)
