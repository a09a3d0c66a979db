"""Make the pictures of docs/console.md: `make screenshots` runs this with Playwright and an installed Chromium.

`memstream dev` serves the letters of the demo, and a small memory with suspicions; Chromium opens the console's views.
Pictures are small enough to keep in the repository.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from playwright.sync_api import sync_playwright

ROOT = Path(__file__).resolve().parent.parent
FOLDER = ROOT / "docs" / "images"
MEMSTREAM = ROOT / ".venv" / "bin" / "memstream"
QUESTION = "Did the Great Fire delay the time signals of Chicago?"
OTHER = "When did Chicago get its time by telegraph?"
SIZE = {"width": 1100, "height": 640}
PICTURE_BYTES_MAX = 150_000


@contextmanager
def serve_letters() -> Iterator[str]:
    """The address of the console of `memstream dev`."""
    with tempfile.TemporaryDirectory() as folder:
        command = [str(MEMSTREAM), "dev", "--listen", "127.0.0.1:0", "--data", f"{folder}/data", "--json"]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None
            try:
                yield json.loads(process.stdout.readline())["console"]
            finally:
                process.terminate()


def take(page: Any, name: str) -> None:
    """Saves what the page shows. Raises AssertionError for a picture that is too large."""
    path = FOLDER / f"console-{name}.png"
    page.screenshot(path=path)
    assert path.stat().st_size < PICTURE_BYTES_MAX, f"{path} has {path.stat().st_size} bytes"


def ask(page: Any, pane: Any, question: str) -> None:
    """Asks in one pane of the recall desk."""
    pane.get_by_role("textbox", name="Query").fill(question)
    page.keyboard.press("Enter")
    pane.locator(".ranking > li").first.wait_for()


def take_all(page: Any, console: str) -> None:
    """All pictures."""
    memory = f"{console}#/m/demo/letters"
    page.set_viewport_size({"width": 1100, "height": 760})
    page.goto(f"{memory}/recall")
    ask(page, page.locator(".pane"), QUESTION)
    page.locator(".explained summary").first.click()
    page.evaluate("scrollTo(0, 0)")
    take(page, "recall")
    page.get_by_role("button", name="Compare two queries").click()
    page.set_viewport_size({"width": 1100, "height": 600})
    second = page.get_by_role("region", name="Query 2")
    ask(page, second, OTHER)
    first = page.get_by_role("region", name="Query 1")
    for pane in (first, second):
        pane.get_by_label("Limit").fill("3")
        pane.get_by_role("button", name="Recall").click()
        pane.locator(".ranking > li").nth(3).wait_for(state="detached")
    page.evaluate("scrollTo(0, 0)")
    take(page, "compare")
    page.set_viewport_size(SIZE)
    page.goto(memory)
    page.locator("[data-state=live]").wait_for()
    page.locator("table.steps tbody tr").nth(3).wait_for()
    take(page, "live")
    page.goto(f"{memory}/conflicts")
    page.locator("ol.conflicts > li").nth(1).wait_for()
    take(page, "conflicts")
    page.goto(f"{memory}/timeline")
    page.locator(".timeline li").first.wait_for()
    take(page, "timeline")
    page.goto(f"{console}#/server")
    page.locator(".view:not([aria-busy])").wait_for()
    page.locator(".facts").first.wait_for()
    take(page, "server")
    page.emulate_media(color_scheme="dark")
    page.goto(memory)
    page.locator("table.steps tbody tr").nth(3).wait_for()
    fragment = page.locator("[data-tier=shortTerm] .card", has_text="enhanced").first
    fragment.get_by_role("link").first.click()
    page.get_by_text("events, among").wait_for()
    take(page, "fragment-dark")


def main() -> int:
    """Take the pictures; returns the exit code."""
    chromium = shutil.which("chromium")
    if chromium is None:
        print("screenshots: chromium is not installed (Debian: apt-get install chromium)", file=sys.stderr)
        return 1
    FOLDER.mkdir(exist_ok=True)
    arguments = ["--no-sandbox"] if os.geteuid() == 0 else []  # Chromium's sandbox refuses to run as root
    with serve_letters() as console, sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, args=arguments)
        page = browser.new_page(viewport=SIZE, locale="en-US", timezone_id="UTC")
        take_all(page, console)
        browser.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
