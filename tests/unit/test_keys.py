"""A client's key: made once, kept, readable by its owner only."""

import os
import stat
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Barrier

import pytest
from cryptography.hazmat.primitives.asymmetric import ec, ed25519
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat, load_pem_public_key

from fedtrain.errors import ConfigError
from fedtrain.security.keys import FILE_NAME, load_or_create_key, public_pem


def test_a_key_is_made_once_and_is_the_same_afterwards(tmp_path: Path) -> None:
    folder = tmp_path / "new" / "client"
    first = public_pem(load_or_create_key(folder))
    assert public_pem(load_or_create_key(folder)) == first
    assert [file.name for file in folder.iterdir()] == [FILE_NAME]


@pytest.mark.skipif(os.name != "posix", reason="other systems have other permissions")
def test_only_its_owner_can_read_it(tmp_path: Path) -> None:
    folder = tmp_path / "client"
    before = os.umask(0)
    try:
        load_or_create_key(folder)
    finally:
        os.umask(before)
    assert stat.S_IMODE((folder / FILE_NAME).stat().st_mode) == 0o600
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700


def test_the_key_is_p256_and_its_public_half_is_pem(tmp_path: Path) -> None:
    key = load_or_create_key(tmp_path)
    assert isinstance(key.curve, ec.SECP256R1)
    public = load_pem_public_key(public_pem(key))
    assert isinstance(public, ec.EllipticCurvePublicKey)
    assert public.public_numbers() == key.public_key().public_numbers()
    assert public_pem(key).startswith(b"-----BEGIN PUBLIC KEY-----\n")


def test_many_that_start_at_once_get_one_key(tmp_path: Path) -> None:
    together = Barrier(8)

    def start(index: int) -> bytes:
        together.wait(10)
        return public_pem(load_or_create_key(tmp_path))

    with ThreadPoolExecutor(8) as pool:
        assert len(set(pool.map(start, range(8)))) == 1
    assert [file.name for file in tmp_path.iterdir()] == [FILE_NAME]


def test_what_a_crash_left_of_a_key_does_not_stand_in_the_way(tmp_path: Path) -> None:
    (tmp_path / f".{FILE_NAME}.{os.getpid()}.tmp").write_bytes(b"-----BEGIN")
    load_or_create_key(tmp_path)
    assert (tmp_path / FILE_NAME).exists()


def test_a_folder_whose_file_system_has_no_hard_links_will_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def unsupported(*args: object) -> None:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(os, "link", unsupported)
    first = public_pem(load_or_create_key(tmp_path))
    assert public_pem(load_or_create_key(tmp_path)) == first
    assert [file.name for file in tmp_path.iterdir()] == [FILE_NAME]


def test_a_file_that_is_no_key_is_named_and_left_alone(tmp_path: Path) -> None:
    (tmp_path / FILE_NAME).write_text("something else")
    with pytest.raises(ConfigError, match=r"node-key\.pem is not a private key: restore it, or delete it"):
        load_or_create_key(tmp_path)
    assert (tmp_path / FILE_NAME).read_text() == "something else"


@pytest.mark.parametrize("key", [ec.generate_private_key(ec.SECP384R1()), ed25519.Ed25519PrivateKey.generate()])
def test_a_key_of_another_kind_is_refused(
    tmp_path: Path, key: ec.EllipticCurvePrivateKey | ed25519.Ed25519PrivateKey
) -> None:
    (tmp_path / FILE_NAME).write_bytes(key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()))
    with pytest.raises(ConfigError, match="not a P-256 key"):
        load_or_create_key(tmp_path)


def test_a_folder_that_cannot_be_made_is_named_with_the_setting(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"client\.state_dir=.*file/client: Not a directory"):
        load_or_create_key(tmp_path / "file" / "client")
