"""Guesses at a secret that a person chose are slowed down. Log-ins with a generated secret never wait."""

import asyncio
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from structlog.testing import capture_logs

from gateway.listener import admission, connection
from gateway.listener.credentials import add
from gateway.listener.login_limit import LoginLimit
from gateway.listener.refusals import LOGIN
from tests.support.mqtt_peers import (
    ACCEPTED,
    CODEWORD,
    USERS,
    RecordingIntake,
    connect,
    connected,
    listening,
)
from tests.support.waiting import until

PER_MINUTE = 10
WRONG, NOT_AUTHORIZED = b"\x20\x02\x00\x04", b"\x20\x02\x00\x05"
HOME, AWAY = "192.0.2.1", "203.0.113.1"


def fail(limit: LoginLimit, name: str, source: str, times: int, now_s: float = 0.0) -> None:
    for _ in range(times):
        limit.failed(name, source, now_s)


def test_a_name_that_failed_too_often_is_not_let_in_until_a_while_has_passed() -> None:
    limit = LoginLimit(PER_MINUTE)
    fail(limit, "m001", HOME, PER_MINUTE - 1)
    assert limit.lets_in("m001", AWAY, 0.0)
    fail(limit, "m002", HOME, 1_000)
    assert not limit.lets_in("m002", HOME, 0.0)
    assert not limit.lets_in("m002", AWAY, 5.0), "wherever it comes from, unless it logged in there before"
    assert limit.lets_in("m002", AWAY, 7.0), "one more has leaked away"
    assert limit.lets_in("m001", HOME, 0.0), "and it is nobody else's business"


def test_guesses_from_elsewhere_do_not_keep_out_the_owner() -> None:
    limit = LoginLimit(PER_MINUTE)
    assert limit.lets_in("m001", HOME, 0.0)
    for number in range(1_000):
        limit.failed("m001", f"198.51.100.{number}", 0.0)
    assert not limit.lets_in("m001", AWAY, 0.0)
    assert limit.lets_in("m001", HOME, 0.0)


@pytest.mark.slow
@given(
    guesses=st.lists(
        st.tuples(st.sampled_from([HOME, AWAY, "198.51.100.7"]), st.sampled_from(["m001", "m002"]), st.floats(0, 3)),
        min_size=50,
        max_size=150,
    )
)
def test_no_name_is_judged_more_often_than_the_bounds_say(guesses: list[tuple[str, str, float]]) -> None:
    """The bound counts how often somebody learns whether a guess was right."""
    limit, now_s = LoginLimit(PER_MINUTE), 0.0
    limit.lets_in("m001", HOME, now_s)
    judged: dict[tuple[str, bool], list[float]] = {}
    for source, name, pause_s in guesses:
        now_s += pause_s
        key = name, name == "m001" and source == HOME
        # Had it been right, it would have been let in, which tells a guesser that it was.
        if limit._bucket(name, source).wait_s(now_s) == 0:
            judged.setdefault(key, []).append(now_s)
        limit.failed(name, source, now_s)
    for moments in judged.values():
        for first in moments:
            assert sum(first <= moment < first + 60 for moment in moments) <= 2 * PER_MINUTE


def test_what_is_remembered_is_bounded_by_the_names_in_the_settings() -> None:
    limit = LoginLimit(PER_MINUTE)
    for number in range(10_000):
        limit.lets_in("m001", f"192.0.{number // 250}.{number % 250}", 0.0)
        limit.failed("m001", f"198.51.{number // 250}.{number % 250}", 0.0)
    assert len(limit._failures) <= 2
    assert len(limit._homes) == 1


# -- at the listener ------------------------------------------------------------------------------


async def tries(listener: Any, name: str, secret: str) -> bytes:
    """The answer to a log-in."""
    async with connected(listener, connect(name, login=(name, secret)), b"") as peer:
        return await peer.read(4)


async def test_a_secret_that_was_made_here_is_judged_at_once_however_many_fail(tmp_path: Path) -> None:
    """Under its name, from its own address, many at a time; also where the settings have a secret of that name too."""
    path = tmp_path / "devices.json"
    made = {each.name: each.secret for each in add(path, ["m001", "m7", "m8"], None)}
    settings: dict[str, Any] = {"anonymous": False, "users": USERS, "failed_logins_per_minute_max": 1}
    async with listening(RecordingIntake(), devices_file=path, **settings) as listener:
        for name, secret in made.items():
            wrong = asyncio.gather(*(tries(listener, name, f"wrong {number}") for number in range(50)))
            await until(lambda: listener.counts["bad-credentials"])
            assert await tries(listener, name, secret) == ACCEPTED
            assert set(await wrong) == {WRONG}
            assert await tries(listener, name, secret) == ACCEPTED
        assert listener.counts["bad-credentials"] == 50 * len(made)
        assert {name for name, _ in listener.shared.login_limit._failures} == {"m001"}


async def test_a_wrong_sensor_beside_right_ones_is_slowed_down_and_they_are_not() -> None:
    settings: dict[str, Any] = {"anonymous": False, "users": USERS, "failed_logins_per_minute_max": 2}
    with capture_logs() as lines:
        async with listening(RecordingIntake(), **settings) as listener:
            for _ in range(2):
                assert await tries(listener, "m002", "wrong") == WRONG
            assert await tries(listener, "m002", CODEWORD) == WRONG, "a guesser must not learn that it was right"
            assert await tries(listener, "m001", CODEWORD) == ACCEPTED
            assert listener.counts["too-many-failed-logins"] == 1
    told = [line for line in lines if line["event"] == LOGIN]
    assert [line["reason"] for line in told] == ["bad-credentials", "too-many-failed-logins"]
    assert {line["user"] for line in told} == {"m002"}
    assert "a secret of sluice devices add has no such bound" in told[1]["why"]


async def test_made_up_names_make_no_room_for_guesses() -> None:
    """An entry of a name that exists is never given up for one that does not."""
    settings: dict[str, Any] = {"anonymous": False, "users": USERS, "failed_logins_per_minute_max": 1}
    async with listening(RecordingIntake(), **settings) as listener:
        assert await tries(listener, "m001", "wrong") == WRONG
        for number in range(200):
            assert await tries(listener, f"made up {number}", "wrong") == WRONG
        assert await tries(listener, "m001", CODEWORD) == WRONG
        assert [name for name, _ in listener.shared.login_limit._failures] == ["m001"]


async def test_an_answer_tells_nobody_whether_a_name_exists(tmp_path: Path) -> None:
    """A made-up name, one of each kind of secret, and one that failed too often: all are answered alike, at once."""
    path = tmp_path / "devices.json"
    add(path, ["m7"], None)
    settings: dict[str, Any] = {"anonymous": False, "users": USERS, "failed_logins_per_minute_max": 1}
    async with listening(RecordingIntake(), devices_file=path, **settings) as listener:
        took_s: dict[str, list[float]] = {}
        for _ in range(30):
            for name in ("made up", "m7", "m001", "m002"):
                begun_s = time.perf_counter()
                assert await tries(listener, name, "wrong") == WRONG
                took_s.setdefault(name, []).append(time.perf_counter() - begun_s)
        assert not listener.counts["too-many-failed-logins"]
        quickest_s = {name: min(each) for name, each in took_s.items()}
        # No pause, which would be a second and more, is in any of them.
        assert max(quickest_s.values()) < min(quickest_s.values()) + 0.05


async def test_whoever_shows_a_certificate_is_not_concerned(monkeypatch: pytest.MonkeyPatch) -> None:
    """It gives no user name, and so do those who show nothing: that is no name which all of them have together."""
    settings: dict[str, Any] = {"anonymous": False, "users": USERS, "failed_logins_per_minute_max": 1}
    async with listening(RecordingIntake(), **settings) as listener:
        for _ in range(3):
            async with connected(listener, connect()) as peer:
                assert await peer.read_to_end() == NOT_AUTHORIZED
            assert await tries(listener, "m001", "wrong") == WRONG
        monkeypatch.setattr(connection, "common_name", lambda _: "m001")
        async with connected(listener, connect("certified"), ACCEPTED):
            pass


async def test_a_mistake_of_ours_shows_no_secret_in_its_traceback(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError("a mistake")

    async with listening(RecordingIntake(), anonymous=False, users=USERS) as listener:
        monkeypatch.setattr(admission, "admit", fail)
        async with connected(listener, connect("hush-hush", login=("hush-hush", "hush-hush"))):
            await until(lambda: "a mistake" in caplog.text)
    assert "hush" not in caplog.text
