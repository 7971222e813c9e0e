"""Certificates: making them, loading and renewing them, and what is said about bad ones."""

import ipaddress
import socket
import ssl
import threading
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec

from fedtrain.errors import ConfigError
from fedtrain.security import tls
from fedtrain.security.certificates import Made, make_certificates
from fedtrain.security.tls import ServerCertificate, Trust, is_loopback, require_encrypted
from fedtrain.tools import main


def shake_hands(server: ssl.SSLContext, client: ssl.SSLContext, host: str = "localhost") -> bytes:
    """What certificate (DER) a client gets when both contexts meet.

    Raises:
        ssl.SSLError: as the client sees it.
    """
    ours, theirs = socket.socketpair()

    def serve() -> None:
        try:
            with server.wrap_socket(theirs, server_side=True):
                pass
        except OSError:
            theirs.close()

    thread = threading.Thread(target=serve)
    thread.start()
    try:
        with client.wrap_socket(ours, server_hostname=host) as connection:
            found = connection.getpeercert(binary_form=True)
            assert found is not None
            return found
    finally:
        ours.close()
        thread.join()


def der(path: Path) -> bytes:
    return ssl.PEM_cert_to_DER_cert(path.read_text())


def context_of(trust: Trust, host: str = "localhost") -> ssl.SSLContext:
    context = trust.context_for(host)
    assert context is not None
    return context


@pytest.fixture
def made(tmp_path: Path) -> Made:
    return make_certificates(tmp_path / "certificates")


def test_what_is_made_holds_the_hosts_and_the_validity_that_were_asked_for(tmp_path: Path) -> None:
    made = make_certificates(tmp_path, ["fl.example.org", "*.example.net", "192.0.2.7", "[2001:db8::1]"], days=30)
    certificate = x509.load_pem_x509_certificate(made.certificate.read_bytes())
    names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    assert names.get_values_for_type(x509.DNSName) == ["fl.example.org", "*.example.net"]
    assert names.get_values_for_type(x509.IPAddress) == [
        ipaddress.ip_address("192.0.2.7"),
        ipaddress.ip_address("2001:db8::1"),
    ]
    now = datetime.now(UTC)
    assert timedelta(days=29.9) < certificate.not_valid_after_utc - now <= timedelta(days=30)
    assert now - certificate.not_valid_before_utc > timedelta(hours=23)  # so that a clock that is behind does no harm
    assert made.expires == certificate.not_valid_after_utc
    for path in (made.key, tmp_path / "ca-key.pem"):
        assert path.stat().st_mode & 0o777 == 0o600
        key = serialization.load_pem_private_key(path.read_bytes(), password=None)
        assert isinstance(key, ec.EllipticCurvePrivateKey)
        assert isinstance(key.curve, ec.SECP256R1)


def test_the_chain_holds_in_the_strictest_reading(made: Made) -> None:
    context = context_of(Trust(made.ca))
    context.verify_flags |= ssl.VERIFY_X509_STRICT
    for host in ("localhost", "127.0.0.1", "::1"):
        assert shake_hands(ServerCertificate(made.certificate, made.key).context, context, host) == der(
            made.certificate
        )


def test_an_authority_is_used_again_and_nothing_is_replaced_unasked(made: Made) -> None:
    folder, before = made.ca.parent, made.certificate.read_bytes()
    with pytest.raises(ConfigError, match=r"server\.pem exists: use --force"):
        make_certificates(folder)
    assert made.certificate.read_bytes() == before
    authority = made.ca.read_bytes()
    again = make_certificates(folder, ["localhost"], force=True)
    assert (made.new_authority, again.new_authority) == (True, False)
    assert again.ca.read_bytes() == authority
    assert again.certificate.read_bytes() != before
    assert shake_hands(ServerCertificate(again.certificate, again.key).context, context_of(Trust(made.ca)))


def test_half_an_authority_is_refused(made: Made) -> None:
    (made.ca.parent / "ca-key.pem").unlink()
    with pytest.raises(ConfigError, match=r"ca-key\.pem is missing, its other half is there"):
        make_certificates(made.ca.parent, force=True)
    other = make_certificates(made.ca.parent / "other")
    made.ca.write_bytes(other.ca.read_bytes())
    (made.ca.parent / "ca-key.pem").write_bytes(made.key.read_bytes())
    with pytest.raises(ConfigError, match=r"ca-key\.pem is not the key of"):
        make_certificates(made.ca.parent, force=True)


@pytest.mark.parametrize("host", ["", "fl example", "fl.example.org:9092", "https://fl", "-x", "a..b", "x" * 64])
def test_what_is_no_host_is_refused(tmp_path: Path, host: str) -> None:
    with pytest.raises(ConfigError, match="--host: expected a name"):
        make_certificates(tmp_path / "new", [host])
    assert not (tmp_path / "new").exists()


def test_the_command_makes_them_and_says_what_to_configure(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "c"
    assert main(["certificates", "--dir", str(folder), "--host", "fl.example.org", "192.0.2.7", "--days", "7"]) == 0
    said = capsys.readouterr().out
    assert f"server.certificate={folder}/server.pem server.key={folder}/server-key.pem" in said
    assert f"'server.addresses=[\"fl.example.org:9092\"]' server.ca={folder}/ca.pem" in said
    assert main(["certificates", "--dir", str(folder)]) == 2
    assert capsys.readouterr().err.startswith(f"error: {folder}/server.pem exists: use --force")
    assert main(["certificates", "--dir", str(folder), "--force", "--days", "0"]) == 2
    assert capsys.readouterr().err == "error: --days: expected a number of days >= 1, found 0\n"


def test_loopback_is_told_from_other_addresses() -> None:
    assert all(map(is_loopback, ["localhost", "LOCALHOST", "127.0.0.1", "127.255.0.9", "::1", "[::1]"]))
    assert not any(map(is_loopback, ["0.0.0.0", "::", "10.0.0.1", "localhost.example.org", "127.0.0.1.nip.io", ""]))


def test_plain_text_is_refused_where_other_machines_connect() -> None:
    require_encrypted("127.0.0.1", certificate=False, insecure=False)
    for host in ("0.0.0.0", "::", "fl.example.org"):
        require_encrypted(host, certificate=True, insecure=False)
        require_encrypted(host, certificate=False, insecure=True)
        with pytest.raises(ConfigError, match=rf"^server\.host={host}: .*server\.certificate.*server\.insecure=true"):
            require_encrypted(host, certificate=False, insecure=False)


def test_a_client_speaks_plain_text_to_loopback_only_unless_it_is_told_to(made: Made) -> None:
    assert Trust().context_for("127.0.0.1") is None
    assert Trust().context_for("fl.example.org") is not None
    assert Trust(made.ca).context_for("localhost") is not None
    assert Trust(insecure=True).context_for("fl.example.org") is None
    with pytest.raises(ConfigError, match=r"^server\.insecure: expected false where server\.ca is given"):
        Trust(made.ca, insecure=True)


def test_a_client_checks_the_chain_and_the_host_and_takes_no_old_protocol(made: Made) -> None:
    for context in (context_of(Trust(made.ca)), context_of(Trust(), "fl.example.org")):
        assert (context.verify_mode, context.check_hostname) == (ssl.CERT_REQUIRED, True)
        assert context.minimum_version is ssl.TLSVersion.TLSv1_2
    # Only the authority that is named is trusted, not the system's as well.
    assert len(context_of(Trust(made.ca)).get_ca_certs()) == 1
    server = ServerCertificate(made.certificate, made.key).context
    assert server.minimum_version is ssl.TLSVersion.TLSv1_2
    old = ssl.create_default_context(cafile=made.ca)
    old.set_ciphers("DEFAULT:@SECLEVEL=0")
    with pytest.warns(DeprecationWarning, match="TLSv1_1"):
        old.minimum_version = old.maximum_version = ssl.TLSVersion.TLSv1_1
    with pytest.raises(ssl.SSLError):
        shake_hands(server, old)


def test_files_that_are_not_what_they_should_be_are_named(made: Made, tmp_path: Path) -> None:
    empty, other = tmp_path / "empty.pem", make_certificates(tmp_path / "other")
    empty.write_bytes(b"")
    locked = tmp_path / "locked.pem"
    key = serialization.load_pem_private_key(made.key.read_bytes(), password=None)
    locked.write_bytes(
        key.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.PKCS8,
            serialization.BestAvailableEncryption(b"secret"),
        )
    )
    for certificate, key_path, says in (
        (tmp_path / "none", made.key, f"server.certificate={tmp_path}/none: expected a file that can be read"),
        (made.certificate, tmp_path / "none", f"server.key={tmp_path}/none: expected a file that can be read"),
        (empty, made.key, f"server.certificate={empty}: expected a certificate in PEM, found none"),
        (made.key, made.key, f"server.certificate={made.key}: expected a certificate in PEM, found none"),
        (
            made.certificate,
            empty,
            f"server.key={empty}: expected the private key (PEM) of {made.certificate}, found none",
        ),
        (
            made.certificate,
            locked,
            f"server.key={locked}: expected the private key (PEM) of {made.certificate}, found none",
        ),
        (
            made.certificate,
            other.key,
            f"server.key={other.key}: expected the private key (PEM) of {made.certificate}, ",
        ),
    ):
        with pytest.raises(ConfigError) as refusal:
            ServerCertificate(certificate, key_path)
        assert str(refusal.value).startswith(says)
    for path in (empty, tmp_path / "none", made.key):
        with pytest.raises(ConfigError, match=rf"^server\.ca={path}: expected a "):
            Trust(path)


def test_a_certificate_that_has_expired_is_refused_at_start(made: Made, monkeypatch: pytest.MonkeyPatch) -> None:
    class Later(datetime):
        @classmethod
        def now(cls, tz: Any = None) -> Any:
            return datetime.now(tz) + timedelta(days=366)

    monkeypatch.setattr(tls, "datetime", Later)
    with pytest.raises(ConfigError, match=r"server\.pem: expired on \d{4}-\d\d-\d\d \d\d:\d\d UTC: renew it$"):
        ServerCertificate(made.certificate, made.key)


def test_new_handshakes_get_the_renewed_certificate_and_broken_files_change_nothing(
    made: Made, monkeypatch: pytest.MonkeyPatch
) -> None:
    heard: list[tuple[str, dict[str, object]]] = []

    def report(event: str, round: int = 0, **fields: object) -> None:
        heard.append((event, fields))

    monkeypatch.setattr(tls, "_SETTLE_S", 0.0)
    served, trust = ServerCertificate(made.certificate, made.key), context_of(Trust(made.ca))
    context, first = served.context, der(made.certificate)
    served.refresh(report)
    assert (shake_hands(context, trust), heard) == (first, [])

    make_certificates(made.ca.parent, ["localhost"], days=10, force=True)
    second = der(made.certificate)
    served.refresh(report)
    assert shake_hands(context, trust) == second != first
    assert heard == [("certificate_renewed", {"expires": served.expires.isoformat()})]

    right = made.key.read_bytes()
    make_certificates(made.ca.parent / "other")
    made.key.write_bytes((made.ca.parent / "other/server-key.pem").read_bytes())
    served.refresh(report)
    served.refresh(report)
    assert [event for event, _ in heard] == ["certificate_renewed", "certificate_refused"]
    assert "found another one" in str(heard[1][1]["reason"])
    made.certificate.unlink()
    served.refresh(report)
    assert [event for event, _ in heard[2:]] == ["certificate_refused"]
    assert shake_hands(context, trust) == second

    make_certificates(made.ca.parent, ["localhost"], force=True)
    assert made.key.read_bytes() != right
    served.refresh(report)
    assert shake_hands(context, trust) == der(made.certificate)
    assert heard[-1][0] == "certificate_renewed"


def test_what_is_wrong_with_a_server_is_said_in_words(made: Made, tmp_path: Path) -> None:
    server = ServerCertificate(made.certificate, made.key).context
    other = Trust(make_certificates(tmp_path / "other").ca)
    with pytest.raises(ssl.SSLError) as wrong_authority:
        shake_hands(server, context_of(other))
    assert other.explain(wrong_authority.value, "localhost") == (
        f"its certificate is not signed by the authority that this client trusts, server.ca={other.ca}"
    )
    trust = Trust(made.ca)
    for host in ("fl.example.org", "192.0.2.7"):
        with pytest.raises(ssl.SSLError) as wrong_host:
            shake_hands(server, context_of(trust), host)
        assert trust.explain(wrong_host.value, host).startswith(
            f"its certificate is not for {host!r}: connect to a name"
        )
    system = Trust()
    with pytest.raises(ssl.SSLError) as unknown:
        shake_hands(server, context_of(system, "fl.example.org"))
    assert system.explain(unknown.value, "localhost").endswith("those that this system trusts (server.ca=null)")
