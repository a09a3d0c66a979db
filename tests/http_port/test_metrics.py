"""Metrics on the HTTP port: off by default, and for callers with the right to them."""

from __future__ import annotations

from pathlib import Path

from tests.access.conftest import guarded_files
from tests.http_port.test_console import get
from tests.http_port.test_edges import CREATE, call
from tests.server.conftest import QUICK, check_log
from tests.support.server import ServerProcess, free_address

METRICS = "/metrics"


def test_metrics_are_off_by_default(http_server: tuple[ServerProcess, str]) -> None:
    assert get(http_server[1], METRICS).status_code == 404


def test_metrics_need_the_right_admin_of_the_whole_server(tmp_path: Path) -> None:
    keys_file, policy_file, keys = guarded_files(tmp_path / "access")
    address = free_address()
    settings = QUICK | {"api_keys_file": str(keys_file), "access_policy_file": str(policy_file)}
    with ServerProcess(tmp_path / "data", http_listen=address, http_metrics="true", **settings) as server:
        root = {"authorization": f"Bearer {keys['root']}"}
        body = '{"namespace": "a", "memory": "joy"}'
        assert call(address, CREATE, body, authorization=f"Bearer {keys['alice']}").status_code == 200
        assert get(address, METRICS).status_code == 401
        assert get(address, METRICS, authorization="Bearer nonsense").json()["code"] == "unauthenticated"
        for name in keys.keys() - {"root"}:
            refused = get(address, METRICS, authorization=f"Bearer {keys[name]}")
            assert (refused.status_code, refused.json()["code"]) == (403, "permission_denied"), name
            assert "memstream_" not in refused.text
        answer = get(address, METRICS, **root)
        assert answer.headers["content-type"].startswith("text/plain; version=")
        assert answer.headers["cache-control"] == "no-store"
        assert 'memstream_calls_total{code="OK",rpc="CreateMemory"} 1.0\n' in answer.text
        openmetrics = get(address, METRICS, accept="application/openmetrics-text; version=1.0.0", **root)
        assert openmetrics.text.endswith("# EOF\n")
        assert call(address, METRICS, **root).status_code == 405
        assert get(address, METRICS, host="evil.example", **root).status_code == 403
        assert get(address, METRICS, origin="https://evil.example", **root).status_code == 403
        assert server.stop() == 0
        check_log(server)
        assert not any(key in server.log() for key in keys.values())
