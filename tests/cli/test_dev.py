"""`memstream dev`: a server with the letters, and commands that work as it prints them."""

from __future__ import annotations

import asyncio
import contextlib
import json
import shlex
import signal
import socket
from collections.abc import Iterator
from pathlib import Path

import httpx2
import pytest

from memstream.local_files import Directory
from tests.cli.commands import call, environment, run
from tests.support.forked import ForkedProgram
from tests.support.journals import only_sqlite
from tests.support.waiting import until

pytestmark: pytest.MarkDecorator = only_sqlite("`memstream dev` keeps its memory in a directory")


def test_printed_commands_work_until_ctrl_c(tmp_path: Path) -> None:
    data = tmp_path / "data"
    words = ["dev", "--listen", "127.0.0.1:0", "--data", str(data)]
    with ForkedProgram(words, environment()) as process:
        lines = []
        while not lines or "Ctrl-C" not in lines[-1]:
            lines.append(process.stdout.readline())
            assert lines[-1], lines
        address = lines[1].split()[3].rstrip(",")
        console = next(line for line in lines if line.strip().startswith("console")).split()[1]
        assert "<title>memstream</title>" in httpx2.get(console, timeout=30).text
        recalling = shlex.split(next(line for line in lines if line.strip().startswith("memstream recall")))
        recalled = call(*recalling[1:])
        assert "delayed by the Great Fire" in " ".join(recalled.stdout.split()), recalled.stderr
        text = "".join(lines)
        host = json.loads(text[text.index("{") : text.rindex("}") + 1])
        assert host["mcpServers"]["memory"]["args"] == ["mcp", "--target", address, "--memory", "demo/letters"]
        process.send_signal(signal.SIGINT)
        assert process.wait(60) == 0
    assert not Directory(data).is_served()


def test_json_is_one_line_with_address_and_host_entry(tmp_path: Path) -> None:
    words = ["dev", "--listen", "127.0.0.1:0", "--data", str(tmp_path / "data"), "--json"]
    with ForkedProgram(words, environment()) as process:
        described = json.loads(process.stdout.readline())
        assert described["letters"] == 1_342
        assert httpx2.get(described["console"], timeout=30).status_code == 200
        assert described["address"] in described["mcpServers"]["memory"]["args"]
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0


def test_two_at_once_have_a_console_each(tmp_path: Path) -> None:
    """Both find the default port free; one gets it."""
    words = ["dev", "--listen", "127.0.0.1:0", "--json", "--data"]
    with (
        ForkedProgram([*words, str(tmp_path / "one")], environment()) as one,
        ForkedProgram([*words, str(tmp_path / "other")], environment()) as other,
    ):
        consoles = [json.loads(process.stdout.readline())["console"] for process in (one, other)]
        assert [httpx2.get(console, timeout=30).status_code for console in consoles] == [200, 200]
        assert consoles[0] != consoles[1]


def test_taken_http_port_is_the_last_line_of_the_log(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        words = ("serve", "--listen", "127.0.0.1:0", "--data", str(tmp_path / "data"), "--http-listen", address)
        done = run(*words)
    assert done.returncode == 1
    assert f"cannot listen at {address}" in done.stderr.splitlines()[-1]
    assert "Traceback" not in done.stderr


def test_serve_says_that_its_port_is_in_use(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        words = ("serve", "--data", str(tmp_path / "data"), "--http-listen", "")
        done = run(*words, "--listen", address)
        metrics = run(*words, "--listen", "127.0.0.1:0", "--metrics-listen", address)
    assert (done.returncode, metrics.returncode) == (1, 1)
    assert done.stderr.endswith(f"cannot listen at {address}: Address already in use\n")
    assert metrics.stderr.endswith(f"cannot listen at {address} (metrics_listen): Address already in use\n")


def test_dev_takes_another_port_for_a_taken_one(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        words = ["dev", "--listen", address, "--data", str(tmp_path / "data"), "--json"]
        with ForkedProgram(words, environment()) as process:
            described = json.loads(process.stdout.readline())
            own = described["address"]
            assert own != address
            assert f"{address} is in use, perhaps by another server: this one is at {own}" in process.stderr.readline()
            assert call("info", "--json", target=own).returncode == 0
            process.send_signal(signal.SIGTERM)
            assert process.wait(60) == 0


@contextlib.contextmanager
def hold_port(port: int) -> Iterator[None]:
    """Listens there, as soon as any server of another test has left."""

    async def listen() -> socket.socket | None:
        with contextlib.suppress(OSError):
            return socket.create_server(("127.0.0.1", port))
        return None

    with asyncio.run(until(listen)):
        yield


def test_serve_takes_another_http_port_than_a_taken_default(tmp_path: Path) -> None:
    with hold_port(7701):
        words = ["serve", "--listen", "127.0.0.1:0", "--data", str(tmp_path / "data")]
        with ForkedProgram(words, environment()) as process:
            url = ""
            while not url:
                line = process.stdout.readline()
                assert line
                url = line.split()[1] if line.strip().startswith("http ") else ""
            assert not url.endswith(":7701/")
            assert httpx2.get(f"{url}healthz", timeout=30).text == "ok\n"
            process.send_signal(signal.SIGTERM)
            assert process.wait(60) == 0


def test_address_that_is_none_is_misuse() -> None:
    done = call("dev", "--listen", "nowhere")
    assert (done.returncode, done.stderr) == (
        2,
        "memstream: --listen: must be host:port with a port of 0 to 65535, is 'nowhere'\n",
    )
