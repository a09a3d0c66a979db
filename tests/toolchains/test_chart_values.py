"""The values of the Helm chart: every setting reaches the server unchanged, and mistakes are rejected by name."""

from __future__ import annotations

import re
from collections.abc import Callable
from enum import Enum, EnumMeta
from pathlib import Path
from typing import Any

import pytest
import yaml
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from memstream_server.rpc.access.caller import Verb
from memstream_server.settings import Settings
from scripts.chart import kind_of
from tests.toolchains import charts
from tests.toolchains.charts import (
    CHART,
    STORES,
    Container,
    load_settings,
    needs_helm,
    rejection_of,
    render_objects,
    without_settings,
)

__all__ = ["needs_helm", "without_settings"]  # fixtures

pytestmark = pytest.mark.toolchain


# ---- settings

HOSTILE = """a: "b" 'c' # d $(POD_IP) $$ $(no {{ e }}\n- ü\u2028🐝\t\\n [f], {g} %s"""
"""A text that YAML, templates and Kubernetes could each misread."""
HOSTILE_URL = "http://user:'p$(POD_IP)$$\"@[::1]:4317/%7B?a=1&b={{ c }}#d: e"
HOSTILE_BASE_URL = "http://user:'p$(POD_IP)$$\"@[::1]:4317/%7B?a=1&b={{c}}:e,%s"
"""Like HOSTILE_URL, without the spaces and the fragment that a base URL must not have."""
SIMPLE = (int, float, bool, str, Path)
"""Types of settings whose values are made here, in addition to enumerations."""


def _bound_of(field: FieldInfo, end: str) -> Any:
    limits = {type(limit).__name__.lower(): limit for limit in field.metadata}
    return getattr(limits[end], end)


def _enum_values(kind: EnumMeta) -> list[Any]:
    members: list[Any] = list(kind)
    return [member.value for member in members]


def _lowest(_name: str, field: FieldInfo) -> Any:
    kind = kind_of(field)
    if kind in (int, float):
        return _bound_of(field, "ge")
    if kind is bool:
        return False
    return _enum_values(kind)[0] if isinstance(kind, EnumMeta) else ""


def _highest(name: str, field: FieldInfo) -> Any:
    kind = kind_of(field)
    if kind in (int, float):
        return _bound_of(field, "le")
    if kind is bool:
        return True
    if isinstance(kind, EnumMeta):
        return _enum_values(kind)[-1]
    if name == "http_listen":
        return "[::1]:65535"
    if name.endswith("_base_url"):
        return HOSTILE_BASE_URL
    return HOSTILE_URL if name.endswith(("_url", "_endpoint")) else HOSTILE


def _default(_name: str, field: FieldInfo) -> Any:
    default = "" if field.default is PydanticUndefined else field.default  # a directory of the user
    return default.value if isinstance(default, Enum) else "" if default is None else default


def _free_settings() -> dict[str, FieldInfo]:
    """Those that `settings` of the chart may have: not the chart's own, no secrets, and no lists or tables."""
    text = (CHART / "templates/_checks.tpl").read_text("utf-8")
    owned = yaml.safe_load(re.search(r'"memstream.owned" -}}\n(.*?)\{\{- end', text, re.S)[1])  # type: ignore[index]
    assert set(owned) <= set(Settings.model_fields)
    fields = {name: field for name, field in Settings.model_fields.items() if name not in owned}
    kinds = {name: kind_of(field) for name, field in fields.items()}
    return {name: fields[name] for name, kind in kinds.items() if kind in SIMPLE or isinstance(kind, EnumMeta)}


def _plain_value(value: Any) -> Any:
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
    settings = load_settings(Container(render_objects({"settings": chosen}, tmp_path)), monkeypatch)
    assert {name: _plain_value(getattr(settings, name)) for name in chosen} == chosen


@pytest.mark.parametrize("flag", ["--set", "--set-json"])
def test_numbers_from_the_command_line_are_exact(flag: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    flags = (flag, "settings.import_max_bytes=1099511627776", flag, "settings.caller_bytes_per_s=1234567")
    settings = load_settings(Container(render_objects({}, tmp_path, *flags)), monkeypatch)
    assert (settings.import_max_bytes, settings.caller_bytes_per_s) == (1_099_511_627_776, 1_234_567)


def test_chart_values_reach_the_server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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
    container = Container(render_objects(values, tmp_path))
    settings = load_settings(container, monkeypatch)
    assert settings.journal_url.get_secret_value() == "postgresql://u:p$(POD_IP)$$:@h/d"
    assert (settings.milvus_uri, settings.milvus_token.get_secret_value()) == (f"http://{hostile}", hostile)
    assert {settings.tls_peer_name, settings.jwt_issuer, settings.jwt_audience} == {hostile}
    assert (settings.jwt_jwks, settings.trusted_proxies) == (f"https://{hostile}", "10.0.0.0/8,unix")
    assert (settings.listen, settings.metrics_listen) == ("[::]:7700", "[::]:65535")
    assert (settings.advertise, settings.log_format.value) == (f"[{charts.POD_IP}]:7700", "console")
    assert (settings.drain_grace_s, container.pod["terminationGracePeriodSeconds"]) == (600, 1_800)


def test_model_secrets_come_from_variables(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    reference = {"secretKeyRef": {"name": "models", "key": "llm"}}
    values = {"extraEnv": [{"name": "MEMSTREAM_LLM_API_KEY", "valueFrom": reference}]}
    settings = load_settings(Container(render_objects(values, tmp_path), {"models/llm": "sk-$$"}), monkeypatch)
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
    "policy that is no TOML": ({"access": {"policy": {"inline": "[[grant]"}}}, "access.policy.inline is not TOML"),
    "policy of other tables": ({"access": {"policy": {"inline": "[[grants]]"}}}, '"grants" is unknown'),
    "policy of one bracket": ({"access": {"policy": {"inline": "[grant]"}}}, "the file is a list of [[grant]]"),
    "policy without verbs": (
        {"access": {"policy": {"inline": "[[grant]]\nwho = ['*']\nnamespaces = ['*']\n"}}},
        "grant 1 must have exactly who, namespaces, verbs",
    ),
    "policy of unknown verbs": (
        {"access": {"policy": {"inline": "[[grant]]\nwho = ['*']\nnamespaces = ['*']\nverbs = ['reed']\n"}}},
        'there is no verb "reed"',
    ),
    "memory that does not suffice": ({"resources": {"limits": {"memory": "255Mi"}}}, "the server needs 256Mi at rest"),
    "memory in bytes": ({"resources": {"limits": {"memory": 200_000_000}}}, "the server needs 256Mi at rest"),
    "memory in thousandths": ({"resources": {"limits": {"memory": "200000000000m"}}}, "the server needs 256Mi at rest"),
    "metrics at the HTTP port": ({"metrics": {"port": 7701}}, "port"),
    "Ingress without a host": ({"http": {"ingress": {"enabled": True}}}, "needs http.ingress.host"),
    "Ingress without the port": (
        {"http": {"enabled": False, "ingress": {"enabled": True, "host": "a"}}},
        "needs http.enabled",
    ),
    "HTTP setting": ({"settings": {"http_hosts": "a"}}, "settings.http_hosts is set by the chart: use http.hosts"),
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


@pytest.mark.parametrize("memory", ["256Mi", "1Gi", "0.25Gi", "300M", "1e9", 268_435_456, 4_294_967_296])
def test_memory_that_suffices_is_accepted(memory: str | int, tmp_path: Path) -> None:
    assert render_objects({"resources": {"limits": {"memory": memory}}}, tmp_path)


def test_chart_knows_every_verb(tmp_path: Path) -> None:
    verbs = [verb.value for verb in Verb] + ["*"]
    policy = f"[[grant]]\nwho = ['key:admin']\nnamespaces = ['*']\nverbs = {verbs}\n"
    assert render_objects({"access": {"policy": {"inline": policy}}}, tmp_path)


def test_chart_takes_grants_by_labels(tmp_path: Path) -> None:
    policy = "[[grant]]\nwho = ['key:admin']\nnamespaces = ['*']\nverbs = ['read']\nlabels = { team = 'core' }\n"
    assert render_objects({"access": {"policy": {"inline": policy}}}, tmp_path)


@pytest.mark.parametrize("name", REFUSED)
def test_a_mistake_is_rejected_by_name(name: str, tmp_path: Path) -> None:
    values, why = REFUSED[name]
    assert why in rejection_of(values, tmp_path)
