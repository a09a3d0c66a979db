"""The console's files, their headers, and what its caller may do."""

from __future__ import annotations

import http.client
import re
import subprocess
import sys
import zipfile
from pathlib import Path
from urllib.parse import urljoin

import httpx2
import pytest

from memstream_server.rpc.access.caller import Verb
from memstream_server.rpc.http.pages import FOLDER, read_files
from tests.access.conftest import guarded_files
from tests.http_port.test_edges import call
from tests.server.conftest import QUICK, check_log
from tests.support.local_http import NO_TLS
from tests.support.pages import ROOT
from tests.support.server import ServerProcess, free_address

Server = tuple[ServerProcess, str]
RIGHTS = "/console/rights"


def get(address: str, path: str = "/", **headers: str) -> httpx2.Response:
    given = {name.replace("_", "-"): value for name, value in headers.items()}
    return httpx2.get(f"http://{address}{path}", headers=given, timeout=30, verify=NO_TLS)


def get_as_is(address: str, path: str) -> int:
    """The status of a path that no client normalises."""
    connection = http.client.HTTPConnection(address, timeout=30)
    connection.putrequest("GET", path, skip_host=True)
    connection.putheader("Host", address)
    connection.endheaders()
    status = connection.getresponse().status
    connection.close()
    return status


def test_page_and_every_file_have_safe_headers(http_server: Server) -> None:
    address = http_server[1]
    assert "/console/views/live.js" in read_files()
    for path, file in read_files().items():
        answer = get(address, path)
        assert answer.content == file.body
        policy = answer.headers["content-security-policy"]
        assert policy.startswith("default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self';")
        for rule in ("frame-ancestors 'none'", "base-uri 'none'", "form-action 'none'", "require-trusted-types-for"):
            assert rule in policy
        assert "unsafe" not in policy
        assert answer.headers["x-content-type-options"] == "nosniff"
        assert answer.headers["x-frame-options"] == "DENY"
        assert answer.headers["referrer-policy"] == "no-referrer"
        assert answer.headers["cache-control"] == "no-cache"
        assert "access-control-allow-origin" not in answer.headers
    assert get(address, "/console/app.js").headers["content-type"].startswith("text/javascript")


def test_unchanged_file_is_not_sent_again(http_server: Server) -> None:
    first = get(http_server[1], "/console/app.js")
    again = get(http_server[1], "/console/app.js", if_none_match=first.headers["etag"])
    assert (again.status_code, again.content) == (304, b"")


@pytest.mark.parametrize(
    "path",
    [
        "/console/../pyproject.toml",
        "/console/%2e%2e/rpc/server.py",
        "/console//etc/passwd",
        "/console/views/",
        "/console/index.html",
        "/console/views/..%2fapp.js",
        "/console/app.js%00",
        "/console/..\\app.js",
    ],
)
def test_path_that_is_no_file_is_not_found(path: str, http_server: Server) -> None:
    assert get_as_is(http_server[1], path) == 404


@pytest.mark.parametrize("path", ["/", "/console/app.js", RIGHTS])
def test_foreign_host_and_page_get_no_console(path: str, http_server: Server) -> None:
    address = http_server[1]
    assert get(address, path, host="evil.example").status_code == 403
    assert get(address, path, origin="https://evil.example").status_code == 403
    assert get(address, path, origin=f"http://{address}").status_code == 200
    assert call(address, path).status_code == 405


def test_without_authentication_everything_is_allowed(http_server: Server) -> None:
    assert get(http_server[1], RIGHTS).json() == {"principal": "", "rights": [verb.value for verb in Verb]}


def test_rights_are_those_of_the_policy_file(tmp_path: Path) -> None:
    keys_file, policy_file, keys = guarded_files(tmp_path / "access")
    address = free_address()
    settings = QUICK | {"api_keys_file": str(keys_file), "access_policy_file": str(policy_file)}
    with ServerProcess(tmp_path / "data", http_listen=address, **settings) as server:
        assert get(address).status_code == 200, "the page itself has no secret: it asks for the key"
        assert get(address, RIGHTS).status_code == 401
        assert get(address, RIGHTS, authorization="Bearer nonsense").json()["code"] == "unauthenticated"
        reader = {"authorization": f"Bearer {keys['only-read']}"}
        assert get(address, f"{RIGHTS}?namespace=v", **reader).json() == {
            "principal": "key:only-read",
            "rights": ["read"],
        }
        assert get(address, f"{RIGHTS}?namespace=a", **reader).json()["rights"] == []
        everything = get(address, RIGHTS, authorization=f"Bearer {keys['root']}").json()["rights"]
        assert everything == [verb.value for verb in Verb]
        assert server.stop() == 0
        check_log(server)
        assert "permission_denied" not in server.log(), "a question about rights is no attempt"
        assert not any(key in server.log() for key in keys.values())


def test_start_prints_the_address_of_the_console(http_server: Server) -> None:
    server, address = http_server
    assert f"  http       http://{address}/ (with the console)" in server.log()


def test_console_is_off_by_its_setting(tmp_path: Path) -> None:
    address = free_address()
    with ServerProcess(tmp_path / "data", http_listen=address, console="false", http_metrics="true", **QUICK):
        assert "memstream_calls_total" in get(address, "/metrics").text, "without authentication nobody is refused"
        for path in ("/", "/console/app.js", RIGHTS):
            assert get(address, path).status_code == 404
        assert call(address).status_code == 200


def test_page_loads_its_own_modules_alone() -> None:
    """Every import and every address of the page is a file of the console."""
    files = read_files()
    for name, file in files.items():
        text = file.body.decode()
        for wanted in re.findall(r'(?m)^(?:import|export) .*from "([^"]+)";$', text):
            assert urljoin(name, wanted) in files, f"{name} imports {wanted}"
        for wanted in re.findall(r'(?:src|href)="([^"#]+)"', text):  # relative, for a proxy that adds a prefix
            assert f"/{wanted}" in files, f"{name} loads {wanted}"
        if name != "/" and name.endswith(".js"):
            assert f'href="{name[1:]}"' in files["/"].body.decode() or name == "/console/boot.js", (
                f"{name} is not preloaded"
            )
        assert not re.search(r"https?://|innerHTML|outerHTML|document\.write|eval\(|localStorage", text)
        assert name == "/console/api.js" or "sessionStorage" not in text, f"{name} keeps something"
        assert not re.search(r"\sstyle=|\son[a-z]+=\"|<script>", text), f"{name} has inline styles or handlers"


def test_wheel_contains_every_file(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "hatchling", "build", "--target", "wheel", "--directory", str(tmp_path)]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True, timeout=120)
    (wheel,) = tmp_path.glob("*.whl")
    packed = set(zipfile.ZipFile(wheel).namelist())
    own = [path.relative_to(FOLDER).as_posix() for path in FOLDER.rglob("*") if path.is_file()]
    assert len(own) == len(read_files())
    assert {f"memstream_server/console/{name}" for name in own} <= packed
