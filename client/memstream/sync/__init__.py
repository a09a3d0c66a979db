"""The blocking SDK, for scripts without an event loop: the same names, and each call waits for its answer.

    with memstream.sync.connect("127.0.0.1:7700") as client:
        joy = client.create_memory("comedy/joy", exist_ok=True)
        with joy.observe(producer="joy-1") as stream:
            stream.send("user: My name is Bob")
        print(joy.recall_once("What's my name?")[0].fragment.content)

All clients share one event loop on one background thread (grpc.aio supports one per process); they may be used from any
other thread, but not after a fork. A program with its own event loop uses the asynchronous SDK.

Modules, of which scripts/sync_sdk.py writes the first five from the asynchronous classes:
client: Client.
memory: Memory and its fragment listing.
streams: the Observe, Recall and Watch streams, and standing queries.
conversations: conversations and their watch.
agent: AgentMemory.
bases: the base classes.
loop: the background event loop.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import memstream.client
from memstream.argument_types import Count, KeepaliveSeconds, LocalSetting, Seconds
from memstream.arguments import check_arguments
from memstream.backoff import Retry
from memstream.channel import CLIENT_NAME, Tls, Token, Tracing
from memstream.kinds import kind_of
from memstream.local_client import client_of, local_server
from memstream.sync.bases import Sent
from memstream.sync.blocks import Blocks, BlockWatch
from memstream.sync.client import Client
from memstream.sync.conversations import Conversation, ConversationWatch
from memstream.sync.memory import FragmentListing, Memory
from memstream.sync.streams import ObserveStream, RecallStream, StandingQuery, Watch

__all__ = [
    "BlockWatch",
    "Blocks",
    "Client",
    "Conversation",
    "ConversationWatch",
    "FragmentListing",
    "Memory",
    "ObserveStream",
    "RecallStream",
    "Sent",
    "StandingQuery",
    "Watch",
    "connect",
    "local",
]


@check_arguments
def connect(
    target: str,
    *,
    token: Token | None = None,
    tls: Tls | None = None,
    timeout_s: Seconds = 30.0,
    retry: Retry | None = None,
    keepalive_s: KeepaliveSeconds = 60.0,
    receive_bytes_max: Count = 64 << 20,
    client_name: str = CLIENT_NAME,
    options: Sequence[tuple[str, str | int]] = (),
    tracing: Tracing | None = None,
) -> Client:
    """A client of the server at `target`; use it with `with`. The arguments are those of memstream.connect."""
    return Client(
        memstream.client.connect(
            target,
            token=token,
            tls=tls,
            timeout_s=timeout_s,
            retry=retry,
            keepalive_s=keepalive_s,
            receive_bytes_max=receive_bytes_max,
            client_name=client_name,
            options=options,
            tracing=tracing,
        )
    )


def local(
    path: str | Path,
    *,
    timeout_s: Seconds = 30.0,
    retry: Retry | None = None,
    tracing: Tracing | None = None,
    start_timeout_s: Seconds = 30.0,
    **settings: LocalSetting,
) -> Client:
    """A client of the server of the data directory `path`, which is found or started; use it with `with`.

    The arguments and errors are those of memstream.local.
    """
    kind_of(Seconds).check("timeout_s", timeout_s)
    server = local_server(path, start_timeout_s, settings)
    server.open()
    return Client(client_of(server, timeout_s, retry, tracing))
