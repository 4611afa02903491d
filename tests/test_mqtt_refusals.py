"""What the log says of refusals: by device, and never more than a little."""

import pytest
from structlog.testing import capture_logs

from gateway import mqtt_refusals
from gateway.ingress_mqtt_listener import MqttListener
from gateway.mqtt_refusals import LINES_MAX, Refusals
from tests.mqtt_peers import USERS, RecordingIntake, connect, connected, listening, until

LOGGED = "refused by the MQTT listener"
AGAIN = "an older connection was ended: the same client identifier connected again"
SUMMED_UP = "refused or ended by the MQTT listener in the last minute, beside what was logged"


async def try_to_log_in(listener: MqttListener, *users: str) -> None:
    for user in users:
        async with connected(listener, connect(user, login=(user, "wrong"))) as peer:
            assert await peer.read_to_end() == b"\x20\x02\x00\x04"


async def test_a_mistyped_password_is_logged_of_each_device_once_and_then_summed_up(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(mqtt_refusals, "LOG_INTERVAL_S", 0.3)
    with capture_logs() as lines:
        async with listening(RecordingIntake(), anonymous=False, users=USERS) as listener:
            await try_to_log_in(listener, "m001", "m001", "m002", "m001", "m003")
            named = [(line["reason"], line["user"]) for line in lines if line["event"] == LOGGED]
            assert named == [("bad-credentials", "m001"), ("bad-credentials", "m002"), ("bad-credentials", "m003")]
            await until(lambda: lines[-1]["event"] == SUMMED_UP)
            assert lines[-1]["reasons"] == {"bad-credentials": 2}
            await try_to_log_in(listener, "m001")
            assert lines[-1]["event"] == LOGGED, "once in each minute"
            assert listener.counts["bad-credentials"] == 6


def refuse(count: int, refusals: Refusals, name: str) -> None:
    for number in range(count):
        refusals.refused("bad-credentials", "wrong password", user=f"{name}{number}")


async def test_made_up_names_neither_flood_the_log_nor_hide_a_device_nor_are_kept() -> None:
    refusals = Refusals({f"m{number}" for number in range(1_000)})
    with capture_logs() as lines:
        refuse(1_000, refusals, "made up ")
        assert len(lines) == LINES_MAX
        refuse(1_000, refusals, "m")
        assert [line["user"] for line in lines[LINES_MAX:]] == [f"m{number}" for number in range(LINES_MAX)]
        refusals.finish()
        assert lines[-1]["reasons"] == {"bad-credentials": 2_000 - 2 * LINES_MAX}
        refusals.refused("bad-credentials", "wrong password", user="x" * 4_000)
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
