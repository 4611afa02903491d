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

from gateway import control, device_states
from gateway.buffer_rows import Entry, Series
from gateway.cli import main
from gateway.clock_kernel import boot_id, boottime_us
from gateway.device_clocks import DeviceClocks
from gateway.device_notes import NO_ANSWER, NO_CLOCK, NO_TICK, NOT_HEARD, RESTARTED
from gateway.device_states import DevicesAsked, devices_page
from gateway.devices_heard import DevicesHeard
from gateway.intake import FrontDoor
from gateway.reading import Mark, Reading
from gateway.routes import compile_routes
from gateway.settings import GatewaySettings, KafkaSettings, RouteSettings
from tests.buffers import entry, opened, store
from tests.gateways import answering

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
async def gateway(directory: Path, serial: dict[str, Any] | None = None) -> AsyncIterator[FrontDoor]:
    """The parts of a gateway that runs, as far as devices are known by them."""
    async with opened(directory / "buffer.db", boot_id()) as buffer:
        settings = msgspec.convert({"id": "gw1"}, GatewaySettings)
        clocks = DeviceClocks(boot_id())
        door = FrontDoor(buffer, compile_routes([ROUTE], None, frozenset()), settings, KAFKA, boottime_us, clocks)
        await door.recall_clocks()
        answers = control.handlers(door, buffer, {"serial": lambda: serial})
        try:
            async with answering(directory / "buffer.db", answers):
                yield door
        finally:
            door.keep_clocks()


async def devices(directory: Path, *options: str) -> Result:
    """In a thread, for this one answers as the daemon."""
    wide = CliRunner(env={"COLUMNS": "1000"})
    return await asyncio.to_thread(wide.invoke, main, ["devices", "--config", str(write(directory)), *options])


async def listed(directory: Path) -> dict[str, dict[str, Any]]:
    shown = await devices(directory, "--json")
    assert shown.exit_code in {0, 1}, shown.output
    return {device["device"]: device for device in json.loads(shown.stdout)["devices"]}


async def take(door: FrontDoor, *readings: Reading) -> None:
    outcome: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
    door.take(readings, outcome.set_result)
    assert await asyncio.wait_for(outcome, 10)


def reading(
    device: str, sequence: int, received_us: int, tick_ms: int | None = None, port: str | None = None
) -> Reading:
    topic = f"device/{device}/thermo"
    return Reading(topic, port or topic, b"21.5", received_us, "7-1", sequence, tick_ms)


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
    assert (found["before"]["note"], found["before"]["boot"]) == (NOT_HEARD, "1-00000001")
    assert 60 <= found["before"]["heard_s"] < 600
    assert shown.exit_code == 0
    assert shown.stdout.splitlines()[1].startswith("attic   /dev/ttyUSB0")


async def test_of_a_gateway_that_is_stopped_the_file_tells(tmp_path: Path) -> None:
    async with gateway(tmp_path) as door:
        probe(door.clocks, "attic", boottime_us())
        await take(door, reading("attic", 1, boottime_us(), 5, "/dev/ttyUSB0"))
    shown = await devices(tmp_path, "--json")
    told = json.loads(shown.stdout)
    (attic,) = told["devices"]
    assert (told["running"], told["unheard"]) == (False, None)
    assert (attic["place"], attic["is_serial"], attic["boot"]) == ("/dev/ttyUSB0", True, "7-1")
    assert attic["clocks"][0]["drift_ppm"][0] < 5_000 < attic["clocks"][0]["drift_ppm"][1]


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
        # A tick that stands still.
        for number in range(10):
            await take(door, reading("shed", number, now_us + number * 10 * SECOND_US, 5))
        shown = await devices(tmp_path)
    assert shown.exit_code == 1
    assert f"shed: {NO_CLOCK}" in shown.stdout
    assert "to be looked at: 1 of 1 device" in shown.stdout


async def test_a_drift_has_the_digits_that_mean_something(tmp_path: Path) -> None:
    async with gateway(tmp_path) as door:
        probe(door.clocks, "attic", boottime_us())
        (run,) = door.clocks.runs()
        (clock,) = (await listed(tmp_path))["attic"]["clocks"]
    exact = run.clock.drift_ppm
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
            with pytest.raises(control.RefusedError, match="cannot be taken"):
                await asyncio.to_thread(control.call, socket, "devices", **arguments)


@settings(max_examples=30)
@given(st.sets(st.text(max_size=4), max_size=12), st.sets(st.text(max_size=4), max_size=12), st.integers(1, 5))
def test_pages_follow_each_other_without_a_gap(heard: set[str], ticking: set[str], limit: int) -> None:
    by_readings, clocks = DevicesHeard(), DeviceClocks("boot")
    by_readings.note(of_device(name) for name in heard - {""})
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
    return Entry(Series("t", name, name, "s", "sluice.reading", "text/plain", "s"), b"", 1)


async def test_what_the_marks_hold_that_is_no_clock_costs_nobody_else_anything(tmp_path: Path) -> None:
    async with gateway(tmp_path) as door:
        probe(door.clocks, "attic", boottime_us())
    async with opened(tmp_path / "buffer.db", boot_id()) as buffer:
        buffer.append((), None, [Mark("clock/device/shed/", b"\xff\x00")])
    assert list(await listed(tmp_path)) == ["attic"]
    async with gateway(tmp_path) as door:
        assert [run.device for run in door.clocks.runs()] == ["attic"]
