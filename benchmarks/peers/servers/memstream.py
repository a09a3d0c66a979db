"""memstream's server over gRPC, driven through the SDK; vectors are given with every observation and query."""

from __future__ import annotations

from benchmarks.peers.memstream import Memstream, open_server
from benchmarks.peers.protocol import PeerOptions, Processes, run_peer
from benchmarks.peers.servers.processes import list_tree, measure


class MemstreamServer(Memstream):
    """As in the other comparison, but only the server's processes are measured."""

    def processes(self) -> Processes:
        return measure(list_tree(self.server_pid))


async def make_peer(given: PeerOptions) -> MemstreamServer:
    return MemstreamServer(given, await open_server(given, probed=False))


if __name__ == "__main__":
    run_peer(make_peer)
