"""The gateway's own report once a second."""

import json
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from structlog.testing import capture_logs

from gateway.clock import kernel_clock
from gateway.clock.floor import ClockFloor
from gateway.clock.gateway_clock import Look
from gateway.clock.kernel_clock import ClockWatch, boottime_us
from gateway.config.config_file import route_table
from gateway.daemon.housekeeping import QUARANTINED_INTERVAL_S, TOO_OLD_INTERVAL_S, Housekeeping
from gateway.intake.front_door import FrontDoor
from gateway.settings import GatewaySettings, KafkaSettings, Settings
from tests.support.buffers import entry, opened, rows, store


def test_readings_that_grew_too_old_are_logged_once_a_minute_with_their_count() -> None:
    buffer: Any = SimpleNamespace(counts=Counter())
    nobody: Any = None
    clock = ClockWatch(GatewaySettings("gw1", clock="system"))
    housekeeping = Housekeeping(nobody, buffer, nobody, clock, nobody, nobody)
    told = []
    with capture_logs() as lines:
        for second in range(int(TOO_OLD_INTERVAL_S) * 2 + 1):
            buffer.counts["too-old"] += 10 if 10 <= second <= 20 else 0
            housekeeping._tell_what_was_too_old(float(second + 1))
            told.append(len(lines))
    assert [line["count"] for line in lines] == [10, 100]
    assert told.index(2) - told.index(1) == TOO_OLD_INTERVAL_S
    assert {line["setting"] for line in lines} == {"buffer.age_max_s"}


def test_the_log_names_quarantined_devices_at_once_and_then_once_a_minute() -> None:
    quarantine = SimpleNamespace(by_reason=Counter[str](), last={})
    door: Any = SimpleNamespace(quarantine=quarantine)
    nobody: Any = None
    clock = ClockWatch(GatewaySettings("gw1", clock="system"))
    housekeeping = Housekeeping(door, nobody, nobody, clock, nobody, nobody)
    told = []
    with capture_logs() as lines:
        for second in range(int(QUARANTINED_INTERVAL_S) + 2):
            quarantine.by_reason["no-pairs"] += 1
            quarantine.last["no-pairs"] = f"scale{second}", "/dev/ttyUSB0"
            if second == 5:
                quarantine.by_reason["no-route"] += 2
                quarantine.last["no-route"] = "", "shed/7"
            housekeeping._tell_what_was_quarantined(float(second))
            told.append(len(lines))
    assert [(line["reason"], line["count"], line["last_device"], line["last_subject"]) for line in lines] == [
        ("no-pairs", 1, "scale0", "/dev/ttyUSB0"),
        ("no-route", 2, None, "shed/7"),
        ("no-pairs", 60, "scale60", "/dev/ttyUSB0"),
    ]
    assert (told.index(1), told.index(2), told.index(3)) == (0, 5, 60)


async def test_what_grew_too_old_is_told_from_what_made_room(tmp_path: Path) -> None:
    old_us = boottime_us() - 7_200_000_000
    async with opened(tmp_path / "buffer.db", age_max_s=3600) as buffer:
        await store(buffer, [entry(received_us=old_us), entry(received_us=old_us)])
        buffer._commits._age_due_s = 0.0
        await store(buffer, [entry(received_us=boottime_us())])
        assert buffer.counts["too-old"] == buffer.counts["dropped"] == 2


class Looks:
    """The clocks, as the kernel is made to show them."""

    def __init__(self, *found: Look) -> None:
        self._found = list(found)

    def __call__(self, *_: object) -> Look:
        return self._found.pop(0) if len(self._found) > 1 else self._found[0]


async def test_once_the_clock_is_learnt_what_went_before_is_corrected(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now_us = boottime_us()
    unsynced, synced = Look(now_us, 10**12, None), Look(now_us + 2_000_000, 1_800_000_000_000_000, 20_000)
    wrong = Look(now_us + 4_000_000, 1_900_000_000_000_000, 20_000)
    monkeypatch.setattr(kernel_clock, "read_clocks", Looks(unsynced, unsynced, synced, synced, wrong))
    gateway, kafka = GatewaySettings("gw1"), KafkaSettings(("127.0.0.1:1",))
    clock = ClockWatch(gateway)
    nobody: Any = None
    async with opened(tmp_path / "buffer.db", clock=clock.now) as buffer:
        door = FrontDoor(buffer, route_table(Settings(gateway, kafka)), gateway, kafka, boottime_us)
        housekeeping = Housekeeping(door, buffer, nobody, clock, nobody, ClockFloor())

        async def look() -> list[Any]:
            """Look at the clock as each second; the events that came of it."""
            seen = len(await rows(buffer))
            housekeeping._look_at_the_clock()
            # With the next commit it is on disk.
            assert await store(buffer, [entry()])
            await housekeeping._correct_times()
            told = [row.datum.payload for row in (await rows(buffer))[seen:]]
            return [json.loads(payload) for payload in told if payload.startswith(b"{")]

        await buffer.owe_correction(buffer.boot_id)
        assert await look() == []
        with capture_logs() as lines:
            learnt, correction = await look()
            assert learnt["offset_us"] == synced.offset_us
            assert 20_000 <= learnt["error_us"] < 30_000
            assert correction["boot"] == buffer.boot_id
            assert (correction["version"], correction["quality"], correction["supersedes"]) == (1, "synced", False)
            assert (correction["offset_us"], correction["boottime_us"]) == (synced.offset_us, synced.at_us)
            assert await look() == [], "once"
            (anew,) = await look()
            assert (anew["version"], anew["offset_us"], anew["supersedes"]) == (2, wrong.offset_us, True)
        told = [line["event"] for line in lines]
        assert told.count("times that were told before they were known are corrected on gateway-events") == 2
        assert [line["by_s"] for line in lines if "was wrong" in line["event"]] == [100_000_000.0]
