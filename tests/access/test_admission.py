"""One caller that takes all it may have leaves the others what is theirs."""

from __future__ import annotations

from pathlib import Path

import grpc
import grpc.aio
import pytest

import memstream
from memstream.v1 import stream_service_pb2 as pb
from memstream.v1.stream_service_pb2_grpc import StreamServiceStub
from memstream_server.rpc.access.admission import Admission
from memstream_server.rpc.errors import QuotaExceeded
from tests.access.conftest import guarded_files
from tests.server.conftest import MakeServer, started
from tests.support.waiting import until


def test_what_has_ended_counts_no_more_and_each_principal_for_itself() -> None:
    admission = Admission(streams_max=1, calls_max=2)
    with (
        admission.admitted("key:a", "streams"),
        admission.admitted("key:a", "calls"),
        admission.admitted("key:a", "calls"),
    ):
        for what in ("streams", "calls"):
            with pytest.raises(QuotaExceeded), admission.admitted("key:a", what):
                pass
            with admission.admitted("key:b", what):
                pass
    with admission.admitted("key:a", "streams"):
        pass
    assert not admission._under_way


async def test_streams_of_one_caller_leave_room_for_another(tmp_path: Path, make_server: MakeServer) -> None:
    keys_file, policy_file, keys = guarded_files(tmp_path / "access")
    server = await started(
        make_server(api_keys_file=str(keys_file), access_policy_file=str(policy_file), caller_streams_max=2)
    )
    for name, path in (("alice", "a/joy"), ("bob", "b/joy")):
        async with memstream.connect(server.address, token=keys[name]) as client:
            await client.create_memory(path)
    async with grpc.aio.insecure_channel(server.address) as channel:

        async def opened(name: str, namespace: str) -> grpc.aio.StreamStreamCall[pb.RecallRequest, pb.RecallResponse]:
            metadata = (("authorization", f"Bearer {keys[name]}"),)
            call = StreamServiceStub(channel).Recall(metadata=metadata, timeout=60)
            await call.write(pb.RecallRequest(open=pb.RecallOpen(namespace=namespace, memory="joy")))
            await call.read()
            return call

        async def opens(name: str, namespace: str) -> bool:
            try:
                (await opened(name, namespace)).cancel()
            except grpc.aio.AioRpcError as error:
                if error.code() is not grpc.StatusCode.RESOURCE_EXHAUSTED:
                    raise
                return False
            return True

        mine = [await opened("alice", "a") for _ in range(2)]
        assert not await opens("alice", "a")
        assert await opens("bob", "b")
        mine[0].cancel()
        await until(lambda: opens("alice", "a"))
