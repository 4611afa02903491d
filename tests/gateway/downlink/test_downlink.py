"""Commands from their records to their ends: over a real buffer file, to devices that do as the test says."""

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from hypothesis import HealthCheck, given
from hypothesis import settings as examples
from hypothesis import strategies as st

from gateway.buffer.buffer import Buffer
from gateway.buffer.rows import START
from gateway.clock.gateway_clock import BootClock
from gateway.command import CommandReports, DeviceCommand
from gateway.config.config_file import route_table
from gateway.downlink import downlink as module
from gateway.downlink import ledger
from gateway.downlink.downlink import Downlink
from gateway.downlink.ledger import LEDGER_MARKS
from gateway.intake.front_door import FrontDoor
from gateway.reading import BufferFileError
from gateway.settings import CommandSettings, GatewaySettings, KafkaSettings, Settings
from tests.support.buffers import opened
from tests.support.commands import Sent, command_record
from tests.support.waiting import until

GATEWAY = GatewaySettings("gw1")
KAFKA = KafkaSettings(("127.0.0.1:1",))
NOW = datetime(2026, 11, 30, 12, tzinfo=UTC)
NOW_US = int(NOW.timestamp()) * 1_000_000
EVERY = CommandSettings(("*",))


class Devices:
    """Devices that get each command at once, or are away. They acknowledge when the test says so."""

    def __init__(self, *present: str, away: tuple[str, ...] = ()) -> None:
        self.reports: CommandReports | None = None
        self.present = set(present)
        self.away = set(away)
        self.got: list[str] = []
        """Ids of commands in the order in which the devices got them."""
        self.until_us: set[int] = set()
        self._has: set[str] = set()
        self.asked: list[str] = []
        """Each device that the gateway asked about, to pass a command on."""

    def knows(self, device: str) -> bool:
        self.asked.append(device)
        return device in self.present | self.away

    def offer(self, command: DeviceCommand, until_us: int) -> None:
        if command.device in self.present and command.id not in self._has:
            self._has.add(command.id)
            self.got.append(command.id)
            self.until_us.add(until_us)

    def withdraw(self, command_id: str) -> bool:
        was_there = command_id in self._has
        self._has.discard(command_id)
        return was_there

    def come(self, device: str) -> None:
        self.away.discard(device)
        self.present.add(device)
        assert self.reports is not None
        self.reports.ready(device)

    def acknowledge(self, command_id: str) -> None:
        assert self.reports is not None
        self.reports.delivered(command_id, "mqtt")


class World:
    """A gateway with its file, which outlives it."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / "buffer.db"
        self.now_us = 1
        """CLOCK_BOOTTIME."""
        self.clock = BootClock.constant(NOW_US - 1, 1_000)

    @contextlib.asynccontextmanager
    async def gateway(
        self, devices: Devices, settings: CommandSettings = EVERY
    ) -> AsyncIterator[tuple[Downlink, Buffer]]:
        async with opened(self.path) as buffer:
            routes = route_table(Settings(GATEWAY, KAFKA))
            door = FrontDoor(buffer, routes, GATEWAY, KAFKA, lambda: self.now_us)
            downlink = Downlink(settings, GATEWAY, door, buffer, lambda: self.clock, [devices])
            running = asyncio.create_task(downlink.run())
            try:
                yield downlink, buffer
            finally:
                running.cancel()
                with contextlib.suppress(asyncio.CancelledError):
                    await running


@pytest.fixture
def world(tmp_path: Path) -> World:
    return World(tmp_path)


@pytest.fixture(autouse=True)
def quick_looks() -> Iterator[None]:
    with mock.patch.object(module, "LOOK_S", 0.02):
        yield


async def ends(buffer: Buffer) -> list[dict[str, Any]]:
    """The events in the file, oldest first."""
    _, rows = await buffer.read(START, 1_000)
    return [json.loads(row.datum.payload) for row in rows]


async def until_ended(buffer: Buffer, count: int = 1) -> list[dict[str, Any]]:
    """The events, once there are so many; fails if there are more."""
    found: list[dict[str, Any]] = []
    while len(found) < count:
        await asyncio.sleep(0.01)
        found = await ends(buffer)
    assert len(found) == count
    return found


async def open_marks(buffer: Buffer) -> set[str]:
    marks = await buffer.run(lambda file: file.marks(LEDGER_MARKS))
    return {key for key in marks if "/open/" in key}


def of_noon(*arguments: Any, **fields: Any) -> Sent:
    return command_record(*arguments, **{"expires": NOW + timedelta(hours=1), **fields})


async def test_a_command_is_passed_on_and_ends_with_its_acknowledgement(world: World) -> None:
    devices = Devices("42")
    async with world.gateway(devices) as (downlink, buffer):
        await downlink.take(0, "k", [of_noon("c1")])
        await until(lambda: devices.got == ["c1"])
        assert devices.until_us == {world.now_us + 3_600_000_000 - 1_000}, "an hour, less what the clock may be off"
        assert await ends(buffer) == []
        devices.acknowledge("c1")
        devices.acknowledge("c1")
        (end,) = await until_ended(buffer)
        assert end == {"device": "42", "id": "c1", "outcome": "delivered", "reason": None, "by": "mqtt"}
        assert not await open_marks(buffer)
        devices.acknowledge("c1")
        await asyncio.sleep(0.1)
        assert len(await ends(buffer)) == 1
        assert downlink.state() == {
            "topic": "gateway-commands.gw1",
            "waiting": 0,
            "counts": {"read": 1, "delivered": 1},
        }


async def test_a_command_waits_for_a_device_that_is_away_through_a_restart(world: World) -> None:
    async with world.gateway(Devices(away=("42",))) as (downlink, _):
        await downlink.take(0, "k", [of_noon("c1")])
    devices = Devices(away=("42",))
    async with world.gateway(devices) as (downlink, buffer):
        assert await downlink.offset(0, "k") == 1
        assert await downlink.offset(0, "another cluster") is None
        assert await downlink.offset(1, "k") is None
        devices.come("42")
        await until(lambda: devices.got == ["c1"])
        devices.acknowledge("c1")
        await until_ended(buffer)


async def test_whether_a_command_of_an_earlier_start_was_sent_is_not_known(world: World) -> None:
    async with world.gateway(Devices("42", away=("43",))) as (downlink, _):
        await downlink.take(0, "k", [of_noon("c1"), of_noon("c2", "43", offset=1)])
    devices = Devices("43", away=("42", "44"))
    async with world.gateway(devices) as (downlink, buffer):
        await downlink.take(0, "k", [of_noon("c3", "44", offset=2)])
        await until(lambda: devices.got == ["c2"])
        world.now_us += 3_600_000_000 + 2_000
        found = {end["id"]: end["sent"] for end in await until_ended(buffer, 3)}
        assert found == {"c1": None, "c2": True, "c3": False}


async def test_a_change_of_one_device_costs_no_look_at_the_others(world: World) -> None:
    others = tuple(map(str, range(100, 200)))
    devices = Devices("2", "3", away=("1", *others))
    records = [of_noon(f"c{name}", name, offset=offset) for offset, name in enumerate(others)]
    with mock.patch.object(module, "LOOK_S", 3_600.0):
        async with world.gateway(devices) as (downlink, buffer):
            await downlink.take(0, "k", [*records, of_noon("c1", "1", offset=100)])
            await until(lambda: "1" in devices.asked)
            devices.asked.clear()
            devices.come("1")
            await until(lambda: devices.got == ["c1"])
            await downlink.take(0, "k", [of_noon("c2", "2", offset=101)])
            await until(lambda: devices.got == ["c1", "c2"])
            devices.come("3")
            devices.acknowledge("c1")
            await until_ended(buffer)
            assert devices.asked == ["1", "2"], "one has no command, and another one has ended"


async def test_a_command_of_a_fetch_is_weighed_a_few_times_however_many_there_are(world: World) -> None:
    count = 300
    weigh = mock.Mock(side_effect=ledger._weight)
    async with world.gateway(Devices("42"), CommandSettings(("*",), per_device_max=100)) as (downlink, buffer):
        with mock.patch.object(ledger, "_weight", weigh):
            await downlink.take(0, "k", [of_noon(f"c{number}", offset=number) for number in range(count)])
        assert len(downlink._ledger) == 100
        await until_ended(buffer, count - 100)
    assert weigh.call_count <= 3 * count


async def test_a_crash_between_acknowledgement_and_end_delivers_again_and_ends_once(world: World) -> None:
    devices = Devices("42")
    async with world.gateway(devices) as (downlink, buffer):
        await downlink.take(0, "k", [of_noon("c1")])
        await until(lambda: devices.got == ["c1"])
        with mock.patch.object(buffer, "store_own", side_effect=BufferFileError("killed before the commit")):
            devices.acknowledge("c1")
            await asyncio.sleep(0.1)
    again = Devices("42")
    async with world.gateway(again) as (_, buffer):
        await until(lambda: again.got == ["c1"])
        again.acknowledge("c1")
        (end,) = await until_ended(buffer)
        assert end["outcome"] == "delivered"


async def test_a_command_expires_and_is_passed_on_no_more(world: World) -> None:
    devices = Devices("42", away=("43",))
    async with world.gateway(devices) as (downlink, buffer):
        await downlink.take(0, "k", [of_noon("c1"), of_noon("c2", "43", offset=1)])
        await until(lambda: devices.got == ["c1"])
        world.now_us += 3_600_000_000 + 2_000
        devices.come("43")
        found = {end["id"]: (end["outcome"], end["sent"]) for end in await until_ended(buffer, 2)}
        assert found == {"c1": ("expired", True), "c2": ("expired", False)}
        assert devices.got == ["c1"]


async def test_a_command_that_came_too_late_is_never_passed_on(world: World) -> None:
    devices = Devices("42")
    async with world.gateway(devices) as (downlink, buffer):
        await downlink.take(0, "k", [of_noon("c1", expires=NOW - timedelta(seconds=1))])
        (end,) = await until_ended(buffer)
        assert end["outcome"] == "expired"
        assert not await open_marks(buffer)
    assert devices.got == []


@pytest.mark.parametrize("error_us", [None, 7_200_000_000])
async def test_while_the_time_is_not_known_nothing_is_passed_on_and_nothing_expires(
    error_us: int | None, world: World
) -> None:
    """The second clock is known, but two hours are as likely as none."""
    known, world.clock = world.clock, BootClock.constant(NOW_US, error_us)
    devices = Devices("42")
    async with world.gateway(devices) as (downlink, buffer):
        await downlink.take(0, "k", [of_noon("c1")])
        await asyncio.sleep(0.1)
        assert devices.got == []
        assert await ends(buffer) == []
        world.clock = known
        await until(lambda: devices.got == ["c1"])


async def test_an_unknown_device_is_called_so_after_a_while(world: World) -> None:
    devices = Devices()
    async with world.gateway(devices) as (downlink, buffer):
        await downlink.take(0, "k", [of_noon("c1")])
        world.now_us += module.UNKNOWN_AFTER_US - 1
        await asyncio.sleep(0.1)
        assert await ends(buffer) == []
        world.now_us += 1
        (end,) = await until_ended(buffer)
        assert end["outcome"] == "unknown-device"


@pytest.mark.parametrize(
    ("settings", "records", "reasons"),
    [
        (CommandSettings(("heater-*", "7")), [of_noon("a", "42"), of_noon("b", "77")], ["not-listed", "not-listed"]),
        (CommandSettings(("*",), per_device_max=1), [of_noon("a"), of_noon("b")], ["too-many-commands"]),
        (
            CommandSettings(("*",), bytes_max=20_000),
            [of_noon("a"), of_noon("b", "43", bytes(16_000)), of_noon("c", "44", bytes(4_000))],
            ["too-many-commands"],
        ),
        (EVERY, [of_noon("a", namespace="other")], ["other-namespace"]),
    ],
)
async def test_what_is_refused_says_why(
    settings: CommandSettings, records: list[Sent], reasons: list[str], world: World
) -> None:
    devices = Devices("42", "43", "44", "77")
    async with world.gateway(devices, settings) as (downlink, buffer):
        await downlink.take(0, "k", records)
        found = await until_ended(buffer, len(reasons))
        assert [(end["outcome"], end["reason"]) for end in found] == [("refused", reason) for reason in reasons]
        await until(lambda: len(devices.got) == len(records) - len(reasons))


async def test_a_listed_name_may_be_a_pattern(world: World) -> None:
    devices = Devices("heater-1", "7")
    async with world.gateway(devices, CommandSettings(("heater-*", "7"))) as (downlink, _):
        await downlink.take(0, "k", [of_noon("a", "heater-1"), of_noon("b", "7")])
        await until(lambda: sorted(devices.got) == ["a", "b"])


async def test_a_command_that_waits_and_comes_again_is_one_command(world: World) -> None:
    devices = Devices("42")
    async with world.gateway(devices) as (downlink, buffer):
        await downlink.take(0, "k", [of_noon("c1"), of_noon("c1", offset=1)])
        await downlink.take(0, "k", [of_noon("c1", offset=2)])
        assert downlink.counts["repeated"] == 2
        devices.acknowledge("c1")
        await until_ended(buffer)
    assert devices.got == ["c1"]


async def test_a_session_that_ends_during_the_commit_leaves_no_doubt(world: World) -> None:
    """The next session must not take the records again, whose commit goes on."""
    devices = Devices("42")
    async with world.gateway(devices) as (downlink, _):
        taking = asyncio.create_task(downlink.take(0, "k", [of_noon("c1")]))
        await asyncio.sleep(0)
        taking.cancel()
        assert await downlink.offset(0, "k") == 1
        await until(lambda: devices.got == ["c1"])


async def test_a_failing_disk_takes_nothing_in(world: World) -> None:
    devices = Devices("42")
    async with world.gateway(devices) as (downlink, buffer):
        with (
            mock.patch.object(buffer, "store_own", side_effect=BufferFileError("it fails")),
            pytest.raises(BufferFileError),
        ):
            await downlink.take(0, "k", [of_noon("c1")])
        assert await downlink.offset(0, "k") is None
    assert devices.got == []


STEPS = st.sampled_from(["stop", "acknowledge", "go", "come"])


@examples(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(STEPS, max_size=12))
async def test_whatever_happens_each_command_ends_once(
    tmp_path_factory: pytest.TempPathFactory, steps: list[str]
) -> None:
    """A law: however often the gateway stops or the device goes, there is one end for each command.

    What is not stored when it stops is gone, as after a kill.
    """
    world = World(tmp_path_factory.mktemp("law"))
    sent = 3
    records = [of_noon(f"c{number}", offset=number) for number in range(sent)]
    devices = Devices("42")
    steps = [*steps, "come"]
    while steps:
        async with world.gateway(devices) as (downlink, buffer):
            offset = await downlink.offset(0, "k")
            if (offset or 0) < sent:
                await downlink.take(0, "k", records[offset or 0 :])
            while steps and (step := steps.pop(0)) != "stop":
                match step:
                    case "acknowledge" if devices.got:
                        devices.acknowledge(devices.got[-1])
                    case "go":
                        devices.present.clear()
                        devices.away.add("42")
                    case "come":
                        devices.come("42")
                await asyncio.sleep(0.005)
            if not steps:
                world.now_us += 7_200_000_000
                found = await until_ended(buffer, sent)
                assert {end["id"] for end in found} == {"c0", "c1", "c2"}
                assert not await open_marks(buffer)
        devices = Devices(*devices.present, away=tuple(devices.away))
