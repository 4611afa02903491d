"""Heartbeats: what may still come is never before the low watermark."""

import asyncio
from pathlib import Path

import pytest
from msgspec.structs import replace

from gateway.buffer.attachment import Attachment
from gateway.buffer.buffer import Buffer
from gateway.buffer.salvage import salvage
from gateway.buffer.schema import corruption
from gateway.clock.gateway_clock import BootClock, Look
from gateway.clock.rfc3339 import rfc3339
from gateway.clock.sensor_clock import DeviceClock
from gateway.uplink.heartbeat import Heartbeat
from tests.gateway.uplink.test_forward_rounds import GATEWAY, Uplink, kafka_settings
from tests.support.buffers import CLOCK, changed, confirm, entry, input_of, opened, rows, store
from tests.support.waiting import until

NOW_US = 5_000_000


def heartbeat(buffer: Buffer) -> Heartbeat:
    front_door = Uplink(buffer, kafka_settings()).front_door
    return Heartbeat(buffer, front_door, GATEWAY, kafka_settings(), lambda: CLOCK)


def wall(boottime_us: int) -> str:
    """The earliest that this may have been."""
    return rfc3339(CLOCK.at(boottime_us) - (CLOCK.error_us(boottime_us) or 0)).decode()


async def test_what_is_taken_in_again_meanwhile_is_told_of_once_at_least(tmp_path: Path) -> None:
    """A reading moves from the quarantine to the rows that wait: it is in the one or the other."""
    async with opened(tmp_path / "buffer.db") as buffer:
        input_ = input_of("no-route", b"x", "42", "device/42/thermo", 7)
        assert await store(buffer, [replace(entry(b"report"), quarantined=input_)])
        await confirm(buffer, await rows(buffer))
        beat = asyncio.create_task(heartbeat(buffer)._body(NOW_US, CLOCK, {}))
        await asyncio.sleep(0)
        await buffer.transact(lambda file: file.requeue({}, {1: entry(received_us=7)}))
        told = await beat
        assert told["pending"] or told["quarantined"]
        again = await heartbeat(buffer)._body(NOW_US, CLOCK, {})
        assert (again["low_watermark"], again["quarantined"]) == (wall(7), [])


async def test_nothing_is_promised_while_a_damaged_file_is_salvaged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(salvage, "WAIT_S", 0.05)
    async with opened(tmp_path / "buffer.db") as buffer:
        assert await store(buffer, [entry(b"%d" % n, received_us=7) for n in range(10)])
        assert (await heartbeat(buffer)._body(NOW_US, CLOCK, {}))["low_watermark"] == wall(7)
        with monkeypatch.context() as patch:
            # As where there is no room.
            patch.setattr(Attachment, "_adopt_now", lambda *_: False)
            await buffer.run(lambda _: buffer._commits._fail(corruption("found just now")))
            told = await heartbeat(buffer)._body(NOW_US, CLOCK, {})
            assert (told["pending"], told["low_watermark"]) == ([], None)
        await until(lambda: bool(buffer.attachment.salvaged))
        assert (await heartbeat(buffer)._body(NOW_US, CLOCK, {}))["low_watermark"] is not None
        await confirm(buffer, await rows(buffer))
        assert (await heartbeat(buffer)._body(NOW_US, CLOCK, {}))["low_watermark"] == wall(NOW_US)


async def test_a_boot_that_is_known_by_an_interval_holds_the_watermark_at_its_beginning(tmp_path: Path) -> None:
    path = tmp_path / "buffer.db"
    async with opened(path, "boot-0", lambda: BootClock("unknown", 100.0)) as buffer:
        assert await store(buffer, [entry(received_us=7)])
        assert (await heartbeat(buffer)._body(NOW_US, CLOCK, {}))["low_watermark"] is None
    async with opened(path) as buffer:
        clock = await buffer.boot_clock("boot-0")
        told = await heartbeat(buffer)._body(NOW_US, CLOCK, {})
        earliest_us = clock.at(7) - (clock.error_us(7) or 0)
        assert clock.quality == "bounded"
        assert told["low_watermark"] == rfc3339(earliest_us).decode()
        assert told["pending"][0]["from"] == told["low_watermark"]  # type: ignore[index]
        assert told["pending"][0]["to"] == rfc3339(clock.at(7) + (clock.error_us(7) or 0)).decode()  # type: ignore[index]


async def test_a_heartbeat_without_a_clock_is_to_be_corrected_too(tmp_path: Path) -> None:
    clock = BootClock("unknown", 100.0)
    async with opened(tmp_path / "buffer.db", clock=lambda: clock) as buffer:
        front_door = Uplink(buffer, kafka_settings()).front_door
        await Heartbeat(buffer, front_door, GATEWAY, kafka_settings(), lambda: clock).record(NOW_US, {})
        clock = CLOCK
        assert await store(buffer, [entry()])
        assert buffer.owes_correction


async def test_a_salvaged_lane_has_its_floor(tmp_path: Path) -> None:
    async with opened(tmp_path / "buffer.db") as buffer:
        assert await store(buffer, [entry(received_us=7)])
        await buffer.run(lambda _: buffer._commits._fail(corruption("found just now")))
        await until(lambda: bool(buffer.attachment.salvaged))
        assert (await heartbeat(buffer)._body(NOW_US, CLOCK, {}))["low_watermark"] == wall(7)


async def test_a_clock_that_becomes_better_known_brings_nothing_before_the_watermark(tmp_path: Path) -> None:
    now = BootClock("unknown", 100.0).looked(Look(10_000_000, 1_700_000_000_000_000, 2_000_000))
    async with opened(tmp_path / "buffer.db", clock=lambda: now) as buffer:
        assert await store(buffer, [entry(received_us=5_000_000)])
        told = await heartbeat(buffer)._body(11_000_000, now, {})
        now = now.looked(Look(75_000_000, 1_700_000_000_000_000 - 1_900_000, 10_000))
        assert now.revision == 0
        assert str(told["low_watermark"]) <= rfc3339(now.at(5_000_000)).decode()


async def test_a_reading_that_its_sensor_has_kept_for_long_is_not_before_the_watermark(tmp_path: Path) -> None:
    received_us = 4_000_000_000
    # Taken a second after its sensor started, and kept for an hour.
    kept = changed(entry(received_us=received_us, sequence=1), tick_ms=1_000)
    clock = DeviceClock("crystal")
    clock.probed(received_us, received_us + 3_000, 3_601_000, 0)
    async with opened(tmp_path / "buffer.db") as buffer:
        assert await store(buffer, [kept])
        told = await heartbeat(buffer)._body(received_us, CLOCK, {})
        estimate = clock.estimate(1_000, received_us)
        assert estimate is not None
        assert str(told["low_watermark"]) <= rfc3339(CLOCK.at(estimate[0])).decode()
