"""Generate the contract's Python code from protos/ into client/memstream/v1 (`--check` only compares).

The proto path equals the import path, so no import is rewritten. `__init__.py` and `py.typed` are not generated.
"""

from __future__ import annotations

import argparse
import filecmp
import sys
import tempfile
from importlib.metadata import files
from importlib.resources import files as resources
from pathlib import Path

from grpc_tools import protoc

ROOT = Path(__file__).resolve().parent.parent
PROTOS = ROOT / "protos"
VENDORED = ROOT / "third_party" / "googleapis"
CLIENT = ROOT / "client"
PACKAGE = Path("memstream/v1")
GENERATED = ("*_pb2.py", "*_pb2.pyi", "*_pb2_grpc.py", "*_pb2_grpc.pyi")


def generate_code(out: Path) -> None:
    """Write every generated file under `out`. Raises SystemExit with protoc's code if it rejects a file."""
    sources = sorted(str(path.relative_to(PROTOS)) for path in PROTOS.rglob("*.proto"))
    binaries = Path(sys.executable).parent
    code = protoc.main(
        [
            "protoc",
            f"--proto_path={PROTOS}",
            f"--proto_path={VENDORED}",
            f"--proto_path={resources('grpc_tools') / '_proto'}",
            *(f"--plugin={name}={binaries / name}" for name in ("protoc-gen-mypy", "protoc-gen-mypy_grpc")),
            *(f"--{kind}_out={out}" for kind in ("python", "grpc_python")),
            *(f"--{kind}_out=quiet:{out}" for kind in ("mypy", "mypy_grpc")),
            *sources,
        ]
    )
    if code:
        raise SystemExit(code)


def generated_names(under: Path) -> set[str]:
    """Names of the generated files of the package under `under`."""
    return {path.name for pattern in GENERATED for path in (under / PACKAGE).glob(pattern)}


def find_drift(fresh: Path) -> list[str]:
    """Differences between the committed code and the code just generated under `fresh`."""
    there, here = generated_names(fresh), generated_names(CLIENT)
    differing = [
        name
        for name in sorted(there & here)
        if not filecmp.cmp(fresh / PACKAGE / name, CLIENT / PACKAGE / name, shallow=False)
    ]
    return [
        *(f"{PACKAGE / name} is missing" for name in sorted(there - here)),
        *(f"{PACKAGE / name} has no proto" for name in sorted(here - there)),
        *(f"{PACKAGE / name} differs" for name in differing),
        *vendored_drift(),
    ]


def vendored_drift() -> list[str]:
    """Vendored protos that differ from the installed googleapis-common-protos."""
    installed = {str(entry): Path(str(entry.locate())) for entry in files("googleapis-common-protos") or ()}
    found = []
    for path in sorted(VENDORED.rglob("*.proto")):
        twin = installed.get(str(path.relative_to(VENDORED)))
        if twin is None or twin.read_bytes() != path.read_bytes():
            found.append(f"{path.relative_to(ROOT)} differs from the installed googleapis-common-protos")
    return found


def main() -> int:
    """The exit code: 1 if `--check` finds a difference."""
    arguments = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    arguments.add_argument("--check", action="store_true", help="compare instead of writing")
    if not arguments.parse_args().check:
        for name in generated_names(CLIENT):
            (CLIENT / PACKAGE / name).unlink()
        generate_code(CLIENT)
        return 0
    with tempfile.TemporaryDirectory() as fresh:
        generate_code(Path(fresh))
        found = find_drift(Path(fresh))
    for line in found:
        print(line, file=sys.stderr)
    if found:
        print("run `make generate` and commit the result", file=sys.stderr)
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
