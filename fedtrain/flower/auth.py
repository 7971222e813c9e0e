"""Signed requests, as Flower's nodes sign them: a public key, a time, and the key's signature of that time."""

import binascii
from base64 import b64decode, b64encode
from collections.abc import Mapping
from datetime import datetime, timedelta
from functools import lru_cache

from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives.asymmetric import ec
from flwr.common.constant import SYSTEM_TIME_TOLERANCE, TIMESTAMP_HEADER, TIMESTAMP_TOLERANCE
from flwr.supercore.constant import FLEET_HTTP_PUBLIC_KEY_HEADER, FLEET_HTTP_SIGNATURE_HEADER
from flwr.supercore.date import now
from flwr.supercore.primitives.asymmetric import (
    bytes_to_public_key,
    public_key_to_bytes,
    sign_message,
    verify_signature,
)

from fedtrain.security.keys import public_pem

_REUSE_S = 5.0
_MAX_KEY_BYTES, _MAX_SIGNATURE_BYTES = 1024, 256
"""What is longer is none; it would take memory in the cache."""


class NotAuthenticated(Exception):  # noqa: N818
    """The request is not signed by the key that it names, or too long ago."""


class Signer:
    """Signs requests with a node key and the server's time; a signature is used again for some seconds."""

    def __init__(self, key: ec.EllipticCurvePrivateKey) -> None:
        self._key = key
        self._public = b64encode(public_pem(key)).decode()
        self._behind = timedelta(0)
        self._signed_at: datetime | None = None
        self._headers: dict[str, str] = {}

    def headers(self) -> dict[str, str]:
        """Headers that identify the node."""
        current = now() + self._behind
        if self._signed_at is None or not 0 <= (current - self._signed_at).total_seconds() < _REUSE_S:
            stamp = current.isoformat()
            self._headers = {
                FLEET_HTTP_PUBLIC_KEY_HEADER: self._public,
                TIMESTAMP_HEADER: stamp,
                FLEET_HTTP_SIGNATURE_HEADER: b64encode(sign_message(self._key, stamp.encode())).decode(),
            }
            self._signed_at = current  # last: another thread may use the headers from here on
        return self._headers

    def adopt_time(self, server_time: str) -> None:
        """Sign with the server's time from now on, so that this machine's clock does not matter."""
        self._behind, self._signed_at = datetime.fromisoformat(server_time) - now(), None


def authenticate(headers: Mapping[str, str]) -> bytes:
    """The public key (PEM) that signed a request; header names are in lower case.

    Raises:
        NotAuthenticated: naming nothing that would help an intruder.
    """
    try:
        public = b64decode(headers[FLEET_HTTP_PUBLIC_KEY_HEADER], validate=True)
        signature = b64decode(headers[FLEET_HTTP_SIGNATURE_HEADER], validate=True)
        stamp = headers[TIMESTAMP_HEADER]
        age = (now() - datetime.fromisoformat(stamp)).total_seconds()
    except (KeyError, ValueError, TypeError, binascii.Error):
        raise NotAuthenticated from None
    if not -SYSTEM_TIME_TOLERANCE < age < TIMESTAMP_TOLERANCE + SYSTEM_TIME_TOLERANCE:
        raise NotAuthenticated
    fits = len(public) <= _MAX_KEY_BYTES and len(signature) <= _MAX_SIGNATURE_BYTES
    identity = _verified(public, stamp, signature) if fits else None
    if identity is None:
        raise NotAuthenticated
    return identity


@lru_cache(maxsize=4096)
def _verified(public: bytes, stamp: str, signature: bytes) -> bytes | None:
    """The key in its one canonical form if the signature is its own, else None."""
    try:
        key = bytes_to_public_key(public)
        if not isinstance(key, ec.EllipticCurvePublicKey) or not verify_signature(
            key, stamp.encode("ascii"), signature
        ):
            return None
        return public_key_to_bytes(key)
    except (ValueError, TypeError, UnicodeError, UnsupportedAlgorithm):
        return None
