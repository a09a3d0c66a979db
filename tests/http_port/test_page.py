"""The curl commands of docs/http.md and README.md, sent by an HTTP client, answer as documented."""

from __future__ import annotations

import itertools
import re
import shlex

import httpx2
import pytest

from tests.support.local_http import NO_TLS
from tests.support.pages import ROOT, find_blocks
from tests.support.server import ServerProcess

DOCUMENTED = "127.0.0.1:7701"


def send_like_curl(command: str, address: str) -> tuple[int, str]:
    """Sends the request of `curl -sS URL -H HEADER -d BODY`; of a stream (-N) reads the first event. (status, text)."""
    words = shlex.split(command.replace("\\\n", " "))
    assert words[:2] in (["curl", "-sS"], ["curl", "-sSN"]), words
    options = list(zip(words[3::2], words[4::2], strict=True))
    assert {name for name, _ in options} <= {"-H", "-d"}, options
    headers = dict(value.split(": ", 1) for name, value in options if name == "-H")
    body = dict(options)["-d"].encode()
    url = words[2].replace(DOCUMENTED, address)
    with httpx2.stream("POST", url, content=body, headers=headers, timeout=30, verify=NO_TLS) as answer:
        if words[1] == "-sSN":
            return answer.status_code, "\n".join(itertools.takewhile(bool, answer.iter_lines()))
        return answer.status_code, answer.read().decode()


@pytest.mark.parametrize("page", ["docs/http.md", "README.md"])
def test_curl_of_a_page_answers_as_documented(page: str, http_server: tuple[ServerProcess, str]) -> None:
    found = list(find_blocks((ROOT / page).read_text("utf-8"), "sh", "text"))
    commands = [index for index, block in enumerate(found) if block.code.startswith("curl")]
    assert commands
    for index in commands:
        status, text = send_like_curl(found[index].code, http_server[1])
        assert status == 200, text
        expected = found[index + 1].code.strip()
        pattern = ".*".join(re.escape(part) for part in expected.split("..."))
        assert re.match(pattern, text, re.DOTALL), text
