"""Who guesses at secrets is slowed down, whatever they try, and no neighbour notices."""

import asyncio
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st
from structlog.testing import capture_logs

from gateway.listener import admission, connection
from gateway.listener.login_limit import ENTRIES_MAX, MANY, Attempt, LoginLimit, TooManyError, Waiting, source_of
from gateway.listener.refusals import LOGIN
from tests.support.mqtt_peers import (
    ACCEPTED,
    CODEWORD,
    PINGREQ,
    PINGRESP,
    USERS,
    RecordingIntake,
    connect,
    connected,
    listening,
)
from tests.support.waiting import until

PER_MINUTE, DELAY_S, HELD = 10, 3.0, 256
WRONG, NOT_AUTHORIZED = b"\x20\x02\x00\x04", b"\x20\x02\x00\x05"
RIGHT = connect("right", login=("m001", CODEWORD))


def limit() -> LoginLimit:
    return LoginLimit(PER_MINUTE, DELAY_S, HELD)


def fail(limits: LoginLimit, attempt: Attempt, times: int, now_s: float = 0.0) -> None:
    """Be judged so often, and be wrong."""
    for _ in range(times):
        limits.failed(attempt, now_s, has_waited=True)


@pytest.mark.parametrize(
    ("peer", "source"),
    [
        ("192.0.2.7:1024", "192.0.2.7"),
        ("::1:1024", "::/64"),
        ("2001:db8:1:2:3:4:5:6:1024", "2001:db8:1:2::/64"),
        ("fe80::1%eth0:1024", "fe80::/64"),
        ("::ffff:192.0.2.7:1024", "192.0.2.7"),
        ("", ""),
    ],
)
def test_one_host_is_one_source(peer: str, source: str) -> None:
    assert source_of(peer) == source


def test_the_first_failures_are_answered_at_once_and_the_next_wait_right_or_wrong() -> None:
    limits, guesser = limit(), Attempt("192.0.2.1", "m001")
    fail(limits, guesser, PER_MINUTE - 1)
    assert limits.before(guesser, 0.0) is None
    fail(limits, guesser, 1)
    waiting = limits.before(guesser, 0.0)
    assert waiting is not None
    assert waiting.seconds == DELAY_S
    assert limits.waiting == 1
    limits.release(waiting)
    assert limits.waiting == 0
    assert limits.before(guesser, 60.0 / PER_MINUTE) is None, "one more has leaked away"
    assert limits.before(guesser, 0.0) is not None


def test_a_minute_or_two_after_the_last_failure_nothing_of_it_is_felt() -> None:
    limits, guesser = limit(), Attempt("192.0.2.1", "m001")
    fail(limits, guesser, 1_000)
    assert limits.before(guesser, 60.0) is not None
    assert limits.before(guesser, 70.0) is None
    fail(limits, guesser, 1, 130.0)
    assert limits.before(guesser, 130.0) is None


def test_who_logs_in_has_a_clean_slate() -> None:
    limits, sensor = limit(), Attempt("192.0.2.1", "m001")
    fail(limits, sensor, PER_MINUTE)
    limits.succeeded(sensor)
    assert limits.before(sensor, 0.0) is None


def test_neighbours_behind_one_address_do_not_notice() -> None:
    limits = limit()
    for name in ("m001", "made up", ""):
        fail(limits, Attempt("192.0.2.1", name), 1_000)
    assert limits.before(Attempt("192.0.2.1", "m002"), 0.0) is None


def test_who_guesses_at_a_name_from_everywhere_waits_and_the_true_one_does_not() -> None:
    limits, true = limit(), Attempt("192.0.2.1", "m001")
    limits.succeeded(true)
    for number in range(MANY * PER_MINUTE):
        fail(limits, Attempt(f"198.51.100.{number}", "m001"), 1)
    assert limits.before(Attempt("203.0.113.1", "m001"), 0.0) is not None
    assert limits.before(true, 0.0) is None
    assert limits.before(Attempt("203.0.113.1", "m002"), 0.0) is None


def test_an_address_that_tries_many_names_has_its_failures_answered_late() -> None:
    limits = limit()
    for number in range(MANY * PER_MINUTE):
        assert limits.failed(Attempt("192.0.2.1", f"m{number}"), 0.0, has_waited=False) is None
    late = limits.failed(Attempt("192.0.2.1", "other"), 0.0, has_waited=False)
    assert late is not None
    limits.release(late)
    assert limits.failed(Attempt("192.0.2.1", "other"), 0.0, has_waited=True) is None, "nobody waits twice"
    assert limits.failed(Attempt("192.0.2.2", "other"), 0.0, has_waited=False) is None


def test_few_wait_of_one_more_of_an_address_and_some_of_all() -> None:
    limits, held = limit(), 0
    for number in range(100):
        for name in ("m1", "m2", "m3", "m4", "m5", "m6"):
            attempt = Attempt(f"192.0.2.{number}", name)
            fail(limits, attempt, PER_MINUTE)
            mine = 0
            try:
                while mine < 1_000:
                    limits.before(attempt, 0.0)
                    mine += 1
            except TooManyError:
                held += mine
            assert mine <= HELD // 64
    assert limits.waiting == held
    assert held <= HELD


@given(
    guesses=st.lists(
        st.tuples(st.integers(0, 3), st.sampled_from(["m001", "m002", "x"]), st.floats(0, 5)), min_size=50, max_size=300
    )
)
def test_no_name_is_judged_more_often_than_the_bounds_say(guesses: list[tuple[int, str, float]]) -> None:
    """Whoever tries, from wherever, and closes without waiting: what counts is how often a secret was looked at."""
    limits, now_s = limit(), 0.0
    judged: dict[Attempt, list[float]] = {}
    waiting: list[tuple[float, Waiting]] = []
    for host, name, pause_s in guesses:
        now_s += pause_s * 0.02
        for due_s, each in [entry for entry in waiting if entry[0] <= now_s]:
            waiting.remove((due_s, each))
            limits.release(each)
            judged.setdefault(each.attempt, []).append(due_s)
            limits.failed(each.attempt, due_s, has_waited=True)
        attempt = Attempt(f"192.0.2.{host}", name)
        try:
            held = limits.before(attempt, now_s)
        except TooManyError:
            continue
        if held is not None:
            waiting.append((now_s + held.seconds, held))
            continue
        judged.setdefault(attempt, []).append(now_s)
        try:
            late = limits.failed(attempt, now_s, has_waited=False)
        except TooManyError:
            continue
        if late is not None:
            limits.release(late)
    for moments in judged.values():
        for first in moments:
            within = sum(first <= moment < first + 60 for moment in moments)
            assert within <= 2 * PER_MINUTE + (60 / DELAY_S) * (HELD // 64)
        # In a burst that is shorter than a pause.
        assert all(
            sum(at <= other < at + DELAY_S for other in moments) <= PER_MINUTE + 1 + HELD // 64 for at in moments
        )


def test_what_is_remembered_is_bounded() -> None:
    limits = limit()
    for number in range(ENTRIES_MAX + 100):
        attempt = Attempt.of(f"192.0.{number // 250}.{number % 250}:1", "x" * 60_000)
        limits.failed(attempt, 0.0, has_waited=False)
        limits.succeeded(Attempt.of("192.0.2.1:1", f"m{number}"))
    assert len(attempt.user) == 64
    for remembered in (limits._pairs._levels, limits._names._levels, limits._sources._levels, limits._homes):
        assert len(remembered) <= ENTRIES_MAX
    assert not limits._held


# -- at the listener ------------------------------------------------------------------------------


@pytest.mark.usefixtures("steady_time")
async def test_a_wrong_sensor_beside_right_ones_is_slowed_down_and_they_are_not() -> None:
    async with listening(
        RecordingIntake(), anonymous=False, users=USERS, failed_logins_per_minute_max=2, failed_login_delay_s=0.5
    ) as listener:
        for _ in range(2):
            async with connected(listener, connect("w", login=("m002", "wrong"))) as peer:
                assert await peer.read_to_end() == WRONG
        begun = time.monotonic()
        async with connected(listener, connect("w", login=("m002", "wrong")) + PINGREQ) as late:
            assert await late.silent(0.1)
            async with connected(listener, RIGHT + PINGREQ, ACCEPTED + PINGRESP):
                assert time.monotonic() < begun + 0.45, "a neighbour waited"
            assert listener.shared.login_limit.waiting == 1
        async with connected(listener, connect("w", login=("m002", CODEWORD)) + PINGREQ) as mended:
            assert await mended.silent(0.1)
            assert await mended.read(6) == ACCEPTED + PINGRESP, "what came behind CONNECT is not lost"
            assert time.monotonic() > begun + 0.5
        async with connected(listener, connect("v", login=("m002", CODEWORD)), ACCEPTED):
            pass
        await until(lambda: not listener.shared.login_limit.waiting)


@pytest.mark.usefixtures("steady_time")
async def test_whoever_shows_a_certificate_does_not_wait_because_others_show_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Neither gives a user name: that is no name which all of them have together."""
    async with listening(
        RecordingIntake(), anonymous=False, users=USERS, failed_logins_per_minute_max=1, failed_login_delay_s=5
    ) as listener:
        async with connected(listener, connect()) as peer:
            assert await peer.read_to_end() == NOT_AUTHORIZED
        monkeypatch.setattr(connection, "common_name", lambda _: "m001")
        async with asyncio.timeout(1), connected(listener, connect("certified"), ACCEPTED):
            assert not listener.shared.login_limit.waiting


@pytest.mark.usefixtures("steady_time")
async def test_whoever_does_not_wait_for_an_answer_learns_nothing_sooner() -> None:
    """A guesser that takes no answer within a moment for a refusal: its right guess is not answered sooner either."""
    async with listening(
        RecordingIntake(), anonymous=False, users=USERS, failed_logins_per_minute_max=1, failed_login_delay_s=1
    ) as listener:
        async with connected(listener, connect(login=("m001", "wrong"))) as peer:
            assert await peer.read_to_end() == WRONG
        for guess in ("a", CODEWORD, "b", "c"):
            async with connected(listener, connect(login=("m001", guess))) as peer:
                assert await peer.silent()
        assert listener.counts["bad-credentials"] == 1, "none was even judged by then"
        async with connected(listener, connect(login=("m001", "d"))) as peer:
            assert await peer.read_to_end() == b"", "those that went keep their places, or guesses would come faster"
        await until(lambda: not listener.shared.login_limit.waiting)
        await until(lambda: not listener.shared.connections)
        assert not listener.shared.sessions


@pytest.mark.usefixtures("steady_time")
async def test_beyond_those_that_may_wait_a_log_in_ends_unjudged_and_is_told() -> None:
    with capture_logs() as lines:
        async with listening(
            RecordingIntake(),
            anonymous=False,
            users=USERS,
            failed_logins_per_minute_max=1,
            failed_login_delay_s=0.5,
            failed_logins_held_max=64,
        ) as listener:
            async with connected(listener, connect(login=("m001", "wrong"))) as peer:
                assert await peer.read_to_end() == WRONG
            async with connected(listener, connect(login=("m001", "wrong"))) as held:
                await until(lambda: listener.shared.login_limit.waiting)
                async with connected(listener, RIGHT) as beyond:
                    assert await beyond.read_to_end() == b""
                assert await held.read_to_end() == WRONG
            assert listener.counts["too-many-failed-logins"] == 1
            await asyncio.sleep(0.5)
            async with connected(listener, RIGHT, b"") as peer:
                assert await peer.read(4) == ACCEPTED, "and it is let in once there is room"
    reasons = [line["reason"] for line in lines if line["event"] == LOGIN]
    assert reasons == ["bad-credentials", "too-many-failed-logins"]


@pytest.mark.usefixtures("steady_time")
async def test_a_listener_that_ends_does_not_wait_for_those_that_wait() -> None:
    begun = time.monotonic()
    async with listening(
        RecordingIntake(), anonymous=False, users=USERS, failed_logins_per_minute_max=1, failed_login_delay_s=30
    ) as listener:
        async with connected(listener, connect(login=("m001", "wrong"))) as peer:
            await peer.read_to_end()
        reader, writer = await asyncio.open_connection("127.0.0.1", listener.port)
        writer.write(RIGHT)
        await until(lambda: listener.shared.login_limit.waiting)
    assert await reader.read() == b""
    writer.close()
    await until(lambda: not listener.shared.login_limit.waiting)
    assert time.monotonic() < begun + 5


@pytest.mark.parametrize("waits", [False, True])
async def test_a_mistake_of_ours_shows_no_secret_in_its_traceback(
    waits: bool,  # noqa: FBT001
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError("a mistake")

    async with listening(
        RecordingIntake(), anonymous=False, users=USERS, failed_logins_per_minute_max=1, failed_login_delay_s=0.1
    ) as listener:
        if waits:
            async with connected(listener, connect(login=("hush-hush", "hush-hush"))) as peer:
                assert await peer.read_to_end() == WRONG
        monkeypatch.setattr(admission, "admit", fail)
        async with connected(listener, connect("hush-hush", login=("hush-hush", "hush-hush"))):
            await until(lambda: "a mistake" in caplog.text)
    assert "hush" not in caplog.text


@pytest.mark.usefixtures("steady_time")
async def test_patience_with_a_client_that_waits_is_no_shorter_than_its_pause() -> None:
    async with listening(
        RecordingIntake(),
        anonymous=False,
        users=USERS,
        connect_timeout_s=0.2,
        failed_logins_per_minute_max=1,
        failed_login_delay_s=0.5,
    ) as listener:
        async with connected(listener, connect(login=("m001", "wrong"))) as peer:
            assert await peer.read_to_end() == WRONG
        async with connected(listener, RIGHT, ACCEPTED):
            pass
        assert not listener.counts["connect-timeout"]
