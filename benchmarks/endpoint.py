"""A slow embedding endpoint in a separate process: each request takes the same time, however many texts it has.

    python endpoint.py PORT_FILE

The program answers OpenAI's `embeddings` after LATENCY_S with the vectors of the server's own hashing embedder.
"""

from __future__ import annotations

import asyncio
import base64
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from aiohttp import ClientSession, web

from memstream_server.adapters.models.hashing import HashingEmbedder

LATENCY_S = 0.05
MODEL = "slow"
_START_MAX_S = 30.0


async def _serve_embeddings(port_file: Path) -> None:
    embedder = HashingEmbedder()

    async def answer_request(request: web.Request) -> web.Response:
        texts = (await request.json())["input"]
        until = time.monotonic() + LATENCY_S
        packed = [base64.b64encode(vector.tobytes()).decode() for vector in embedder.vectors(texts)]
        data = [{"index": place, "embedding": each} for place, each in enumerate(packed)]
        await asyncio.sleep(until - time.monotonic())
        return web.json_response({"data": data, "model": MODEL})

    app = web.Application(client_max_size=64 << 20)
    app.router.add_post("/v1/embeddings", answer_request)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    part = port_file.with_suffix(".part")
    part.write_text(f"http://127.0.0.1:{runner.addresses[0][1]}/v1", "utf-8")
    part.replace(port_file)
    await asyncio.Event().wait()


@contextmanager
def run_endpoint() -> Iterator[str]:
    """Yield the endpoint's base URL. Raises RuntimeError when it does not start."""
    with tempfile.TemporaryDirectory() as scratch:
        port_file = Path(scratch) / "endpoint"
        process = subprocess.Popen([sys.executable, __file__, str(port_file)])
        try:
            until = time.monotonic() + _START_MAX_S
            while not port_file.exists():
                if process.poll() is not None or time.monotonic() > until:
                    raise RuntimeError("the endpoint did not start")
                time.sleep(0.05)
            yield port_file.read_text("utf-8")
        finally:
            process.kill()
            process.wait()


async def embed_one_by_one(base_url: str, texts: list[str], at_once: int) -> tuple[float, list[float]]:
    """Embed with a bare client that sends one text per request: (texts per second, seconds of each request)."""
    seconds: list[float] = []
    waiting = iter(texts)

    async def ask(session: ClientSession) -> None:
        for text in waiting:
            began = time.perf_counter()
            async with session.post(f"{base_url}/embeddings", json={"model": MODEL, "input": [text]}) as reply:
                await reply.read()
            seconds.append(time.perf_counter() - began)

    async with ClientSession() as session:
        began = time.perf_counter()
        await asyncio.gather(*(ask(session) for _ in range(at_once)))
        return len(seconds) / (time.perf_counter() - began), seconds


if __name__ == "__main__":
    asyncio.run(_serve_embeddings(Path(sys.argv[1])))
