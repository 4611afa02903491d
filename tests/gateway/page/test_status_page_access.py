"""Who may see the status page: addresses, names, sessions, failed log-ins."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from structlog.testing import capture_logs

from gateway.page.access import (
    ADDRESSES_MAX,
    FAILURES_MAX,
    FAILURES_S,
    FAILURES_TOTAL_MAX,
    LINES_MAX,
    SESSION_IDLE_S,
    SESSION_S,
    SESSIONS_MAX,
    LogIns,
    Remembered,
    Sessions,
    is_loopback,
    is_of_a_private_network,
    is_our_name,
)


@pytest.mark.parametrize(
    "address", ["127.0.0.1", "10.0.0.7", "172.16.3.4", "192.168.1.20", "169.254.9.9", "::1", "fe80::1%eth0", "fd12::5"]
)
def test_addresses_of_the_lan(address: str) -> None:
    assert is_of_a_private_network(address)


@pytest.mark.parametrize(
    "address", ["8.8.8.8", "100.64.0.1", "::ffff:8.8.8.8", "2a00::1", "64:ff9b::a00:1", "::", "", "lan", "10.0.0"]
)
def test_addresses_of_elsewhere(address: str) -> None:
    assert not is_of_a_private_network(address)


def test_an_ipv4_address_within_ipv6_is_that_address() -> None:
    assert is_of_a_private_network("::ffff:10.0.0.7")
    assert is_loopback("::ffff:127.0.0.1")
    assert not is_loopback("10.0.0.7")


@pytest.mark.parametrize(
    "host",
    [
        *("192.168.1.20:8080", "localhost:8080", "barn.local", "BARN.local:8080", "other.local.", "barn", "barn:8080"),
        *("barn.lan", "barn.home.arpa:80", "[fe80::1]:8080", "[::1]", "127.0.0.1"),
    ],
)
def test_names_of_this_gateway(host: str) -> None:
    assert is_our_name(host, "barn")
    assert is_our_name(host, "barn.farm.example")


@pytest.mark.parametrize(
    "host",
    [
        *("", "evil.example", "evil.example:8080", "barn.evil.example", "barn.local.evil.example", "8.8.8.8", ".local"),
        *("192.168.1.20.evil.example", "localhost.evil.example", "evil.example#.local:x", "[::1", "a" * 300, "barn:x"),
        *("barn:80:80", "notbarn", "[2a00::1]:80", "xbarn.lan"),
    ],
)
def test_names_that_somebody_else_may_lead_here(host: str) -> None:
    assert not is_our_name(host, "barn")


@given(st.text(max_size=60), st.text(max_size=20))
def test_no_name_that_ends_on_the_internet_is_ours(host: str, own: str) -> None:
    assert not is_our_name(f"{host}.example", own)


def test_a_session_ends_when_idle_and_at_the_latest_after_a_week() -> None:
    sessions = Sessions()
    token = sessions.begin(0)
    assert len(token) == 22, "128 bits"
    assert sessions.is_open(token, SESSION_IDLE_S)
    assert not sessions.is_open(token, 2 * SESSION_IDLE_S + 1)
    assert not sessions.is_open(token, 0), "it does not come back"
    token, now_s = sessions.begin(0), 0.0
    while now_s < SESSION_S:
        assert sessions.is_open(token, now_s)
        now_s += SESSION_IDLE_S
    assert not sessions.is_open(token, SESSION_S + 1)


def test_sessions_are_bounded_and_ended() -> None:
    sessions = Sessions()
    tokens = [sessions.begin(number) for number in range(SESSIONS_MAX + 1)]
    assert [sessions.is_open(token, 100) for token in tokens] == [False] + [True] * SESSIONS_MAX
    sessions.end(tokens[1])
    assert not sessions.is_open(tokens[1], 100)
    sessions.end_all()
    assert not sessions.is_open(tokens[2], 100)
    assert not sessions.is_open("", 100)


def test_a_password_is_remembered_for_the_line_that_it_was_right_for() -> None:
    remembered = Remembered()
    assert not remembered.is_right("line", "")
    remembered.remember("line", "right")
    assert remembered.is_right("line", "right")
    assert not remembered.is_right("line", "wrong")
    assert not remembered.is_right("another line", "right")


def test_failures_of_one_address_keep_it_out_for_a_while() -> None:
    log_ins = LogIns()
    for second in range(FAILURES_MAX):
        assert log_ins.wait_s("10.0.0.1", second) == 0
        log_ins.begin("10.0.0.1", second)
    assert log_ins.wait_s("10.0.0.1", FAILURES_MAX) == FAILURES_S - FAILURES_MAX
    assert log_ins.wait_s("10.0.0.2", FAILURES_MAX) == 0
    assert log_ins.wait_s("10.0.0.1", FAILURES_S) == 0


def test_log_ins_that_succeed_are_not_slowed_by_failures_elsewhere() -> None:
    log_ins = LogIns()
    for second in range(50):
        log_ins.begin("10.0.0.1", second)
        log_ins.succeeded("10.0.0.1", second)
    for number in range(FAILURES_TOTAL_MAX):
        log_ins.begin(f"10.0.1.{number}", 50)
    assert log_ins.wait_s("10.0.2.1", 51) > 0
    assert log_ins.wait_s("10.0.0.1", 51) == 0


@given(st.lists(st.tuples(st.integers(0, 40), st.floats(0, 20)), max_size=100))
def test_no_more_than_so_many_guesses_a_minute(tries: list[tuple[int, float]]) -> None:
    """This holds for any number of addresses."""
    log_ins, now_s = LogIns(), 0.0
    guesses: list[tuple[float, str]] = []
    for number, pause_s in tries:
        now_s += pause_s
        peer = f"10.0.0.{number}"
        if log_ins.wait_s(peer, now_s) == 0:
            log_ins.begin(peer, now_s)
            guesses.append((now_s, peer))
    for begin_s, _ in guesses:
        within = [peer for at_s, peer in guesses if begin_s <= at_s < begin_s + FAILURES_S]
        assert len(within) <= FAILURES_TOTAL_MAX
        assert all(within.count(peer) <= FAILURES_MAX for peer in within)


def test_memory_of_failures_is_bounded() -> None:
    log_ins = LogIns()
    for number in range(3 * ADDRESSES_MAX):
        log_ins.begin(str(number), 0)
    assert len(log_ins._failed) == ADDRESSES_MAX
    assert len(log_ins._failed_all) == FAILURES_TOTAL_MAX


def test_each_refused_log_in_has_its_line_or_its_place_in_a_sum() -> None:
    log_ins = LogIns()
    with capture_logs() as lines:
        for _ in range(LINES_MAX + 7):
            log_ins.note_refused("10.0.0.1", "the password is wrong", 0)
        log_ins.sum_up(30)
        log_ins.sum_up(61)
        log_ins.note_refused("10.0.0.2", "the password is wrong", 62)
        log_ins.sum_up(63, is_end=True)
    assert [line["peer"] for line in lines if "peer" in line] == ["10.0.0.1"] * LINES_MAX + ["10.0.0.2"]
    assert [line["reasons"] for line in lines if "reasons" in line] == [{"the password is wrong": 7}]
    assert log_ins.refused == LINES_MAX + 8
