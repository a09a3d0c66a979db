"""The Helm chart: every mode is valid, every setting reaches the server as it was given, mistakes are named."""

from __future__ import annotations

import json
import re
import shutil
import tomllib
from collections.abc import Callable
from enum import Enum, EnumMeta
from pathlib import Path
from typing import Any

import pytest
import yaml
from pydantic.fields import FieldInfo

from memstream.v1 import server_service_pb2, stream_service_pb2
from memstream_server.observability import PROBES
from memstream_server.rpc.access.keys import name_of, parse_keys
from memstream_server.rpc.access.policy import parse_policy
from memstream_server.rpc.error_and_limits_interceptor import ROUTING_KEY
from memstream_server.settings import Settings, load, unknown_variables
from scripts.chart import kind_of
from tests.toolchains import charts, deploying
from tests.toolchains.charts import CHART, KUBERNETES, Container, named, refusal, rendered, workload
from tests.toolchains.environments import ROOT
from tests.toolchains.programs import Absent, run

pytestmark = pytest.mark.toolchain

STORES = {"journal": {"existingSecret": "database"}, "milvus": {"uri": "http://milvus:19530"}}
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
    "no policies": {"networkPolicy": {"enabled": False}, **MESH},
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


@pytest.fixture(autouse=True, scope="module")
def _programs() -> None:
    try:
        deploying.helm()
    except Absent as absent:
        pytest.skip(str(absent))


@pytest.fixture(autouse=True)
def _no_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in Settings.model_fields:
        monkeypatch.delenv(f"MEMSTREAM_{name.upper()}", raising=False)


def loaded(container: Container, monkeypatch: pytest.MonkeyPatch) -> Settings:
    """The settings of a server that starts in the container."""
    environment = container.environment()
    assert unknown_variables(environment) == []
    for name, text in environment.items():
        monkeypatch.setenv(name, text)
    return load()


# ---- what the chart makes


def test_the_chart_is_clean() -> None:
    done = charts.helm("lint", "--strict", CHART)
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize("mode", MODES)
def test_objects_are_valid(mode: str, tmp_path: Path) -> None:
    """Against Kubernetes' own schemas, strictly: an unknown field is an error. Istio's are not among them."""
    objects = [one for one in rendered(MODES[mode], tmp_path) if "istio" not in one["apiVersion"]]
    names = [(one["kind"], one["metadata"]["name"]) for one in objects]
    assert len(names) == len(set(names))
    file = tmp_path / "objects.yaml"
    file.write_text(yaml.safe_dump_all(objects), "utf-8")
    try:
        validate = deploying.tool("kubernetes-validate")
    except Absent as absent:
        pytest.skip(str(absent))
    run(validate, "--strict", "--kubernetes-version", KUBERNETES, file)


@pytest.mark.parametrize("mode", MODES)
def test_a_server_takes_the_settings_of_each_mode(mode: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    objects = rendered(MODES[mode], tmp_path)
    container = Container(objects, GIVEN)
    settings = loaded(container, monkeypatch)
    replicated = MODES[mode].get("mode") == "replicated"
    assert workload(objects)["kind"] == ("Deployment" if replicated else "StatefulSet")
    assert workload(objects)["spec"]["replicas"] == (MODES[mode].get("replicas", 3) if replicated else 1)
    assert bool(settings.milvus_uri and settings.journal_url.get_secret_value() and settings.advertise) == replicated
    assert settings.insecure_listen == ("insecureListen" in MODES[mode])
    mounted = container.settings(tmp_path)
    for name in ("tls_cert_file", "tls_client_ca_file", "tls_peer_ca_file", "api_keys_file", "access_policy_file"):
        assert name not in mounted or Path(mounted[name]).exists()


@pytest.mark.parametrize("mode", MODES)
def test_pods_stop_in_order_and_may_do_little(mode: str, tmp_path: Path) -> None:
    objects = rendered(MODES[mode], tmp_path)
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
    claims = workload(objects)["spec"].get("volumeClaimTemplates", [])
    assert {each["name"] for each in server["volumeMounts"]} == volumes | {each["metadata"]["name"] for each in claims}
    ports = {each["name"]: each["containerPort"] for each in server["ports"]}
    for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
        assert server[probe]["httpGet"]["port"] == "metrics"
        assert server[probe]["httpGet"]["path"] in PROBES
    assert environment["MEMSTREAM_METRICS_LISTEN"].endswith(f":{ports['metrics']}")
    assert environment["MEMSTREAM_LISTEN"].endswith(f":{ports['grpc']}")
    selector = workload(objects)["spec"]["selector"]["matchLabels"]
    labels = workload(objects)["spec"]["template"]["metadata"]["labels"]
    assert selector.items() <= labels.items()
    for name in ("memory", "memory-peers"):
        assert named(objects, "Service", name)["spec"]["selector"] == selector


def test_probes_ask_for_services_of_the_contract() -> None:
    modules = (server_service_pb2, stream_service_pb2)
    services = {one.full_name for module in modules for one in module.DESCRIPTOR.services_by_name.values()}
    assert set(PROBES.values()) <= services


def test_peers_are_reached_before_they_are_ready(tmp_path: Path) -> None:
    objects = rendered(MODES["replicated"], tmp_path)
    peers = named(objects, "Service", "memory-peers")["spec"]
    assert (peers["clusterIP"], peers["publishNotReadyAddresses"]) == ("None", True)
    environment = Container(objects, GIVEN).environment()
    assert environment["MEMSTREAM_ADVERTISE"] == f"{charts.POD_IP}:7700"
    assert environment["MEMSTREAM_TLS_PEER_NAME"] == "memory.agents.svc"
    assert len(environment["MEMSTREAM_PEER_SECRET"]) >= 32


def test_generated_keys_open_the_generated_policy(tmp_path: Path) -> None:
    values = {"access": {"apiKeys": {"name": "ops@example.com"}}}
    container = Container(rendered(values, tmp_path))
    files = container.settings(tmp_path)
    key = container.text("Secret", "memory-access", "api-key")
    keys = parse_keys(Path(files["api_keys_file"]).read_text("utf-8"))
    assert name_of(keys, key) == "ops@example.com"
    policy = parse_policy(Path(files["access_policy_file"]).read_text("utf-8"))
    verbs = {verb for grant in policy.grants for verb in grant.verbs}
    assert all(policy.may("key:ops@example.com", verb, "any") for verb in verbs)
    assert not any(policy.may("key:other", verb, "any") for verb in verbs)
    other = Container(rendered(values, tmp_path))
    assert other.text("Secret", "memory-access", "api-key") != key


@pytest.fixture
def copied(tmp_path: Path) -> Path:
    """The chart, where a test may change it: `global.found` of the values has what `lookup` finds in a cluster."""
    copy = tmp_path / "copied"
    shutil.copytree(CHART, copy)
    secrets = copy / "templates/secrets.yaml"
    looked = 'lookup "v1" "Secret" .Release.Namespace $secret'
    text = secrets.read_text("utf-8")
    assert text.count("lookup ") == text.count(looked) == 2
    found = "get ((.Values.global | default dict).found | default dict) $secret | default dict"
    secrets.write_text(text.replace(looked, found), "utf-8")
    return copy


def test_an_upgrade_keeps_what_the_chart_made(copied: Path, tmp_path: Path) -> None:
    first = rendered(MODES["replicated"], tmp_path, chart=copied)
    found = {
        name: {"data": named(first, "Secret", name)["data"], "metadata": {"creationTimestamp": "2026-05-08T12:00:00Z"}}
        for name in ("memory-tls", "memory-access")
    }
    again = rendered(MODES["replicated"] | {"global": {"found": found}}, tmp_path, chart=copied)
    for name, key in (
        *(("memory-tls", key) for key in ("tls.crt", "tls.key", "ca.crt")),
        *(("memory-access", key) for key in ("api-key", "peer-secret")),
    ):
        assert named(again, "Secret", name)["data"][key] == named(first, "Secret", name)["data"][key]
    values = {"access": {"apiKeys": {"name": "ops"}}, "global": {"found": found}}
    container = Container(rendered(values, tmp_path, chart=copied))
    keys = parse_keys(container.text("Secret", "memory-access", "keys.json"))
    assert name_of(keys, container.text("Secret", "memory-access", "api-key")) == "ops"
    assert "peer-secret" not in named(container.objects, "Secret", "memory-access")["data"]


@pytest.mark.parametrize("mode", MODES)
def test_notes_name_what_the_chart_makes(mode: str, copied: Path, tmp_path: Path) -> None:
    """Helm shows notes only with a cluster: here they are made an object."""
    notes = (copied / "templates/NOTES.txt").read_text("utf-8")
    shown = 'kind: Notes\napiVersion: v1\nmetadata: {name: notes}\ntext: {{ include "notes" . | toJson }}\n'
    (copied / "templates/notes.yaml").write_text('{{- define "notes" }}' + notes + "{{- end }}\n" + shown, "utf-8")
    objects = rendered(MODES[mode], tmp_path, chart=copied)
    text = named(objects, "Notes", "notes")["text"]
    for name, key in re.findall(r"get secret (\S+) --output jsonpath='\{\.data\.([^}]+)\}'", text):
        assert key.replace("\\.", ".") in named(objects, "Secret", name)["data"]
    made = [one["metadata"]["name"] for one in objects if one["kind"] == "Secret"]
    assert ("memory-tls" in made) == ("ca.crt" in text)
    key = "memory-access" in made and "api-key" in named(objects, "Secret", "memory-access")["data"]
    assert key == ("MEMSTREAM_TOKEN" in text)
    ((name, port),) = re.findall(r"port-forward service/(\S+) 7700:(\d+)", text)
    assert named(objects, "Service", name)["spec"]["ports"][0]["port"] == int(port)
    assert ("WARNING" in text) == ("insecureListen" in MODES[mode])
    assert ("--tls" in text) == (mode not in ("mesh", "no policies"))


# ---- settings

HOSTILE = """a: "b" 'c' # d $(POD_IP) $$ $(no {{ e }}\n- ü\u2028🐝\t\\n [f], {g} %s"""
"""A text that YAML, templates and Kubernetes could each misread."""
HOSTILE_URL = "http://user:'p$(POD_IP)$$\"@[::1]:4317/%7B?a=1&b={{ c }}#d: e"
SIMPLE = (int, float, bool, str, Path)
"""Types of settings whose values are made here, in addition to enumerations."""


def _bound(field: FieldInfo, end: str) -> Any:
    limits = {type(limit).__name__.lower(): limit for limit in field.metadata}
    return getattr(limits[end], end)


def _enum_values(kind: EnumMeta) -> list[Any]:
    members: list[Any] = list(kind)
    return [member.value for member in members]


def _lowest(_name: str, field: FieldInfo) -> Any:
    kind = kind_of(field)
    if kind in (int, float):
        return _bound(field, "ge")
    if kind is bool:
        return False
    return _enum_values(kind)[0] if isinstance(kind, EnumMeta) else ""


def _highest(name: str, field: FieldInfo) -> Any:
    kind = kind_of(field)
    if kind in (int, float):
        return _bound(field, "le")
    if kind is bool:
        return True
    if isinstance(kind, EnumMeta):
        return _enum_values(kind)[-1]
    return HOSTILE_URL if name.endswith(("_url", "_endpoint")) else HOSTILE


def _default(_name: str, field: FieldInfo) -> Any:
    default = field.default
    return default.value if isinstance(default, Enum) else "" if default is None else default


def _free_settings() -> dict[str, FieldInfo]:
    """Those that `settings` of the chart may have: not the chart's own, no secrets, and no lists or tables."""
    text = (CHART / "templates/_checks.tpl").read_text("utf-8")
    owned = yaml.safe_load(re.search(r'"memstream.owned" -}}\n(.*?)\{\{- end', text, re.S)[1])  # type: ignore[index]
    assert set(owned) <= set(Settings.model_fields)
    fields = {name: field for name, field in Settings.model_fields.items() if name not in owned}
    kinds = {name: kind_of(field) for name, field in fields.items()}
    return {name: fields[name] for name, kind in kinds.items() if kind in SIMPLE or isinstance(kind, EnumMeta)}


def _plain(value: Any) -> Any:
    return value.value if isinstance(value, Enum) else str(value) if isinstance(value, Path) else value


@pytest.mark.parametrize("choose", [_lowest, _highest, _default], ids=["lowest", "highest", "default"])
def test_every_setting_reaches_the_server_unchanged(
    choose: Callable[[str, FieldInfo], Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    chosen = {name: choose(name, field) for name, field in _free_settings().items()}
    # Optional numbers and directories have no text that means unset: they are left out.
    chosen = {name: value for name, value in chosen.items() if value != "" or kind_of(_free_settings()[name]) is str}
    if chosen.get("embedding") == "onnx":
        assert "embedding_model_dir" in chosen
    settings = loaded(Container(rendered({"settings": chosen}, tmp_path)), monkeypatch)
    assert {name: _plain(getattr(settings, name)) for name in chosen} == chosen


@pytest.mark.parametrize("flag", ["--set", "--set-json"])
def test_numbers_of_the_command_line_are_exact(flag: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    flags = (flag, "settings.import_max_bytes=1099511627776", flag, "settings.caller_bytes_per_s=1234567")
    settings = loaded(Container(rendered({}, tmp_path, *flags)), monkeypatch)
    assert (settings.import_max_bytes, settings.caller_bytes_per_s) == (1_099_511_627_776, 1_234_567)


def test_values_of_the_chart_reach_the_server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hostile = HOSTILE.replace("\n", " ")  # no URL has line breaks
    values = {
        "mode": "replicated",
        "journal": {"url": "postgresql://u:p$(POD_IP)$$:@h/d"},
        "milvus": {"uri": f"http://{hostile}", "token": hostile},
        "tls": {"peerName": hostile},
        "access": {
            "jwt": {"issuer": hostile, "audience": hostile, "jwks": {"url": f"https://{hostile}"}},
            "trustedProxies": ["10.0.0.0/8", "unix"],
        },
        "drain": {"preStopSeconds": 600, "graceSeconds": 600, "restSeconds": 600},
        "metrics": {"port": 65_535},
        "ipv6": True,
        "settings": {"log_format": "console"},
    }
    container = Container(rendered(values, tmp_path))
    settings = loaded(container, monkeypatch)
    assert settings.journal_url.get_secret_value() == "postgresql://u:p$(POD_IP)$$:@h/d"
    assert (settings.milvus_uri, settings.milvus_token.get_secret_value()) == (f"http://{hostile}", hostile)
    assert {settings.tls_peer_name, settings.jwt_issuer, settings.jwt_audience} == {hostile}
    assert (settings.jwt_jwks, settings.trusted_proxies) == (f"https://{hostile}", "10.0.0.0/8,unix")
    assert (settings.listen, settings.metrics_listen) == ("[::]:7700", "[::]:65535")
    assert (settings.advertise, settings.log_format.value) == (f"[{charts.POD_IP}]:7700", "console")
    assert (settings.drain_grace_s, container.pod["terminationGracePeriodSeconds"]) == (600, 1_800)


def test_secrets_of_models_come_by_variables(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    reference = {"secretKeyRef": {"name": "models", "key": "llm"}}
    values = {"extraEnv": [{"name": "MEMSTREAM_LLM_API_KEY", "valueFrom": reference}]}
    settings = loaded(Container(rendered(values, tmp_path), {"models/llm": "sk-$$"}), monkeypatch)
    assert settings.llm_api_key.get_secret_value() == "sk-$$"


# ---- what it refuses


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "unknown value": ({"replica": 3}, "replica"),
    "unknown nested value": ({"service": {"prot": 1}}, "prot"),
    "former value": ({"tlsSecretName": "tls"}, "tlsSecretName"),
    "unknown setting": ({"settings": {"recal_limit_max": 3}}, "settings.recal_limit_max: there is no such setting"),
    "setting in capitals": ({"settings": {"BATCH_MAX": 3}}, "settings.BATCH_MAX: there is no such setting"),
    "setting of the chart": (
        {"settings": {"listen": "0.0.0.0:1"}},
        "settings.listen is set by the chart: use service.port",
    ),
    "drain": ({"settings": {"drain_grace_s": 3}}, "use drain.graceSeconds"),
    "journal": (
        {"settings": {"journal_url": "postgresql://a"}},
        "settings.journal_url is set by the chart: use journal",
    ),
    "secret setting": ({"settings": {"llm_api_key": "sk"}}, "MEMSTREAM_LLM_API_KEY in extraEnv, with valueFrom"),
    "above its bound": ({"settings": {"batch_max": 100_001}}, "batch_max"),
    "below its bound": ({"settings": {"trace_ratio": -0.1}}, "trace_ratio"),
    "text for a number": ({"settings": {"batch_max": "many"}}, "batch_max"),
    "fraction for an integer": ({"settings": {"batch_max": 1.5}}, "batch_max"),
    "number for a text": ({"settings": {"llm_model": 4}}, "llm_model"),
    "text for a switch": ({"settings": {"llm_scoring": "yes"}}, "llm_scoring"),
    "unknown choice": ({"settings": {"embedding": "word2vec"}}, "embedding"),
    "mode": ({"mode": "many"}, "mode"),
    "tag that is a number": ({"image": {"tag": 20260101}}, "tag"),
    "variable that is a number": ({"extraEnv": [{"name": "A", "value": 1_000_000}]}, "value"),
    "annotation that is a number": ({"podAnnotations": {"a": 1_000_000}}, "podAnnotations"),
    "variable of the chart": (
        {"extraEnv": [{"name": "MEMSTREAM_LISTEN", "value": "x"}]},
        "extraEnv: MEMSTREAM_LISTEN is set by the chart: use service.port",
    ),
    "variable that is a setting too": (
        {"extraEnv": [{"name": "MEMSTREAM_BATCH_MAX", "value": "2"}], "settings": {"batch_max": 1}},
        "extraEnv: MEMSTREAM_BATCH_MAX is also in settings.batch_max",
    ),
    "variable of no setting": (
        {"extraEnv": [{"name": "MEMSTREAM_BACH_MAX", "value": "2"}]},
        "extraEnv: there is no setting MEMSTREAM_BACH_MAX",
    ),
    "variable in mixed case": (
        {"extraEnv": [{"name": "MEMSTREAM_batch_max", "value": "2"}]},
        "extraEnv: there is no setting MEMSTREAM_batch_max",
    ),
    "variable twice": (
        {"extraEnv": [{"name": "A", "value": "1"}, {"name": "A", "value": "2"}]},
        "extraEnv has A twice",
    ),
    "pod's address": ({"extraEnv": [{"name": "POD_IP", "value": "1"}]}, "POD_IP is set by the chart"),
    "volume of the chart": ({"extraVolumes": [{"name": "data", "emptyDir": {}}]}, "the chart has a volume data itself"),
    "mount of the chart": (
        {"extraVolumeMounts": [{"name": "x", "mountPath": "/etc/memstream/"}]},
        "the chart mounts /etc/memstream/ itself",
    ),
    "replicated without a journal": ({"mode": "replicated"}, "set journal.existingSecret"),
    "replicated without Milvus": ({"mode": "replicated", "journal": STORES["journal"]}, "set milvus.uri"),
    "several single servers": ({"replicas": 2}, "set mode: replicated"),
    "peers of a single server": ({"tls": {"peerName": "a"}}, "for mode replicated"),
    "volume of replicas": ({"mode": "replicated", **STORES, "persistence": {"existingClaim": "a"}}, "for mode single"),
    "names of another certificate": ({"tls": {"existingSecret": "a", "names": ["b"]}}, "has its own"),
    "keys that are off": (
        {"access": {"apiKeys": {"enabled": False, "existingSecret": "a"}, "trustedProxies": ["unix"]}},
        "needs access.apiKeys.enabled",
    ),
    "secret in a variable": ({"extraEnv": [{"name": "MEMSTREAM_LLM_API_KEY", "value": "sk"}]}, "use valueFrom"),
    "journal twice": ({"journal": {"url": "postgresql://a", "existingSecret": "b"}}, "url or existingSecret, not both"),
    "no PostgreSQL": ({"journal": {"url": "mysql://a"}}, "journal"),
    "Milvus token alone": ({"milvus": {"token": "a"}}, "a token needs milvus.uri"),
    "no TLS": ({"tls": {"enabled": False}}, "without both set insecureListen"),
    "no access": ({"access": {"enabled": False}}, "without both set insecureListen"),
    "TLS parts without TLS": (
        {"tls": {"enabled": False, "existingSecret": "a"}, "insecureListen": True},
        "need tls.enabled",
    ),
    "access parts without access": (
        {"access": {"enabled": False, "trustedProxies": ["unix"]}, "insecureListen": True},
        "need access.enabled",
    ),
    "nobody to ask": ({"access": {"apiKeys": {"enabled": False}}}, "something that says who calls"),
    "keys without a policy": ({"access": {"apiKeys": {"existingSecret": "a"}}}, "access.policy must say"),
    "part of JWT": ({"access": {"jwt": {"issuer": "a"}}}, "there is only issuer"),
    "policy twice": (
        {"access": {"policy": {"inline": "a", "existingConfigMap": "b"}}},
        "access.policy: give one of inline, existingConfigMap",
    ),
    "JWKS twice": (
        {"access": {"jwt": {"jwks": {"url": "https://a", "inline": "{}"}}}},
        "access.jwt.jwks: give one of inline, url",
    ),
    "JWKS in plain text": ({"access": {"jwt": {"jwks": {"url": "http://a"}}}}, "jwks"),
    "mesh with TLS of the server": ({"istio": {"enabled": True}}, "istio.enabled needs tls.enabled: false"),
    "peers that the CA of clients did not sign": (
        {"mode": "replicated", **STORES, "tls": {"clientCA": {"inline": "PEM"}}},
        "servers are clients of each other",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_mistake_is_refused_by_name(name: str, tmp_path: Path) -> None:
    values, why = REFUSED[name]
    assert why in refusal(values, tmp_path)


# ---- Istio


def test_istio_routes_by_what_the_sdk_sends(tmp_path: Path) -> None:
    """The file and the chart say the same; Istio's own validation was not run."""
    rule, route, peers = yaml.safe_load_all((ROOT / "deploy/istio/destination-rule.yaml").read_text("utf-8"))
    objects = rendered(MODES["mesh"], tmp_path)
    made = named(objects, "DestinationRule")
    assert made["spec"]["trafficPolicy"] == rule["spec"]["trafficPolicy"]
    assert made["spec"]["host"] == "memory.agents.svc.cluster.local"
    assert rule["spec"]["trafficPolicy"]["loadBalancer"]["consistentHash"]["httpHeaderName"] == ROUTING_KEY
    for written, name in ((route, "memory"), (peers, "memory-peers")):
        spec = named(objects, "VirtualService", name)["spec"]
        assert json.dumps(spec) == json.dumps(written["spec"]).replace("memstream.memstream", "memory.agents").replace(
            "memstream-peers.memstream", "memory-peers.agents"
        )


@pytest.mark.parametrize("name", ["memory", "memory-peers"])
def test_the_mesh_neither_repeats_nor_ends_calls(name: str, tmp_path: Path) -> None:
    objects = rendered(MODES["mesh"] | {"service": {"port": 8800}}, tmp_path)
    route = named(objects, "VirtualService", name)["spec"]
    ((http,), (host,)) = route["http"], route["hosts"]
    assert (http["timeout"], http["retries"]) == ("0s", {"attempts": 0})
    (destination,) = (each["destination"] for each in http["route"])
    ports = [each["port"] for each in named(objects, "Service", name)["spec"]["ports"]]
    assert destination["host"] == host == f"{name}.agents.svc.cluster.local"
    assert destination["port"]["number"] in ports
    traffic = named(objects, "DestinationRule")["spec"]["trafficPolicy"]["connectionPool"]["http"]
    assert (traffic["idleTimeout"], traffic["maxRequestsPerConnection"]) == ("0s", 0)


def test_the_chart_has_the_version_of_the_package() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    chart = yaml.safe_load((CHART / "Chart.yaml").read_text("utf-8"))
    assert chart["appVersion"] == project["version"]


def test_generated_certificates_hold_every_name(tmp_path: Path) -> None:
    from cryptography import x509

    container = Container(rendered({"tls": {"names": ["memory.example"]}}, tmp_path))
    pem = container.text("Secret", "memory-tls", "tls.crt").encode()
    names = x509.load_pem_x509_certificate(pem).extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    assert set(names.get_values_for_type(x509.DNSName)) == {
        *("memory", "memory.agents", "memory.agents.svc", "memory.agents.svc.cluster.local"),
        *("localhost", "memory.example"),
    }
