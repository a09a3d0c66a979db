"""Measures the console in Chromium: first paint, lag of live events, growth of the page's heap.

    python -m benchmarks.console [--memories N] [--fragments N] [--live-s SECONDS] [--json FILE]

Chromium must be installed, or installable by apt; Playwright comes from requirements/browser.txt. The server, the
browser and the writer share one machine.

First paint: navigation until the first row or card is in the page, with N memories in one namespace and a memory of N
fragments; median of ROUNDS, each in a fresh browser context. Live: observations arrive one by one, so that EVENTS_PER_S
events a second are committed; the lag is from the commit's time in the event until its row is in the page, by one
clock. Growth, every SAMPLE_S: the used JavaScript heap after a garbage collection, and resident memory of the server;
each slope is that of a line through the samples after the first third, and "of 8 h" is what that line adds for the
events of 8 hours at one event a second (288 s at EVENTS_PER_S).

The server's memory rises as much without a page or a watch: SQLite's page caches fill, which is bounded (32 MB for the
writer, 8 MB for each reader), and the memory keeps about 2 KB of each fragment in RAM (`active_bytes`). So the slope of
a short run does not hold for 8 hours. Without a page it was 8.6 KB an observation in a run of 6,000, 3.5 in one of
24,000 and 2.5 in one of 80,000; after a memory of 100,000 fragments a minute of live events with a page added nothing.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import memstream
from tests.support.processes import resident_mib
from tests.support.server import ServerProcess, free_address
from tests.toolchains import browser

ROUNDS = 5
EVENTS_PER_S = 100
EVENTS_OF_8_H = 8 * 3_600
"""At one event a second."""
WORDS = [f"word{number}" for number in range(5_000)]
EVENTS_PER_OBSERVATION = 4
"""Observed, admitted, overflowed and promoted."""
SAMPLE_S = 10.0
LIVE_MIN_S = 4 * SAMPLE_S
AT_ONCE = 64
COLLECT_LAGS = """() => {
  window.lags = new Uint32Array(20_001);  // events by milliseconds of lag: the measure itself does not grow
  new MutationObserver((changes) => {
    for (const { addedNodes } of changes) {
      for (const row of addedNodes) {
        const lag = Math.round(Date.now() - Date.parse(row.querySelector("time").dateTime));
        window.lags[Math.min(20_000, Math.max(0, lag))] += 1;
      }
    }
  }).observe(document.querySelector("table.steps tbody"), { childList: true });
}"""


FIRST_ROW = """new MutationObserver((_, observer) => {
  if (!document.querySelector("SELECTOR")) return;
  window.firstRow = performance.now();
  observer.disconnect();
}).observe(document, { childList: true, subtree: true });"""


def percentile(counts: list[int], share: float) -> float:
    """The milliseconds that this share of the events does not exceed; `counts` has the events by milliseconds."""
    below, wanted = 0, share * sum(counts)
    for milliseconds, count in enumerate(counts):
        below += count
        if below >= wanted:
            return milliseconds
    return len(counts)


async def fill_server(client: memstream.Client, memories: int, fragments: int) -> None:
    """Memories bench/m-NUMBER, and bench/a-large with many fragments."""
    gate = asyncio.Semaphore(AT_ONCE)

    async def create_memory(number: int) -> None:
        async with gate:
            await client.create_memory(f"bench/m-{number:05d}", labels={"number": str(number)})

    await asyncio.gather(*(create_memory(number) for number in range(memories)))
    large = await client.create_memory("bench/a-large")
    async with large.observe("bench") as stream:
        for number in range(fragments):
            await stream.send(f"Clock {number} in tower {number % 997} struck at minute {number % 60}.")
        await stream.flush()


async def time_first_paint(chromium: Any, url: str, selector: str) -> dict[str, float]:
    """Milliseconds from the navigation: the first contentful paint, and the first row."""
    found: dict[str, list[float]] = {"first contentful paint": [], "first row": []}
    for _ in range(ROUNDS):
        context = await chromium.new_context(viewport={"width": 1280, "height": 800})
        page = await context.new_page()
        await page.add_init_script(FIRST_ROW.replace("SELECTOR", selector))
        await page.goto(url)
        await page.locator(selector).first.wait_for()
        row_ms, paint_ms = await page.evaluate(
            "() => [window.firstRow, performance.getEntriesByName('first-contentful-paint')[0]?.startTime ?? NaN]"
        )
        found["first row"].append(row_ms)
        found["first contentful paint"].append(paint_ms)
        await context.close()
    return {name: statistics.median(values) for name, values in found.items()}


async def write_events(memory: memstream.Memory, stop: asyncio.Event) -> int:
    """Observes one text at a time at the rate. Returns the number of observations."""
    draw = random.Random(7)
    period_s, began_s, count = EVENTS_PER_OBSERVATION / EVENTS_PER_S, time.monotonic(), 0
    async with memory.observe("live") as stream:
        while not stop.is_set():
            await stream.send(" ".join(draw.choices(WORDS, k=12)))
            count += 1
            await asyncio.sleep(max(0.0, began_s + count * period_s - time.monotonic()))
        await stream.flush()
    return count


async def read_heap(session: Any) -> dict[str, float]:
    """Used heap in KB after a garbage collection, and elements in the document."""
    await session.send("HeapProfiler.collectGarbage")
    used = (await session.send("Runtime.getHeapUsage"))["usedSize"]
    return {"kb": used / 1_024, "nodes": (await session.send("Memory.getDOMCounters"))["nodes"]}


def fit_slope(samples: list[dict[str, float]], name: str) -> float:
    """The growth of that figure in a second: a line through the samples after the first third."""
    settled = samples[len(samples) // 3 :]
    return statistics.linear_regression([each["at_s"] for each in settled], [each[name] for each in settled]).slope


async def measure_live(
    chromium: Any, address: str, client: memstream.Client, server_pid: int, live_s: float
) -> dict[str, float]:
    """Lag in milliseconds, and growth of the page's heap and of the server."""
    memory = await client.create_memory("bench/live")
    context = await chromium.new_context(viewport={"width": 1280, "height": 800})
    page = await context.new_page()
    await page.goto(f"http://{address}/#/m/bench/live/live")
    await page.locator("[data-state=live]").wait_for()
    session = await context.new_cdp_session(page)
    await page.evaluate(COLLECT_LAGS)
    stop = asyncio.Event()
    writing = asyncio.create_task(write_events(memory, stop))
    began_s, samples = time.monotonic(), list[dict[str, float]]()
    while time.monotonic() - began_s < live_s:
        await asyncio.sleep(min(SAMPLE_S, live_s))
        heap = await read_heap(session)
        samples.append({"at_s": time.monotonic() - began_s, **heap, "rss_mib": resident_mib(server_pid)})
    stop.set()
    observations = await writing
    elapsed_s = time.monotonic() - began_s
    lags = await page.evaluate("[...window.lags]")
    state = await page.locator(".state").text_content()
    await context.close()
    assert state == "live", state
    heap_slope, rss_slope = fit_slope(samples, "kb"), fit_slope(samples, "rss_mib")
    events_per_s = sum(lags) / elapsed_s
    return {
        "events/s": events_per_s,
        "observations": observations,
        "lag p50 ms": percentile(lags, 0.5),
        "lag p99 ms": percentile(lags, 0.99),
        "lag max ms": max(lag for lag, count in enumerate(lags) if count),
        "heap first KB": samples[0]["kb"],
        "heap last KB": samples[-1]["kb"],
        "heap KB/min": heap_slope * 60,
        "heap KB of 8 h": heap_slope * EVENTS_OF_8_H / events_per_s,
        "nodes first": samples[0]["nodes"],
        "nodes last": samples[-1]["nodes"],
        "nodes of 8 h": fit_slope(samples, "nodes") * EVENTS_OF_8_H / events_per_s,
        "server RSS first MiB": samples[0]["rss_mib"],
        "server RSS last MiB": samples[-1]["rss_mib"],
        "server RSS MiB/min": rss_slope * 60,
        "server RSS MiB of 8 h": rss_slope * EVENTS_OF_8_H / events_per_s,
    }


async def run_benchmark(memories: int, fragments: int, live_s: float) -> dict[str, dict[str, float]]:
    """All figures, by name."""
    options = browser.launch_options()
    from playwright.async_api import async_playwright  # importable from here on

    address = free_address()
    with (
        tempfile.TemporaryDirectory() as folder,
        ServerProcess(Path(folder) / "data", http_listen=address, disk_free_min_bytes=0) as server,
    ):
        async with memstream.connect(server.address) as client, async_playwright() as playwright:
            await fill_server(client, memories, fragments)
            chromium = await playwright.chromium.launch(**options)
            fragment = await anext(aiter(client.memory("bench/a-large").list_fragments()))
            views = {
                f"memories ({memories:,})": ("#/namespace/bench", "table.memories tbody tr"),
                f"browse ({fragments:,} fragments)": ("#/m/bench/a-large", "table.fragments tbody tr"),
                f"live ({fragments:,} fragments)": ("#/m/bench/a-large/live", ".card"),
                f"timeline ({fragments:,} fragments)": ("#/m/bench/a-large/timeline", ".timeline li"),
                f"a fragment's fields ({fragments:,} fragments)": (
                    f"#/m/bench/a-large/fragment/{fragment.id}",
                    ".facts",
                ),
                f"its first event ({fragments:,} fragments)": (
                    f"#/m/bench/a-large/fragment/{fragment.id}",
                    "table.steps tbody tr",
                ),
            }
            figures = {
                name: await time_first_paint(chromium, f"http://{address}/{path}", selector)
                for name, (path, selector) in views.items()
            }
            figures["live"] = await measure_live(chromium, address, client, server.pid, live_s)
            await chromium.close()
    return figures


def main() -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--memories", type=int, default=10_000)
    parser.add_argument("--fragments", type=int, default=100_000)
    parser.add_argument(
        "--live-s", type=float, default=180.0, help=f"seconds of live events, at least {LIVE_MIN_S:.0f}"
    )
    parser.add_argument("--json", type=Path, help="write the figures there")
    given = parser.parse_args()
    if given.live_s < LIVE_MIN_S:
        parser.error(f"--live-s is {given.live_s:g}: a slope needs at least {LIVE_MIN_S:.0f} seconds")
    figures = asyncio.run(run_benchmark(given.memories, given.fragments, given.live_s))
    for name, values in figures.items():
        print(f"{name}: " + ", ".join(f"{label} {value:,.1f}" for label, value in values.items()))
    if given.json:
        given.json.write_text(json.dumps(figures, indent=2), "utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
