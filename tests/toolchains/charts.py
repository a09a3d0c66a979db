"""Renders the Helm chart as Kubernetes would run it: its objects, and a container's environment and files."""

from __future__ import annotations

import base64
import os
import re
import subprocess
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import yaml

from memstream_server.settings import ENV_PREFIX, Settings, load, unknown_variables
from tests.toolchains import deploying
from tests.toolchains.environments import ROOT
from tests.toolchains.programs import Absent

CHART = ROOT / "deploy/helm/memstream"
KUBERNETES = "1.33"
POD_IP = "127.0.0.1"
STORES = {"journal": {"existingSecret": "database"}, "milvus": {"uri": "http://milvus:19530"}}
Object = dict[str, Any]


def helm(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    """Runs Helm with these arguments; does not check the exit code. Raises Absent."""
    command = [str(deploying.build_helm()), *(str(each) for each in arguments)]
    cluster = {"KUBECONFIG": os.devnull}
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False, env=os.environ | cluster)


def template(
    values: Mapping[str, Any], folder: Path, *flags: str, chart: Path = CHART
) -> subprocess.CompletedProcess[str]:
    """`helm template` of release `memory` in namespace `agents`."""
    file = folder / "values.yaml"
    file.write_text(yaml.safe_dump(dict(values), allow_unicode=True), "utf-8")
    where = ("--namespace", "agents", "--values", file, "--kube-version", KUBERNETES)
    return helm("template", "memory", chart, *where, *flags)


def render_objects(values: Mapping[str, Any], folder: Path, *flags: str, chart: Path = CHART) -> list[Object]:
    """Renders the chart's objects."""
    done = template(values, folder, *flags, chart=chart)
    assert done.returncode == 0, done.stderr
    return [each for each in yaml.safe_load_all(done.stdout) if each]


def rejection_of(values: Mapping[str, Any], folder: Path, *flags: str) -> str:
    """Returns the error with which the chart rejects values."""
    done = template(values, folder, *flags)
    assert done.returncode != 0, done.stdout
    return done.stderr


def find_object(objects: Iterable[Object], kind: str, name: str = "memory") -> Object:
    """Returns the object of that kind and name."""
    (found,) = (one for one in objects if (one["kind"], one["metadata"]["name"]) == (kind, name))
    return found


def find_workload(objects: Iterable[Object]) -> Object:
    """Returns the Deployment or StatefulSet."""
    (found,) = (one for one in objects if one["kind"] in ("Deployment", "StatefulSet"))
    return found


@dataclass
class Container:
    """The server's container of rendered objects. `given` has the texts of Secrets and ConfigMaps that the chart
    does not create, by "name/key"."""

    objects: list[Object]
    given: Mapping[str, str] = field(default_factory=dict)

    @property
    def pod(self) -> Object:
        """Spec of the pod."""
        spec: Object = find_workload(self.objects)["spec"]["template"]["spec"]
        return spec

    @property
    def server(self) -> Object:
        """The container itself."""
        (server,) = self.pod["containers"]
        found: Object = server
        return found

    def environment(self) -> dict[str, str]:
        """Its variables, as the kubelet sets them."""
        made: dict[str, str] = {}
        for each in self.server["env"]:
            if "value" in each:
                made[each["name"]] = _expand_variables(each["value"], made)
            elif "fieldRef" in each["valueFrom"]:
                made[each["name"]] = POD_IP
            else:
                source = each["valueFrom"]["secretKeyRef"]
                made[each["name"]] = self.text("Secret", source["name"], source["key"])
        return made

    def settings(self, folder: Path) -> dict[str, str]:
        """The server's settings by name, with /data and /etc/memstream in `folder`; writes the mounted files."""
        self._mount(folder / "etc")
        texts = {
            name.removeprefix(ENV_PREFIX).lower(): text
            for name, text in self.environment().items()
            if name.startswith(ENV_PREFIX)
        }
        places = {"/etc/memstream/": f"{folder}/etc/", "/data/": f"{folder}/data/"}
        for name, text in texts.items():
            for inside, outside in places.items():
                if text.startswith(inside):
                    texts[name] = text.replace(inside, outside, 1)
        return texts

    def _mount(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        sources = [each for volume in self.pod["volumes"] for each in volume.get("projected", {}).get("sources", [])]
        for source in sources:
            ((kind, where),) = source.items()
            for item in where["items"]:
                text = self.text({"secret": "Secret", "configMap": "ConfigMap"}[kind], where["name"], item["key"])
                (folder / item["path"]).write_text(text, "utf-8")

    def text(self, kind: str, name: str, key: str) -> str:
        """Returns a text of a Secret or ConfigMap."""
        if f"{name}/{key}" in self.given:
            return self.given[f"{name}/{key}"]
        text: str = find_object(self.objects, kind, name)["data"][key]
        return base64.b64decode(text).decode() if kind == "Secret" else text


def _expand_variables(text: str, known: Mapping[str, str]) -> str:
    """Replaces $(NAME) if the variable exists, and $$ by $."""

    def replace(match: re.Match[str]) -> str:
        if match[0] == "$$":
            return "$"
        return known.get(match[1], match[0])

    return re.sub(r"\$\$|\$\(([^)]*)\)", replace, text)


@pytest.fixture(autouse=True, scope="module")
def needs_helm() -> None:
    """Skips a module's tests without Helm."""
    try:
        deploying.build_helm()
    except Absent as absent:
        pytest.skip(str(absent))


@pytest.fixture(autouse=True)
def without_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    """Removes the settings of this process's environment."""
    for name in Settings.model_fields:
        monkeypatch.delenv(f"MEMSTREAM_{name.upper()}", raising=False)


def load_settings(container: Container, monkeypatch: pytest.MonkeyPatch) -> Settings:
    """The settings of a server that starts in the container."""
    environment = container.environment()
    assert unknown_variables(environment) == []
    for name, text in environment.items():
        monkeypatch.setenv(name, text)
    return load()
