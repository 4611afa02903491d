"""The log of refusals names devices, and never grows by more than a little."""

import asyncio
from typing import Any

import pytest
from structlog.testing import capture_logs

from gateway.listener.listener import MqttListener
from gateway.listener.refusals import ADDRESSES_MAX, LATELY_MAX, LINES_MAX, LOGIN, LOGINS_AGAIN, Refusals
from gateway.mqtt.protocol import Connect
from tests.support.mqtt_peers import CODEWORD, USERS, RecordingIntake, connect, connected, listening
from tests.support.waiting import patience

LOGGED = "refused by the MQTT listener"
AGAIN = "an older connection was ended: the same client identifier connected again"


async def try_to_log_in(listener: MqttListener, *users: str) -> None:
    for user in users:
        async with connected(listener, connect(user, login=(user, "wrong"))) as peer:
            assert await peer.read_to_end() == b"\x20\x02\x00\x04"


async def test_a_mistyped_password_is_logged_of_each_device_once_and_then_summed_up() -> None:
    with capture_logs() as lines:
        async with listening(RecordingIntake(), anonymous=False, users=USERS) as listener:
            await try_to_log_in(listener, "m001", "m001", "m002", "m001", "m003")
            named = [(line["reason"], line["user"]) for line in lines if line["event"] == LOGIN]
            unknown = "m0… (4 characters, no device's name)"
            assert named == [("bad-credentials", "m001"), ("bad-credentials", "m002"), ("bad-credentials", unknown)]
            assert listener.counts["bad-credentials"] == 5
    assert (lines[-1]["event"], lines[-1]["count"], lines[-1]["others"]) == (LOGINS_AGAIN, 2, {})
    assert lines[-1]["again"] == {"m001 from 127.0.0.1: bad-credentials": 2}


async def test_a_minute_later_it_is_logged_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gateway.listener.refusals.LOG_INTERVAL_S", 0.05)
    with capture_logs() as lines:
        settings: dict[str, Any] = {"anonymous": False, "users": USERS, "failed_logins_per_minute_max": 1_000}
        async with listening(RecordingIntake(), **settings) as listener, asyncio.timeout(patience(5)):
            while sum(line["event"] == LOGIN for line in lines) < 3:
                await try_to_log_in(listener, "m001")
                await asyncio.sleep(0.02)


async def test_a_refused_log_in_is_told_of_until_that_sensor_logs_in() -> None:
    async with listening(RecordingIntake(), anonymous=False, users=USERS) as listener:
        await try_to_log_in(listener, "m001")
        (told,) = listener.refusals.lately()
        assert (told["user"], str(told["why"]).partition(";")[0]) == ("m001", "the password is wrong")
        async with connected(listener, connect("m001", login=("m001", CODEWORD))) as peer:
            assert await peer.read(4) == b"\x20\x02\x00\x00"
            assert listener.refusals.lately() == []


def log_in(refusals: Refusals, user: str | None, peer: str = "192.0.2.1:1024", client_id: str = "") -> None:
    refusals.refused_login("bad-credentials", "why", Connect(client_id, True, 60, None, user, b"the password"), peer)


async def test_made_up_names_and_addresses_hide_no_device_and_every_log_in_is_counted() -> None:
    refusals = Refusals({f"m{number}" for number in range(1_000)})
    with capture_logs() as lines:
        for number in range(1_000):
            log_in(refusals, f"{number:04} made up" * (1 + number % 40))
        assert len(lines) == LINES_MAX
        for number in range(1_000):
            log_in(refusals, "m7", f"192.0.2.{number % 256}:1024")
        assert len(lines) == LINES_MAX + ADDRESSES_MAX
        log_in(refusals, "m8")
        assert lines[-1]["user"] == "m8"
        told = len(lines)
        refusals.finish()
        assert len(lines) == told + 1
        assert lines[-1]["count"] == 2_001 - told
        assert lines[-1]["count"] == sum(lines[-1]["again"].values()) + sum(lines[-1]["others"].values())
        log_in(refusals, "m8")
        assert lines[-1]["event"] == LOGIN
        refusals.finish()
        assert len(lines) == told + 2


@pytest.mark.parametrize(
    ("user", "client_id", "user_told", "client_told"),
    [
        ("m1", "kitchen", "m1", "kitchen"),
        ("m1", "the password", "m1", "th… (12 characters)"),
        ("m1", "m1-the password", "m1", "m1… (15 characters)"),
        ("m1", "the passcode", "m1", "th… (12 characters)"),
        ("m1", "the", "m1", "the"),
        ("hush", "so hush", "hu… (4 characters, no device's name)", "so… (7 characters)"),
        ("hush-hush", "hush-hush", "hu… (9 characters, no device's name)", "hu… (9 characters)"),
        ("hush-hush", "m1", "hu… (9 characters, no device's name)", "m1"),
        ("", "", "… (0 characters, no device's name)", ""),
        (None, "kitchen", None, "kitchen"),
        ("m1", "x" * 4_000, "m1", "x" * 80),
    ],
)
async def test_the_log_shows_nothing_that_may_be_a_secret(
    user: str | None, client_id: str, user_told: str | None, client_told: str
) -> None:
    refusals = Refusals({"m1"})
    with capture_logs() as lines:
        log_in(refusals, user, client_id=client_id)
        refusals.finish()
    assert (lines[0]["user"], lines[0]["client_id"]) == (user_told, client_told)
    assert "hush-hush" not in str(lines)
    assert "the password" not in str(lines)


async def test_the_page_is_told_of_refused_log_ins_until_that_sensor_logs_in() -> None:
    refusals = Refusals({"m1", "m2"})
    log_in(refusals, "m1")
    log_in(refusals, "hush-hush", "192.0.2.2:1024")
    log_in(refusals, "m1", "192.0.2.3:1024")
    refusals.refused("tls-handshake-failed", "the TLS handshake failed", peer="192.0.2.4:1024")
    refusals.refused("packet-too-large", "too large", peer="192.0.2.5:1024")
    told = refusals.lately()
    assert [each["address"] for each in told] == ["192.0.2.4", "192.0.2.3", "192.0.2.2"]
    assert (told[1]["user"], told[1]["why"]) == ("m1", "why")
    assert "hush-hush" not in str(told)
    refusals.let_in("m2", "192.0.2.9:1")
    assert len(refusals.lately()) == 3
    refusals.let_in("m1", "192.0.2.9:1")
    # Who had another name is known by its address.
    refusals.let_in("m2", "192.0.2.2:1")
    assert [each["address"] for each in refusals.lately()] == ["192.0.2.4"]
    for number in range(1_000):
        log_in(refusals, "made up", f"192.0.{number}.1:1024")
    assert len(refusals.lately()) == LATELY_MAX
    refusals.finish()


def refuse(count: int, refusals: Refusals, name: str) -> None:
    for number in range(count):
        refusals.refused("packet-too-large", "too large", user=f"{name}{number}")


async def test_made_up_clients_neither_flood_the_log_nor_hide_a_device_nor_are_kept() -> None:
    refusals = Refusals({f"m{number}" for number in range(1_000)})
    with capture_logs() as lines:
        refuse(1_000, refusals, "made up ")
        assert len(lines) == LINES_MAX
        refuse(1_000, refusals, "m")
        assert [line["user"] for line in lines[LINES_MAX:]] == [f"m{number}" for number in range(LINES_MAX)]
        refusals.finish()
        assert lines[-1]["reasons"] == {"packet-too-large": 2_000 - 2 * LINES_MAX}
        refusals.refused("packet-too-large", "too large", user="x" * 4_000)
        assert lines[-1]["user"] == "x" * 80
        refusals.finish()


async def test_a_client_that_connects_again_is_no_refusal_and_takes_no_place_of_one() -> None:
    refusals = Refusals(())
    with capture_logs() as lines:
        for number in range(2 * LINES_MAX):
            refusals.refused("taken-over", "another connection", client_id=f"c{number % (LINES_MAX + 1)}")
        assert {(line["log_level"], line["event"]) for line in lines} == {("info", AGAIN)}
        assert [line["client_id"] for line in lines] == [f"c{number}" for number in range(LINES_MAX)]
        refuse(LINES_MAX, refusals, "made up ")
        assert sum(line["event"] == LOGGED for line in lines) == LINES_MAX
        refusals.finish()
        assert (lines[-1]["log_level"], lines[-1]["count"]) == ("info", LINES_MAX)
        assert refusals.counts["taken-over"] == 2 * LINES_MAX


@pytest.mark.parametrize(
    ("sent", "reason"),
    [(connect(keep_alive_s=1), "keep-alive-timeout"), (b"", "connect-timeout")],
    ids=["after CONNECT", "before it"],
)
async def test_a_client_that_falls_silent_was_not_refused(sent: bytes, reason: str) -> None:
    with capture_logs() as lines:
        async with listening(RecordingIntake(), connect_timeout_s=0.1) as listener, connected(listener, sent) as peer:
            await peer.read_to_end()
    (line,) = [line for line in lines if line.get("reason") == reason]
    assert line["event"].startswith("connection ended by the MQTT listener")
    assert ("check its power and radio" in line["event"]) == (reason == "keep-alive-timeout")
    assert not any(line["event"].startswith("refused") for line in lines)


async def test_whoever_gives_no_name_is_known_by_its_address() -> None:
    refusals = Refusals(())
    with capture_logs() as lines:
        for peer in ("192.0.2.1:1024", "192.0.2.1:1025", "192.0.2.2:1024"):
            refusals.refused("first-packet-not-connect", "no MQTT", peer=peer)
        assert [line["peer"] for line in lines] == ["192.0.2.1:1024", "192.0.2.2:1024"]
        refusals.finish()
