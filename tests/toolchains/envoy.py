"""Envoy in front of servers, with a file of deploy/envoy/: other ports, and endpoints that may change."""

from __future__ import annotations

import json
import os
import subprocess
import urllib.request
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import yaml

from tests.support.server import free_address
from tests.toolchains.environments import ROOT


def _socket(address: str) -> dict[str, Any]:
    host, _, port = address.rpartition(":")
    return {"socket_address": {"address": host, "port_value": int(port)}}


def _with_mutual_tls(configuration: dict[str, Any], certificates: Path) -> None:
    """Adds the parts of deploy/envoy/mtls.yaml; the folder `certificates` has tls.crt, tls.key and ca.crt."""
    text = (ROOT / "deploy/envoy/mtls.yaml").read_text("utf-8").replace("/etc/envoy/tls/", f"{certificates}/")
    parts = yaml.safe_load(text)
    resources = configuration["static_resources"]
    chain = resources["listeners"][0]["filter_chains"][0]
    chain |= parts["filter_chain"]
    chain["filters"][0]["typed_config"] |= parts["connection_manager"]
    resources["clusters"][0] |= parts["cluster"]


def tolerate_pauses(configuration: dict[str, Any]) -> None:
    """A change: Envoy waits a minute for the answer to a ping or a health check, not 1 or 2 s.

    A busy machine may stop a server for longer, and its calls would fail or go to another server.
    """
    cluster = configuration["static_resources"]["clusters"][0]
    (options,) = cluster["typed_extension_protocol_options"].values()
    options["explicit_http_config"]["http2_protocol_options"]["connection_keepalive"]["timeout"] = "60s"
    for check in cluster.get("health_checks", ()):
        check["timeout"] = "60s"


class Envoy:
    """A running Envoy; clients connect to `address`. With `certificates` (a folder) it accepts only mutual TLS."""

    def __init__(
        self,
        program: Path,
        folder: Path,
        servers: Sequence[str],
        certificates: Path | None = None,
        configured: str = "envoy.yaml",
        change: Callable[[dict[str, Any]], None] = lambda _: None,
    ) -> None:
        """`change` may change the configuration: shorten a time, or leave an option out."""
        self.address, self._admin = free_address(), free_address()
        self._folder = folder
        configuration = yaml.safe_load((ROOT / "deploy/envoy" / configured).read_text("utf-8"))
        configuration["admin"]["address"] = _socket(self._admin)
        configuration["node"] = {"id": "test", "cluster": "test"}
        configuration["static_resources"]["listeners"][0]["address"] = _socket(self.address)
        if certificates is not None:
            _with_mutual_tls(configuration, certificates)
        cluster = configuration["static_resources"]["clusters"][0]
        del cluster["load_assignment"]
        source = {"path_config_source": {"path": str(folder / "endpoints.json")}, "resource_api_version": "V3"}
        cluster |= {"type": "EDS", "eds_cluster_config": {"eds_config": source}}
        change(configuration)
        (folder / "envoy.yaml").write_text(yaml.safe_dump(configuration), "utf-8")
        self.set_servers(servers)
        with (folder / "envoy.log").open("wb") as log:
            self._process = subprocess.Popen(
                [str(program), "--config-path", str(folder / "envoy.yaml"), "--disable-hot-restart"],
                cwd=ROOT,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._process.kill()
        self._process.wait(30)

    def set_servers(self, servers: Sequence[str]) -> None:
        """Sets the servers to which Envoy sends calls."""
        endpoints = [{"endpoint": {"address": _socket(one)}} for one in servers]
        assignment = {
            "@type": "type.googleapis.com/envoy.config.endpoint.v3.ClusterLoadAssignment",
            "cluster_name": "memstream",
            "endpoints": [{"lb_endpoints": endpoints}],
        }
        part = self._folder / "endpoints.json.part"
        part.write_text(json.dumps({"version_info": "1", "resources": [assignment]}), "utf-8")
        os.replace(part, self._folder / "endpoints.json")  # Envoy reads the file when it is replaced

    def _read_admin(self, path: str) -> dict[str, Any]:
        """Raises OSError while Envoy starts: it has servers before it listens."""
        body = b""
        for each in ("ready", path):
            with urllib.request.urlopen(f"http://{self._admin}/{each}", timeout=10) as answer:
                body = answer.read()
        read: dict[str, Any] = json.loads(body)
        return read

    def read_counters(self) -> dict[str, int]:
        """Envoy's counters and gauges of the servers, by name without the cluster's; empty while Envoy starts."""
        try:
            stats = self._read_admin("stats?format=json&filter=cluster.memstream")["stats"]
        except OSError:
            return {}
        return {one["name"].removeprefix("cluster.memstream."): one["value"] for one in stats if "value" in one}

    def healthy_servers(self) -> set[str]:
        """Returns the addresses of the healthy servers; empty while Envoy starts."""
        assert self._process.poll() is None, (self._folder / "envoy.log").read_text("utf-8")[-3_000:]
        try:
            clusters = self._read_admin("clusters?format=json")["cluster_statuses"]
        except OSError:
            return set()
        hosts = [host for each in clusters for host in each.get("host_statuses", ())]
        return {
            f"{at['address']}:{at['port_value']}"
            for host in hosts
            if host.get("health_status", {}).get("eds_health_status") == "HEALTHY"
            and not host["health_status"].get("failed_active_health_check")
            for at in [host["address"]["socket_address"]]
        }
