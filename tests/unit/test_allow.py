"""The list of clients that may join, and the commands that edit it."""

import os
from base64 import b64encode
from pathlib import Path
from typing import Any

import pytest
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec, ed25519

from fedtrain.errors import ConfigError
from fedtrain.security.allow import AllowList, allow, key_text, parse_key, read_allow_list, require_listed, revoke
from fedtrain.security.files import Watch, write_file
from fedtrain.security.keys import load_or_create_key, public_pem
from fedtrain.tools import main

_SPKI = (serialization.Encoding.DER, serialization.PublicFormat.SubjectPublicKeyInfo)


def new_key() -> tuple[bytes, str]:
    """A public key in PEM, and as one word (worked out without the code under test)."""
    private = ec.generate_private_key(ec.SECP256R1())
    return public_pem(private), b64encode(private.public_key().public_bytes(*_SPKI)).decode()


PEM_A, KEY_A = new_key()
PEM_B, KEY_B = new_key()
PEM_C, KEY_C = new_key()


class Heard(list[tuple[str, dict[str, Any]]]):
    """A report that keeps what it hears."""

    def __call__(self, event: str, round: int = 0, **fields: object) -> None:
        self.append((event, fields))


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "clients.txt"
    path.write_text(f"# wards\n\nward-3 {KEY_A}\n  ward-4\t{KEY_B}   # asked for by Ada\n")
    return path


def test_a_list_has_one_client_per_line_and_comments(file: Path) -> None:
    assert read_allow_list(file) == {"ward-3": KEY_A, "ward-4": KEY_B}


def test_a_key_in_pem_and_as_one_word_is_the_same(file: Path) -> None:
    assert key_text(PEM_A) == KEY_A
    assert parse_key(PEM_A.decode()) == parse_key(KEY_A) == KEY_A


def test_a_compressed_key_gets_the_form_that_requests_have() -> None:
    private = ec.generate_private_key(ec.SECP256R1())
    point = private.public_key().public_bytes(serialization.Encoding.X962, serialization.PublicFormat.CompressedPoint)
    head = bytes.fromhex("3039301306072a8648ce3d020106082a8648ce3d030107032200")
    assert parse_key(b64encode(head + point).decode()) == key_text(public_pem(private))


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("ward-5", "line 5: expected ID KEY, found 'ward-5'"),
        (f"ward-5 {KEY_C} x", "line 5: expected ID KEY"),
        (f"5 {KEY_C}", "line 5: expected ID KEY"),
        ("ward-5 bm8ga2V5", "line 5: expected the public key of a client"),
        ("ward-5 no-base64", "line 5: expected the public key of a client"),
        (f"ward-3 {KEY_C}", "line 5: this client id is in line 3 already"),
        (f"ward-5 {KEY_A}", "line 5: this key is in line 3 already"),
    ],
)
def test_a_line_that_is_wrong_is_named(file: Path, line: str, says: str) -> None:
    file.write_text(file.read_text() + line + "\n")
    with pytest.raises(ConfigError) as refusal:
        read_allow_list(file)
    assert str(refusal.value).startswith(f"{file}, {says}")


def test_keys_of_other_kinds_and_private_keys_are_refused() -> None:
    for other in (ed25519.Ed25519PrivateKey.generate(), ec.generate_private_key(ec.SECP384R1())):
        with pytest.raises(ConfigError, match=r"\(P-256\), found a key of another kind"):
            parse_key(b64encode(other.public_key().public_bytes(*_SPKI)).decode())
    private = ec.generate_private_key(ec.SECP256R1()).private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    with pytest.raises(ConfigError, match="found a private key: keep it where it is") as refusal:
        parse_key(private.decode())
    assert private.decode().splitlines()[1] not in str(refusal.value)


def test_only_a_listed_pair_of_id_and_key_may_join(file: Path) -> None:
    listed = AllowList(file)
    assert listed.refusal("ward-3", PEM_A) == listed.refusal("ward-4", PEM_B) == ""
    assert listed.refusal("ward-5", PEM_C).startswith("client id 'ward-5' is not in the server's list")
    assert listed.refusal("ward-3", PEM_C).startswith("client id 'ward-3' is listed with another key")
    assert listed.refusal("ward-5", PEM_A).startswith("this key is listed for the client id 'ward-3', found 'ward-5'")
    assert listed.refusal("ward-4", PEM_A).startswith("this key is listed for the client id 'ward-3', found 'ward-4'")


def test_a_replaced_file_is_read_at_once_and_a_broken_one_leaves_the_list_as_it_is(file: Path) -> None:
    listed, heard = AllowList(file), Heard()
    assert not listed.refresh(heard)
    write_file(file, f"ward-4 {KEY_B}\n".encode())
    assert listed.refresh(heard)
    assert not listed.refresh(heard)
    assert listed.refusal("ward-3", PEM_A)
    assert heard == [("allow_list_changed", {"clients": 1})]
    write_file(file, b"ward-4\n")
    assert not listed.refresh(heard)
    assert not listed.refresh(heard)
    assert listed.refusal("ward-4", PEM_B) == ""
    assert [event for event, _ in heard] == ["allow_list_changed", "allow_list_refused"]
    assert str(heard[1][1]["reason"]).startswith(f"{file}, line 1: expected ID KEY")
    write_file(file, f"ward-4 {KEY_B}\n# the same again\n".encode())
    assert not listed.refresh(heard)


def test_a_file_that_is_written_in_place_counts_when_it_has_settled(tmp_path: Path) -> None:
    path, now = tmp_path / "list", [100.0]
    path.write_text("one")
    watch = Watch([path], settle_s=0.2, clock=lambda: now[0])
    assert not watch.changed()
    path.write_text("")  # an editor truncates it first
    assert not watch.changed()
    now[0] += 0.15
    path.write_text("other")
    assert not watch.changed()
    now[0] += 0.15  # 0.3 s after the first change, 0.15 s after the last
    assert not watch.changed()
    now[0] += 0.06
    assert watch.changed()
    assert not watch.changed()


def test_two_files_count_as_changed_when_both_have_settled(tmp_path: Path) -> None:
    one, two, now = tmp_path / "one", tmp_path / "two", [100.0]
    one.write_text("1")
    two.write_text("1")
    watch = Watch([one, two], settle_s=1.0, clock=lambda: now[0])
    write_file(one, b"2")
    assert not watch.changed()
    now[0] += 0.9
    write_file(two, b"2")
    assert not watch.changed()
    now[0] += 0.9
    assert not watch.changed()
    now[0] += 0.2
    assert watch.changed()


def test_a_file_that_vanishes_and_comes_back_unchanged_is_no_change(tmp_path: Path) -> None:
    path, now = tmp_path / "list", [100.0]
    path.write_text("one")
    watch = Watch([path], settle_s=0.2, clock=lambda: now[0])
    path.rename(tmp_path / "aside")
    assert not watch.changed()
    (tmp_path / "aside").rename(path)
    now[0] += 1.0
    assert not watch.changed()


def test_allowing_adds_or_replaces_and_keeps_comments_and_permissions(file: Path) -> None:
    os.chmod(file, 0o640)
    assert not allow(file, "ward-5", KEY_C)
    assert file.read_text() == (f"# wards\n\nward-3 {KEY_A}\n  ward-4\t{KEY_B}   # asked for by Ada\nward-5 {KEY_C}\n")
    _, other = new_key()
    assert allow(file, "ward-4", other)
    assert not allow(file, "ward-4", other)
    assert f"  ward-4\t{other}   # asked for by Ada\n" in file.read_text()
    assert file.stat().st_mode & 0o777 == 0o640
    assert sorted(path.name for path in file.parent.iterdir()) == ["clients.txt"]


def test_a_key_of_another_client_is_not_given_to_a_second_one(file: Path) -> None:
    before = file.read_text()
    with pytest.raises(ConfigError, match=r"this key is listed for 'ward-3' already: give 'ward-4' a key of its own"):
        allow(file, "ward-4", KEY_A)
    assert file.read_text() == before


def test_revoking_takes_one_line_away(file: Path) -> None:
    revoke(file, "ward-3")
    assert file.read_text() == f"# wards\n\n  ward-4\t{KEY_B}   # asked for by Ada\n"
    with pytest.raises(ConfigError, match=r"expected 'ward-3' in it, found no such client"):
        revoke(file, "ward-3")


def test_a_link_to_a_list_stays_a_link(file: Path) -> None:
    link = file.with_name("link")
    link.symlink_to(file)
    allow(link, "ward-5", KEY_C)
    assert link.is_symlink()
    assert "ward-5" in read_allow_list(file)


def test_without_a_list_only_loopback_is_open() -> None:
    for host in ("localhost", "127.0.0.1", "127.8.0.1", "::1"):
        require_listed(host, listed=False, anyone=False)
    for host in ("0.0.0.0", "::", "192.0.2.1", "fl.example.org"):
        require_listed(host, listed=True, anyone=False)
        require_listed(host, listed=False, anyone=True)
        with pytest.raises(ConfigError, match=rf"^server\.host={host}: .*clients\.allow.*clients\.open=true"):
            require_listed(host, listed=False, anyone=False)


def test_the_commands_make_a_key_list_it_replace_it_and_revoke_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file, state = str(tmp_path / "clients.txt"), tmp_path / "state"
    assert main(["key", "--id", "ward-3", "--state-dir", str(state)]) == 0
    line = capsys.readouterr().out
    assert line == f"ward-3 {key_text(public_pem(load_or_create_key(state)))}\n"
    assert main(["key", "--state-dir", str(state)]) == 0
    assert line == f"ward-3 {capsys.readouterr().out}"

    assert main(["clients", "allow", file, "ward-3", line]) == 0
    assert capsys.readouterr().out == f"{file}: ward-3 may join\n"
    (tmp_path / "new.pem").write_bytes(PEM_B)
    assert main(["clients", "allow", file, "ward-3", str(tmp_path / "new.pem")]) == 0
    assert capsys.readouterr().out == f"{file}: ward-3 has another key now\n"
    assert main(["clients", "list", file]) == 0
    assert capsys.readouterr().out == f"ward-3 {KEY_B}\n"
    assert main(["clients", "revoke", file, "ward-3"]) == 0
    assert read_allow_list(Path(file)) == {}


def test_the_commands_say_what_is_wrong(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = str(tmp_path / "clients.txt")
    for arguments, says in (
        (
            ["clients", "allow", file, "ward-3", f"ward-4 {KEY_A}"],
            "error: expected the key of 'ward-3', found that of 'ward-4'",
        ),
        (["clients", "allow", file, "3", KEY_A], "error: expected a client id"),
        (["clients", "list", file], f"error: {file}: expected a list of clients, found: No such file"),
        (["key"], "error: expected --id ID or --state-dir DIR, found neither"),
        (["key", "--id", "../x"], "error: client.id='../x': expected a letter"),
    ):
        assert main(arguments) == 2
        assert capsys.readouterr().err.startswith(says)
    assert list(tmp_path.iterdir()) == []
