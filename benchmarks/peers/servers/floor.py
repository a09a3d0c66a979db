"""The floor: a bare grpc.aio server (floor_server.py), driven through memstream's SDK like memstream."""

from __future__ import annotations

import sys

from benchmarks.peers.memstream import SdkClient
from benchmarks.peers.protocol import PeerOptions, Processes, run_peer
from benchmarks.peers.servers.processes import ServerProcess, accepts, find_free_port


class Floor(SdkClient):
    """memstream's client with another server."""

    def __init__(self, given: PeerOptions, server: ServerProcess, address: str) -> None:
        super().__init__(given, address)
        self._server = server

    def processes(self) -> Processes:
        return self._server.measure()

    async def close(self) -> None:
        await super().close()
        self._server.stop()


async def make_peer(given: PeerOptions) -> Floor:
    port = find_free_port()
    program = "benchmarks.peers.servers.floor_server"
    server = ServerProcess([sys.executable, "-m", program, str(given.directory), str(port)], given.directory)
    server.wait_until(lambda: accepts(port))
    return Floor(given, server, f"127.0.0.1:{port}")


if __name__ == "__main__":
    run_peer(make_peer)
