"""How the output of a program that downloads is shown and kept."""

from __future__ import annotations

import io
import subprocess

import pytest

from memstream_server.adapters.models.local.sources import UnreachableIndex, _failure, _wait_for

SCRIPT = "echo 1 of 2; echo 2 of 2 >&2; exit 3"


@pytest.mark.parametrize("shown", [True, False], ids=["terminal", "no terminal"])
def test_output_is_shown_as_it_arrives_and_kept(shown: bool) -> None:
    process = subprocess.Popen(["sh", "-c", SCRIPT], stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    show = io.StringIO()
    assert _wait_for(process, show if shown else None, process.stdout) == (3, "1 of 2\n2 of 2\n")
    assert show.getvalue() == ("1 of 2\n2 of 2\n" if shown else "")


def test_a_program_ends_when_its_output_cannot_be_shown() -> None:
    process = subprocess.Popen(["sh", "-c", "echo 1; exec sleep 60"], stdout=subprocess.PIPE)
    show = io.StringIO()
    show.close()
    with pytest.raises(ValueError, match="closed file"):
        _wait_for(process, show, process.stdout)
    assert process.returncode is not None


@pytest.mark.parametrize(
    ("output", "complaint"),
    [
        ("Could not transfer artifact a:b:1: Connection refused", "Maven cannot reach the package index"),
        ("write failed: No space left on device", "Maven found no space on the disk"),
        ("Could not find artifact a:b:1 in central", "Maven failed"),
        ("", "Maven failed: it gave no reason"),
    ],
)
def test_a_failure_says_what_to_do(output: str, complaint: str) -> None:
    error = _failure("Maven", "settings.xml", output, output.splitlines())
    assert str(error).startswith(complaint)
    assert isinstance(error, UnreachableIndex) == ("cannot reach" in complaint)


def test_credentials_are_not_in_an_error() -> None:
    error = _failure("pip", "pip.conf", "no", ["from https://user:secret@index.example/simple: 401"])
    assert "secret" not in str(error)
