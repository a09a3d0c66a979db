"""`memstream healthcheck` connects by the server's settings, with every kind of TLS."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.cli.commands import call
from tests.support.certificates import Authority
from tests.support.server import ServerProcess

Start = Callable[..., ServerProcess]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    made: list[ServerProcess] = []

    def started(listen: str = "127.0.0.1:0", **settings: str) -> ServerProcess:
        made.append(ServerProcess(tmp_path / f"data{len(made)}", listen, **settings).start())
        return made[-1]

    yield started
    for server in made:
        server.kill()


def checked(*flags: str, **settings: str) -> tuple[int, str]:
    """Exit code and standard error of a check with these settings."""
    done = call("healthcheck", *flags, **settings)
    return done.returncode, done.stderr


def test_healthcheck_reports_serving(start: Start) -> None:
    server = start()
    assert checked(listen=server.address) == (0, "")
    assert checked("--json", "--listen", server.address, listen="127.0.0.1:1")[0] == 0
    code, said = checked("--service", "no.such", listen=server.address)
    assert (code, "has no service 'no.such'" in said) == (1, True)
    server.stop()
    code, said = checked(listen=server.address)
    assert (code, "does not answer: UNAVAILABLE" in said) == (1, True)


def test_healthcheck_uses_the_listen_setting(start: Start, tmp_path: Path) -> None:
    everywhere = start("0.0.0.0:0", insecure_listen="true")
    assert checked(listen=everywhere.address, insecure_listen="true")[0] == 0
    port_file = tmp_path / "port"
    port_file.write_text(f"{everywhere.address}\n")
    assert checked(listen="127.0.0.1:0", port_file=str(port_file))[0] == 0
    code, said = checked(listen="127.0.0.1:0")
    assert (code, "port_file" in said) == (1, True)
    with tempfile.TemporaryDirectory(prefix="ms-", dir="/tmp") as short:  # a socket's path is limited to 107 bytes
        listen = f"unix:{short}/s"
        start(listen)
        assert checked(listen=listen)[0] == 0
        config = tmp_path / "memstream.toml"
        config.write_text(f'listen = "{listen}"\n')
        assert checked("--config", str(config))[0] == 0


def test_healthcheck_fails_with_1_on_bad_settings() -> None:
    code, said = checked(listen="7700")
    assert (code, "listen" in said) == (1, True)
    code, said = checked(listen="127.0.0.1:1", tls_cert_file="/no/such", tls_key_file="/no/such")
    assert (code, "cannot read /no/such" in said) == (1, True)


@pytest.mark.parametrize("dns", ["memory.agents.svc", "*.agents.svc"])
def test_healthcheck_trusts_the_certificate_of_any_name(start: Start, tmp_path: Path, dns: str) -> None:
    authority = Authority(tmp_path / "tls")
    certificate, key = authority.issue("server", dns=(dns,), loopback=False)
    server = start(tls_cert_file=str(certificate), tls_key_file=str(key))
    tls = {"tls_cert_file": str(certificate), "tls_key_file": str(key)}
    assert checked(listen=server.address, **tls)[0] == 0
    other = authority.issue("other", dns=(dns,), loopback=False)
    code, said = checked(listen=server.address, tls_cert_file=str(other[0]), tls_key_file=str(other[1]))
    assert (code, "does not answer" in said) == (1, True)


def test_healthcheck_presents_a_client_certificate(start: Start, tmp_path: Path) -> None:
    """The server's certificate, or another one if the clients' CA did not sign it."""
    authority, clients = Authority(tmp_path / "tls"), Authority(tmp_path / "clients", "clients")
    policy = tmp_path / "policy.toml"
    policy.write_text("")
    for ca, own in ((authority, True), (clients, False)):
        certificate, key = authority.issue("server")
        settings = {
            "tls_cert_file": str(certificate),
            "tls_key_file": str(key),
            "tls_client_ca_file": str(ca.ca),
            "access_policy_file": str(policy),
        }
        server = start(**settings)
        code, said = checked(listen=server.address, **settings)
        assert (code == 0) == own
        assert own or "must be signed by tls_client_ca_file" in said
        probe, probe_key = ca.issue("probe")
        flags = ("--tls-cert", str(probe), "--tls-key", str(probe_key))
        assert checked(*flags, listen=server.address, **settings)[0] == 0
