"""Which vector index the settings choose, and what a start says if it is not installed."""

from __future__ import annotations

from pathlib import Path

import pytest

from memstream_server.app.errors import StartError
from memstream_server.app.running import choose_index
from memstream_server.settings import Settings


def test_lite_is_chosen_without_a_uri(tmp_path: Path) -> None:
    assert not choose_index(Settings(data_dir=tmp_path)).shared
    assert choose_index(Settings(data_dir=tmp_path, milvus_uri="http://127.0.0.1:1")).shared


def test_none_is_chosen_for_a_shared_database_without_a_uri(tmp_path: Path) -> None:
    chosen = Settings(data_dir=tmp_path, journal_url="postgresql://db/memstream")
    assert chosen.is_without_index
    assert choose_index(chosen).shared
    assert not Settings(data_dir=tmp_path).is_without_index


def test_missing_lite_is_refused_with_the_remedy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("memstream_server.app.running.find_spec", lambda _name: None)
    with pytest.raises(StartError, match=r"\.\[server\].*milvus_uri"):
        choose_index(Settings(data_dir=tmp_path))
    assert choose_index(Settings(data_dir=tmp_path, milvus_uri="http://127.0.0.1:1")).shared
