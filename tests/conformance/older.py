"""A server with an earlier contract: a proxy that removes later fields from requests to a real server.

So far that is `RecallOpen.done_in_recollections`: such a server ends every answer with a message of its own.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import grpc
import grpc.aio

from memstream.v1 import stream_service_pb2 as pb
from tests.support.passing import PassingOn


class Older(PassingOn):
    """The earlier server, a proxy of a current one. `openings`: the RecallOpen messages that clients sent."""

    def __init__(self, target: str) -> None:
        super().__init__(target)
        self.openings: list[pb.RecallOpen] = []

    def service(self, details: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler[Any, Any]:
        """Forwards a call without later fields."""
        recalling = details.method.endswith("/Recall")

        async def forward(requests: AsyncIterator[bytes], context: Any) -> AsyncIterator[bytes]:
            call = self._channel.stream_stream(details.method)(self._aged(requests) if recalling else requests)
            try:
                async for answer in call:
                    yield answer
            except grpc.aio.AioRpcError as error:
                await context.abort(error.code(), error.details() or "", error.trailing_metadata() or ())
            finally:
                call.cancel()

        return grpc.stream_stream_rpc_method_handler(forward)

    async def _aged(self, requests: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
        async for request in requests:
            message = pb.RecallRequest.FromString(request)
            if message.HasField("open"):
                self.openings.append(pb.RecallOpen.FromString(message.open.SerializeToString()))
                message.open.ClearField("done_in_recollections")
            yield message.SerializeToString()
