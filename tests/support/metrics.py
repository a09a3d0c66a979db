"""Scrapes a server's Prometheus endpoint."""

from __future__ import annotations

import asyncio
import urllib.request


def scrape_metrics(address: str) -> dict[str, float]:
    """Every series of the endpoint with its value."""
    with urllib.request.urlopen(f"http://{address}/metrics", timeout=30) as answer:
        text = answer.read().decode()
    lines = (line.rpartition(" ") for line in text.splitlines() if line and not line.startswith("#"))
    return {name: float(value) for name, _, value in lines}


async def all_indexed(address: str) -> bool:
    """Whether the write-behind has finished a round and the outbox is empty."""
    seen = await asyncio.to_thread(scrape_metrics, address)
    return seen["memstream_indexed_seconds_count"] > 0 and seen["memstream_outbox_depth"] == 0
