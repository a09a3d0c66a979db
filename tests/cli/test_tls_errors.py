"""What commands say if TLS of client and server do not fit, against real servers."""

from __future__ import annotations

from pathlib import Path

import pytest

from memstream_server.cli import server as server_module
from tests.cli.commands import call
from tests.support.certificates import Authority
from tests.support.server import ServerProcess


def failure(*words: str) -> str:
    """The one line of a failed command."""
    done = call("info", "--timeout", "5", *words)
    assert (done.returncode, done.stdout) == (1, "")
    return done.stderr


def test_failed_connection_says_which_flag_helps(
    server: ServerProcess, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server_module, "FIRST_CONNECTION_S", 0.2)  # the time for which a command tries again
    authority = Authority(tmp_path)
    certificate, key = authority.issue("server", dns=("memory.example",), loopback=False)
    files = {"tls_cert_file": str(certificate), "tls_key_file": str(key)}
    with ServerProcess(tmp_path / "data").configure(**files) as encrypted:
        given = ("--target", encrypted.address)
        assert "is not trusted: name its CA with --tls-ca" in failure(*given, "--tls")
        assert "if the server has TLS, pass --tls or --tls-ca" in failure(*given)
        assert "is for another name" in failure(*given, "--tls-ca", str(authority.ca))
    assert "has no TLS: leave out --tls" in failure("--target", server.address, "--tls-ca", str(authority.ca))
