"""The parts alone: policy files, keys, proxies, headers between servers, settings, and secrecy."""

from __future__ import annotations

import errno
import itertools
import json
import os
import re
import time
import warnings
from pathlib import Path
from typing import Any

import jwt
import pytest
from cryptography.hazmat.primitives.asymmetric import rsa
from jwt.algorithms import RSAAlgorithm

import memstream
from memstream.client import connect
from memstream_server.cli.server import Server
from memstream_server.rpc.access import keys, peers
from memstream_server.rpc.access.admission import CLIENTS_OF_OWNER_MAX, NAME_MAX, OWNERS_MAX, Clients
from memstream_server.rpc.access.caller import CALLER, Caller, Verb
from memstream_server.rpc.access.files import AccessError, Watched
from memstream_server.rpc.access.peers import (
    CALLER_HEADER,
    Peers,
    TlsError,
    TlsFiles,
    TrustedProxies,
    forwarded_uri,
    server_credentials,
)
from memstream_server.rpc.access.policy import parse_policy
from memstream_server.rpc.access.tokens import JwtIdentities
from memstream_server.rpc.errors import Unauthenticated
from memstream_server.settings import Settings, SettingsError, load
from tests.cli.commands import run
from tests.support.certificates import Authority
from tests.support.server import ServerProcess

GRANT = """
[[grant]]
who = ["key:joy", "uri:spiffe://mesh/*"]
namespaces = ["comedy", "joy-*"]
verbs = ["observe", "read"]
"""
SECRET = "a secret of more than thirty-two characters"


@pytest.fixture(autouse=True)
def _no_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("MEMSTREAM_")]:
        monkeypatch.delenv(name)


def test_documents_have_a_row_for_every_verb() -> None:
    page = (Path(__file__).parents[2] / "docs/security.md").read_text("utf-8")
    table = page.partition("| verb | allows |")[2].partition("\n\n")[0]
    assert re.findall(r"^\| `(\w+)` \|", table, re.M) == [verb.value for verb in Verb]


@pytest.mark.parametrize(
    ("principal", "verb", "namespace", "allowed"),
    [
        ("key:joy", Verb.READ, "comedy", True),
        ("key:joy", Verb.RECALL, "comedy", False),
        ("key:joy", Verb.READ, "comedy2", False),
        ("key:joy", Verb.READ, "joy-", True),
        ("key:joy", Verb.READ, "joy", False),
        ("key:joy", Verb.READ, "", False),
        ("key:joyful", Verb.READ, "comedy", False),
        ("jwt:joy", Verb.READ, "comedy", False),
        ("uri:spiffe://mesh/ns/joy", Verb.OBSERVE, "joy-1", True),
        ("uri:spiffe://meshes", Verb.OBSERVE, "joy-1", False),
    ],
)
def test_only_what_is_granted_is_allowed(principal: str, verb: Verb, namespace: str, allowed: bool) -> None:
    assert parse_policy(GRANT).may(principal, verb, namespace) is allowed


def test_whole_server_needs_a_grant_of_all_namespaces() -> None:
    policy = parse_policy('[[grant]]\nwho = ["*"]\nnamespaces = ["*"]\nverbs = ["*"]\n')
    assert all(policy.may("key:any", verb, "") for verb in Verb)
    assert not parse_policy("").may("key:any", Verb.READ, "comedy")


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("grant = 3", "two brackets"),
        ("[grant]\nwho = []", "two brackets"),
        ("[[grants]]", "'grants' is unknown"),
        ('[[grant]]\nwho = ["key:a"]\nnamespaces = ["a"]', "grant 1 must have exactly"),
        (GRANT + 'more = "x"', "grant 1 must have exactly"),
        (GRANT.replace('"read"', '"reed"'), "grant 1: verbs has 'reed'"),
        (GRANT.replace('"key:joy"', '"joy"'), "names begin with key:"),
        (GRANT.replace('"comedy"', '"co*dy"'), "at the end only"),
        (GRANT.replace('["comedy", "joy-*"]', "[]"), "must be a list of names"),
        ("[[grant", "Expected"),
    ],
)
def test_a_policy_that_is_wrong_is_refused_whole(text: str, complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint.replace("[", r"\[")):
        parse_policy(text)


def test_unreadable_file_is_reloaded_once_readable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("memstream_server.rpc.access.files.POLL_INTERVAL_S", 0.0)
    file = tmp_path / "policy.toml"
    file.write_text("before", "utf-8")
    watched = Watched(file, str)
    file.write_text("and after", "utf-8")
    with monkeypatch.context() as patched:
        patched.setattr(Path, "read_bytes", denied)
        assert watched.read_current() == "before"
    assert watched.read_current() == "and after", "a change of its mode alone leaves time and size as they were"


def denied(*_: Any) -> bytes:
    raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))


def test_keys_are_hashed_and_match_only_whole(tmp_path: Path) -> None:
    file = tmp_path / "keys.json"
    made, given = keys.create_key(file, "joy")
    other, _ = keys.create_key(file, "joy")
    known = keys.parse_keys(file.read_text())
    assert given not in file.read_text()
    assert given.split("_", 2)[2] not in file.read_text()
    assert file.stat().st_mode & 0o777 == 0o600
    assert keys.name_of(known, given) == "joy"
    for wrong in ("", "msk_", given[:-1], given + "A", given.swapcase(), given.replace(made.id, other.id)):
        assert keys.name_of(known, wrong) is None
    keys.revoke_key(file, made.id)
    assert keys.name_of(keys.parse_keys(file.read_text()), given) is None
    assert [key.id for key in keys.read_keys(file)] == [other.id]
    with pytest.raises(AccessError, match="has no key"):
        keys.revoke_key(file, made.id)


ID_OF_NO_KIND = json.dumps({"keys": [{"id": ["s3cret"], "name": "a", "sha256": "0" * 64, "created": ""}]})


@pytest.mark.parametrize(
    "text", ["{", "[]", '{"keys": [{}]}', '{"keys": [{"id": "s3cret", "name": "a b"}]}', ID_OF_NO_KIND]
)
def test_invalid_key_file_error_hides_its_text(tmp_path: Path, text: str) -> None:
    file = tmp_path / "keys.json"
    file.write_text(text)
    with pytest.raises(AccessError, match="not a file written by") as refused:
        keys.read_keys(file)
    assert "s3cret" not in str(refused.value)


def test_cli_creates_lists_and_revokes_keys(tmp_path: Path) -> None:
    file = str(tmp_path / "keys.json")
    made = json.loads(run("keys", "create", "joy", "--file", file, "--json").stdout)
    shown = run("keys", "create", "sad", "--file", file)
    assert shown.stdout.startswith("msk_")
    assert shown.stdout.strip() not in shown.stderr
    assert run("keys", "revoke", made["id"], "--file", file).returncode == 0
    listed = run("keys", "list", "--file", file, "--json").stdout
    assert [json.loads(line)["name"] for line in listed.splitlines()] == ["sad"]
    assert shown.stdout.strip().split("_", 2)[2] not in listed


@pytest.mark.parametrize(
    ("listed", "peer", "believed"),
    [
        ("", "ipv4:127.0.0.1:1", False),
        ("127.0.0.0/8", "ipv4:127.0.0.6:1", True),
        ("127.0.0.0/8", "ipv4:10.0.0.1:1", False),
        ("127.0.0.0/8", "ipv6:%5B::1%5D:1", False),
        ("::1, 10.0.0.0/8", "ipv6:%5B::1%5D:1", True),
        ("10.0.0.0/8", "ipv6:[::ffff:10.1.2.3]:1", True),
        ("10.0.0.0/8", "unix:", False),
        ("unix", "unix:", True),
        ("unix", "ipv4:127.0.0.1:1", False),
        ("0.0.0.0/0", "nonsense", False),
    ],
)
def test_only_listed_peers_are_believed(listed: str, peer: str, believed: bool) -> None:
    assert (peer in TrustedProxies(listed)) is believed


@pytest.mark.parametrize(
    ("header", "uri"),
    [
        ("URI=spiffe://a", "spiffe://a"),
        ('By=x;Hash=1;Subject="CN=\\"q\\",URI=evil;O=b,URI=evil";URI=spiffe://a', "spiffe://a"),
        ("URI=spiffe://old,By=x; uri=spiffe://a", "spiffe://a"),
        ('URI="spiffe://a;b"', "spiffe://a;b"),
    ],
)
def test_the_nearest_proxys_word_is_taken(header: str, uri: str) -> None:
    assert forwarded_uri(header) == uri


@pytest.mark.parametrize("header", ["", "URI=", "By=x", "URI=a;URI=b", "URI=a,", 'URI="a', 'Subject="\\";URI=a'])
def test_a_proxys_word_without_one_uri_is_nobodys(header: str) -> None:
    with pytest.raises(Unauthenticated):
        forwarded_uri(header)


def test_forwarded_caller_is_signed_without_credentials(monkeypatch: pytest.MonkeyPatch) -> None:
    async def allowed() -> None:
        """No authorization."""

    ours, other = Peers(secret=SECRET), Peers(secret=SECRET[::-1])
    given = [("authorization", "Bearer s3cret"), ("x-forwarded-client-cert", "URI=x"), (CALLER_HEADER, "forged")]
    token = CALLER.set(Caller("jwt:jóy", lambda _verb, _namespace: True, allowed))
    try:
        passed = dict(ours.forwarded_metadata([*given, ("x-request-id", "1")], "/a/B"))
    finally:
        CALLER.reset(token)
    assert set(passed) == {CALLER_HEADER, "x-request-id"}
    header = str(passed[CALLER_HEADER])
    assert ours.verify_principal(header, "/a/B") == "jwt:jóy"
    refused: list[tuple[Peers, Any, str]] = [
        (other, header, "/a/B"),
        (Peers(), header, "/a/B"),
        (ours, header, "/a/C"),
        (ours, header[:-8] + "AAAAAAA=", "/a/B"),
        (ours, "A" + header[1:], "/a/B"),
        (ours, "", "/a/B"),
        (ours, "a.b.c", "/a/B"),
        (ours, "é.é", "/a/B"),
    ]
    for who, said, path in refused:
        with pytest.raises(Unauthenticated):
            who.verify_principal(said, path)
    monkeypatch.setattr(peers, "VALID_S", -1.0)
    with pytest.raises(Unauthenticated):
        ours.verify_principal(header, "/a/B")


@pytest.mark.parametrize(
    ("given", "complaint"),
    [
        ({"listen": "0.0.0.0:1"}, "without TLS and authentication"),
        ({"listen": "[::]:1", "tls_cert_file": "c", "tls_key_file": "k"}, "without authentication"),
        ({"listen": "memory.example:1", "api_keys_file": "k", "access_policy_file": "p"}, "without TLS"),
        ({"tls_cert_file": "c"}, "go together"),
        ({"tls_client_ca_file": "c"}, "need tls_cert_file"),
        ({"jwt_jwks": "j", "jwt_issuer": "i"}, "go together"),
        ({"api_keys_file": "k"}, "access_policy_file goes with"),
        ({"access_policy_file": "k"}, "access_policy_file goes with"),
        ({"peer_secret": "s3cret"}, "at least 32 characters"),
        (
            {"api_keys_file": "k", "access_policy_file": "p", "journal_url": "postgresql://x/y"},
            "need a peer_secret",
        ),
    ],
)
def test_misleading_security_settings_are_refused(given: dict[str, str], complaint: str) -> None:
    with pytest.raises(SettingsError, match=complaint) as refused:
        load(None, given)
    assert "s3cret" not in str(refused.value)


@pytest.mark.parametrize(
    "given",
    [
        {"listen": "localhost:1"},
        {"listen": "[::1]:1"},
        {"listen": "unix:/tmp/x"},
        {"listen": "0.0.0.0:1", "insecure_listen": True},
        {
            "listen": "0.0.0.0:1",
            "tls_cert_file": "c",
            "tls_key_file": "k",
            "api_keys_file": "k",
            "access_policy_file": "p",
        },
    ],
)
def test_settings_that_listen_safely_are_taken(given: dict[str, Any]) -> None:
    assert load(None, given).listen == given["listen"]


def test_insecure_listen_is_refused_or_warned_about(tmp_path: Path) -> None:
    refused = run("serve", "--data", str(tmp_path / "data"), "--listen", "0.0.0.0:0")
    assert refused.returncode == 2
    assert "insecure_listen" in refused.stderr
    with ServerProcess(tmp_path / "data", "0.0.0.0:0", insecure_listen="on") as server:
        assert "insecure_listen" in server.log()
        assert "TLS and authentication" in server.log()


@pytest.mark.parametrize(
    "jwks", ["http://issuer.example/jwks", "ftp://127.0.0.1/jwks", "/nowhere/jwks.json"], ids=["plain", "ftp", "absent"]
)
def test_issuer_keys_need_https_or_a_file(jwks: str) -> None:
    with pytest.raises(AccessError):
        JwtIdentities(jwks, "issuer", "audience")


@pytest.mark.parametrize("text", ["[]", '{"keys": 3}', '{"keys": [{"kty": "EC", "alg": ["ES256"]}]}', "{"])
def test_a_key_set_that_is_none_is_refused(tmp_path: Path, text: str) -> None:
    file = tmp_path / "jwks.json"
    file.write_text(text)
    with pytest.raises(AccessError, match="not a JSON web key set"):
        JwtIdentities(str(file), "issuer", "audience")


def test_mismatched_tls_files_are_refused(tmp_path: Path) -> None:
    authority = Authority(tmp_path)
    certificate, key = authority.issue("one")
    _, other = authority.issue("two")
    server_credentials(TlsFiles(certificate, key, authority.ca))
    for files in (
        TlsFiles(certificate, other),
        TlsFiles(certificate, certificate),
        TlsFiles(tmp_path / "absent", key),
        TlsFiles(certificate, key, key),
    ):
        with pytest.raises(TlsError) as refused:
            server_credentials(files)
        assert "BEGIN" not in str(refused.value)


def test_secrets_show_in_no_representation(tmp_path: Path) -> None:
    certificate, key = Authority(tmp_path).issue("joy")
    tls = memstream.Tls.of_files(None, certificate, key)
    client = connect("127.0.0.1:1", token="s3cret", tls=tls)
    settings = Settings(peer_secret=SECRET)  # type: ignore[arg-type]  # as the environment gives it
    for shown in (repr(tls), repr(client._settings), repr(Server("x", "s3cret", 1.0, tls)), repr(settings)):
        assert "s3cret" not in shown
        assert SECRET not in shown
        assert "PRIVATE" not in shown


def test_a_certificate_and_its_key_go_together(tmp_path: Path) -> None:
    certificate, key = Authority(tmp_path).issue("joy")
    for given in ({"certificate": certificate}, {"key": key}):
        with pytest.raises(ValueError, match="go together"):
            memstream.Tls.of_files(**given)


def _rsa(bits: int) -> dict[str, Any]:
    private = rsa.generate_private_key(65_537, bits)
    return {"private": private, "jwk": json.loads(RSAAlgorithm.to_jwk(private.public_key())) | {"kid": "k"}}


@pytest.mark.parametrize(
    ("bits", "more", "reason"),
    [
        (2_048, {}, ""),
        (2_048, {"use": "sig", "key_ops": ["verify"]}, ""),
        (2_048, {"use": "enc"}, "not for signatures"),
        (2_048, {"use": 5}, "not for signatures"),
        (2_048, {"key_ops": ["encrypt"]}, "not for signatures"),
        (2_048, {"key_ops": "verify"}, "not for signatures"),
        (2_048, {"d": "AQAB"}, "a private key"),
        (2_048, {"kty": "oct", "k": "AAAA", "alg": "HS256"}, "not of an asymmetric algorithm"),
        (2_048, {"kty": "none"}, "malformed"),
        (1_024, {}, "an RSA key of less than 2048 bits"),
    ],
)
async def test_key_that_must_not_verify_is_named_and_unused(
    tmp_path: Path, bits: int, more: dict[str, Any], reason: str
) -> None:
    made, other = _rsa(bits), _rsa(2_048)
    file = tmp_path / "jwks.json"
    file.write_text(json.dumps({"keys": [made["jwk"] | more, other["jwk"] | {"kid": "other"}, "no key"]}))
    identities = JwtIdentities(str(file), "issuer", "audience")
    said = {"sub": "joy", "iss": "issuer", "aud": "audience", "exp": int(time.time()) + 600}
    by_other = jwt.encode(said, other["private"], algorithm="RS256", headers={"kid": "other"})
    assert await identities.verify_subject(by_other) == "joy"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # PyJWT's own about a short key
        token = jwt.encode(said, made["private"], algorithm="RS256", headers={"kid": "k"})
    if not reason:
        assert await identities.verify_subject(token) == "joy"
        return
    with pytest.raises(Unauthenticated, match="no such key"):
        await identities.verify_subject(token)
    file.write_text(json.dumps({"keys": [made["jwk"] | more]}))
    with pytest.raises(AccessError, match=reason):
        JwtIdentities(str(file), "issuer", "audience")


class _Said:
    """A call's context with a user agent and an address."""

    def __init__(self, said: str | bytes, address: str) -> None:
        self._said, self._address = said, address

    def invocation_metadata(self) -> tuple[tuple[str, str | bytes], ...]:
        return (("te", "trailers"), ("user-agent", self._said))

    def peer(self) -> str:
        return self._address


def test_clients_are_bounded_and_their_names_harmless() -> None:
    clients = Clients(itertools.count(1).__next__)
    said = "evil\x1b[2J\u202e\U000e0041\n" + "x" * 500
    with clients.count_call("", _Said(said, "ipv4:10.0.0.1:40000"), "streams"):
        (one,) = clients.list_latest()
        assert (one.calls, one.streams, one.address) == (1, 1, "ipv4:10.0.0.1")
    assert one.streams == 0
    assert one.name.startswith(r"evil\x1b[2J\u202e\U000e0041\nxxx")
    assert one.name.isprintable()
    assert one.name.count("x") < NAME_MAX
    with clients.count_call("", _Said(said + "y" * 60_000, "ipv4:10.0.0.1:40001"), "calls"):
        assert [each.calls for each in clients.list_latest()] == [2], "what is cut off is not kept to compare"
    for number in range(OWNERS_MAX + 50):
        with clients.count_call("", _Said(b"old \x9b", f"ipv6:[::{number:x}]:1"), "calls"):
            pass
    for number in range(OWNERS_MAX):
        with clients.count_call("key:a", _Said(f"n{number}", "unix:"), "calls"):
            pass
    found = clients.list_latest()
    assert len(found) == OWNERS_MAX - 1 + CLIENTS_OF_OWNER_MAX
    assert (found[0].name, found[-1].name) == (f"n{OWNERS_MAX - 1}", r"old \x9b")
