"""Certificates to try TLS with: an authority of one's own, and server certificates that it signs.

certificates/ca.pem            for the clients: server.ca
certificates/ca-key.pem        signs server certificates; whoever has it can pose as the server
certificates/server.pem        for the server: server.certificate
certificates/server-key.pem    for the server: server.key
"""

import ipaddress
import re
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from fedtrain.errors import ConfigError
from fedtrain.security.files import write_file

LOOPBACK_HOSTS = ("localhost", "127.0.0.1", "::1")

_AUTHORITY_DAYS = 3650
_EARLIER = timedelta(days=1)
"""Certificates are valid from before now on, since the clocks of clients may be behind."""

_USAGES = (
    "digital_signature",
    "content_commitment",
    "key_encipherment",
    "data_encipherment",
    "key_agreement",
    "key_cert_sign",
    "crl_sign",
    "encipher_only",
    "decipher_only",
)


@dataclass(frozen=True)
class Made:
    """What `make_certificates` has made."""

    ca: Path
    certificate: Path
    key: Path
    hosts: tuple[str, ...]
    expires: datetime
    """When the server's certificate ends."""
    new_authority: bool
    """Whether ``ca.pem`` is new, so that clients need it."""


def make_certificates(
    folder: Path, hosts: Sequence[str] = LOOPBACK_HOSTS, *, days: int = 365, force: bool = False
) -> Made:
    """Make a server certificate, and the authority that signs it where the folder has none. All keys are P-256.

    Args:
        folder: Made if it is not there.
        hosts: Names and addresses that clients find the server under, at least one; ``*.example.org`` is a name too.
        days: How long the server's certificate is valid, >= 1; it ends with its authority (ten years) at the latest.
        force: Replace a server certificate that is there. An authority is never replaced.

    Raises:
        ConfigError: a value is impossible, or the folder has a server certificate or a damaged authority.
    """
    if days < 1:
        raise ConfigError(f"--days: expected a number of days >= 1, found {days}")
    if not hosts:
        raise ConfigError("--host: expected at least one name or address that clients find the server under")
    names = [_general_name(host) for host in hosts]
    certificate_path, key_path = folder / "server.pem", folder / "server-key.pem"
    for path in (certificate_path, key_path):
        if path.exists() and not force:
            raise ConfigError(f"{path} exists: use --force to replace the server's certificate, or another --dir")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        ca_key, ca, new_authority = _authority(folder)
        key = ec.generate_private_key(ec.SECP256R1())
        now = datetime.now(UTC)
        expires = min(now + timedelta(days=days), ca.not_valid_after_utc)
        certificate = _sign_server(key, names, hosts[0], ca_key, ca, now - _EARLIER, expires)
        write_file(key_path, _private_pem(key), mode=0o600)
        write_file(certificate_path, certificate.public_bytes(serialization.Encoding.PEM))
    except OSError as error:
        raise ConfigError(f"--dir {folder}: {error.strerror}: choose a folder that can be written") from None
    expires = certificate.not_valid_after_utc
    return Made(folder / "ca.pem", certificate_path, key_path, tuple(hosts), expires, new_authority)


def _authority(folder: Path) -> tuple[ec.EllipticCurvePrivateKey, x509.Certificate, bool]:
    path, key_path = folder / "ca.pem", folder / "ca-key.pem"
    if not path.exists() and not key_path.exists():
        key, certificate = _new_authority()
        write_file(key_path, _private_pem(key), mode=0o600)
        write_file(path, certificate.public_bytes(serialization.Encoding.PEM))
        return key, certificate, True
    for needed in (path, key_path):
        if not needed.exists():
            raise ConfigError(f"{needed} is missing, its other half is there: restore it, or use another --dir")
    try:
        found = serialization.load_pem_private_key(key_path.read_bytes(), password=None)
        certificate = x509.load_pem_x509_certificate(path.read_bytes())
    except (ValueError, TypeError):
        raise ConfigError(f"{path} or {key_path} can't be read: restore them, or use another --dir") from None
    if not isinstance(found, ec.EllipticCurvePrivateKey) or found.public_key() != certificate.public_key():
        raise ConfigError(f"{key_path} is not the key of {path}: restore them, or use another --dir")
    if certificate.not_valid_after_utc <= datetime.now(UTC):
        raise ConfigError(
            f"{path} expired on {certificate.not_valid_after_utc:%Y-%m-%d}: make new ones in another --dir"
        )
    return found, certificate, False


def _new_authority() -> tuple[ec.EllipticCurvePrivateKey, x509.Certificate]:
    key, now = ec.generate_private_key(ec.SECP256R1()), datetime.now(UTC)
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "fedtrain test authority")])
    builder = _builder(name, name, key.public_key(), now - _EARLIER, now + timedelta(days=_AUTHORITY_DAYS))
    builder = builder.add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
    builder = builder.add_extension(_key_usage("key_cert_sign", "crl_sign"), critical=True)
    return key, builder.sign(key, hashes.SHA256())


def _sign_server(
    key: ec.EllipticCurvePrivateKey,
    names: Sequence[x509.GeneralName],
    common_name: str,
    ca_key: ec.EllipticCurvePrivateKey,
    ca: x509.Certificate,
    begin: datetime,
    end: datetime,
) -> x509.Certificate:
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, common_name[:64])])
    builder = _builder(subject, ca.subject, key.public_key(), begin, end)
    for extension, critical in (
        (x509.BasicConstraints(ca=False, path_length=None), True),
        (_key_usage("digital_signature"), True),
        (x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), False),
        (x509.SubjectAlternativeName(names), False),
        (x509.AuthorityKeyIdentifier.from_issuer_public_key(ca_key.public_key()), False),
    ):
        builder = builder.add_extension(extension, critical=critical)
    return builder.sign(ca_key, hashes.SHA256())


def _builder(
    subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePublicKey, begin: datetime, end: datetime
) -> x509.CertificateBuilder:
    builder = x509.CertificateBuilder(subject_name=subject, issuer_name=issuer, public_key=key)
    builder = builder.serial_number(x509.random_serial_number()).not_valid_before(begin).not_valid_after(end)
    return builder.add_extension(x509.SubjectKeyIdentifier.from_public_key(key), critical=False)


def _key_usage(*allowed: str) -> x509.KeyUsage:
    return x509.KeyUsage(**{usage: usage in allowed for usage in _USAGES})


def _general_name(host: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(host.strip("[]")))
    except ValueError:
        pass
    label = r"[A-Za-z0-9_]([A-Za-z0-9_-]{0,61}[A-Za-z0-9_])?"
    if len(host) > 253 or not re.fullmatch(rf"(\*\.)?{label}(\.{label})*", host):
        raise ConfigError(f"--host: expected a name (such as fl.example.org) or an IP address, found {host!r}")
    return x509.DNSName(host)


def _private_pem(key: ec.EllipticCurvePrivateKey) -> bytes:
    return key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
