"""`sluice check` on the clock: trusted or not, and why."""

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path

import msgspec
import pytest

from gateway.clock.floor import RELEASED_US, ClockFloor
from gateway.clock.gateway_clock import WallClock
from gateway.clock.kernel_clock import boottime_us
from gateway.clock.report import ClockView
from gateway.commands.check.clock import check_clock
from gateway.commands.check.finding import Finding, Remark
from gateway.config.config_file import load
from gateway.settings import Settings
from gateway.uplink.state import UplinkState
from tests.support.buffers import append, entry, opened
from tests.support.gateways import answering

RELEASED = datetime.fromtimestamp(RELEASED_US / 1e6, UTC)
LATER = RELEASED + timedelta(days=100)
SUBJECT = "clock of the running sluice"


@pytest.fixture(autouse=True)
def nothing_of_this_box(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No time daemon, and no fake-hwclock, unless a test says so."""
    monkeypatch.setattr("gateway.commands.check.clock.processes", list)
    monkeypatch.setattr("gateway.commands.check.clock.FAKE_HWCLOCK", tmp_path / "fake-hwclock.data")
    return iter((None,))


def settings_of(folder: Path, gateway: str = "") -> Settings:
    path = folder / "gateway.toml"
    path.write_text(
        f'[gateway]\nid = "gw1"\n{gateway}\n[buffer]\npath = "{folder}/buffer.db"\n'
        '[kafka]\nbootstrap = ["127.0.0.1:1"]\n'
    )
    return load(path)


def showing(now: datetime, error_us: int | None = None) -> WallClock:
    return WallClock(int(now.timestamp() * 1e6) - boottime_us(), error_us)


def judged(settings: Settings, clock: WallClock) -> dict[str, tuple[str, str]]:
    return {finding.subject: (judgement(finding), finding.words) for finding in check_clock(settings, clock)}


def judgement(finding: Finding) -> str:
    return "FAIL" if not finding.ok else "warn" if isinstance(finding, Remark) else "ok"


def runs(monkeypatch: pytest.MonkeyPatch, *names: str) -> None:
    monkeypatch.setattr("gateway.commands.check.clock.processes", lambda: list(range(len(names))))
    monkeypatch.setattr("gateway.commands.check.clock.name_of", lambda process: names[process])


# -- what the kernel says -------------------------------------------------------------------------


def test_the_kernel_vouches_for_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = settings_of(tmp_path)
    assert judged(settings, showing(LATER, 12_345))["clock"] == (
        "ok",
        "the kernel says that it is synced, within ± 12.3 ms",
    )
    runs(monkeypatch, "bash", "systemd-timesyn", "chronyd")
    how, words = judged(settings, showing(LATER, 2_000_000))["clock"]
    assert (how, words.endswith("within ± 2.0 s, kept by chronyd and systemd-timesyncd")) == ("ok", True)


def test_the_kernel_does_not_vouch_for_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = settings_of(tmp_path)
    how, words = judged(settings, showing(LATER))["clock"]
    assert how == "warn"
    assert "no known time daemon runs here: sudo apt install systemd-timesyncd" in words
    assert "Once Kafka is reached, readings wait for it, for 10 min at most" in words
    assert f"It says {LATER:%Y-%m-%d %H:%M:%S} UTC, which may be right" in words
    runs(monkeypatch, "ntpd")
    (tmp_path / "fake-hwclock.data").touch()
    _, words = judged(settings, showing(LATER))["clock"]
    assert "; ntpd runs, and has not succeeded yet: see that it" in words
    assert "which may be right, or late by as long as the box was off (fake-hwclock)" in words


def test_a_date_that_cannot_be_is_wrong_whoever_vouches_for_it(tmp_path: Path) -> None:
    y2000 = datetime(2000, 1, 1, tzinfo=UTC)
    impossible = f"it says 2000-01-01 00:00:00 UTC, and this version of Sluice was made on {RELEASED:%Y-%m-%d}"
    how, words = judged(settings_of(tmp_path), showing(y2000))["clock"]
    assert how == "warn"
    assert words.endswith(f"It is wrong: {impossible}")
    how, words = judged(settings_of(tmp_path), showing(y2000, 1_000))["clock"]
    assert how == "FAIL"
    assert impossible in words
    how, words = judged(settings_of(tmp_path, 'clock = "system"'), showing(y2000, 1_000_000))["clock"]
    assert how == "FAIL"
    assert impossible in words
    assert 'write clock = "kernel" under [gateway]' in words


# -- what the installer says ----------------------------------------------------------------------


def test_a_system_clock_is_vouched_for_by_its_owner(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = settings_of(tmp_path, 'clock = "system"\nsystem_clock_error_ms = 250')
    found = judged(settings, showing(LATER, 250_000))
    how, words = found["clock"]
    assert how == "ok"
    assert "within ± 250.0 ms" in words
    assert "the host must keep the clock" in words
    assert "gateway.clock" not in found
    runs(monkeypatch, "chronyd")
    assert judged(settings, showing(LATER, 250_000))["clock"][1].endswith("; chronyd runs here")


def test_a_clock_that_is_set_to_when_it_was_saved_is_no_clock_to_trust(tmp_path: Path) -> None:
    (tmp_path / "fake-hwclock.data").touch()
    how, words = judged(settings_of(tmp_path, 'clock = "system"'), showing(LATER, 1_000))["gateway.clock"]
    assert how == "warn"
    assert "times that look right and are late" in words
    assert "gateway.clock" not in judged(settings_of(tmp_path), showing(LATER, 1_000))


async def test_a_clock_behind_what_the_buffer_knows_is_wrong(tmp_path: Path) -> None:
    settings = settings_of(tmp_path, 'clock = "system"')
    floor = ClockFloor()
    async with opened(tmp_path / "buffer.db") as buffer:
        for said in (LATER + timedelta(days=3650), LATER):
            # Where it was synced to a wrong time at first, what counts is what was learnt then.
            mark = floor.learn(int(said.timestamp() * 1e6), 0)
            assert mark is not None
            assert await append(buffer, [entry()], [mark])
            how, words = judged(settings, showing(said - timedelta(minutes=1), 1_000_000))["clock"]
            assert how == "FAIL"
            assert "has passed, as the buffer tells" in words
        assert judged(settings, showing(LATER + timedelta(minutes=1), 1_000_000))["clock"][0] == "ok"


# -- what the daemon says -------------------------------------------------------------------------


@asynccontextmanager
async def daemon(folder: Path, clock: object, uplink: object = None) -> AsyncIterator[None]:
    async def answer(_arguments: dict[str, object]) -> object:
        return {"clock": clock, "uplink": uplink}

    async with opened(folder / "buffer.db"), answering(folder / "buffer.db", {"state": answer}):
        yield


async def told(folder: Path, clock: object) -> tuple[str, str] | None:
    async with daemon(folder, clock):
        found = await asyncio.to_thread(judged, settings_of(folder), showing(LATER, 1_000))
    return found.get(SUBJECT)


async def test_how_the_daemon_sees_it(tmp_path: Path) -> None:
    hour_ago_us = boottime_us() - 3_600_000_000
    synced = ClockView(synced=True, error_us=15_000, since_us=hour_ago_us)
    assert await told(tmp_path, synced) == ("ok", "known for 1 h, now within ± 15.0 ms")
    unsynced = ClockView(synced=False, error_us=None, since_us=hour_ago_us)
    assert await told(tmp_path, unsynced) == (
        "warn",
        "not synced since this box was started; sluice has watched it for 1 h",
    )


@pytest.mark.parametrize(
    ("uplink", "synced", "words"),
    [
        (
            UplinkState(up=True),
            False,
            "Readings go with times that may be wrong, and are corrected once it is. ",
        ),
        (
            UplinkState(up=True, waits_for_clock=True, clock_until_us=3_650_000_000, was_reached=True),
            False,
            "Readings wait on this box for it, for 1 h more at most",
        ),
        (UplinkState(), False, "Once Kafka is reached, readings wait for it, for 10 min at most"),
        (None, False, "Once Kafka is reached, readings wait for it, for 10 min at most"),
        (UplinkState(up=True), True, "The running sluice has known the time before, and goes on by that"),
    ],
)
async def test_the_check_says_which_times_readings_get_from_an_unsynced_clock(
    tmp_path: Path, uplink: UplinkState | None, *, synced: bool, words: str
) -> None:
    view = ClockView(synced, 15_000 if synced else None, boottime_us() - 3_600_000_000)
    if uplink is not None and uplink.clock_until_us is not None:
        uplink = replace(uplink, clock_until_us=boottime_us() + uplink.clock_until_us)
    async with daemon(tmp_path, view, uplink):
        found = await asyncio.to_thread(judged, settings_of(tmp_path), showing(LATER))
    how, told_of_it = found["clock"]
    assert how == "warn"
    # What to do comes first.
    todo, _, meanwhile = told_of_it.partition(" under [gateway]. ")
    assert "no known time daemon runs here: sudo apt install systemd-timesyncd; or, in a container" in todo
    assert meanwhile.startswith(words)


async def test_a_clock_that_is_set_again_and_again_is_remarked_on(tmp_path: Path) -> None:
    now_us = boottime_us()
    hour_us = 3_600_000_000
    view = ClockView(True, 15_000, now_us - 10 * hour_us, 3, now_us - 3 * hour_us, -3_200_000)
    found = await told(tmp_path, view)
    assert found is not None
    assert found[0] == "warn"
    assert "set 3 times since the start. Somebody set this box's clock 3 h ago, by -3.2 s" in found[1]


async def test_a_daemon_that_says_nothing_of_its_clock_is_no_trouble_of_it(tmp_path: Path) -> None:
    assert await told(tmp_path, None) is None
    assert await told(tmp_path, {"synced": "yes"}) is None
    async with opened(tmp_path / "buffer.db"):
        assert SUBJECT not in judged(settings_of(tmp_path), showing(LATER, 1_000))


def test_what_is_asked_is_what_is_told() -> None:
    view = ClockView(synced=True, error_us=1, since_us=2)
    assert msgspec.convert(msgspec.to_builtins(view), ClockView) == view
