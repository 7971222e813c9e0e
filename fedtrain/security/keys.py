"""A client's key: made at its first start, kept in its state folder, never sent."""

import os
import tempfile
from pathlib import Path

from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec

from fedtrain.errors import ConfigError
from fedtrain.params import sync_folder

FILE_NAME = "node-key.pem"


def load_or_create_key(state_dir: Path) -> ec.EllipticCurvePrivateKey:
    """The P-256 key in `state_dir`, made there (readable by its owner only) if there is none.

    Raises:
        ConfigError: the folder can't be written, or the file is not a P-256 private key.
    """
    path = state_dir / FILE_NAME
    try:
        state_dir.mkdir(parents=True, exist_ok=True, mode=0o700)
        if not path.exists():
            _create(path)
        key = serialization.load_pem_private_key(path.read_bytes(), password=None)
    except OSError as error:
        raise ConfigError(
            f"client.state_dir={state_dir}: {error.strerror}: a client keeps its key there: name one it can write"
        ) from None
    except ValueError:
        raise ConfigError(f"{path} is not a private key: restore it, or delete it to join under a new id") from None
    if not isinstance(key, ec.EllipticCurvePrivateKey) or not isinstance(key.curve, ec.SECP256R1):
        raise ConfigError(f"{path} is not a P-256 key: restore it, or delete it to join under a new id")
    return key


def _create(path: Path) -> None:
    key = ec.generate_private_key(ec.SECP256R1())
    pem = key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    descriptor, temporary = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)  # readable by its owner only
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(pem)
            file.flush()
            os.fsync(file.fileno())
        try:
            os.link(temporary, path)  # unlike a rename, never replaces the key of another process that was quicker
        except FileExistsError:
            return
        except OSError:  # a file system without hard links
            os.rename(temporary, path)
    finally:
        Path(temporary).unlink(missing_ok=True)
    sync_folder(path.parent)


def public_pem(key: ec.EllipticCurvePrivateKey) -> bytes:
    """The public key in PEM, which is how Flower knows a node."""
    return key.public_key().public_bytes(serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo)
