"""The console behind nginx, below a prefix that nginx removes from what it forwards."""

from __future__ import annotations

import contextlib
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

import memstream
from tests.server.conftest import QUICK, check_log
from tests.support.server import ServerProcess, free_address
from tests.toolchains import browser
from tests.toolchains.programs import Absent, install_packages

pytestmark = pytest.mark.toolchain

PREFIX = "/team/memory/"
CONFIGURATION = """
daemon off;
pid {folder}/nginx.pid;
error_log stderr;
events {{}}
http {{
  access_log off;
  client_body_temp_path {folder}/body;
  proxy_temp_path {folder}/proxy;
  fastcgi_temp_path {folder}/fastcgi;
  uwsgi_temp_path {folder}/uwsgi;
  scgi_temp_path {folder}/scgi;
  server {{
    listen {address};
    location = /team/memory {{ return 301 {prefix}; }}
    location {prefix} {{
      proxy_pass http://{target}/;
      proxy_set_header Host $http_host;
      proxy_http_version 1.1;
      proxy_buffering off;
    }}
  }}
}}
"""


def wait_for_listener(address: str) -> None:
    """Raises AssertionError after a generous deadline."""
    host, port = address.split(":")
    for _ in range(1_500):
        with contextlib.suppress(OSError), socket.create_connection((host, int(port)), timeout=1):
            return
        time.sleep(0.02)
    raise AssertionError(f"nothing listens at {address}")


@pytest.fixture
def proxied(tmp_path: Path) -> Iterator[tuple[ServerProcess, str]]:
    """A server, and host:port of the nginx in front of its HTTP port."""
    try:
        if shutil.which("nginx") is None:
            install_packages("nginx", "nginx-light")
    except Absent as absent:
        pytest.skip(str(absent))
    target, address = free_address(), free_address()
    file = tmp_path / "nginx.conf"
    file.write_text(CONFIGURATION.format(folder=tmp_path, address=address, prefix=PREFIX, target=target))
    with ServerProcess(tmp_path / "data", http_listen=target, **QUICK) as server:
        nginx = subprocess.Popen(["nginx", "-p", str(tmp_path), "-c", str(file)])
        try:
            wait_for_listener(address)
            yield server, address
        finally:
            nginx.terminate()
            nginx.wait()
        assert server.stop() == 0
    check_log(server)


async def test_console_works_below_a_prefix(proxied: tuple[ServerProcess, str]) -> None:
    server, address = proxied
    try:
        options = browser.launch_options()
    except Absent as absent:
        pytest.skip(str(absent))
    from playwright.async_api import async_playwright

    async with memstream.connect(server.address) as client:
        await (await client.create_memory("shop/joy")).observe_batch(["The key is under the mat."])
    requested: list[str] = []
    async with async_playwright() as playwright:
        chromium = await playwright.chromium.launch(**options)
        page = await chromium.new_page()
        page.on("request", lambda request: requested.append(request.url))
        await page.goto(f"http://{address}/team/memory")
        await page.get_by_role("link", name="joy", exact=True).wait_for()
        await page.evaluate("location.hash = '#/m/shop/joy/live'")
        await page.get_by_text("The key is under the mat.").first.wait_for()
        await page.evaluate("location.hash = '#/m/shop/joy/recall'")
        await page.get_by_label("Query", exact=True).fill("Where is the key?")
        await page.get_by_role("button", name="Recall", exact=True).click()
        await page.get_by_text("The key is under the mat.").first.wait_for()
        await chromium.close()
    assert any(url.endswith("StreamService/Watch") for url in requested)
    outside = [url for url in requested if not url.startswith(f"http://{address}{PREFIX[:-1]}")]
    assert outside == []
