"""`make site`: it builds without a warning, its links lead somewhere, and it takes nothing from the internet."""

from __future__ import annotations

import re
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path

import pytest
import yaml

from scripts.site import CONFIG, HOME, ROOT, named
from tests.toolchains.environments import Environment
from tests.toolchains.programs import Absent

pytestmark = pytest.mark.toolchain

PAGES = list(named(yaml.safe_load(CONFIG.read_text("utf-8"))["nav"]))


class _Page(HTMLParser):
    """What a page refers to: links of the reader, assets of the browser; its anchors; and the text of paragraphs."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.links: list[str] = []
        self.assets: list[str] = []
        self.anchors: set[str] = set()
        self.paragraphs: list[str] = []
        self._open: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self._open.append(tag)
        given = {name: value for name, value in attrs if value}
        self.anchors |= {given[name] for name in ("id", "name") if name in given}
        if "href" in given:
            (self.links if tag == "a" else self.assets).append(given["href"])
        if "src" in given:
            self.assets.append(given["src"])
        if tag == "p":
            self.paragraphs.append("")

    def handle_endtag(self, tag: str) -> None:
        while tag in self._open and self._open.pop() != tag:
            pass

    def handle_data(self, data: str) -> None:
        if "p" in self._open and "code" not in self._open:
            self.paragraphs[-1] += data


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> dict[Path, _Page]:
    """The pages built, by file."""
    folder = tmp_path_factory.mktemp("site")
    try:
        Environment("site", memstream=False).run(str(ROOT / "scripts" / "site.py"), str(folder / "out"), home=folder)
    except Absent as absent:
        pytest.skip(str(absent))
    return {file: _Page(file.read_text("utf-8")) for file in (folder / "out").rglob("*.html")}


def test_every_page_is_in_the_site(site: dict[Path, _Page]) -> None:
    built = {str(file).partition("/out/")[2] for file in site}
    pages = {"index.html" if page == HOME else str(Path(page).with_suffix(".html")) for page in PAGES}
    assert {page.replace("README.html", "index.html") for page in pages} | {"404.html"} == built


def test_links_have_existing_targets(site: dict[Path, _Page]) -> None:
    def broken() -> Iterator[str]:
        for file, page in site.items():
            for link in [*page.links, *page.assets]:
                path, _, anchor = link.partition("#")
                if re.match(r"[a-z]+:", link) or file.name == "404.html":
                    continue
                target = (file.parent / path).resolve() if path else file
                anchors = site[target].anchors if target in site else set()
                if not target.exists() or (anchor and not anchor.startswith("__") and anchor not in anchors):
                    yield f"{file.name}: {link}"

    assert list(broken()) == []


def test_the_site_loads_nothing_from_the_internet(site: dict[Path, _Page]) -> None:
    assert {asset for page in site.values() for asset in page.assets if re.match(r"(https?:)?//", asset)} == set()
    # What the theme's scripts would fetch a diagram's renderer for, once a page has one.
    assert not any("mermaid" in block for file in site for block in re.findall(r'class="([^"]*)"', file.read_text()))


def test_lists_and_code_blocks_are_rendered(site: dict[Path, _Page]) -> None:
    paragraphs = [text for page in site.values() for text in page.paragraphs]
    assert len(paragraphs) > 300
    assert [text for text in paragraphs if re.search(r"^(- |\d\. |```|\|)", text, re.M)] == []
