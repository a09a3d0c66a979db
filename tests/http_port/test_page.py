"""The curl commands of docs/http.md and README.md, sent by an HTTP client, answer as documented."""

from __future__ import annotations

import re
import shlex

import httpx2
import pytest

from tests.support.pages import ROOT, find_blocks
from tests.support.server import ServerProcess

DOCUMENTED = "127.0.0.1:7701"


def send_like_curl(command: str, address: str) -> httpx2.Response:
    """Sends the request of `curl -sS URL -H HEADER -d BODY`."""
    words = shlex.split(command.replace("\\\n", " "))
    assert words[:2] == ["curl", "-sS"], words
    options = dict(zip(words[3::2], words[4::2], strict=True))
    assert options.keys() <= {"-H", "-d"}, options
    name, _, value = options["-H"].partition(": ")
    url = words[2].replace(DOCUMENTED, address)
    return httpx2.post(url, content=options["-d"].encode(), headers={name: value}, timeout=30)


@pytest.mark.parametrize("page", ["docs/http.md", "README.md"])
def test_curl_of_a_page_answers_as_documented(page: str, http_server: tuple[ServerProcess, str]) -> None:
    found = list(find_blocks((ROOT / page).read_text("utf-8"), "sh", "text"))
    commands = [index for index, block in enumerate(found) if block.code.startswith("curl")]
    assert commands
    for index in commands:
        answer = send_like_curl(found[index].code, http_server[1])
        assert answer.status_code == 200, answer.text
        expected = found[index + 1].code.strip()
        pattern = ".*".join(re.escape(part) for part in expected.split("..."))
        assert re.match(pattern, answer.text), answer.text
