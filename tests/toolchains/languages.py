"""Compilers and packages of other languages, from this machine and the registries; kept in .cache/."""

from __future__ import annotations

import hashlib
import json
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache, cached_property
from pathlib import Path
from typing import Any

from tests.conformance.world import Runner
from tests.toolchains.programs import CACHE, Absent, alone

ROOT = Path(__file__).resolve().parents[2]
RUN_S = 600

GO_PLUGINS = {
    "protoc-gen-go": "google.golang.org/protobuf/cmd/protoc-gen-go@v1.36.12",
    "protoc-gen-go-grpc": "google.golang.org/grpc/cmd/protoc-gen-go-grpc@v1.6.2",
}
PYTHON = Runner("Python", [sys.executable, "-m", "tests.conformance.run"])


def find_program(program: str) -> str:
    """Returns the path of a program. Raises Absent."""
    found = shutil.which(program)
    if found is None:
        raise Absent(f"{program} is not installed")
    return found


def run(*command: str, cwd: Path = ROOT, env: Mapping[str, str] | None = None) -> str:
    """Runs a command and returns its output. Raises AssertionError with the output when it fails."""
    done = _run_command(command, cwd, env)
    assert done.returncode == 0, f"{' '.join(command)} failed:\n{done.stdout[-8000:]}\n{done.stderr[-8000:]}"
    return done.stdout


def fetch(what: str, *command: str, cwd: Path = ROOT, env: Mapping[str, str] | None = None) -> None:
    """Runs a command that needs a registry. Raises Absent when it fails: the registry may be unreachable."""
    done = _run_command(command, cwd, env)
    if done.returncode:
        raise Absent(f"{what} cannot be fetched: {(done.stderr or done.stdout).strip()[-300:]}")


def build_once(folder: Path, sources: Iterable[Path], build: Callable[[], object]) -> None:
    """Calls `build`, which makes `folder`, unless it has succeeded with these sources; other processes wait."""
    digest = hashlib.sha256()
    for file in sorted(sources):
        digest.update(file.read_bytes())
    work = f"{folder.parent.name}-{folder.name}"
    with alone(work):
        stamp = CACHE / f"{work}.built"
        if not folder.exists() or not stamp.exists() or stamp.read_text("utf-8") != digest.hexdigest():
            build()
            stamp.write_text(digest.hexdigest(), "utf-8")


def _run_command(command: Sequence[str], cwd: Path, env: Mapping[str, str] | None) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, cwd=cwd, env=env, capture_output=True, text=True, timeout=RUN_S, check=False)


class Go:
    """The Go client, its runner and the generators."""

    folder = ROOT / "client" / "go"

    def __init__(self) -> None:
        self._go = find_program("go")
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
        """Runs `go WORDS` there and returns its output."""
        return run(self._go, *words, cwd=cwd or self.folder, env=self.environment)

    def plugins(self) -> Path:
        """Installs the generators and returns their folder."""
        for name, module in GO_PLUGINS.items():
            version = module.rpartition("@")[2]
            if not (self.bin / name).exists() or version not in self.go("version", "-m", str(self.bin / name)):
                fetch(name, self._go, "install", module, cwd=self.folder, env=self.environment)
        return self.bin

    def runner(self) -> Runner:
        """Builds the runner; go's cache makes a repeated build fast."""
        self.go("build", "-o", str(self.bin / "conformance"), "./internal/conformance")
        return Runner("Go", [str(self.bin / "conformance")])


class Node:
    """The TypeScript client, its runner and the generator."""

    folder = ROOT / "client" / "typescript"

    def __init__(self) -> None:
        find_program("node")
        version = run(find_program("node"), "--version").strip()
        if int(version.removeprefix("v").partition(".")[0]) < 20:
            raise Absent(f"the TypeScript client needs Node.js 20, found {version}")
        modules = self.folder / "node_modules"
        build_once(modules, [self.folder / "package-lock.json"], self._install)
        self.bin = modules / ".bin"

    def _install(self) -> None:
        words = ("ci", "--cache", str(CACHE / "npm"), "--no-audit", "--no-fund", "--ignore-scripts")
        fetch("the packages of the TypeScript client", find_program("npm"), *words, cwd=self.folder)

    def npm(self, script: str) -> str:
        """Runs a script of package.json and returns its output."""
        return run(find_program("npm"), "run", "--silent", script, cwd=self.folder)

    @cached_property
    def built(self) -> Path:
        """Compiles the client with strict types, once, and returns the output folder."""
        built = self.folder / "dist"
        sources = [
            self.folder / "package-lock.json",
            self.folder / "tsconfig.json",
            *(self.folder / "src").rglob("*.ts"),
        ]
        build_once(built, sources, lambda: self.npm("build"))
        return built

    def program(self, code: str) -> str:
        """Compiles a user's program with strict types, runs it and returns its output."""
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

    def compile_programs(self, programs: Mapping[int, str]) -> dict[int, Path]:
        """Compiles users' programs with strict types, at once. Returns their scripts, in a new folder."""
        folder = Path(tempfile.mkdtemp(dir=self.built))
        files = {name: folder / f"program{name}.ts" for name in programs}
        for name, code in programs.items():
            files[name].write_text(code, "utf-8")
        options = ("--outDir", str(folder), "--rootDir", str(folder), "--module", "nodenext", "--target", "es2023")
        checks = ("--strict", "--types", "node", "--skipLibCheck")
        run(str(self.bin / "tsc"), *options, *checks, *map(str, files.values()), cwd=self.folder)
        return {name: file.with_suffix(".js") for name, file in files.items()}

    def consume(self, code: str, target: str) -> None:
        """Type-checks a program of a project that has only the packed client and its dependencies: no @types/node, and
        every declaration is checked. Raises AssertionError with the compiler's errors."""
        assert self.built
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            run(find_program("npm"), "pack", "--silent", "--pack-destination", name, cwd=self.folder)
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
        """The content of package.json."""
        found: dict[str, Any] = json.loads((self.folder / "package.json").read_text("utf-8"))
        return found

    @property
    def locked(self) -> dict[str, dict[str, Any]]:
        """The packages that a user installs, by path: those of package-lock.json without development packages."""
        lock = json.loads((self.folder / "package-lock.json").read_text("utf-8"))
        return {path: one for path, one in lock["packages"].items() if path and not one.get("dev")}

    def runner(self) -> Runner:
        return Runner("TypeScript", ["node", "--enable-source-maps", str(self.built / "conformance" / "main.js")])


@cache
def node() -> Node:
    """Returns the Node shared by all tests. Raises Absent."""
    return Node()


NODE_22 = "22.23.3"
"""The Node.js that the AI SDK asks for; npm has its program in a package for each system."""
_NODES = {("Linux", "x86_64"): "linux-x64", ("Linux", "aarch64"): "linux-arm64", ("Darwin", "arm64"): "darwin-arm64"}


def node_22() -> str:
    """Returns the path of Node.js 22, which is installed if it is not there. Raises Absent."""
    system = _NODES.get((platform.system(), platform.machine()))
    if system is None:
        raise Absent(f"npm has no Node.js {NODE_22} for {platform.system()} on {platform.machine()}")
    folder = CACHE / f"node-{NODE_22}"
    program = folder / "node_modules" / f"node-{system}" / "bin" / "node"
    with alone(folder.name):
        if not program.exists():
            folder.mkdir(exist_ok=True)
            (folder / "package.json").write_text('{"private": true}', "utf-8")
            words = ("install", "--no-audit", "--no-fund", "--ignore-scripts", "--cache", str(CACHE / "npm"))
            wanted = f"node-{system}@{NODE_22}"
            fetch(f"Node.js {NODE_22}", find_program("npm"), *words, wanted, cwd=folder)
    return str(program)


def buf(template: str, plugins: Path, out: Path) -> None:
    """Generates code by a template into `out`, with the plugins of that folder."""
    found = str(Path(sys.executable).parent)
    environment = os.environ | {"PATH": f"{plugins}:{found}:{os.environ['PATH']}", "BUF_CACHE_DIR": str(CACHE / "buf")}
    run(f"{found}/buf", "generate", "--template", template, "--output", str(out), env=environment)


class Java:
    """The generated Java and its runner."""

    folder = ROOT / "client" / "java"
    _target = folder / "target"

    def __init__(self) -> None:
        self._maven, self._java = find_program("mvn"), find_program("java")
        find_program("javac")

    def runner(self) -> Runner:
        """Builds the runner if its sources or the contract have changed: compiling the generated code is slow.

        From nothing: Maven keeps state of a build that ended early, and of another commit.
        """
        patterns = ((self.folder, "pom.xml"), (self.folder / "src", "*.java"), (ROOT / "protos", "*.proto"))
        build_once(self._target, [file for root, name in patterns for file in root.rglob(name)], self._package)
        return Runner("Java", [self._java, "-cp", self._classes, "dev.memstream.conformance.Main"], client=False)

    def _package(self) -> None:
        shutil.rmtree(self._target, ignore_errors=True)
        words = (self._maven, "--batch-mode", "-ntp", f"-Dmaven.repo.local={CACHE / 'm2'}", "package")
        done = _run_command(words, self.folder, None)
        if done.returncode and ("Could not transfer" in done.stdout or "Could not resolve" in done.stdout):
            raise Absent(f"the packages of the Java client cannot be fetched: {done.stdout.strip()[:300]}")
        assert done.returncode == 0, done.stdout[-8000:]
        assert (self._target / "classes/dev/memstream/conformance/Main.class").exists(), done.stdout[-8000:]

    def java(self, program: str) -> str:
        """Runs one source file with the generated code and returns its output."""
        self.runner()
        return run(self._java, "-cp", self._classes, program)

    @property
    def _classes(self) -> str:
        return f"{self._target / 'classes'}{os.pathsep}{(self._target / 'classpath').read_text('utf-8').strip()}"
