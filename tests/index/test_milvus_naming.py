"""Names in Milvus."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from memstream_server.adapters.milvus.collection import parse_release
from memstream_server.adapters.milvus.index import connect_milvus
from memstream_server.adapters.milvus.naming import (
    ID_LENGTH_MAX,
    collection_name,
    decode_id,
    encode_id,
    partition_name,
    quote_id,
)
from memstream_server.ports.journal.records import Space

TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=40)


@given(TEXT)
def test_encoded_ids_are_ascii_and_round_trip(identifier: str) -> None:
    assert re.fullmatch(r"[A-Za-z0-9_.~%-]*", encode_id(identifier))
    assert decode_id(encode_id(identifier)) == identifier
    assert quote_id(identifier) == f'"{encode_id(identifier)}"'


def test_ulids_are_stored_unchanged() -> None:
    assert encode_id("01ARZ3NDEKTSV4RRFFQ69G5FAV") == "01ARZ3NDEKTSV4RRFFQ69G5FAV"


@pytest.mark.parametrize("identifier", ["x" * (ID_LENGTH_MAX + 1), "é" * (ID_LENGTH_MAX // 6 + 1), "\ud800"])
def test_invalid_ids_are_refused(identifier: str) -> None:
    with pytest.raises(ValueError, match=r"too long|surrogates"):
        encode_id(identifier)


def test_partitions_are_stable_and_spread() -> None:
    """A literal name: a changed hash would lose all rows of existing stores."""
    assert partition_name("memory-1", 64) == "p55"
    assert len({partition_name(f"memory-{number}", 64) for number in range(1000)}) == 64


@given(TEXT, st.integers(1, 4096))
def test_collection_names_are_valid(model: str, dimension: int) -> None:
    name = collection_name(Space(model, dimension, 64), "memstream")
    assert re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]{0,254}", name)


def test_similar_spaces_get_separate_collections() -> None:
    spaces = [Space("a/b", 8, 64), Space("a-b", 8, 64), Space("A/b", 8, 64), Space("a/b", 9, 64), Space("a/b", 8, 32)]
    assert len({collection_name(space, "memstream") for space in spaces}) == len(spaces)


@pytest.mark.parametrize("uri", ["milvus.db", "/data/milvus.db", "http://host/x.db", "localhost:19530", ""])
def test_other_uris_are_refused(uri: str) -> None:
    with pytest.raises(ValueError, match="not the URI"):
        connect_milvus(uri)


@pytest.mark.parametrize(
    ("version", "expected"),
    [
        ("v2.3.5-lite", (2, 3)),
        ("2.5.14", (2, 5)),
        ("Zilliz Cloud Vector Database(Compatible with Milvus 2.4)", (2, 4)),
        ("dev", (999, 0)),
    ],
)
def test_release_is_parsed_from_version(version: str, expected: tuple[int, int]) -> None:
    assert parse_release(version) == expected


def test_description_hides_credentials() -> None:
    assert connect_milvus("https://user:secret@example.org:443").description == "milvus at example.org"
