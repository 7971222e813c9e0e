"""Signed requests: what is accepted, for how long, and what is not."""

from base64 import b64decode, b64encode
from datetime import UTC, datetime, timedelta

import pytest
from cryptography.hazmat.primitives.asymmetric import ec, ed25519
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat
from hypothesis import given
from hypothesis import strategies as st

from fedtrain.flower import auth
from fedtrain.flower.auth import NotAuthenticated, Signer, authenticate
from fedtrain.security.keys import public_pem

NOON = datetime(2030, 1, 1, 12, tzinfo=UTC)
KEY, OTHER = (ec.generate_private_key(ec.SECP256R1()) for _ in range(2))
PUBLIC, TIME, SIGNATURE = "flwr-public-key", "flwr-timestamp", "flwr-signature"


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[datetime]:
    """The time that signer and server read; change its one element to let time pass."""
    times = [NOON]
    monkeypatch.setattr(auth, "now", lambda: times[0])
    return times


def test_a_signed_request_names_its_key(clock: list[datetime]) -> None:
    assert authenticate(Signer(KEY).headers()) == public_pem(KEY)


@pytest.mark.parametrize(("age_s", "accepted"), [(-5, False), (-4.9, True), (0, True), (304.9, True), (305, False)])
def test_a_signature_is_good_for_five_minutes_and_five_seconds_of_clock_error(
    clock: list[datetime], age_s: float, accepted: bool
) -> None:
    headers = Signer(KEY).headers()
    clock[0] = NOON + timedelta(seconds=age_s)
    if accepted:
        assert authenticate(headers) == public_pem(KEY)
    else:
        with pytest.raises(NotAuthenticated):
            authenticate(headers)


def test_a_signature_is_used_again_for_five_seconds_and_never_before_it_was_made(clock: list[datetime]) -> None:
    signer = Signer(KEY)
    first = signer.headers()
    clock[0] = NOON + timedelta(seconds=4.9)
    assert signer.headers() is first
    clock[0] = NOON + timedelta(seconds=5)
    second = signer.headers()
    assert second[TIME] == "2030-01-01T12:00:05+00:00"
    clock[0] = NOON  # the clock was set back
    assert signer.headers()[TIME] == "2030-01-01T12:00:00+00:00"


@pytest.mark.parametrize("minutes", [-600, 10])
def test_a_signer_that_has_heard_the_servers_time_signs_with_it(clock: list[datetime], minutes: int) -> None:
    signer = Signer(KEY)
    clock[0] = NOON + timedelta(minutes=minutes)
    wrong = signer.headers()
    signer.adopt_time(NOON.isoformat())
    right = signer.headers()
    clock[0] = NOON
    with pytest.raises(NotAuthenticated):
        authenticate(wrong)
    assert right[TIME] == "2030-01-01T12:00:00+00:00"
    assert authenticate(right) == public_pem(KEY)


def changed(**changes: str) -> dict[str, str]:
    headers = dict(Signer(KEY).headers())
    return {**headers, **{{"public": PUBLIC, "time": TIME, "signature": SIGNATURE}[k]: v for k, v in changes.items()}}


def encoded(key: ec.EllipticCurvePrivateKey | ed25519.Ed25519PrivateKey) -> str:
    return b64encode(key.public_key().public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)).decode()


@pytest.mark.parametrize(
    "changes",
    [
        {"public": ""},
        {"public": "!"},
        {"public": b64encode(b"no key").decode()},
        {"public": encoded(OTHER)},
        {"public": encoded(ed25519.Ed25519PrivateKey.generate())},
        {"public": b64encode(b" " * 1100 + public_pem(KEY)).decode()},
        {"time": "noon"},
        {"time": ""},
        {"time": "2030-01-01T12:00:00"},
        {"time": "2030-01-01T12:00:01+00:00"},
        {"time": "0001-01-01T00:00:00+23:59"},
        {"time": "9999-12-31T23:59:59-23:59"},
        {"signature": ""},
        {"signature": "AAAA"},
        {"signature": Signer(OTHER).headers()[SIGNATURE]},
    ],
    ids=str,
)
def test_a_request_that_is_not_what_its_key_signed_is_refused(clock: list[datetime], changes: dict[str, str]) -> None:
    with pytest.raises(NotAuthenticated):
        authenticate(changed(**changes))


@pytest.mark.parametrize("header", [PUBLIC, TIME, SIGNATURE])
def test_a_request_that_lacks_a_header_is_refused(clock: list[datetime], header: str) -> None:
    headers = changed()
    del headers[header]
    with pytest.raises(NotAuthenticated):
        authenticate(headers)


def test_one_key_is_one_identity_however_it_is_written(clock: list[datetime]) -> None:
    pem = b64decode(changed()[PUBLIC])
    for form in (pem + b"\n", b"a comment before it\n" + pem, pem.replace(b"\n", b"\r\n")):
        assert authenticate(changed(public=b64encode(form).decode())) == public_pem(KEY)


@given(st.lists(st.tuples(st.sampled_from([PUBLIC, TIME, SIGNATURE]), st.text(max_size=40)), max_size=3))
def test_no_headers_raise_anything_else(pairs: list[tuple[str, str]]) -> None:
    with pytest.raises(NotAuthenticated):
        authenticate({**changed(), SIGNATURE: "AAAA", **dict(pairs)})
