"""Checks deploy/ without the chart, with the programs that read it. test_mesh.py also runs Envoy's part."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from memstream_server.cli.group import COMMANDS
from memstream_server.settings import load, unknown_variables
from tests.toolchains import deploying
from tests.toolchains.environments import ROOT
from tests.toolchains.front import write_certificates
from tests.toolchains.programs import Absent, run

pytestmark = pytest.mark.toolchain

DEPLOY = ROOT / "deploy"
OF_ACCESS = {"MEMSTREAM_INSECURE_LISTEN", "MEMSTREAM_TLS_CERT_FILE", "MEMSTREAM_TLS_KEY_FILE"}
"""Settings of servers that listen beyond loopback."""


def find_or_skip(get: Any, *arguments: str) -> Path:
    """Returns a program, or skips the test with the reason."""
    try:
        found: Path = get(*arguments)
    except Absent as absent:
        pytest.skip(str(absent))
    return found


# ---- the image


def test_the_dockerfile_passes_hadolint() -> None:
    run(find_or_skip(deploying.find_tool, "hadolint"), DEPLOY / "Dockerfile")


def test_the_dockerfile_copies_enough_to_build_memstream(tmp_path: Path) -> None:
    """Runs its build stage up to the wheel with only the files that it copies."""
    text = (DEPLOY / "Dockerfile").read_text("utf-8")
    ignored = (DEPLOY / "Dockerfile.dockerignore").read_text("utf-8").splitlines()
    allowed = {line[1:] for line in ignored if line.startswith("!")}
    for sources in re.findall(r"^COPY (?!--from)(.+) \S+$", text, re.M):
        for source in sources.split():
            assert source in allowed, f"{source} is ignored"
            target = tmp_path / source
            target.parent.mkdir(parents=True, exist_ok=True)
            if (ROOT / source).is_dir():
                shutil.copytree(ROOT / source, target, ignore=shutil.ignore_patterns("__pycache__"))
            else:
                shutil.copy(ROOT / source, target)
    pip = ("-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation", "--wheel-dir", tmp_path / "dist")
    run(find_or_skip(deploying.find_tool, "python"), *pip, tmp_path)
    (wheel,) = (tmp_path / "dist").glob("memstream-*.whl")
    assert wheel.stat().st_size > 100_000
    locked = (ROOT / "requirements/server.txt").read_text("utf-8")
    for needed in ("hatchling", "psycopg-binary", "opentelemetry-sdk", "pymilvus"):
        assert re.search(rf"^{needed}==", locked, re.M), needed
    assert re.search(r"^USER 10001", text, re.M)
    program, command = json.loads(re.findall(r"HEALTHCHECK (?:.*\n)*? +CMD (\[.*\])", text)[0])
    assert (program, command in COMMANDS) == (json.loads(re.findall(r"^ENTRYPOINT (.*)", text, re.M)[0])[0], True)


# ---- compose


def test_compose_has_valid_settings_of_the_server(monkeypatch: pytest.MonkeyPatch) -> None:
    compose = yaml.safe_load((DEPLOY / "compose.yaml").read_text("utf-8"))
    server = compose["services"]["server"]
    assert (DEPLOY / server["build"]["context"] / server["build"]["dockerfile"]).exists()
    assert server["read_only"]
    password = "p@ss/w:o#r?d"
    for name, value in server["environment"].items():
        monkeypatch.setenv(name, re.sub(r"\$\{POSTGRES_PASSWORD:[^}]*\}", password, value))
    assert set(unknown_variables(server["environment"])) <= OF_ACCESS
    settings = load()
    assert float(server["stop_grace_period"].rstrip("s")) > settings.drain_grace_s + 10
    conninfo = pytest.importorskip("psycopg.conninfo").conninfo_to_dict(settings.journal_url.get_secret_value())
    assert conninfo == {"host": "postgres", "port": "5432", "user": "memstream", "dbname": "memstream"}
    assert os.environ["PGPASSWORD"] == password
    assert settings.milvus_uri == "http://milvus:19530"
    assert (settings.http_listen, settings.console) == ("0.0.0.0:7701", True)
    assert "127.0.0.1:7701:7701" in [port.split("  ")[0] for port in server["ports"]]
    for name, service in compose["services"].items():
        assert "healthcheck" in service or name == "server"  # the server's image has one
        assert all(port.startswith("127.0.0.1:") for port in service.get("ports", ()))


def test_compose_accepts_its_file() -> None:
    docker = shutil.which("docker")
    if docker is None or subprocess.run([docker, "compose", "version"], capture_output=True, check=False).returncode:
        pytest.skip("docker compose is not installed")
    command = (docker, "compose", "--file", DEPLOY / "compose.yaml", "config", "--quiet")
    run(*command, POSTGRES_PASSWORD="secret")
    without = {name: value for name, value in os.environ.items() if name != "POSTGRES_PASSWORD"}
    refused = subprocess.run(list(map(str, command)), env=without, capture_output=True, text=True, check=False)
    assert refused.returncode, "it starts without a password"


# ---- systemd


def test_unit_starts_a_server_with_valid_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    unit = (DEPLOY / "systemd/memstream.service").read_text("utf-8")
    given = re.findall(r"^Environment=(\w+)=(.*)$", unit, re.M)
    assert unknown_variables(dict(given)) == []
    for name, value in given:
        monkeypatch.setenv(name, value)
    settings = load()
    assert settings.data_dir == Path("/var/lib") / re.findall(r"^StateDirectory=(.*)$", unit, re.M)[0]
    (command,) = re.findall(r"^ExecStart=/opt/memstream/bin/memstream (\w+)$", unit, re.M)
    assert command in COMMANDS
    assert int(re.findall(r"^TimeoutStopSec=(\d+)$", unit, re.M)[0]) > 2 * settings.drain_grace_s + 10


def test_systemd_accepts_its_unit(tmp_path: Path) -> None:
    analyze = shutil.which("systemd-analyze")
    if analyze is None:
        pytest.skip("systemd-analyze is not installed")
    text = (DEPLOY / "systemd/memstream.service").read_text("utf-8")
    unit = tmp_path / "memstream.service"
    unit.write_text(text.replace("/opt/memstream/bin/memstream", shutil.which("true") or "/bin/true"), "utf-8")
    done = subprocess.run([analyze, "verify", str(unit)], capture_output=True, text=True, check=False)
    assert "memstream.service" not in done.stderr, done.stderr
    assert done.returncode == 0, done.stderr


# ---- Prometheus


def test_every_expression_is_valid_promql() -> None:
    board = json.loads((DEPLOY / "grafana/memstream.json").read_text("utf-8"))
    rules = yaml.safe_load((DEPLOY / "prometheus/alerts.yaml").read_text("utf-8"))
    asked = [target["expr"] for panel in board["panels"] for target in panel["targets"]]
    asked = [one.replace("$__rate_interval", "5m").replace("$instance", ".*") for one in asked]
    asked += [rule["expr"] for group in rules["groups"] for rule in group["rules"]]
    program = "import json, sys, promql_parser\nfor one in json.load(sys.stdin): promql_parser.parse(one)"
    run(find_or_skip(deploying.find_tool, "python"), "-c", program, stdin=json.dumps(asked))


# ---- Envoy


@pytest.mark.parametrize("name", ["envoy.yaml", "browsers.yaml", "console.yaml"])
def test_envoy_accepts_its_configuration(name: str, tmp_path: Path) -> None:
    envoy = find_or_skip(deploying.find_envoy)
    deploying.write_descriptors()
    write_certificates(tmp_path)
    written = tmp_path / name
    text = (DEPLOY / "envoy" / name).read_text("utf-8")
    for place, file in (("tls.crt", "server.pem"), ("tls.key", "server.key")):
        text = text.replace(f"/etc/envoy/tls/{place}", str(tmp_path / file))
    written.write_text(text, "utf-8")
    base = ("--base-id", str(os.getpid() % 10_000))
    run(envoy, "--mode", "validate", "--config-path", written, *base, cwd=ROOT)
