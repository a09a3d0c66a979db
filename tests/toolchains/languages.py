"""Compilers and packages of other languages: taken from this machine and the registries, kept under .cache/."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from functools import cache, cached_property
from pathlib import Path
from typing import Any

from tests.conformance.world import Runner
from tests.toolchains.programs import Absent

ROOT = Path(__file__).resolve().parents[2]
CACHE = ROOT / ".cache"
RUN_S = 600

GO_PLUGINS = {
    "protoc-gen-go": "google.golang.org/protobuf/cmd/protoc-gen-go@v1.36.12",
    "protoc-gen-go-grpc": "google.golang.org/grpc/cmd/protoc-gen-go-grpc@v1.6.2",
}
PYTHON = Runner("Python", [sys.executable, "-m", "tests.conformance.run"])


def needed(program: str) -> str:
    """Where a program is. Raises Absent."""
    found = shutil.which(program)
    if found is None:
        raise Absent(f"{program} is not installed")
    return found


def run(*command: str, cwd: Path = ROOT, env: Mapping[str, str] | None = None) -> str:
    """What a command prints. Raises AssertionError with all it said when it fails."""
    done = _done(command, cwd, env)
    assert done.returncode == 0, f"{' '.join(command)} failed:\n{done.stdout[-8000:]}\n{done.stderr[-8000:]}"
    return done.stdout


def fetch(what: str, *command: str, cwd: Path = ROOT, env: Mapping[str, str] | None = None) -> None:
    """Runs a command that needs a registry. Raises Absent when it fails: it may be out of reach."""
    done = _done(command, cwd, env)
    if done.returncode:
        raise Absent(f"{what} cannot be had: {(done.stderr or done.stdout).strip()[-300:]}")


def _done(command: Sequence[str], cwd: Path, env: Mapping[str, str] | None) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, cwd=cwd, env=env, capture_output=True, text=True, timeout=RUN_S, check=False)


class Go:
    """The Go client, its runner and the generators."""

    folder = ROOT / "client" / "go"

    def __init__(self) -> None:
        self._go = needed("go")
        kept = CACHE / "go"
        self.bin = kept / "bin"
        self.environment = os.environ | {
            "GOBIN": str(self.bin),
            "GOCACHE": str(kept / "build"),
            "GOFLAGS": "-modcacherw -buildvcs=false",
            "GOMODCACHE": str(kept / "mod"),
            "GOTOOLCHAIN": "local",
        }
        fetch("the modules of the Go client", self._go, "mod", "download", cwd=self.folder, env=self.environment)

    def go(self, *words: str, cwd: Path | None = None) -> str:
        """What `go WORDS` prints there."""
        return run(self._go, *words, cwd=cwd or self.folder, env=self.environment)

    def plugins(self) -> Path:
        """The folder of the generators."""
        for name, module in GO_PLUGINS.items():
            version = module.rpartition("@")[2]
            if not (self.bin / name).exists() or version not in self.go("version", "-m", str(self.bin / name)):
                fetch(name, self._go, "install", module, cwd=self.folder, env=self.environment)
        return self.bin

    def runner(self) -> Runner:
        """Built anew; go's cache knows what is needed."""
        self.go("build", "-o", str(self.bin / "conformance"), "./internal/conformance")
        return Runner("Go", [str(self.bin / "conformance")])


class Node:
    """The TypeScript client, its runner and the generator."""

    folder = ROOT / "client" / "typescript"

    def __init__(self) -> None:
        needed("node")
        version = run(needed("node"), "--version").strip()
        if int(version.removeprefix("v").partition(".")[0]) < 20:
            raise Absent(f"the TypeScript client needs Node.js 20, here is {version}")
        digest = hashlib.sha256((self.folder / "package-lock.json").read_bytes()).hexdigest()
        stamp = self.folder / "node_modules" / ".installed"
        if not stamp.exists() or stamp.read_text("utf-8") != digest:
            cache = str(CACHE / "npm")
            words = ("ci", "--cache", cache, "--no-audit", "--no-fund", "--ignore-scripts")
            fetch("the packages of the TypeScript client", needed("npm"), *words, cwd=self.folder)
            stamp.write_text(digest, "utf-8")
        self.bin = self.folder / "node_modules" / ".bin"

    def npm(self, script: str) -> str:
        """What a script of package.json prints."""
        return run(needed("npm"), "run", "--silent", script, cwd=self.folder)

    @cached_property
    def built(self) -> Path:
        """What the compiler makes of it, with strict types, once."""
        self.npm("build")
        return self.folder / "dist"

    def program(self, code: str) -> str:
        """What a program of a user prints, checked with strict types and run."""
        with tempfile.TemporaryDirectory(dir=self.built) as folder:
            file = Path(folder) / "program.ts"
            file.write_text(code, "utf-8")
            options = (
                "--outDir",
                folder,
                "--rootDir",
                folder,
                "--module",
                "nodenext",
                "--target",
                "es2023",
                "--strict",
            )
            run(str(self.bin / "tsc"), *options, "--types", "node", "--skipLibCheck", str(file), cwd=self.folder)
            return run("node", str(file.with_suffix(".js")), cwd=self.folder)

    def consume(self, code: str, target: str) -> None:
        """Checks a program of a project that has the packed client and its dependencies, and nothing else: no
        @types/node, and every declaration is checked. Raises AssertionError with what is wrong."""
        assert self.built
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            run(needed("npm"), "pack", "--silent", "--pack-destination", name, cwd=self.folder)
            (archive,) = folder.glob("*.tgz")
            modules = folder / "node_modules"
            shutil.unpack_archive(archive, modules / "@memstream", filter="data")
            (modules / "@memstream" / "package").rename(modules / "@memstream" / "client")
            for package in self.package["dependencies"]:
                shutil.copytree(self.folder / "node_modules" / package, modules / package)
            (folder / "package.json").write_text('{"type": "module"}', "utf-8")
            (folder / "use.ts").write_text(code, "utf-8")
            options = ("--noEmit", "--strict", "--module", "nodenext", "--target", target, "--skipLibCheck", "false")
            run(str(self.bin / "tsc"), *options, "--exactOptionalPropertyTypes", "use.ts", cwd=folder)

    @property
    def package(self) -> dict[str, Any]:
        """What package.json says."""
        found: dict[str, Any] = json.loads((self.folder / "package.json").read_text("utf-8"))
        return found

    @property
    def locked(self) -> dict[str, dict[str, Any]]:
        """The packages that a user installs, by path: those of package-lock.json that are not for development."""
        lock = json.loads((self.folder / "package-lock.json").read_text("utf-8"))
        return {path: one for path, one in lock["packages"].items() if path and not one.get("dev")}

    def runner(self) -> Runner:
        return Runner("TypeScript", ["node", "--enable-source-maps", str(self.built / "conformance" / "main.js")])


@cache
def node() -> Node:
    """The one of all tests. Raises Absent."""
    return Node()


def buf(template: str, plugins: Path, out: Path) -> None:
    """Generates what a template says, under `out`, with plugins of that folder."""
    found = str(Path(sys.executable).parent)
    environment = os.environ | {"PATH": f"{plugins}:{found}:{os.environ['PATH']}", "BUF_CACHE_DIR": str(CACHE / "buf")}
    run(f"{found}/buf", "generate", "--template", template, "--output", str(out), env=environment)


class Java:
    """The generated Java and its runner."""

    folder = ROOT / "client" / "java"

    def __init__(self) -> None:
        self._maven, self._java = needed("mvn"), needed("java")
        needed("javac")

    def runner(self) -> Runner:
        """Built anew when anything of it has changed: the generated code takes its time."""
        made = hashlib.sha256()
        for root, pattern in ((self.folder, "pom.xml"), (self.folder / "src", "*.java"), (ROOT / "protos", "*.proto")):
            for file in sorted(root.rglob(pattern)):
                made.update(file.read_bytes())
        stamp = self.folder / "target" / ".built"
        if not stamp.exists() or stamp.read_text("utf-8") != made.hexdigest():
            words = (self._maven, "--quiet", "--batch-mode", f"-Dmaven.repo.local={CACHE / 'm2'}", "package")
            done = _done(words, self.folder, None)
            if "Could not transfer" in done.stdout or "Could not resolve" in done.stdout:
                raise Absent(f"the packages of the Java client cannot be had: {done.stdout.strip()[:300]}")
            assert done.returncode == 0, done.stdout[-8000:]
            stamp.write_text(made.hexdigest(), "utf-8")
        return Runner("Java", [self._java, "-cp", self._classes, "dev.memstream.conformance.Main"], client=False)

    def java(self, program: str) -> str:
        """What one source file prints, run with the generated code."""
        self.runner()
        return run(self._java, "-cp", self._classes, program)

    @property
    def _classes(self) -> str:
        target = self.folder / "target"
        return f"{target / 'classes'}{os.pathsep}{(target / 'classpath').read_text('utf-8').strip()}"
