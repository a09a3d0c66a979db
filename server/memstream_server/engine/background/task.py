"""A background task of the engine, and a wait for what wakes it."""

from __future__ import annotations

import asyncio


class BackgroundTask:
    """What `_run` does, from `start` to `stop`. A stopped task continues at its next start."""

    _task: asyncio.Task[None] | None = None

    def start(self) -> None:
        self._task = asyncio.create_task(self._run())

    async def stop(self) -> None:
        """Cancel it."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    async def _run(self) -> None:
        raise NotImplementedError


async def wait_for_news(news: asyncio.Event, quiet_s: float) -> None:
    """Until the event is set, `quiet_s` at most."""
    try:
        async with asyncio.timeout(quiet_s):
            await news.wait()
    except TimeoutError:
        return
