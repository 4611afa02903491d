"""`sluice devices`: every device that the gateway knows, from its memory while it runs and from its file."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest
from click.testing import CliRunner, Result
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.buffer.rows import Entry, Series
from gateway.cli import main
from gateway.clock.kernel_clock import boot_id, boottime_us
from gateway.clock.report import ClockView
from gateway.clock.sensor_clocks import DeviceClocks
from gateway.config import config_file
from gateway.config.running_settings import RunningSettings
from gateway.daemon import control, device_states
from gateway.daemon.device_states import DevicesAsked, devices_page
from gateway.devices.listing import read_devices
from gateway.devices.notes import (
    BEGINS_ANEW,
    HEARD_BEFORE,
    LEARNING,
    NO_ANSWER,
    NO_IDENTITY,
    NO_LOG_IN,
    NO_TICK,
    NOT_HEARD,
    NOT_JSON,
    OWN_TIMES,
    RESTARTED,
    RESTARTS,
    STANDS_STILL,
    UNREADABLE_TICK,
)
from gateway.intake.devices_heard import DevicesHeard
from gateway.intake.front_door import FrontDoor
from gateway.intake.kept_clocks import keep_clocks, recall_clocks
from gateway.intake.routes import compile_routes
from gateway.reading import Mark, Reading
from gateway.settings import GatewaySettings, KafkaSettings, ListenerSettings, RouteSettings
from gateway.uplink.state import UplinkState
from tests.support.buffers import CLOCK, entry, entry_of, opened, reading_of, store
from tests.support.gateways import answering
from tests.support.waiting import patience

CONFIG = """\
[gateway]
id = "gw1"
[buffer]
path = "{path}"
[kafka]
bootstrap = ["127.0.0.1:1"]
"""
KAFKA = KafkaSettings(bootstrap=("127.0.0.1:1",))
ROUTE = RouteSettings("device/{device}/{stream}", "device-{stream}", identity="json")
SECOND_US = 1_000_000


def write(directory: Path) -> Path:
    config = directory / "gateway.toml"
    config.write_text(CONFIG.format(path=directory / "buffer.db"))
    return config


@asynccontextmanager
async def gateway(
    directory: Path, serial: dict[str, Any] | None = None, route: RouteSettings = ROUTE
) -> AsyncIterator[FrontDoor]:
    """The parts of a gateway that runs, as far as devices are known by them."""
    async with opened(directory / "buffer.db", boot_id()) as buffer:
        settings = msgspec.convert({"id": "gw1"}, GatewaySettings)
        clocks = DeviceClocks(boot_id())
        door = FrontDoor(buffer, compile_routes([route], None, frozenset()), settings, KAFKA, boottime_us, clocks)
        await recall_clocks(buffer, clocks)
        parts = control.Parts(
            uplink=UplinkState,
            clock=lambda: ClockView(synced=True, error_us=None, since_us=0),
            settings=lambda: RunningSettings("", "gw1", ""),
            serial=None if serial is None else lambda: serial,
        )
        answers = control.handlers(door, buffer, parts)
        try:
            async with answering(directory / "buffer.db", answers):
                yield door
        finally:
            keep_clocks(buffer, clocks, boottime_us())


async def devices(directory: Path, *options: str, command: str = "devices") -> Result:
    """In a thread, for this one answers as the daemon."""
    wide = CliRunner(env={"COLUMNS": "1000"})
    return await asyncio.to_thread(wide.invoke, main, [command, "--config", str(write(directory)), *options])


async def listed(directory: Path) -> dict[str, dict[str, Any]]:
    shown = await devices(directory, "--json")
    assert shown.exit_code in {0, 1}, shown.output
    return {device["device"]: device for device in json.loads(shown.stdout)["devices"]}


async def take(door: FrontDoor, *readings: Reading) -> None:
    outcome: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
    door.take(readings, outcome.set_result)
    assert await asyncio.wait_for(outcome, patience(10))


def reading(
    device: str, sequence: int, received_us: int, tick_ms: int | None = None, port: str | None = None
) -> Reading:
    topic = f"device/{device}/thermo"
    return reading_of(
        topic, b"21.5", received_us, port=port or topic, tick_ms=tick_ms, device_boot="7-1", device_sequence=sequence
    )


def told(received_us: int, topic: str = "device/shed/thermo", **members: object) -> Reading:
    """A publication of an MQTT sensor."""
    return reading_of(topic, json.dumps(members).encode(), received_us)


def probe(clocks: DeviceClocks, device: str, now_us: int, ppm: float = 5_000.0) -> None:
    """Ten round trips, the last of them just now."""
    clock = clocks.of(device, "7-1")
    for ago in range(9, -1, -1):
        at_us = now_us - ago * 10 * SECOND_US
        tick = int(at_us * (1 + ppm / 1e6))
        assert clock.probed(at_us - 2_000, at_us, tick // 1000, tick % 1000)


async def test_a_serial_sensor_an_mqtt_sensor_and_what_the_file_knows(tmp_path: Path) -> None:
    async with opened(tmp_path / "buffer.db", boot_id()) as buffer:
        assert await store(buffer, [entry(device="before", sequence=1, received_us=boottime_us() - 60 * SECOND_US)])
    port = {"device": "attic", "used_s": 0.5, "heard_s": 0.5, "trouble": None, "silent": False}
    async with gateway(tmp_path, {"ports": {"/dev/ttyUSB0": port}}) as door:
        now_us = boottime_us()
        probe(door.clocks, "attic", now_us)
        await take(door, reading("attic", 1, now_us, 5, "/dev/ttyUSB0"), reading("shed", 1, now_us - 3 * SECOND_US))
        found = await listed(tmp_path)
        shown = await devices(tmp_path)
    assert list(found) == ["attic", "before", "shed"]
    attic = found["attic"]
    (clock,) = attic["clocks"]
    assert (attic["place"], attic["is_serial"], attic["boot"], attic["note"]) == ("/dev/ttyUSB0", True, "7-1", None)
    least, most = clock["drift_ppm"]
    assert least <= 5_000 <= most
    assert 0 < clock["error_us"] < 20_000
    assert clock["observed_s"] < 20
    assert (found["shed"]["place"], found["shed"]["note"]) == ("device/shed/thermo", NO_TICK)
    assert found["shed"]["heard_s"] >= 3
    assert (found["before"]["note"], found["before"]["boot"]) == (HEARD_BEFORE, "1-00000001")
    assert 60 <= found["before"]["heard_s"] < 600
    assert shown.exit_code == 0
    assert shown.stdout.splitlines()[1].startswith("attic   /dev/ttyUSB0")


async def test_of_a_gateway_that_is_stopped_the_file_tells(tmp_path: Path) -> None:
    async with gateway(tmp_path) as door:
        probe(door.clocks, "attic", boottime_us())
        await take(door, reading("attic", 1, boottime_us(), 5, "/dev/ttyUSB0"))
    shown = await devices(tmp_path, "--json")
    found = json.loads(shown.stdout)
    (attic,) = found["devices"]
    assert (found["running"], found["unheard"]) == (False, None)
    assert (attic["place"], attic["is_serial"], attic["boot"]) == ("/dev/ttyUSB0", True, "7-1")
    assert attic["clocks"][0]["drift_ppm"][0] < 5_000 < attic["clocks"][0]["drift_ppm"][1]


async def test_the_latest_of_several_topics_is_unknown_after_a_restart(tmp_path: Path) -> None:
    topics = [f"device/shed/{stream}" for stream in ("zeta", "thermo", "alpha", "thermo")]
    async with gateway(tmp_path) as door:
        for number, topic in enumerate(topics):
            await take(door, told(boottime_us(), topic, boot="7-1", seq=number))
        before = (await listed(tmp_path))["shed"]
    stopped = (await listed(tmp_path))["shed"]
    async with gateway(tmp_path):
        after = (await listed(tmp_path))["shed"]
        table = (await devices(tmp_path)).stdout.splitlines()
    assert before["place"] == "device/shed/thermo"
    for found in (stopped, after):
        assert (found["place"], found["is_serial"]) == (None, False)
    assert after["heard_s"] is not None
    assert table[1].split()[:2] == ["shed", "-"]
    assert table[-1] == f"shed: {HEARD_BEFORE}"


async def test_a_sensor_that_cannot_log_in_is_marked_where_a_list_decides(tmp_path: Path) -> None:
    config = write(tmp_path)
    settings = config_file.load(config)
    listener = ListenerSettings(users={"barn": "0" * 64})
    async with gateway(tmp_path) as door:
        for name in ("barn", "shed"):
            await take(door, told(boottime_us(), f"device/{name}/thermo", boot="7-1", seq=1, tick="12345"))
        await take(door, reading("attic", 1, boottime_us(), 5, "/dev/ttyUSB0"))

        async def notes(listener: ListenerSettings | None) -> dict[str, tuple[bool, str | None]]:
            given = msgspec.structs.replace(settings, mqtt_listener=listener)
            found = await asyncio.to_thread(read_devices, given)
            return {each.device: (each.no_log_in, each.note) for each in found.devices}

        assert await notes(listener) == {
            "attic": (False, LEARNING),
            "barn": (False, UNREADABLE_TICK),
            "shed": (True, NO_LOG_IN),
        }
        for anybody in (None, ListenerSettings(anonymous=True)):
            assert not any(marked for marked, _ in (await notes(anybody)).values())
        (tmp_path / "devices.json").write_text('{"version": 1, "devices": {"shed": []}}')
        assert (await notes(listener))["shed"] == (False, UNREADABLE_TICK)
        (tmp_path / "devices.json").write_text("}")
        assert (await notes(listener))["shed"] == (False, UNREADABLE_TICK)


async def test_after_a_restart_of_the_box_no_clock_is_known(tmp_path: Path) -> None:
    clocks = DeviceClocks("the boot before")
    probe(clocks, "attic", boottime_us())
    async with opened(tmp_path / "buffer.db", "the boot before") as buffer:
        buffer.append((), None, clocks.marks(0, all_of_them=True))
    assert (await listed(tmp_path))["attic"]["note"] == RESTARTED
    async with gateway(tmp_path):
        pass
    assert await listed(tmp_path) == {}, "and its mark is gone"


async def test_a_daemon_that_cannot_be_asked_is_said_and_the_file_tells(tmp_path: Path) -> None:
    async with opened(tmp_path / "buffer.db", boot_id()) as buffer:
        assert await store(buffer, [entry(sequence=1)])
        shown = await devices(tmp_path)
    assert "is not known: no gateway listens at" in shown.stdout
    assert "device/42/thermo" in shown.stdout
    assert shown.exit_code == 0


async def test_findings_make_the_exit_code_one(tmp_path: Path) -> None:
    async with gateway(tmp_path) as door:
        now_us = boottime_us()
        for number in range(10):
            await take(door, told(now_us + number * 10 * SECOND_US, boot="7-1", seq=number, tick=5))
        shown = await devices(tmp_path)
    assert shown.exit_code == 1
    assert f"shed: {STANDS_STILL}" in shown.stdout
    assert "to be looked at: 1 of 1 device" in shown.stdout


@pytest.mark.parametrize(
    ("ticks_per_s", "words"),
    [
        (1, "the tick runs 1,000 times too slow: it counts seconds, and must count milliseconds"),
        (1e6, "the tick runs 1,000 times too fast: it counts microseconds, and must count milliseconds"),
        (100, "the tick runs 10 times too slow: it must count milliseconds, also while the sensor sleeps"),
        (1_024, "the tick runs about 2 % too fast, unless "),
        (32_768, "the tick runs 33 times too fast, unless "),
        # An RC oscillator.
        (1_009, None),
    ],
)
@pytest.mark.parametrize("interval_s", [1, 10, 600])
async def test_a_tick_that_counts_no_milliseconds_is_told_with_its_pace(
    tmp_path: Path, ticks_per_s: float, words: str | None, interval_s: int
) -> None:
    async with gateway(tmp_path) as door:
        now_us = boottime_us()
        for number in range(max(6, 150 // interval_s)):
            # Not on the second, so that a count of seconds is off by one at times; the tick wraps on the way.
            late_us, at_s = number * 7_919_000 % 980_000, number * interval_s
            tick = (2**32 - 20_000 + int((at_s + late_us / 1e6) * ticks_per_s)) % 2**32
            await take(door, told(now_us + at_s * SECOND_US + late_us, boot="7-1", seq=number, tick=tick))
        shed = (await listed(tmp_path))["shed"]
    if words is None:
        assert not shed["finding"]
    else:
        assert shed["note"].startswith(words)
        assert shed["finding"]


@pytest.mark.parametrize("is_sequence_kept", [True, False])
async def test_a_tick_that_begins_anew_in_a_boot_is_a_finding_until_the_boot_is_another(
    tmp_path: Path,
    is_sequence_kept: bool,  # noqa: FBT001 - a case
) -> None:
    async with gateway(tmp_path) as door:
        now_us = boottime_us()

        async def send(at_s: int, boot: str, sequence: int, tick: int) -> Any:
            await take(door, told(now_us + at_s * SECOND_US, boot=boot, seq=sequence, tick=tick))
            return (await listed(tmp_path))["shed"]["note"]

        for number in range(30):
            await send(number * 10, "barn", number, 900_000 + number * 10_000)
        notes = [
            await send(300 + number * 10, "barn", number + is_sequence_kept * 30, 1_500 + number * 10_000)
            for number in range(9)
        ]
        assert (notes[0], notes[-1]) == (None, BEGINS_ANEW)
        assert await send(400, "8-1", 0, 1_000) == LEARNING


async def test_readings_that_were_kept_are_of_no_tick_that_begins_anew(tmp_path: Path) -> None:
    async with gateway(tmp_path) as door:
        now_us = boottime_us()
        for at_s in range(900, 1_200, 10):
            await take(door, told(now_us + at_s * SECOND_US, boot="b", seq=at_s, tick=at_s * 1_000))
        # New ones first, then those before, for longer than a minute, between few new ones.
        for at_s in range(1_200, 1_290):
            of_s = at_s if at_s % 80 == 0 else (at_s - 1_200) * 10
            await take(door, told(now_us + at_s * SECOND_US, boot="b", seq=of_s, tick=of_s * 1_000))
        shed = (await listed(tmp_path))["shed"]
    assert (shed["note"], shed["finding"]) == (None, False)


async def test_a_sensor_that_restarts_for_its_readings_is_pointed_to_the_time_of_receipt(tmp_path: Path) -> None:
    async def wake_ups(door: FrontDoor) -> list[dict[str, Any]]:
        now_us, shown = boottime_us(), []
        for number in range(6):
            for sequence, stream in enumerate(("thermo", "hygro")):
                at_us = now_us + number * 600 * SECOND_US + sequence * 50_000
                members = {"boot": f"{number}-1", "seq": sequence, "tick": 1_500 + sequence * 50}
                await take(door, told(at_us, f"device/shed/{stream}", **members))
            shown.append((await listed(tmp_path))["shed"])
        return shown

    async with gateway(tmp_path) as door:
        shown = await wake_ups(door)
    assert [(each["note"], each["finding"]) for each in shown[:2]] == [(LEARNING, False)] * 2
    assert (shown[-1]["note"], shown[-1]["finding"]) == (RESTARTS, True)
    # As it says.
    async with gateway(tmp_path, route=msgspec.structs.replace(ROUTE, time="receipt")) as door:
        shown = await wake_ups(door)
    assert (shown[-1]["note"], shown[-1]["finding"]) == (NO_TICK, False)


@pytest.mark.parametrize(("programs", "topics"), [(3, 3), (2, 1)])
async def test_programs_under_one_name_are_no_sensor_that_restarts(tmp_path: Path, programs: int, topics: int) -> None:
    async with gateway(tmp_path) as door:
        now_us = boottime_us()
        for number in range(24):
            program = number % programs
            members = {"boot": f"{program}-1", "seq": number, "tick": program * 1_000_000 + number * 30_000}
            await take(door, told(now_us + number * 30 * SECOND_US, f"device/shed/{program % topics}", **members))
            assert not (await listed(tmp_path))["shed"]["finding"]


async def test_dates_that_cannot_be_right_are_told_with_their_device(tmp_path: Path) -> None:
    route = msgspec.structs.replace(ROUTE, identity="none", time="timestamp")
    async with gateway(tmp_path, route=route) as door:
        now_us = boottime_us()
        right_ms = CLOCK.at(now_us) // 1_000
        topics = [f"device/{name}/thermo" for name in ("barn", "shed", "well")]
        await take(
            door,
            *(told(now_us, topic, timestamp=ms) for topic, ms in zip(topics, (right_ms, 5_000, right_ms), strict=True)),
        )
        await take(door, told(now_us, topics[2], timestamp=right_ms + 7_200_000))
        found = await listed(tmp_path)
        status = await devices(tmp_path, command="status")
        # Once it is right again, not for ever.
        await take(door, told(now_us + 601 * SECOND_US, topics[1], timestamp=right_ms + 601_000))
        mended = await listed(tmp_path)
    assert (found["barn"]["note"], found["barn"]["finding"]) == (OWN_TIMES, False)
    wrong = "the times that it sends cannot be right, the last is 53.9 years before its receipt"
    assert found["shed"]["note"].startswith(f"{wrong} (1970-01-01T00:00:05.000000Z): set its clock")
    assert "the last is 2 h after its receipt" in found["well"]["note"]
    assert found["shed"]["finding"]
    assert found["well"]["finding"]
    assert (
        "1 reading since the start (the last: shed; sluice devices says more) came with a time too far behind"
        in status.stdout
    )
    assert (
        "1 reading since the start (the last: well; sluice devices says more) came with a time too far ahead"
        in status.stdout
    )
    assert (mended["shed"]["note"], mended["well"]["finding"]) == (OWN_TIMES, True)


@pytest.mark.parametrize("time", ["auto", "tick"])
async def test_a_tick_that_cannot_be_read_is_told_with_its_device(tmp_path: Path, time: Any) -> None:
    async with gateway(tmp_path, route=msgspec.structs.replace(ROUTE, time=time)) as door:
        # Another boot each time, as of a sensor that sleeps.
        for boot in ("6-1", "7-1"):
            await take(door, told(boottime_us(), boot=boot, seq=1, tick="12345"))
        shown = await devices(tmp_path)
        status = await devices(tmp_path, command="status")
        await take(door, told(boottime_us() + 601 * SECOND_US, boot="7-1", seq=2, tick=12_345))
        mended = (await listed(tmp_path))["shed"]
    assert shown.exit_code == 1
    assert f"shed: {UNREADABLE_TICK}" in shown.stdout
    words = "2 readings since the start (the last: shed; sluice devices says more) came with a tick that cannot be read"
    assert words in status.stdout
    assert mended["note"] == LEARNING


async def test_devices_whose_payloads_are_not_as_declared_are_named_with_the_cause(tmp_path: Path) -> None:
    async with gateway(tmp_path) as door:
        now_us = boottime_us()

        async def publish(device: str, payload: bytes, at_us: int) -> None:
            topic = f"device/{device}/thermo"
            await take(door, reading_of(topic, payload, at_us))

        await publish("barn", b'{"boot":"b1","seq":2,"celsius":nan}', now_us)
        await publish("shed", b'{"celsius":21.5}', now_us)
        await publish("well", b'{"boot":"b1","seq":"two"}', now_us)
        found = await listed(tmp_path)
        status = await devices(tmp_path, command="status")
        # Once it is right again, not for ever.
        await publish("barn", b'{"boot":"b1","seq":3,"celsius":21.5}', now_us + 601 * SECOND_US)
        mended = (await listed(tmp_path))["barn"]
    assert {name: device["note"] for name, device in found.items()} == {
        "barn": NOT_JSON.format("`nan` at byte 32"),
        "shed": NO_IDENTITY.format("no `boot` and no `seq`"),
        "well": NO_IDENTITY.format("`seq` is a text that is no number"),
    }
    assert all(device["finding"] for device in found.values())
    lines = [line.removeprefix("payloads").strip() for line in status.stdout.splitlines()]
    assert "shed: no `boot` and no `seq` (1 reading)" in lines
    assert "well: `seq` is a text that is no number (1 reading)" in lines
    assert "barn: `nan` at byte 32 (1 reading)" in lines
    assert (mended["note"], mended["finding"]) == (NO_TICK, False)


async def test_a_drift_has_the_digits_that_mean_something(tmp_path: Path) -> None:
    async with gateway(tmp_path) as door:
        probe(door.clocks, "attic", boottime_us())
        (run,) = door.clocks.runs()
        (clock,) = (await listed(tmp_path))["attic"]["clocks"]
    exact = run.clock.fit.drift_ppm
    assert exact is not None
    assert clock["drift_ppm"] == [round(ppm, 1) for ppm in clock["drift_ppm"]]
    assert exact[0] - 0.1 < clock["drift_ppm"][0] <= exact[0]
    assert exact[1] <= clock["drift_ppm"][1] < exact[1] + 0.1


async def test_a_sensor_that_only_said_hello_is_told_with_its_port(tmp_path: Path) -> None:
    port = {"device": "attic", "used_s": 0.5, "heard_s": 0.5, "trouble": None, "silent": False}
    scale = {"device": "scale", "used_s": None, "heard_s": None, "trouble": None, "acknowledges": False}
    units = {"units": {"meter": {"answers": False}}, "acknowledges": False}
    ports = {"/dev/ttyUSB0": port, "/dev/ttyUSB1": scale, "/dev/ttyUSB2": units}
    async with gateway(tmp_path, {"ports": ports}) as door:
        door.clocks.of("attic", "7-1")
        found = await listed(tmp_path)
    assert {name: (each["place"], each["note"]) for name, each in found.items()} == {
        "attic": ("/dev/ttyUSB0", NO_ANSWER),
        "meter": ("/dev/ttyUSB2", NOT_HEARD),
        "scale": ("/dev/ttyUSB1", NOT_HEARD),
    }


async def test_no_device_and_no_file(tmp_path: Path) -> None:
    missing = await devices(tmp_path)
    assert missing.exit_code == 1
    assert "there is no buffer at" in missing.output
    async with gateway(tmp_path):
        shown = await devices(tmp_path)
    assert (shown.exit_code, shown.stdout) == (0, "no device is known yet\n")


@pytest.mark.slow
async def test_thousands_of_devices_are_all_there(tmp_path: Path) -> None:
    names = [f"sensor-{number:05}" for number in range(5_000)]
    async with gateway(tmp_path) as door:
        now_us = boottime_us()
        await take(door, *(reading(name, 1, now_us, 5) for name in names))
        for name in names:
            door.clocks.of(name, "7-1").probed(now_us - 2_000, now_us, now_us // 1000, 0)
        shown = await devices(tmp_path, "--json")
        found = json.loads(shown.stdout)["devices"]
        table = await devices(tmp_path)
    assert [each["device"] for each in found] == names
    assert all(each["clocks"][0]["error_us"] for each in found)
    assert len(table.stdout.splitlines()) == len(names) + 1


async def test_a_request_that_makes_no_sense_is_refused(tmp_path: Path) -> None:
    async with gateway(tmp_path):
        socket = control.socket_path(tmp_path / "buffer.db")
        for arguments in ({"limit": 0}, {"limit": device_states.PAGE_MAX + 1}, {"after": 7}, {"whose": "attic"}):
            with pytest.raises(control.RequestRefusedError, match="cannot be taken"):
                await asyncio.to_thread(control.call, socket, "devices", **arguments)


@settings(max_examples=30)
@given(st.sets(st.text(max_size=4), max_size=12), st.sets(st.text(max_size=4), max_size=12), st.integers(1, 5))
def test_pages_follow_each_other_without_a_gap(heard: set[str], ticking: set[str], limit: int) -> None:
    by_readings, clocks = DevicesHeard(), DeviceClocks("boot")
    by_readings.record(of_device(name) for name in heard - {""})
    for name in ticking - {""}:
        clocks.of(name, "1")

    async def all_pages() -> list[str]:
        names: list[str] = []
        while True:
            asked = DevicesAsked(names[-1] if names else "", limit)
            page = await devices_page(asked, by_readings, clocks, 0)
            assert len(page.devices) <= limit
            names += [each.device for each in page.devices]
            if page.is_last:
                return names

    assert asyncio.run(all_pages()) == sorted((heard | ticking) - {""})


def of_device(name: str) -> Entry:
    return entry_of(Series("t", name, name, "s", "sluice.reading", "text/plain", "s"), b"")


async def test_a_mark_that_holds_no_clock_costs_other_devices_nothing(tmp_path: Path) -> None:
    async with gateway(tmp_path) as door:
        probe(door.clocks, "attic", boottime_us())
    async with opened(tmp_path / "buffer.db", boot_id()) as buffer:
        buffer.append((), None, [Mark("clock/device/shed/", b"\xff\x00")])
    assert list(await listed(tmp_path)) == ["attic"]
    async with gateway(tmp_path) as door:
        assert [run.device for run in door.clocks.runs()] == ["attic"]
