"""TLS: where it is spoken, the server's certificate, and what a client trusts.

Plain text is for loopback. To every other address a client speaks TLS, and a server that listens on one needs a
certificate; ``server.insecure=true`` is the one way around both.
"""

import functools
import ipaddress
import ssl
from datetime import UTC, datetime
from pathlib import Path

from cryptography import x509

from fedtrain.errors import ConfigError
from fedtrain.observe.events import Report, quiet
from fedtrain.security.files import Watch

_SETTLE_S = 0.9
"""A certificate and its key are two files: they are taken when neither has changed for so long."""


def is_loopback(host: str) -> bool:
    """Whether only this machine can be meant: ``localhost``, ``127.0.0.0/8`` or ``::1``. Other names can't be told."""
    if host.lower() == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


def require_encrypted(host: str, *, certificate: bool, insecure: bool) -> None:
    """Refuse to listen in plain text where other machines connect.

    Args:
        host: What the server listens on.
        certificate: Whether it has one.
        insecure: Whether plain text was asked for.

    Raises:
        ConfigError: it would.
    """
    if not (certificate or insecure or is_loopback(host)):
        raise ConfigError(
            f"server.host={host}: other machines can connect there, which needs a certificate, found none: set "
            "server.certificate and server.key (`fedtrain certificates` makes some to try with), or "
            "server.insecure=true to let models and updates travel in plain text"
        )


class ServerCertificate:
    """The server's certificate, renewed while it runs when its files change.

    Args:
        certificate: PEM file: the certificate, then those between it and its authority.
        key: PEM file of its private key, without a password.

    Raises:
        ConfigError: a file is missing or not what it should be, they do not belong together, or it has expired.
    """

    def __init__(self, certificate: str | Path, key: str | Path) -> None:
        self._certificate, self._key = Path(certificate), Path(key)
        self._watch = Watch([self._certificate, self._key], settle_s=_SETTLE_S)
        self.context, self.expires = _load(self._certificate, self._key)
        """For the listener: every handshake with it uses the newest certificate."""
        self._newest = self.context
        self.context.sni_callback = self._use_newest

    def refresh(self, report: Report = quiet) -> None:
        """Take files that have changed; broken ones are reported, and the certificate stays as it is.

        Args:
            report: Told of ``certificate_renewed`` (expires) and ``certificate_refused`` (reason).
        """
        if not self._watch.changed():
            return
        try:
            self._newest, self.expires = _load(self._certificate, self._key)
        except ConfigError as error:
            report("certificate_refused", reason=str(error))
        else:
            report("certificate_renewed", expires=self.expires.isoformat())

    def _use_newest(self, connection: ssl.SSLSocket | ssl.SSLObject, name: str | None, context: ssl.SSLContext) -> None:
        connection.context = self._newest


def _load(certificate: Path, key: Path) -> tuple[ssl.SSLContext, datetime]:
    """A context with this certificate, and when that expires."""
    # Always a new context: one into which loading has failed halfway could serve nothing any more.
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.num_tickets = 0  # clients keep their connections; a resumed session would show an old certificate
    for name, path in (("server.certificate", certificate), ("server.key", key)):
        _require_file(name, path)
    try:
        first = x509.load_pem_x509_certificates(certificate.read_bytes())[0]
    except ValueError:
        raise ConfigError(f"server.certificate={certificate}: expected a certificate in PEM, found none") from None
    if first.not_valid_after_utc <= datetime.now(UTC):
        raise ConfigError(
            f"server.certificate={certificate}: expired on {first.not_valid_after_utc:%Y-%m-%d %H:%M} UTC: renew it"
        )
    try:
        context.load_cert_chain(certificate, key, password=b"")  # without a password OpenSSL would ask the terminal
    except (ssl.SSLError, OSError) as error:
        mismatch = isinstance(error, ssl.SSLError) and error.reason == "KEY_VALUES_MISMATCH"
        found = "another one" if mismatch else "none that can be read without a password"
        raise ConfigError(f"server.key={key}: expected the private key (PEM) of {certificate}, found {found}") from None
    return context, first.not_valid_after_utc


class Trust:
    """Which servers a client believes, and where it speaks plain text.

    TLS is spoken to every address that is not a loopback one, and to those too if a `ca` is given.

    Args:
        ca: PEM file of the authority that signs the server's certificate; None: those that the system trusts.
        insecure: Speak plain text to every address.

    Raises:
        ConfigError: `ca` holds no certificate, or is given together with `insecure`.
    """

    def __init__(self, ca: str | Path | None = None, *, insecure: bool = False) -> None:
        self.ca, self.insecure = ca, insecure
        if ca is not None:
            if insecure:
                raise ConfigError("server.insecure: expected false where server.ca is given, found true: drop one")
            self._context  # noqa: B018  so that a broken file is found now

    def context_for(self, host: str) -> ssl.SSLContext | None:
        """For connections to a host; None: plain text."""
        if self.insecure or (self.ca is None and is_loopback(host)):
            return None
        return self._context

    @functools.cached_property
    def _context(self) -> ssl.SSLContext:
        if self.ca is not None:
            _require_file("server.ca", Path(self.ca))
        try:
            context = ssl.create_default_context(cafile=self.ca)
        except ssl.SSLError:
            raise ConfigError(f"server.ca={self.ca}: expected a certificate in PEM, found none") from None
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        return context

    def explain(self, error: ssl.SSLError, host: str) -> str:
        """What was wrong with a server, in words that help who operates it or the client."""
        if not isinstance(error, ssl.SSLCertVerificationError):
            if error.reason in ("WRONG_VERSION_NUMBER", "HTTP_REQUEST", "RECORD_LAYER_FAILURE"):
                return "it does not speak TLS: the server needs server.certificate and server.key"
            return f"TLS failed ({error.reason or error})"
        code = error.verify_code
        if code == _EXPIRED:
            return "its certificate (or its authority's) has expired: renew it, or set this machine's clock"
        if code == _NOT_YET_VALID:
            return "its certificate is not valid yet: set this machine's clock, or wait"
        if code in _WRONG_HOST:
            return f"its certificate is not for {host!r}: connect to a name that it is for, or issue one for {host!r}"
        if code in _WRONG_AUTHORITY:
            trusted = "those that this system trusts (server.ca=null)" if self.ca is None else f"server.ca={self.ca}"
            return f"its certificate is not signed by the authority that this client trusts, {trusted}"
        return f"its certificate is refused: {error.verify_message}"


# Codes of OpenSSL, X509_V_ERR_*.
_EXPIRED, _NOT_YET_VALID = 10, 9
_WRONG_HOST = (62, 64)
_WRONG_AUTHORITY = (2, 7, 18, 19, 20, 21)


def _require_file(key: str, path: Path) -> None:
    try:
        with open(path, "rb"):
            pass
    except OSError as error:
        raise ConfigError(f"{key}={path}: expected a file that can be read, found: {error.strerror}") from None
