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
