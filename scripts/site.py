"""Build the site of the documents offline: `python scripts/site.py [FOLDER]` in an environment with
requirements/site.txt.

The pages stay at their place in the repository. The pages that mkdocs.yml names are copied under the same paths. Links
to anything else in the repository become its path, because the site contains only pages. `make site` runs this.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import yaml

ROOT = Path(__file__).resolve().parent.parent
CONFIG = ROOT / "mkdocs.yml"
HOME = "docs/index.md"

_FENCE = re.compile(r"^ *```.*?^ *```$", re.M | re.S)
_MARK = re.compile(r"^ *<!-- no-run: [^>]*-->\n", re.M)
_LIST = re.compile(r"^((?!- )\S.*)\n(?=- )", re.M)
"""A list directly after a paragraph: unlike GitHub, Python-Markdown needs an empty line between them."""
_LINK = re.compile(r"(?<!!)\[(?P<text>[^\]]*)\]\((?P<target>[^)\s]+)\)")


def named(nav: object) -> Iterator[str]:
    """The pages of a navigation, in order."""
    if isinstance(nav, str):
        yield nav
    elif isinstance(nav, list | dict):
        for part in nav.values() if isinstance(nav, dict) else nav:
            yield from named(part)


def stage_page(page: str, pages: set[str]) -> str:
    """A page's text for the site: the home page at the root, no links out of the site, no marks."""
    text = (ROOT / page).read_text("utf-8")
    folder = Path(page).parent

    def rewrite_link(found: re.Match[str]) -> str:
        path, _, anchor = found["target"].partition("#")
        if not path or re.match(r"[a-z]+:", path):
            return found[0]
        target = os.path.normpath(folder / path)
        if target in pages:
            place = os.path.relpath(_site_path(target), Path(_site_path(page)).parent)
            return f"[{found['text']}]({place}{'#' if anchor else ''}{anchor})"
        return found["text"] if target in found["text"] else f"{found['text']} (`{target}`)"

    def rewrite_prose(part: str) -> str:
        return _LINK.sub(rewrite_link, _LIST.sub(r"\1\n\n", _MARK.sub("", part)))

    parts, end = [], 0
    for fence in _FENCE.finditer(text):
        parts += [rewrite_prose(text[end : fence.start()]), fence[0]]
        end = fence.end()
    return "".join([*parts, rewrite_prose(text[end:])])


def _site_path(page: str) -> str:
    return "index.md" if page == HOME else page


def build_site(out: Path) -> None:
    """Build the site into `out`, which is replaced. Raises CalledProcessError on any warning."""
    config = CONFIG.read_text("utf-8")
    pages = set(named(yaml.safe_load(config)["nav"]))
    with tempfile.TemporaryDirectory() as folder:
        stage = Path(folder)
        for page in pages:
            place = stage / "pages" / _site_path(page)
            place.parent.mkdir(parents=True, exist_ok=True)
            place.write_text(stage_page(page, pages), "utf-8")
        shutil.copytree(ROOT / "docs" / "images", stage / "pages" / "docs" / "images")
        (stage / CONFIG.name).write_text(config.replace(HOME, _site_path(HOME)), "utf-8")
        subprocess.run([sys.executable, "-m", "zensical", "build", "--strict"], cwd=stage, check=True)
        shutil.rmtree(out, ignore_errors=True)
        shutil.copytree(stage / "site", out)


if __name__ == "__main__":
    build_site(Path(sys.argv[1] if len(sys.argv) > 1 else ROOT / "site").resolve())
