"""The package `memstream` imports its public names lazily."""

from __future__ import annotations

import re
import subprocess
import sys
import textwrap
from pathlib import Path

import memstream


def run(program: str) -> str:
    """The output of a program in a new interpreter."""
    ended = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program)], capture_output=True, text=True, check=False
    )
    assert ended.returncode == 0, ended.stderr
    return ended.stdout


def test_contract_imports_nothing_of_the_sdk() -> None:
    program = """
        import sys
        import memstream.v1.stream_service_pb2_grpc
        print([name for name in sys.modules if name.startswith("memstream.") and not name.startswith("memstream.v1")])
    """
    assert run(program) == "[]\n"


def test_every_public_name_is_an_attribute_and_listed() -> None:
    program = """
        import memstream
        import memstream.public
        assert set(memstream.public.__all__) <= set(dir(memstream))
        assert all(getattr(memstream, name) is getattr(memstream.public, name) for name in memstream.public.__all__)
        assert memstream.NotFound is memstream.NotFound
        assert not hasattr(memstream, "Nothing")
        from memstream import *
        print(connect.__module__, sync.connect.__module__)
    """
    assert run(program) == "memstream.client memstream.sync\n"


def test_public_modules_do_not_import_the_package() -> None:
    """A lazy lookup would be a circular import: these modules use `import memstream.errors as errors`."""
    folder = Path(memstream.__path__[0])
    files = [*folder.glob("*.py"), *folder.glob("sync/*.py")]
    asking = [
        file.name for file in files if re.search(r"^from memstream import", file.read_text("utf-8"), re.MULTILINE)
    ]
    assert len(files) > 20
    assert asking == []


HEAVY = ("grpc", "numpy", "google.protobuf", "asyncio", "ssl", "subprocess", "dataclasses", "memstream.public")
"""What `import memstream` alone must not import: together they take ten times as long as the rest of it."""
UNUSED = ("click", "jinja2", "mcp", "opentelemetry", "pandas", "pydantic", "pymilvus", "pytest", "sqlalchemy", "yaml")
OWN_UNUSED = ("memstream.agent", "memstream.local_server", "memstream.otel", "memstream.testing", "memstream_server")


def imported(statement: str) -> set[str]:
    """Modules that a new interpreter has after a statement, without those it begins with."""
    return set(run(f"import sys; before = set(sys.modules); {statement}; print(*(set(sys.modules) - before))").split())


def test_import_alone_loads_no_heavy_module() -> None:
    assert imported("import memstream").isdisjoint(HEAVY)


def test_connect_loads_nothing_of_server_or_extras() -> None:
    assert imported("import memstream; memstream.connect").isdisjoint({*UNUSED, *OWN_UNUSED})


def test_what_adapters_import_first_imports_alone() -> None:
    """The adapters of frameworks may import any of these before the blocking SDK, which imports them too."""
    for module in ("memstream.any_loop", "memstream.sync.loop", "memstream.sync.bases", "memstream.client"):
        run(f"import {module}")
