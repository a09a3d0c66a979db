"""Inserts as columns: the message equals pymilvus' own, and Lite stores the same rows either way."""

from __future__ import annotations

import importlib.metadata
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pymilvus
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pymilvus.grpc_gen import milvus_pb2, milvus_pb2_grpc, schema_pb2

from memstream_server.adapters.milvus.child import LITE_READ
from memstream_server.adapters.milvus.collection import MilvusCollection, Timeouts
from memstream_server.adapters.milvus.columns import ColumnInserter, encode_vectors, grpc_target
from memstream_server.adapters.milvus.index import open_lite
from memstream_server.adapters.milvus.lite import LiteProcess
from memstream_server.adapters.milvus.naming import collection_name
from memstream_server.ports.index import IndexUnavailable, Point, Space
from tests.index.conformance import SPACE, fragment_id, points, unit_vectors


@given(st.integers(1, 40), st.integers(1, 300))
def test_vector_column_equals_protobuf_encoding(rows: int, dimension: int) -> None:
    """Lengths that take one, two and three bytes on the wire."""
    vectors = list(np.random.default_rng(rows).standard_normal((rows, dimension)).astype(np.float32))
    field = encode_vectors("vector", vectors)
    assert (field.field_name, field.vectors.dim) == ("vector", dimension)
    assert field.vectors.float_vector.data == [number for vector in vectors for number in vector.tolist()]


@pytest.mark.parametrize(
    ("uri", "token", "target"),
    [
        ("unix:/data/milvus-1.sock", "", "unix:/data/milvus-1.sock"),
        ("http://127.0.0.1:19530", "", "127.0.0.1:19530"),
        ("http://127.0.0.1:19530/", "", "127.0.0.1:19530"),
        ("http://127.0.0.1:19530", "root:Milvus", None),
        ("http://root:Milvus@127.0.0.1:19530", "", None),
        ("http://127.0.0.1:19530/other", "", None),
        ("https://127.0.0.1:19530", "", None),
        ("tcp://127.0.0.1:19530", "", None),
    ],
)
def test_target_only_for_plain_addresses(uri: str, token: str, target: str | None) -> None:
    assert grpc_target(uri, token) == target


def test_patches_match_installed_lite() -> None:
    """Another version works, at three times the CPU: review what `read_by_column` patches, then set LITE_READ."""
    assert importlib.metadata.version("milvus-lite") == LITE_READ


async def test_lite_stores_rows_and_columns_alike(tmp_path: Path) -> None:
    """A token selects rows; Lite does not check it. Each way replaces rows that the other wrote."""
    name = collection_name(SPACE, "memstream")
    child = await LiteProcess.start(tmp_path, [name], start_timeout_s=60, lock_timeout_s=10, stop_timeout_s=10)
    opened = [
        MilvusCollection.connect(child.uri, token, name, SPACE, Timeouts(), "Strong") for token in ("", "root:Milvus")
    ]
    try:
        columns, rows = opened
        columns.ensure_ready()
        vectors = unit_vectors(60)
        columns.upsert(points("m", vectors[:30]))
        rows.upsert(points("m", vectors[30:], first=30))
        columns.flush()
        columns.upsert([Point("m", fragment_id(40), vectors[0])])
        rows.upsert([Point("m", fragment_id(20), vectors[1])])
        for _ in ("unflushed", "flushed"):
            assert columns.count_rows("m") == 60
            assert columns.list_ids("m") == ([fragment_id(number) for number in range(60)], False)
            for written, number in ((0, 0), (0, 40), (1, 1), (1, 20), (29, 29), (59, 59)):
                found, cosines = columns.search("m", vectors[written], 2, 5)
                assert fragment_id(number) in found
                assert cosines[found.index(fragment_id(number))] == pytest.approx(1, abs=1e-5)
            columns.flush()
        bare = ColumnInserter(child.uri, name)
        texts = {column: ["m/f"] for column in ("id", "memory", "spare_text")}
        numbers = {column: [0] for column in ("schema_version", "spare_number")}
        with pytest.raises(pymilvus.MilvusException, match="expected 24"):
            bare.insert_rows("p0", [unit_vectors(1, dimension=23)[0]], texts, numbers, 5)
        with pytest.raises(pymilvus.MilvusException, match="'memory' missing"):
            bare.insert_rows("p0", [vectors[0]], {"id": ["m/f"], "spare_text": [""]}, numbers, 5)
        bare.close()
        columns.flush()
        assert columns.count_rows("m") == 60
        columns.drop_collection()
        with pytest.raises(IndexUnavailable, match="code 100"):
            columns.upsert(points("m", vectors))
    finally:
        for one in opened:
            one.close()
        await child.stop()


class ManyKeys(milvus_pb2_grpc.MilvusServiceServicer):
    """Answers an insert with more than 4 MB of keys."""

    def Insert(self, request: Any, context: Any) -> Any:  # noqa: N802 - the name of the rpc
        keys = schema_pb2.IDs(str_id=schema_pb2.StringArray(data=["k" * 1_000] * 5_000))
        return milvus_pb2.MutationResult(IDs=keys, insert_cnt=request.num_rows)


def test_inserter_takes_an_answer_of_many_keys() -> None:
    server = grpc.server(ThreadPoolExecutor(1))
    milvus_pb2_grpc.add_MilvusServiceServicer_to_server(ManyKeys(), server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    inserter = ColumnInserter(f"127.0.0.1:{port}", "any")
    inserter.insert_rows("p0", unit_vectors(1), {"id": ["k"]}, {}, 30)
    inserter.close()
    server.stop(None).wait()


async def test_lite_takes_one_write_of_many_bytes(tmp_path: Path) -> None:
    """The vectors of one write have up to 4 MB, its keys come on top: gRPC's own bound is 4 MB."""
    dimension, rows = 4_096, 256
    index = await open_lite(tmp_path)
    await index.open(Space("large", dimension, 1))
    await index.upsert(points("m", unit_vectors(rows, dimension=dimension)))
    assert await index.count("m") == rows
    await index.close()
