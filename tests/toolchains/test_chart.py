"""The Helm chart: every mode is valid, loads in a server, and has safe pods, secrets and routes."""

from __future__ import annotations

import json
import re
import shutil
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml

from memstream.v1 import server_service_pb2, stream_service_pb2
from memstream_server.observability import PROBES
from memstream_server.rpc.access.keys import name_of, parse_keys
from memstream_server.rpc.access.policy import parse_policy
from memstream_server.rpc.pipeline import ROUTING_KEY
from tests.toolchains import charts, deploying
from tests.toolchains.charts import (
    CHART,
    KUBERNETES,
    STORES,
    Container,
    find_object,
    find_workload,
    load_settings,
    needs_helm,
    render_objects,
    without_settings,
)
from tests.toolchains.environments import ROOT
from tests.toolchains.programs import Absent, run

__all__ = ["needs_helm", "without_settings"]  # fixtures

pytestmark = pytest.mark.toolchain

MESH = {"tls": {"enabled": False}, "access": {"enabled": False}, "insecureListen": True}
MODES: dict[str, dict[str, Any]] = {
    "no values": {},
    "single, everything": {
        "persistence": {"existingClaim": "claim"},
        "image": {"tag": "1.10", "pullSecrets": [{"name": "registry"}]},
        "tls": {"existingSecret": "certificate", "clientCA": {"existingConfigMap": "clients"}},
        "access": {
            "apiKeys": {"existingSecret": "keys"},
            "policy": {"existingConfigMap": "policy"},
            "jwt": {"issuer": "https://issuer", "audience": "memstream", "jwks": {"existingSecret": "jwks"}},
            "trustedProxies": ["10.0.0.0/8", "unix"],
        },
        "http": {
            "port": 80,
            "hosts": ["memory.internal"],
            "corsOrigins": ["https://app.example"],
            "from": [{"namespaceSelector": {"matchLabels": {"name": "ingress"}}}],
            "ingress": {
                "enabled": True,
                "className": "nginx",
                "annotations": {"nginx.ingress.kubernetes.io/backend-protocol": "HTTPS"},
                "host": "memory.example",
                "tlsSecret": "public",
            },
        },
        "extraEnv": [{"name": "OTEL_SERVICE_NAME", "value": "memory"}],
        "extraVolumes": [{"name": "models", "persistentVolumeClaim": {"claimName": "models"}}],
        "extraVolumeMounts": [{"name": "models", "mountPath": "/models", "readOnly": True}],
        "ipv6": True,
    },
    "replicated": {"mode": "replicated", **STORES},
    "replicated, everything": {
        "mode": "replicated",
        "replicas": 7,
        "journal": {"url": "postgresql://memstream:p%40ss@db/memstream"},
        "milvus": {"uri": "https://zilliz", "token": "root:$(POD_IP)$$"},
        "tls": {
            "existingSecret": "certificate",
            "peerName": "memory.example",
            "peerCA": {"inline": "PEM"},
            "clientCA": {"inline": "PEM"},
        },
        "access": {
            "policy": {"inline": "[[grant]]\nwho = ['key:admin']\nnamespaces = ['*']\nverbs = ['read']\n"},
            "jwt": {"issuer": "https://issuer", "audience": "memstream", "jwks": {"inline": '{"keys": []}'}},
        },
        "peerSecret": {"existingSecret": "peers"},
        "metrics": {"port": 9900, "from": [{"namespaceSelector": {"matchLabels": {"name": "monitoring"}}}]},
        "networkPolicy": {
            "from": [{"podSelector": {"matchLabels": {"app": "agent"}}}],
            "egress": [{"to": [{"podSelector": {"matchLabels": {"app": "postgres"}}}], "ports": [{"port": 5432}]}],
        },
        "podAnnotations": {"a": "b"},
        "nodeSelector": {"disk": "fast"},
        "tolerations": [{"key": "memory", "operator": "Exists", "tolerationSeconds": 10_000_000}],
        "resources": {"limits": {"memory": 4294967296}},
    },
    "mesh": {"mode": "replicated", "istio": {"enabled": True}, **STORES, **MESH},
    "no policies": {"networkPolicy": {"enabled": False}, "http": {"enabled": False}, **MESH},
}
GIVEN = {
    "database/journal-url": "postgresql://memstream@db/memstream",
    "certificate/tls.crt": "PEM",
    "certificate/tls.key": "PEM",
    "certificate/ca.crt": "PEM",
    "clients/ca.crt": "PEM",
    "keys/keys.json": "",
    "policy/policy.toml": "",
    "jwks/jwks.json": "{}",
    "peers/peer-secret": "thirty-two characters or a few more",
}
"""Secrets and ConfigMaps that MODES name."""


# ---- what the chart makes


def test_the_chart_passes_helm_lint() -> None:
    done = charts.helm("lint", "--strict", CHART)
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize("mode", MODES)
def test_objects_match_the_schemas_of_kubernetes(mode: str, tmp_path: Path) -> None:
    """Against Kubernetes' own schemas, strictly: an unknown field is an error. Istio's are not among them."""
    objects = [one for one in render_objects(MODES[mode], tmp_path) if "istio" not in one["apiVersion"]]
    names = [(one["kind"], one["metadata"]["name"]) for one in objects]
    assert len(names) == len(set(names))
    file = tmp_path / "objects.yaml"
    file.write_text(yaml.safe_dump_all(objects), "utf-8")
    try:
        validate = deploying.find_tool("kubernetes-validate")
    except Absent as absent:
        pytest.skip(str(absent))
    run(validate, "--strict", "--kubernetes-version", KUBERNETES, file)


@pytest.mark.parametrize("mode", MODES)
def test_a_server_loads_the_settings_of_each_mode(mode: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    objects = render_objects(MODES[mode], tmp_path)
    container = Container(objects, GIVEN)
    settings = load_settings(container, monkeypatch)
    replicated = MODES[mode].get("mode") == "replicated"
    assert find_workload(objects)["kind"] == ("Deployment" if replicated else "StatefulSet")
    assert find_workload(objects)["spec"]["replicas"] == (MODES[mode].get("replicas", 3) if replicated else 1)
    assert bool(settings.milvus_uri and settings.journal_url.get_secret_value() and settings.advertise) == replicated
    assert settings.insecure_listen == ("insecureListen" in MODES[mode])
    mounted = container.settings(tmp_path)
    for name in ("tls_cert_file", "tls_client_ca_file", "tls_peer_ca_file", "api_keys_file", "access_policy_file"):
        assert name not in mounted or Path(mounted[name]).exists()


@pytest.mark.parametrize("mode", MODES)
def test_pods_stop_in_order_with_few_privileges(mode: str, tmp_path: Path) -> None:
    objects = render_objects(MODES[mode], tmp_path)
    container = Container(objects, GIVEN)
    server, environment = container.server, container.environment()
    assert server["args"] == ["serve"]
    assert container.pod["securityContext"]["runAsNonRoot"]
    assert server["securityContext"] == {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }
    waits = server["lifecycle"]["preStop"]["sleep"]["seconds"] + float(environment["MEMSTREAM_DRAIN_GRACE_S"])
    assert container.pod["terminationGracePeriodSeconds"] >= waits + 10
    writable = {each["mountPath"] for each in server["volumeMounts"] if not each.get("readOnly")}
    assert writable == {"/data", "/tmp"}
    volumes = {each["name"] for each in container.pod["volumes"]}
    claims = find_workload(objects)["spec"].get("volumeClaimTemplates", [])
    assert {each["name"] for each in server["volumeMounts"]} == volumes | {each["metadata"]["name"] for each in claims}
    ports = {each["name"]: each["containerPort"] for each in server["ports"]}
    for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
        assert server[probe]["httpGet"]["port"] == "metrics"
        assert server[probe]["httpGet"]["path"] in PROBES
    assert environment["MEMSTREAM_METRICS_LISTEN"].endswith(f":{ports['metrics']}")
    assert environment["MEMSTREAM_LISTEN"].endswith(f":{ports['grpc']}")
    selector = find_workload(objects)["spec"]["selector"]["matchLabels"]
    labels = find_workload(objects)["spec"]["template"]["metadata"]["labels"]
    assert selector.items() <= labels.items()
    for name in ("memory", "memory-peers"):
        assert find_object(objects, "Service", name)["spec"]["selector"] == selector


@pytest.mark.parametrize("mode", MODES)
def test_http_port_leads_from_service_to_server(mode: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    objects = render_objects(MODES[mode], tmp_path)
    container = Container(objects, GIVEN)
    settings = load_settings(container, monkeypatch)
    ports = {each["name"]: each["containerPort"] for each in container.server["ports"]}
    service = {each["name"]: each for each in find_object(objects, "Service", "memory")["spec"]["ports"]}
    allowed = [
        {port["port"] for port in rule["ports"]}
        for one in objects
        if one["kind"] == "NetworkPolicy"
        for rule in one["spec"]["ingress"]
    ]
    if mode == "no policies":
        assert settings.http_listen == ""
        assert "http" not in ports | service
        return
    assert settings.http_listen.endswith(f":{ports['http']}")
    assert service["http"]["targetPort"] == "http"
    assert service["http"]["port"] == MODES[mode].get("http", {}).get("port", 7701)
    assert service["http"]["appProtocol"] == ("https" if settings.tls_cert_file else "http")
    assert {"grpc", "http"} in allowed
    assert settings.console
    names = {"memory", "memory.agents", "memory.agents.svc", "memory.agents.svc.cluster.local"}
    assert names <= set(settings.http_hosts.split(","))


def test_ingress_leads_to_the_http_port(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    objects = render_objects(MODES["single, everything"], tmp_path)
    ingress = find_object(objects, "Ingress")["spec"]
    (rule,) = ingress["rules"]
    (path,) = rule["http"]["paths"]
    assert (rule["host"], path["path"]) == ("memory.example", "/")
    assert path["backend"]["service"] == {"name": "memory", "port": {"name": "http"}}
    assert ingress["tls"] == [{"hosts": ["memory.example"], "secretName": "public"}]
    policy = find_object(objects, "NetworkPolicy")["spec"]["ingress"]
    (extra,) = (one for one in policy if one["ports"] == [{"protocol": "TCP", "port": "http"}])
    assert extra["from"] == [{"namespaceSelector": {"matchLabels": {"name": "ingress"}}}]
    settings = load_settings(Container(objects, GIVEN), monkeypatch)
    assert settings.http_hosts.endswith(",memory.internal,memory.example")
    assert settings.http_cors_origins == "https://app.example,https://memory.example"
    assert not any(one["kind"] == "Ingress" for one in render_objects({}, tmp_path))


def test_probes_check_services_of_the_contract() -> None:
    modules = (server_service_pb2, stream_service_pb2)
    services = {one.full_name for module in modules for one in module.DESCRIPTOR.services_by_name.values()}
    assert {name for name in PROBES.values() if not name.startswith("memstream.journal")} <= services


def test_peers_are_reachable_before_they_are_ready(tmp_path: Path) -> None:
    objects = render_objects(MODES["replicated"], tmp_path)
    peers = find_object(objects, "Service", "memory-peers")["spec"]
    assert (peers["clusterIP"], peers["publishNotReadyAddresses"]) == ("None", True)
    environment = Container(objects, GIVEN).environment()
    assert environment["MEMSTREAM_ADVERTISE"] == f"{charts.POD_IP}:7700"
    assert environment["MEMSTREAM_TLS_PEER_NAME"] == "memory.agents.svc"
    assert len(environment["MEMSTREAM_PEER_SECRET"]) >= 32


def test_generated_keys_open_the_generated_policy(tmp_path: Path) -> None:
    values = {"access": {"apiKeys": {"name": "ops@example.com"}}}
    container = Container(render_objects(values, tmp_path))
    files = container.settings(tmp_path)
    key = container.text("Secret", "memory-access", "api-key")
    keys = parse_keys(Path(files["api_keys_file"]).read_text("utf-8"))
    assert name_of(keys, key) == "ops@example.com"
    policy = parse_policy(Path(files["access_policy_file"]).read_text("utf-8"))
    verbs = {verb for grant in policy.grants for verb in grant.verbs}
    assert all(policy.may("key:ops@example.com", verb, "any") for verb in verbs)
    assert not any(policy.may("key:other", verb, "any") for verb in verbs)
    other = Container(render_objects(values, tmp_path))
    assert other.text("Secret", "memory-access", "api-key") != key


@pytest.fixture
def chart_copy(tmp_path: Path) -> Path:
    """The chart, where a test may change it: `global.found` of the values has what `lookup` finds in a cluster."""
    copy = tmp_path / "chart_copy"
    shutil.copytree(CHART, copy)
    secrets = copy / "templates/secrets.yaml"
    looked = 'lookup "v1" "Secret" .Release.Namespace $secret'
    text = secrets.read_text("utf-8")
    assert text.count("lookup ") == text.count(looked) == 2
    found = "get ((.Values.global | default dict).found | default dict) $secret | default dict"
    secrets.write_text(text.replace(looked, found), "utf-8")
    return copy


def test_an_upgrade_keeps_generated_secrets(chart_copy: Path, tmp_path: Path) -> None:
    first = render_objects(MODES["replicated"], tmp_path, chart=chart_copy)
    found = {
        name: {
            "data": find_object(first, "Secret", name)["data"],
            "metadata": {"creationTimestamp": "2026-05-08T12:00:00Z"},
        }
        for name in ("memory-tls", "memory-access")
    }
    again = render_objects(MODES["replicated"] | {"global": {"found": found}}, tmp_path, chart=chart_copy)
    for name, key in (
        *(("memory-tls", key) for key in ("tls.crt", "tls.key", "ca.crt")),
        *(("memory-access", key) for key in ("api-key", "peer-secret")),
    ):
        assert find_object(again, "Secret", name)["data"][key] == find_object(first, "Secret", name)["data"][key]
    values = {"access": {"apiKeys": {"name": "ops"}}, "global": {"found": found}}
    container = Container(render_objects(values, tmp_path, chart=chart_copy))
    keys = parse_keys(container.text("Secret", "memory-access", "keys.json"))
    assert name_of(keys, container.text("Secret", "memory-access", "api-key")) == "ops"
    assert "peer-secret" not in find_object(container.objects, "Secret", "memory-access")["data"]


@pytest.mark.parametrize("mode", MODES)
def test_notes_name_the_created_objects(mode: str, chart_copy: Path, tmp_path: Path) -> None:
    """Helm shows notes only with a cluster: here they are made an object."""
    notes = (chart_copy / "templates/NOTES.txt").read_text("utf-8")
    shown = 'kind: Notes\napiVersion: v1\nmetadata: {name: notes}\ntext: {{ include "notes" . | toJson }}\n'
    (chart_copy / "templates/notes.yaml").write_text('{{- define "notes" }}' + notes + "{{- end }}\n" + shown, "utf-8")
    objects = render_objects(MODES[mode], tmp_path, chart=chart_copy)
    text = find_object(objects, "Notes", "notes")["text"]
    for name, key in re.findall(r"get secret (\S+) --output jsonpath='\{\.data\.([^}]+)\}'", text):
        assert key.replace("\\.", ".") in find_object(objects, "Secret", name)["data"]
    made = [one["metadata"]["name"] for one in objects if one["kind"] == "Secret"]
    assert ("memory-tls" in made) == ("ca.crt" in text)
    key = "memory-access" in made and "api-key" in find_object(objects, "Secret", "memory-access")["data"]
    assert key == ("MEMSTREAM_TOKEN" in text)
    ((name, port),) = re.findall(r"port-forward service/(\S+) 7700:(\d+)", text)
    assert find_object(objects, "Service", name)["spec"]["ports"][0]["port"] == int(port)
    assert ("WARNING" in text) == ("insecureListen" in MODES[mode])
    assert ("--tls" in text) == (mode not in ("mesh", "no policies"))


# ---- Istio


def test_istio_routes_by_the_header_that_the_sdk_sends(tmp_path: Path) -> None:
    """The file and the chart say the same; Istio's own validation was not run."""
    rule, route, peers = yaml.safe_load_all((ROOT / "deploy/istio/destination-rule.yaml").read_text("utf-8"))
    objects = render_objects(MODES["mesh"], tmp_path)
    made = find_object(objects, "DestinationRule")
    assert made["spec"]["trafficPolicy"] == rule["spec"]["trafficPolicy"]
    assert made["spec"]["host"] == "memory.agents.svc.cluster.local"
    assert rule["spec"]["trafficPolicy"]["loadBalancer"]["consistentHash"]["httpHeaderName"] == ROUTING_KEY
    for written, name in ((route, "memory"), (peers, "memory-peers")):
        spec = find_object(objects, "VirtualService", name)["spec"]
        assert json.dumps(spec) == json.dumps(written["spec"]).replace("memstream.memstream", "memory.agents").replace(
            "memstream-peers.memstream", "memory-peers.agents"
        )


@pytest.mark.parametrize("name", ["memory", "memory-peers"])
def test_the_mesh_neither_retries_nor_times_out_calls(name: str, tmp_path: Path) -> None:
    objects = render_objects(MODES["mesh"] | {"service": {"port": 8800}}, tmp_path)
    route = find_object(objects, "VirtualService", name)["spec"]
    ((http,), (host,)) = route["http"], route["hosts"]
    assert (http["timeout"], http["retries"]) == ("0s", {"attempts": 0})
    (destination,) = (each["destination"] for each in http["route"])
    ports = [each["port"] for each in find_object(objects, "Service", name)["spec"]["ports"]]
    assert destination["host"] == host == f"{name}.agents.svc.cluster.local"
    assert destination["port"]["number"] in ports
    traffic = find_object(objects, "DestinationRule")["spec"]["trafficPolicy"]["connectionPool"]["http"]
    assert (traffic["idleTimeout"], traffic["maxRequestsPerConnection"]) == ("0s", 0)


def test_the_chart_has_the_version_of_the_package() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    chart = yaml.safe_load((CHART / "Chart.yaml").read_text("utf-8"))
    assert chart["appVersion"] == project["version"]


def test_generated_certificates_name_every_host(tmp_path: Path) -> None:
    from cryptography import x509

    container = Container(render_objects({"tls": {"names": ["memory.example"]}}, tmp_path))
    pem = container.text("Secret", "memory-tls", "tls.crt").encode()
    names = x509.load_pem_x509_certificate(pem).extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    assert set(names.get_values_for_type(x509.DNSName)) == {
        *("memory", "memory.agents", "memory.agents.svc", "memory.agents.svc.cluster.local"),
        *("localhost", "memory.example"),
    }
