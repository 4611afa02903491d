"""Who may connect to the MQTT listener, and which commands a device may receive."""

import hashlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.listener.access import CommandTopics, Identity, Refusal, identify, matches
from gateway.mqtt.protocol import Connect

ONE, TWO, OLD = (hashlib.sha256(secret).hexdigest() for secret in (b"one", b"two", b"old"))
USERS = {"m001": (ONE, OLD)}
OPERATORS = {"ops": (TWO,)}


@pytest.mark.parametrize(
    ("user", "password", "certificate", "anonymous", "outcome"),
    [
        ("m001", b"one", None, False, Identity("m001", digest=ONE)),
        ("m001", b"old", None, False, Identity("m001", digest=OLD)),
        ("m001", b"two", None, False, "bad-credentials"),
        ("m002", b"one", None, False, "bad-credentials"),
        ("", b"", None, False, "bad-credentials"),
        ("m001", None, None, False, "no-credentials"),
        (None, None, None, False, "no-credentials"),
        ("ops", b"two", None, False, Identity("ops", operator=True, digest=TWO)),
        ("ops", b"one", None, False, "bad-credentials"),
        (None, None, "m001", False, Identity("m001")),
        (None, None, "m007", False, "certificate-of-no-user"),
        (None, None, "not a device", False, "certificate-of-no-user"),
        ("m001", b"one", "m007", False, Identity("m001", digest=ONE)),
        ("m001", b"two", "m001", False, "bad-credentials"),
        (None, None, None, True, Identity(None)),
        ("m001", b"wrong", None, True, Identity(None)),
        ("ops", b"two", None, True, Identity("ops", operator=True, digest=TWO)),
        ("ops", b"wrong", None, True, "bad-credentials"),
        ("ops", None, None, True, "no-credentials"),
    ],
)
def test_who_may_connect(
    user: str | None,
    password: bytes | None,
    certificate: str | None,
    anonymous: bool,  # noqa: FBT001
    outcome: Identity | str,
) -> None:
    connect = Connect("c", True, 60, None, user, password)
    found = identify(connect, certificate, USERS, OPERATORS, anonymous=anonymous)
    assert (found.reason if isinstance(found, Refusal) else found) == outcome


def test_without_users_every_certificate_of_the_ca_names_a_device() -> None:
    connect = Connect("c", True, 60, None, None, None)
    assert identify(connect, "m007", {}, OPERATORS, anonymous=False) == Identity("m007")


def test_certificates_let_nobody_in_when_all_users_were_taken_out() -> None:
    connect = Connect("c", True, 60, None, None, None)
    found = identify(connect, "m007", {}, OPERATORS, anonymous=False, listed=True)
    assert isinstance(found, Refusal)
    assert found.reason == "certificate-of-no-user"


@pytest.mark.parametrize(
    ("user", "password", "told"),
    [
        ("m001", b"two", "the password is wrong"),
        ("m007", b"two", "no device has this name"),
        ("old", b"m001", "user name and password are the wrong way round: the user name is 'm001'"),
        ("two", b"ops", "the user name is 'ops'"),
        ("seven", b"m001", "no device has this name"),
        ("m007", b"\xff", "no device has this name"),
    ],
)
def test_why_a_log_in_is_refused_is_told_without_what_the_client_gave(user: str, password: bytes, told: str) -> None:
    found = identify(Connect("c", True, 60, None, user, password), None, USERS, OPERATORS, anonymous=False)
    assert isinstance(found, Refusal)
    assert told in found.message
    assert user == "m001" or user not in found.message


TOPICS = CommandTopics(("command/{device}/#", "to/{device}/+/set"))


@pytest.mark.parametrize(
    ("topic", "device"),
    [
        ("command/m001", "m001"),
        ("command/m001/a/b", "m001"),
        ("to/m001/x/set", "m001"),
        ("to/m001/x/get", None),
        ("to/m001/x/set/y", None),
        ("command", None),
        ("command/", None),
        ("device/m001/thermo", None),
        ("command/a b/c", None),
    ],
)
def test_which_device_a_topic_speaks_to(topic: str, device: str | None) -> None:
    assert TOPICS.device_of(topic) == device


@pytest.mark.parametrize(
    ("topic_filter", "topic", "expected"),
    [
        # The examples of section 4.7.1.
        ("sport/tennis/player1/#", "sport/tennis/player1", True),
        ("sport/tennis/player1/#", "sport/tennis/player1/score/wimbledon", True),
        ("sport/#", "sport", True),
        ("sport/tennis/+", "sport/tennis/player1/ranking", False),
        ("sport/+", "sport", False),
        ("sport/+", "sport/", True),
        ("+/+", "/finance", True),
        ("/+", "/finance", True),
        ("+", "/finance", False),
        ("ACCOUNTS", "Accounts", False),
    ],
)
def test_filters_match_as_the_standard_says(topic_filter: str, topic: str, expected: bool) -> None:  # noqa: FBT001
    assert matches(topic_filter, topic) is expected


level = st.sampled_from(["command", "to", "m001", "m002", "set", "", "x"])
filters = st.tuples(st.lists(level | st.just("+"), min_size=1, max_size=4), st.booleans()).map(
    lambda parts: "/".join(parts[0] + ["#"] * parts[1])
)
names = st.lists(level, min_size=1, max_size=5).map("/".join)


@given(filters, st.lists(names, max_size=30))
def test_what_a_granted_filter_matches_is_always_the_devices_own(topic_filter: str, topics: list[str]) -> None:
    if TOPICS.may_subscribe(topic_filter, "m001"):
        for topic in topics:
            assert not matches(topic_filter, topic) or TOPICS.device_of(topic) == "m001"


def test_an_identifier_that_is_no_device_name_hears_nothing() -> None:
    for name in (None, "", "+", "#", "m001/x", "a b"):
        assert not TOPICS.may_subscribe(f"command/{name}/#", name)
