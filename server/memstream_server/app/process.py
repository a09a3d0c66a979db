"""A server as the process: its signals, allocator and collector, and what it says when it serves."""

from __future__ import annotations

import asyncio
import ctypes
import gc
import signal
import sys
from collections.abc import Callable

from memstream_server.app.running import running
from memstream_server.settings import Settings

SWITCH_INTERVAL_S = 0.0001
M_ARENA_MAX = -8
"""The parameter's number in malloc.h."""
MALLOC_ARENAS = 2


async def serve(settings: Settings, *, announce: Callable[[str], None]) -> None:
    """Run until SIGTERM or SIGINT, then drain. Raises StartError, or Unreadable for the data directory."""
    # sqlite3 gives the interpreter lock away at every row it steps over. With the default of 5 ms its threads win it
    # back too late beside a busy event loop: commits of 574 to 4,012 observations a second became 4,700 with 0.5 ms.
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    _tame_allocator()
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for name in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(name, stop.set)
    async with running(settings) as server:
        # What was imported lives as long as the process: the collector need not look at its 120,000 objects. It did so
        # every second while observations came in, and held everything up for 60 to 280 ms each time. No collection
        # before: it finds 80 objects, 1,300 at a first start, and takes a tenth of the start. Not frozen again later:
        # what lives then may become a cycle that must be found.
        gc.freeze()
        info = server.engine.info()
        announce(f"memstream listens on {server.address}")
        announce(f"  data       {settings.data_dir}")
        announce(f"  journal    {info.journal}")
        announce(f"  embedding  {info.embedding.name}, {info.embedding.dimension} dimensions")
        announce(f"  importance {info.scorer_model or 'constant 0.5 (no LLM rates it)'}")
        announce(f"  insights   {info.insight_model or 'none (no LLM derives them)'}")
        announce(f"  index      {info.index}")
        if settings.reranker_model_dir is not None:
            announce(f"  reranker   {settings.reranker_model_dir.resolve().name}")
        await stop.wait()
        announce("memstream drains and stops")


def _tame_allocator() -> None:
    """Two heaps for all threads instead of eight a core: what one thread frees, another one's heap cannot use.

    Mixed load on two cores had 15 of them, a fifth of the process, half empty and never given back.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)  # glibc's
    if mallopt is not None:
        mallopt(M_ARENA_MAX, MALLOC_ARENAS)
