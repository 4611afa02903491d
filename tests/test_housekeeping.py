"""What the gateway says of itself once a second."""

from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from structlog.testing import capture_logs

from gateway.clock_kernel import ClockWatch, boottime_us
from gateway.housekeeping import QUARANTINED_INTERVAL_S, TOO_OLD_INTERVAL_S, Housekeeping
from gateway.settings import GatewaySettings
from tests.buffers import entry, opened, store


def test_what_grew_too_old_is_in_the_log_once_a_minute_with_its_count() -> None:
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


def test_what_was_quarantined_is_in_the_log_at_once_and_then_once_a_minute_with_whose_it_is() -> None:
    door: Any = SimpleNamespace(quarantined=Counter(), quarantined_last={})
    nobody: Any = None
    clock = ClockWatch(GatewaySettings("gw1", clock="system"))
    housekeeping = Housekeeping(door, nobody, nobody, clock, nobody, nobody)
    told = []
    with capture_logs() as lines:
        for second in range(int(QUARANTINED_INTERVAL_S) + 2):
            door.quarantined["no-pairs"] += 1
            door.quarantined_last["no-pairs"] = f"scale{second}", "/dev/ttyUSB0"
            if second == 5:
                door.quarantined["no-route"] += 2
                door.quarantined_last["no-route"] = "", "shed/7"
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
        buffer._age_due_s = 0.0
        await store(buffer, [entry(received_us=boottime_us())])
        assert buffer.counts["too-old"] == buffer.counts["dropped"] == 2
