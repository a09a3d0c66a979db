"""Inserts rows into Milvus Lite as columns, with the messages of Milvus' protocol.

pymilvus packs rows value by value, which is most of a row's cost for the server; it has no call for columns.

Rules
- Only for Lite over plaintext without a token: pymilvus handles authentication and TLS.
- `put` is an Insert. In Lite the newest row of a key wins, whether inserted or upserted. Its Upsert first looks up
  every key in every segment to complete partial rows, and these rows are complete. On a server an Insert would
  duplicate the row.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

import grpc
import numpy as np
from google.protobuf.wrappers_pb2 import BytesValue
from pymilvus import DataType, MilvusException
from pymilvus.grpc_gen import milvus_pb2, milvus_pb2_grpc, schema_pb2

from memstream_server.core.values import Vector

OPTIONS = [("grpc.max_receive_message_length", -1)]
"""An answer repeats all keys."""


class ColumnInserter:
    """Its own connection to one collection. Blocking, one call at a time; close it after use."""

    def __init__(self, target: str, name: str) -> None:
        self._name = name
        self._channel = grpc.insecure_channel(target, options=OPTIONS)
        self._stub = milvus_pb2_grpc.MilvusServiceStub(self._channel)

    def insert_rows(
        self,
        partition: str,
        vectors: Sequence[Vector],
        texts: dict[str, list[str]],
        numbers: dict[str, list[int]],
        timeout_s: float,
    ) -> None:
        """Insert whole rows: the column `vector`, the others by name. Raises MilvusException and grpc.RpcError."""
        fields = [encode_vectors("vector", vectors)]
        for column, values in texts.items():
            data = schema_pb2.ScalarField(string_data=schema_pb2.StringArray(data=values))
            fields.append(schema_pb2.FieldData(field_name=column, type=DataType.VARCHAR, scalars=data))
        for column, counts in numbers.items():
            data = schema_pb2.ScalarField(long_data=schema_pb2.LongArray(data=counts))
            fields.append(schema_pb2.FieldData(field_name=column, type=DataType.INT64, scalars=data))
        request = milvus_pb2.InsertRequest(
            collection_name=self._name, partition_name=partition, fields_data=fields, num_rows=len(vectors)
        )
        status = self._stub.Insert(request, timeout=timeout_s).status
        if status.code:
            raise MilvusException(status.code, status.reason)

    def close(self) -> None:
        """Close the connection."""
        self._channel.close()


def grpc_target(uri: str, token: str) -> str | None:
    """The gRPC target of a URI; None if the connection needs a token, a user, TLS or a database."""
    if token or not re.fullmatch(r"unix:.+|http://[^/@]+/?", uri):
        return None
    return uri.removeprefix("http://").removesuffix("/")


def encode_vectors(column: str, vectors: Sequence[Vector]) -> schema_pb2.FieldData:
    """A column of vectors of one dimension.

    Protobuf would convert every number to a Python object, at a hundred times the cost. A BytesValue has the same wire
    format as FloatArray's packed numbers: both are field 1, length-delimited.
    """
    packed = BytesValue(value=np.concatenate(vectors).astype("<f4", copy=False).tobytes()).SerializeToString()
    numbers = schema_pb2.FloatArray.FromString(packed)
    field = schema_pb2.VectorField(dim=len(vectors[0]), float_vector=numbers)
    return schema_pb2.FieldData(field_name=column, type=DataType.FLOAT_VECTOR, vectors=field)
