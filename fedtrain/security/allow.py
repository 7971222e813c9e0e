"""The list of clients that may join: a text file with one client per line, its id and its public key.

    # Ward 3, asked for by Ada on 2026-03-01
    ward-3 MFkwEwYHKoZIzj0CAQYIKoZIzj0DAQcDQgAE6X…==
    ward-4 MFkwEwYHKoZIzj0CAQYIKoZIzj0DAQcDQgAEp0…==   # replaced on 2026-04-02

The key is the base64 of its DER form (SubjectPublicKeyInfo, P-256), as ``fedtrain key`` prints it. An id has one key,
and a key one id. What follows a ``#`` is a comment.
"""

import binascii
import contextlib
from base64 import b64decode, b64encode
from pathlib import Path

from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec

from fedtrain.client.identity import CLIENT_ID
from fedtrain.errors import ConfigError
from fedtrain.observe.events import Report, quiet
from fedtrain.security.files import Watch, write_file
from fedtrain.security.tls import is_loopback

_WHAT_TO_DO = "give the path of one (`fedtrain clients allow FILE ID KEY` makes it)"

_SETTLE_S = 0.2
"""An editor that writes a file in place has finished after so long; half a list would throw out the others."""


class AllowList:
    """Who may join: the clients of a file, which is read again when it changes.

    A changed file that can't be read is reported, and the list stays as it was. Not thread-safe.

    Args:
        path: The file.

    Raises:
        ConfigError: the file can't be read; the message names the line.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self._watch = Watch([self.path], settle_s=_SETTLE_S)
        self._keys = read_allow_list(self.path)
        self._ids = {key: client for client, key in self._keys.items()}

    def refresh(self, report: Report = quiet) -> bool:
        """Read the file again if it has changed; whether the list is now another one.

        Args:
            report: Told of ``allow_list_changed`` (clients: how many) and ``allow_list_refused`` (reason).
        """
        if not self._watch.changed():
            return False
        try:
            keys = read_allow_list(self.path)
        except ConfigError as error:
            report("allow_list_refused", reason=str(error))
            return False
        if keys == self._keys:
            return False
        self._keys, self._ids = keys, {key: client for client, key in keys.items()}
        report("allow_list_changed", clients=len(keys))
        return True

    def refusal(self, client: str, public_key: bytes) -> str:
        """Why a client may not join, in words for its operator; empty if it may.

        Args:
            client: The id that it claims.
            public_key: The key that it has signed with, PEM.
        """
        key = key_text(public_key)
        if self._keys.get(client) == key:
            return ""
        if key in self._ids:
            return f"this key is listed for the client id {self._ids[key]!r}, found {client!r}: use that id"
        if client in self._keys:
            return (
                f"client id {client!r} is listed with another key: use the state folder that holds it, or have the "
                "server's operator replace it (`fedtrain clients allow`) with what `fedtrain key` prints here"
            )
        return (
            f"client id {client!r} is not in the server's list of clients: have its operator add "
            "(`fedtrain clients allow`) what `fedtrain key` prints here"
        )


def require_listed(host: str, *, listed: bool, anyone: bool) -> None:
    """Refuse to let anyone join where other machines connect.

    Args:
        host: What the server listens on.
        listed: Whether it has a list of clients.
        anyone: Whether it was asked to do without.

    Raises:
        ConfigError: it would.
    """
    if not (listed or anyone or is_loopback(host)):
        raise ConfigError(
            f"server.host={host}: other machines can connect there, which needs a list of the clients that may join, "
            "found none: set clients.allow to a file (`fedtrain clients allow FILE ID KEY` makes it), or "
            "clients.open=true to let anyone join"
        )


def read_allow_list(path: Path) -> dict[str, str]:
    """Key by client id, in the order of the file.

    Raises:
        ConfigError: the file can't be read, a line is not ``ID KEY``, or an id or a key is there twice.
    """
    return _parse(_read(path), path)


def allow(path: Path, client: str, key: str) -> bool:
    """Add a client to a list, or replace its key; the file is made if it is not there. Comments stay.

    Returns:
        Whether the client had another key before.

    Raises:
        ConfigError: the id, the key or the file is not what it should be, or the key is another client's.
    """
    if not CLIENT_ID.fullmatch(client):
        raise ConfigError(f"expected a client id (a letter, then letters, digits and ._-), found {client!r}")
    text = _read(path) if path.exists() else "# Clients that may join: ID KEY, one per line.\n"
    keys = _parse(text, path)
    key = parse_key(key)
    owners = [other for other, listed in keys.items() if listed == key and other != client]
    if owners:
        raise ConfigError(f"{path}: this key is listed for {owners[0]!r} already: give {client!r} a key of its own")
    lines = text.splitlines()
    if client in keys:
        lines = [_with_key(line, client, key) for line in lines]
    else:
        lines.append(f"{client} {key}")
    _write(path, lines)
    return keys.get(client, key) != key


def revoke(path: Path, client: str) -> None:
    """Take a client off a list. Comments stay.

    Raises:
        ConfigError: the file can't be read, or the client is not in it.
    """
    text = _read(path)
    if client not in _parse(text, path):
        raise ConfigError(
            f"{path}: expected {client!r} in it, found no such client: see `fedtrain clients list {path}`"
        )
    _write(path, [line for line in text.splitlines() if _fields(line)[:1] != [client]])


def key_text(public_key: bytes) -> str:
    """A public key in PEM as one word.

    Args:
        public_key: As `cryptography` writes it, which is base64 between two lines.
    """
    return "".join(public_key.decode("ascii").split("-----")[2].split())


def parse_key(text: str) -> str:
    """A public key in its one canonical form, from that form or from PEM.

    Raises:
        ConfigError: it is not a P-256 public key.
    """
    expected = "expected the public key of a client, as `fedtrain key` prints it"
    if "PRIVATE KEY" in text:
        raise ConfigError(f"{expected}, found a private key: keep it where it is")
    try:
        if "-----BEGIN" in text:
            key = serialization.load_pem_public_key(text.encode())
        else:
            key = serialization.load_der_public_key(b64decode(text, validate=True))
    except (ValueError, binascii.Error, UnsupportedAlgorithm):
        raise ConfigError(f"{expected}, found {_shortened(text)!r}") from None
    if not isinstance(key, ec.EllipticCurvePublicKey) or not isinstance(key.curve, ec.SECP256R1):
        raise ConfigError(f"{expected} (P-256), found a key of another kind")
    der = key.public_bytes(serialization.Encoding.DER, serialization.PublicFormat.SubjectPublicKeyInfo)
    return b64encode(der).decode()


def _parse(text: str, path: Path) -> dict[str, str]:
    keys: dict[str, str] = {}
    lines: dict[str, int] = {}
    for number, line in enumerate(text.splitlines(), start=1):
        fields, where = _fields(line), f"{path}, line {number}"
        if not fields:
            continue
        if len(fields) != 2 or not CLIENT_ID.fullmatch(fields[0]):
            raise ConfigError(f"{where}: expected ID KEY, found {_shortened(line)!r}: correct it, or begin it with '#'")
        try:
            fields[1] = parse_key(fields[1])
        except ConfigError as error:
            raise ConfigError(f"{where}: {error}") from None
        for field, what in zip(fields, ("client id", "key"), strict=True):
            if field in lines:
                raise ConfigError(f"{where}: this {what} is in line {lines[field]} already: remove one of them")
            lines[field] = number
        keys[fields[0]] = fields[1]
    return keys


def _fields(line: str) -> list[str]:
    return line.partition("#")[0].split()


def _with_key(line: str, client: str, key: str) -> str:
    fields = _fields(line)
    return line.replace(fields[1], key, 1) if fields[:1] == [client] else line


def _shortened(text: str) -> str:
    return text if len(text) <= 60 else f"{text[:57]}..."


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{path}: expected a list of clients, found: {error.strerror}: {_WHAT_TO_DO}") from None
    except UnicodeDecodeError:
        raise ConfigError(f"{path}: expected a list of clients, found a file that is not text: {_WHAT_TO_DO}") from None


def _write(path: Path, lines: list[str]) -> None:
    mode = 0o644
    with contextlib.suppress(FileNotFoundError):
        mode = path.stat().st_mode & 0o777
    try:
        write_file(path, ("\n".join(lines) + "\n").encode(), mode=mode)
    except OSError as error:
        raise ConfigError(f"{path}: cannot be written ({error.strerror})") from None
