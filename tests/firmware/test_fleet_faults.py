"""Faults of a fleet: the seeded schedule, a sensor under each fault, real gateways under all of them."""

import asyncio
import json
import re
import signal
import socket
import sqlite3
import subprocess
import sys
from collections import Counter, defaultdict
from contextlib import closing
from dataclasses import dataclass, field, fields, replace
from itertools import islice, pairwise
from pathlib import Path
from typing import Any, Self

import pytest
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st

from gateway.buffer.duplicate_window import DuplicateWindow, Verdict
from gateway.buffer.losses import LOSS_TYPE
from gateway.mqtt.protocol import PUBCOMP, PUBREC, Connect, Publish, PubRel, ServerProtocol, acknowledgements
from gateway.reading import SENSOR_DROPPED
from gateway.record_contract import READING_TYPE
from sluice_sim.cli import main
from sluice_sim.fleet import FleetError, FleetOptions, Progress, run_fleet
from sluice_sim.fleet_cli import BAR_CHARACTERS, _shown_on_terminal, bar
from sluice_sim.fleet_faults import (
    NONE,
    REORDER_BLOCK,
    TICK_MODULUS,
    USUAL,
    Fault,
    FaultError,
    FaultKind,
    FaultRates,
    Traits,
    boot_of,
    faults_of,
    tick_ms,
    traits_of,
    with_rates,
)
from sluice_sim.fleet_ledger import value_of
from sluice_sim.mqtt_sensor import RING_SAMPLES, WINDOW, MqttSensor
from tests.support.gateways import daemon, free_port, write_config
from tests.support.mqtt_peers import RecordingIntake, listening
from tests.support.waiting import until

ACCEPTED = b"\x20\x02\x00\x00"
NAMES = [f"m{number:03d}" for number in range(1, 401)]
Sample = tuple[str, str, int]
"""Device, boot, sequence."""

# --- the schedule -----------------------------------------------------------------------------------------


def first_faults(seed: int, device: str, rates: FaultRates = USUAL, count: int = 20) -> list[Fault]:
    return list(islice(faults_of(seed, device, rates, can_roam=True), count))


def test_a_seed_repeats_every_decision_and_another_one_makes_others() -> None:
    def decisions(seed: int) -> list[object]:
        traits = [replace(traits_of(seed, name, USUAL), draw=Traits().draw) for name in NAMES[:20]]
        repeats = [traits_of(seed, "m001", USUAL).draw("repeat", "1-0", sequence) for sequence in range(20)]
        boots = [boot_of(seed, "m001", number) for number in (1, 2, 3)]
        return [traits, repeats, boots, first_faults(seed, "m001")]

    assert decisions(7) == decisions(7)
    assert all(mine != others for mine, others in zip(decisions(7), decisions(8), strict=True))


def test_a_fault_does_not_depend_on_how_many_sensors_there_are_or_on_who_was_asked_before() -> None:
    alone = first_faults(7, "m002")
    first_faults(7, "m001")
    assert first_faults(7, "m002") == alone


def test_shares_of_sensors_are_as_given_and_without_faults_nothing_is_wrong() -> None:
    traits = [traits_of(3, name, replace(USUAL, qos0=0.25, qos2=0.5)) for name in NAMES]
    assert Counter(each.qos for each in traits)[0] == pytest.approx(100, abs=30)
    assert Counter(each.qos for each in traits)[2] == pytest.approx(200, abs=30)
    assert sum(each.clean_session for each in traits) == pytest.approx(120, abs=30)
    assert sum(each.keeps_ring for each in traits) == pytest.approx(120, abs=30)
    assert sum(each.reorders for each in traits) == pytest.approx(80, abs=30)
    assert min(each.drift_ppm for each in traits) == pytest.approx(-100, abs=5)
    assert max(each.drift_ppm for each in traits) == pytest.approx(100, abs=5)
    sound = traits_of(3, "m001", NONE)
    assert replace(sound, draw=Traits().draw) == Traits()
    assert first_faults(3, "m001", NONE) == []


def test_faults_come_as_often_as_given_one_after_another_and_last_as_long() -> None:
    rates = replace(NONE, reboots=2.0, drop_outs=1.0, drop_out_minutes=30.0)
    faults = first_faults(1, "m001", rates, 3000)
    assert all(before.ends_s < after.begins_s for before, after in pairwise(faults))
    kinds = Counter(fault.kind for fault in faults)
    assert kinds[FaultKind.REBOOT] == pytest.approx(2000, abs=150)
    assert kinds[FaultKind.DROP_OUT] == pytest.approx(1000, abs=150)
    lasted_s = sum(fault.ends_s - fault.begins_s for fault in faults)
    assert (faults[-1].ends_s - lasted_s) / 3600 == pytest.approx(1000, rel=0.1)
    drop_outs_s = [fault.ends_s - fault.begins_s for fault in faults if fault.kind is FaultKind.DROP_OUT]
    assert 900 <= min(drop_outs_s) <= max(drop_outs_s) <= 2700


def test_without_another_gateway_nobody_roams() -> None:
    faults = islice(faults_of(1, "m001", USUAL, can_roam=False), 500)
    assert {fault.kind for fault in faults} == set(FaultKind) - {FaultKind.ROAM}
    assert list(faults_of(1, "m001", replace(NONE, roams=9.0), can_roam=False)) == []


@pytest.mark.parametrize(
    ("given", "why"),
    [
        ({"explosions": 1.0}, "there is no fault 'explosions'; there are drift-ppm"),
        ({"duplicates": 1.5}, r"duplicates is 1.5; .*'share', 0 to 1"),
        ({"reboots": -1.0}, "reboots is -1"),
        ({"qos0": 0.6, "qos2": 0.6}, "together at most 1"),
        ({"reboots": float("nan")}, "reboots is nan"),
    ],
)
def test_a_rate_that_cannot_be_is_refused_in_words(given: dict[str, float], why: str) -> None:
    with pytest.raises(FaultError, match=why):
        with_rates(NONE, given)


def test_drop_outs_without_a_length_have_the_usual_one() -> None:
    assert with_rates(NONE, {"drop-outs": 1.0}).drop_out_minutes == USUAL.drop_out_minutes
    assert with_rates(NONE, {"drop-outs": 1.0, "drop-out-minutes": 5.0}).drop_out_minutes == 5.0


def test_a_clock_that_drifts_is_off_by_its_parts_per_million_and_wraps_at_32_bits() -> None:
    assert tick_ms(1000.0, 0.0) == 1_000_000
    assert tick_ms(1000.0, 100.0) == 1_000_100
    assert tick_ms(1000.0, -100.0) == 999_900
    assert tick_ms(TICK_MODULUS / 1000 + 1.0, 0.0) == 1000


def test_values_are_temperatures_that_everybody_can_compute() -> None:
    """The numbers are those of a published ledger: they must not change."""
    assert [value_of(7, "m001", "1-0a", sequence) for sequence in (0, 1, 1000)] == [19.0, 18.93, 19.16]
    values = [value_of(7, "m001", "1-0a", sequence) for sequence in range(2000)]
    assert all(10 < value < 31 for value in values)
    assert all(abs(before - after) < 0.5 for before, after in pairwise(values))
    assert max(values) - min(values) > 2
    assert values[:50] != [value_of(7, "m001", "2-0b", sequence) for sequence in range(50)]
    assert values[:50] != [value_of(8, "m001", "1-0a", sequence) for sequence in range(50)]


# --- one sensor under each fault, with the gateway's parser as its peer -------------------------------------


@dataclass
class Gateway:
    """Takes a sensor's packets by the gateway's own parser; answers when it is told to."""

    sensor: MqttSensor
    publishes: list[Publish] = field(default_factory=list)
    released: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.protocol = ServerProtocol(65_536)
        (connect,) = self.protocol.receive(self.sensor.connect())
        assert isinstance(connect, Connect)
        self.clean_session = connect.clean_session
        self.answer(ACCEPTED)

    def take(self, data: bytes) -> None:
        for event in self.protocol.receive(data):
            if isinstance(event, PubRel):
                self.released.append(event.packet_id)
            else:
                assert isinstance(event, Publish)
                self.publishes.append(event)

    def answer(self, data: bytes) -> None:
        self.take(self.sensor.receive(data))

    def sample(self, count: int = 1) -> None:
        for _ in range(count):
            self.take(self.sensor.sample(20.0))

    def acknowledge_all(self) -> None:
        """With QoS 1 and 2, until nothing is left to answer."""
        while self.publishes or self.released:
            publishes, self.publishes = self.publishes, []
            released, self.released = self.released, []
            kind = PUBREC if self.sensor.traits.qos == 2 else 0
            self.answer(acknowledgements([kind | publish.packet_id for publish in publishes]))
            self.answer(acknowledgements([PUBCOMP | packet_id for packet_id in released]))

    @property
    def sequences(self) -> list[int]:
        return [json.loads(publish.payload)["seq"] for publish in self.publishes]

    @property
    def packet_ids(self) -> list[int]:
        return [publish.packet_id for publish in self.publishes]

    @property
    def dups(self) -> list[bool]:
        return [publish.dup for publish in self.publishes]


def sensor_with(**traits: object) -> MqttSensor:
    return MqttSensor("m001", "1-0", traits=Traits(**traits))  # type: ignore[arg-type]


def test_qos_2_is_received_released_and_complete_over_a_reconnection() -> None:
    """Section 4.3.3; sent again by section 4.4."""
    sensor = sensor_with(qos=2)
    gateway = Gateway(sensor)
    gateway.sample(3)
    assert [publish.qos for publish in gateway.publishes] == [2, 2, 2]
    gateway.answer(acknowledgements([PUBREC | 1, PUBREC | 2]))
    assert gateway.released == [1, 2]
    assert sensor.boot.acknowledged.pairs() == [[0, 1]]  # PUBREC says that it is stored
    gateway.answer(acknowledgements([PUBCOMP | 1]))
    sensor.disconnected()

    again = Gateway(sensor)
    assert again.released == [2]
    assert (again.packet_ids, again.dups, again.sequences) == ([3], [True], [2])
    again.acknowledge_all()
    assert (sensor.waiting, sensor.unfinished) == (0, 0)
    assert sensor.boot.acknowledged.pairs() == [[0, 2]]


def test_a_pubrec_that_was_answered_before_is_answered_again() -> None:
    gateway = Gateway(sensor_with(qos=2))
    gateway.answer(acknowledgements([PUBREC | 77]))
    assert gateway.released == [77]
    gateway.answer(acknowledgements([PUBCOMP | 77]))
    gateway.sample()
    gateway.answer(acknowledgements([PUBCOMP | 1]))  # no PUBREC came: this says nothing
    assert gateway.sensor.waiting == 1
    assert gateway.sensor.boot.acknowledged.count == 0


def test_qos_0_is_sent_once_not_held_and_said_to_be_no_more_than_sent() -> None:
    sensor = sensor_with(qos=0)
    sensor.sample(20.0)
    gateway = Gateway(sensor)
    gateway.sample(WINDOW + 1)
    assert [publish.qos for publish in gateway.publishes] == [0] * (WINDOW + 2)
    assert sensor.waiting == 0
    assert sensor.boot.handed_over.pairs() == [[0, WINDOW + 1]]
    assert sensor.boot.acknowledged.count == 0


def test_qos_0_waits_in_the_ring_while_nothing_goes_out() -> None:
    sensor = sensor_with(qos=0)
    gateway = Gateway(sensor)
    sensor.can_write = False
    gateway.sample(RING_SAMPLES + 1)
    assert gateway.publishes == []
    sensor.can_write = True
    gateway.take(sensor.go_on())
    assert gateway.sequences == list(range(1, RING_SAMPLES + 1))
    assert json.loads(gateway.publishes[0].payload)["lost"] == [0, 0]

    sensor.can_write = False
    gateway.sample()
    sensor.disconnected()
    assert Gateway(sensor).sequences == [RING_SAMPLES + 1]  # another connection is not the clogged one


def test_the_next_sample_reports_drops_and_the_next_report_waits_for_its_puback() -> None:
    sensor = sensor_with()
    gateway = Gateway(sensor)
    gateway.sample(WINDOW)
    sensor.disconnected()
    for _ in range(RING_SAMPLES + 10):
        sensor.sample(20.0)

    gateway = Gateway(sensor)  # the window again
    gateway.answer(acknowledgements([gateway.publishes[0].packet_id]))
    carrier = gateway.publishes[-1]
    assert carrier.payload.endswith(b',"lost":[4,13]}')
    assert json.loads(carrier.payload)["seq"] == 14
    assert all(b"lost" not in publish.payload for publish in gateway.publishes[:-1])

    gateway.sample()  # into the ring's last free place
    gateway.sample(2)  # two more are dropped
    sensor.disconnected()
    again = Gateway(sensor)
    assert again.publishes[-1].payload == carrier.payload  # it stays a part of that sample
    first, second, third = again.packet_ids[:3]
    again.answer(acknowledgements([first, second, third]))
    assert sum(b"lost" in publish.payload for publish in again.publishes) == 1  # one report at a time
    again.answer(acknowledgements([carrier.packet_id]))
    assert again.publishes[-1].payload.endswith(b',"lost":[15,16]}')
    assert sensor.boot.reported.pairs() == [[4, 13]]
    again.acknowledge_all()
    assert sensor.boot.reported.pairs() == sensor.boot.dropped.pairs() == [[4, 13], [15, 16]]


def test_a_reboot_costs_what_was_held_and_begins_another_boot() -> None:
    sensor = sensor_with()
    gateway = Gateway(sensor)
    gateway.sample(WINDOW + 2)
    gateway.answer(acknowledgements([1]))
    sensor.reboot("2-1")
    assert sensor.waiting == 0
    again = Gateway(sensor)
    again.sample()
    assert json.loads(again.publishes[0].payload)["boot"] == "2-1"
    assert (again.packet_ids, again.dups, again.sequences) == ([1], [False], [0])
    first, second = sensor.boots
    assert (first.acknowledged.pairs(), first.vanished.pairs()) == ([[0, 0]], [[1, WINDOW + 1]])
    assert (second.taken, second.vanished.count) == (1, 0)


def test_a_ring_that_outlives_the_reboot_is_sent_under_the_old_boot_and_new_packet_identifiers() -> None:
    sensor = sensor_with(keeps_ring=True)
    gateway = Gateway(sensor)
    gateway.sample(WINDOW + 2)
    sensor.reboot("2-1")
    again = Gateway(sensor)
    again.sample()
    assert (again.sequences, again.dups) == ([0, 1, 2, 3], [False] * 4)
    again.acknowledge_all()
    first, second = sensor.boots
    assert (first.acknowledged.pairs(), first.vanished.count) == ([[0, WINDOW + 1]], 0)
    assert first.sent == WINDOW + 2
    assert second.acknowledged.pairs() == [[0, 0]]


def test_with_clean_session_what_is_held_is_published_anew() -> None:
    sensor = sensor_with(clean_session=True)
    gateway = Gateway(sensor)
    gateway.sample(2)
    assert gateway.clean_session
    sensor.disconnected()
    again = Gateway(sensor)
    assert (again.sequences, again.dups) == ([0, 1], [False, False])
    assert not set(again.packet_ids) & set(gateway.packet_ids)


def test_with_clean_session_qos_2_does_not_publish_anew_what_was_received() -> None:
    sensor = sensor_with(qos=2, clean_session=True)
    gateway = Gateway(sensor)
    gateway.sample(2)
    gateway.answer(acknowledgements([PUBREC | 1]))
    sensor.disconnected()
    again = Gateway(sensor)
    assert (again.sequences, again.released) == ([1], [])
    again.acknowledge_all()
    assert sensor.boot.acknowledged.pairs() == [[0, 1]]


def test_a_sensor_that_roams_sends_again_what_the_first_gateway_did_not_acknowledge() -> None:
    sensor = sensor_with(qos=2)
    home = Gateway(sensor)
    home.sample(3)
    home.answer(acknowledgements([PUBREC | 1]))
    sensor.roam()
    away = Gateway(sensor)
    assert away.released == []  # that exchange was with the other gateway
    assert (away.sequences, away.dups) == ([1, 2], [True, True])
    away.acknowledge_all()
    assert sensor.boot.acknowledged.pairs() == [[0, 2]]


def test_samples_that_are_held_are_sent_in_another_order_within_their_block_and_each_once() -> None:
    sensor = MqttSensor("m001", "1-0", traits=replace(Traits(reorders=True), draw=traits_of(1, "m001", USUAL).draw))
    for _ in range(RING_SAMPLES):
        sensor.sample(20.0)
    gateway = Gateway(sensor)
    order: list[int] = []
    while gateway.publishes:
        order += gateway.sequences
        packet_ids = gateway.packet_ids
        gateway.publishes.clear()
        gateway.answer(acknowledgements(packet_ids))
    assert sorted(order) == list(range(RING_SAMPLES)) != order
    blocks = [order[at : at + REORDER_BLOCK] for at in range(0, RING_SAMPLES, REORDER_BLOCK)]
    assert [sorted(block) for block in blocks] == [
        list(range(at, at + REORDER_BLOCK)) for at in range(0, RING_SAMPLES, REORDER_BLOCK)
    ]


@pytest.mark.parametrize("qos", [0, 1, 2])
def test_a_duplicate_is_the_same_sample_under_another_packet_identifier_and_counts_once(qos: int) -> None:
    sensor = sensor_with(qos=qos, duplicates=1.0)
    gateway = Gateway(sensor)
    payloads: list[bytes] = []
    packet_ids: list[int] = []
    for _ in range(100):
        gateway.sample()
        while gateway.publishes or gateway.released:
            payloads += [publish.payload for publish in gateway.publishes]
            packet_ids += gateway.packet_ids
            assert not any(gateway.dups)
            if not qos:
                gateway.publishes.clear()
                continue
            publishes, gateway.publishes = gateway.publishes, []
            released, gateway.released = gateway.released, []
            kind = PUBREC if qos == 2 else 0
            gateway.answer(acknowledgements([kind | publish.packet_id for publish in publishes]))
            gateway.answer(acknowledgements([PUBCOMP | packet_id for packet_id in released]))
    assert sorted(Counter(payloads).values()) == [2] * 100
    assert sensor.duplicates == 100
    if qos:
        assert len(set(packet_ids)) == 200
        assert sensor.boot.acknowledged.pairs() == [[0, 99]]


def test_a_duplicate_on_its_way_is_forgotten_with_its_packet_identifier() -> None:
    sensor = sensor_with(keeps_ring=True, duplicates=1.0, draw=lambda *_: 0.9)
    assert Gateway(sensor).sensor.sample(20.0).count(b'"seq":0') == 2  # the second at once
    sensor.reboot("2-1")
    again = Gateway(sensor)
    assert again.sequences == [0, 0]
    again.acknowledge_all()
    assert sensor.waiting == sensor.unfinished == 0


class StoringGateway(Gateway):
    """Stores samples by boot and sequence, as the intake does, with their `lost`."""

    def __init__(self, sensor: MqttSensor, windows: dict[str, DuplicateWindow], lost: dict[str, list[int]]) -> None:
        self.windows = windows
        self.lost = lost
        super().__init__(sensor)

    def take(self, data: bytes) -> None:
        before = len(self.publishes)
        super().take(data)
        for publish in self.publishes[before:]:
            payload = json.loads(publish.payload)
            window = self.windows.setdefault(payload["boot"], DuplicateWindow())
            verdict = window.admit(payload["seq"], publish.payload)
            assert verdict in {Verdict.NEW, Verdict.DUPLICATE}
            if verdict is Verdict.NEW and "lost" in payload:
                first, last = payload["lost"]
                self.lost.setdefault(payload["boot"], []).extend(range(first, last + 1))


def spread(ranges: list[list[int]]) -> list[int]:
    return [number for first, last in ranges for number in range(first, last + 1)]


def interrupt(sensor: MqttSensor, how: str) -> None:
    if how == "reboot":
        sensor.reboot(f"{len(sensor.boots) + 1}-0")
        return
    sensor.disconnected()
    for _ in range(RING_SAMPLES // 2 + 8 if how == "outage" else 0):
        sensor.sample(20.0)


@given(
    st.builds(
        lambda qos, clean, reorders, keeps, duplicates, seed: replace(
            traits_of(seed, "m001", NONE),
            qos=qos,
            clean_session=clean,
            reorders=reorders,
            keeps_ring=keeps,
            duplicates=duplicates,
        ),
        st.sampled_from([0, 1, 2]),
        st.booleans(),
        st.booleans(),
        st.booleans(),
        st.sampled_from([0.0, 0.5]),
        st.integers(0, 9),
    ),
    st.lists(st.sampled_from(["sample", "outage", "cut", "reboot", "answer", "answer", "lose answers"]), max_size=60),
)
def test_every_sample_is_in_one_place_and_what_is_reported_lost_is_lost(traits: Traits, steps: list[str]) -> None:
    sensor = MqttSensor("m001", "1-0", traits=traits)
    windows: dict[str, DuplicateWindow] = {}
    lost: dict[str, list[int]] = {}
    gateway = StoringGateway(sensor, windows, lost)
    for step in [*steps, "cut", "answer", "sample", "answer"]:
        if step == "sample":
            gateway.sample()
        elif step == "lose answers":
            gateway.publishes.clear()
        elif step == "answer":
            if traits.qos:
                gateway.acknowledge_all()
        else:
            interrupt(sensor, step)
            gateway = StoringGateway(sensor, windows, lost)
    taken = sum(boot.taken for boot in sensor.boots)
    places = 0
    for boot in sensor.boots:
        of_boot = [
            number
            for ranges in (boot.acknowledged, boot.handed_over, boot.dropped, boot.vanished)
            for number in spread(ranges.pairs())
        ]
        assert len(of_boot) == len(set(of_boot))
        places += len(of_boot)
        told = lost.get(boot.boot, [])
        assert len(told) == len(set(told))
        assert set(spread(boot.reported.pairs())) <= set(told) <= set(spread(boot.dropped.pairs()))
        if not boot.vanished and boot is sensor.boot:
            assert told == spread(boot.dropped.pairs())
    assert places + sensor.waiting == taken
    assert sensor.waiting == sensor.unfinished == 0


# --- links under faults, with a listener in memory ----------------------------------------------------------


def ignore(progress: Progress) -> None:
    """Show nothing."""


async def test_a_sensor_that_vanishes_leaves_a_connection_behind_that_its_next_one_takes_over() -> None:
    intake = RecordingIntake()
    async with listening(intake) as listener:
        options = FleetOptions(
            "127.0.0.1", listener.port, 5, 20, seed=1, rates=replace(NONE, half_open=60.0), time_scale=600.0
        )
        stopping = asyncio.Event()
        running = asyncio.create_task(run_fleet(options, stopping, ignore))
        await until(lambda: listener.counts["taken-over"] >= 5)
        stopping.set()
        last = await running
    assert last.faults["half_open"] >= 5
    assert last.acknowledged + last.dropped == last.taken
    assert last.waiting == 0


async def test_a_sensor_that_does_not_read_gets_its_acknowledgements_later() -> None:
    intake = RecordingIntake()
    reports: list[Progress] = []
    async with listening(intake) as listener:
        options = FleetOptions(
            "127.0.0.1", listener.port, 5, 30, seconds=3, seed=1, rates=replace(NONE, slow_reads=60.0), time_scale=60.0
        )
        last = await run_fleet(options, asyncio.Event(), reports.append)
    assert last.faults["slow_reads"] >= 5
    assert max(report.waiting for report in reports) > 5 * WINDOW  # they went on sampling meanwhile
    assert (last.waiting, last.dropped, last.reconnects) == (0, 0, 0)
    assert last.acknowledged == last.taken == len(intake.stored)


async def test_a_run_that_is_repeated_strikes_each_sensor_with_the_same_faults(tmp_path: Path) -> None:
    """The runs are compared as far as both come, because they do not end at the same moment."""
    intake = RecordingIntake()

    async def boots(ledger: Path) -> dict[str, list[tuple[str, object]]]:
        async with listening(intake) as listener:
            rates = replace(USUAL, reboots=30.0)
            options = FleetOptions("127.0.0.1", listener.port, 20, 500, 1.0, ledger, 5, rates=rates, time_scale=600.0)
            await run_fleet(options, asyncio.Event(), ignore)
        found: dict[str, list[tuple[str, object]]] = defaultdict(list)
        for (device, boot), line in Ledger.read(ledger).lines.items():
            found[device].append((boot, line["qos"]))
        return found

    first, second = await boots(tmp_path / "first"), await boots(tmp_path / "second")
    assert len(first) == len(second) == 20
    assert max(len(of_device) for of_device in first.values()) > 3
    for device, of_device in first.items():
        assert all(mine == other for mine, other in zip(of_device, second[device], strict=False))


async def test_more_sensors_than_open_files_are_allowed_is_said_before_anything_starts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("resource.getrlimit", lambda _: (100, 100))
    with pytest.raises(FleetError, match=r"200 sensors need 264 open files, .* may have 100: .*--sensors 36"):
        await run_fleet(FleetOptions("127.0.0.1", 1, 200, 1000), asyncio.Event(), ignore)


# --- real gateways, every fault, kill -9 --------------------------------------------------------------------


@dataclass
class Stored:
    """Content of a gateway's buffer after a run without a broker."""

    copies: Counter[Sample]
    payloads: dict[Sample, bytes]
    lost: Counter[tuple[str, str]]
    """Samples that sensors reported as dropped, by device and boot."""


def stored_in(buffer: Path) -> Stored:
    stored = Stored(Counter(), {}, Counter())
    with closing(sqlite3.connect(f"file:{buffer}?mode=ro", uri=True)) as connection:
        rows = "SELECT type, device, payload FROM reading JOIN series ON series.number = reading.series"
        for kind, device, payload in connection.execute(rows):
            body = json.loads(payload)
            if kind == READING_TYPE:
                sample = device, body["boot"], body["seq"]
                stored.copies[sample] += 1
                stored.payloads[sample] = payload
            elif kind == LOSS_TYPE and body["reason"] == SENSOR_DROPPED:
                stored.lost[body["device"], body["device_boot"]] += body["count"]
        not_yet = "SELECT device, device_boot, count FROM loss WHERE reason = ?"
        for device, boot, count in connection.execute(not_yet, (SENSOR_DROPPED,)):
            stored.lost[device, boot] += count
    return stored


@dataclass
class Ledger:
    """The fleet's ledger, by device and boot."""

    lines: dict[tuple[str, str], dict[str, object]]

    @classmethod
    def read(cls, path: Path) -> "Ledger":
        return cls({(line["device"], line["boot"]): line for line in map(json.loads, path.read_text().splitlines())})

    def numbers(self, of: tuple[str, str], key: str) -> set[int]:
        ranges = self.lines[of][key]
        assert isinstance(ranges, list)
        return set(spread(ranges))

    def samples(self, key: str) -> set[Sample]:
        return {(*of, number) for of in self.lines for number in self.numbers(of, key)}

    def value(self, sample: Sample) -> float:
        seed = self.lines[sample[:2]]["seed"]
        assert isinstance(seed, int)
        return value_of(seed, *sample)


class Fleet:
    """`sluice-sim fleet` beside real gateways; the ledger and summary when it has ended."""

    def __init__(self, folder: Path, port: int, *arguments: str) -> None:
        self.ledger = folder / "fleet.jsonl"
        command = [sys.executable, "-m", "sluice_sim", "fleet", "--port", str(port), "--ledger", str(self.ledger)]
        self.process = subprocess.Popen([*command, "--json", *arguments], stdout=subprocess.PIPE)

    async def stop(self) -> tuple[Ledger, dict[str, object]]:
        self.process.send_signal(signal.SIGTERM)
        printed, _ = await asyncio.to_thread(self.process.communicate, timeout=40)
        assert self.process.returncode == 0
        summary = json.loads(printed.splitlines()[-1])
        assert isinstance(summary, dict)
        return Ledger.read(self.ledger), summary

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.wait()


def gateway_config(folder: Path, port: int, *, identity: str = "json") -> Path:
    folder.mkdir(exist_ok=True)
    config = write_config(folder, f"127.0.0.1:{free_port()}", port, "fleet")
    text = config.read_text().replace('identity = "json"', f'identity = "{identity}"')
    # Kafka is away, and two commits make an exchange of QoS 2.
    config.write_text(text.replace("[buffer]", "[buffer]\ncommit_delay_ms = 0"))
    return config


def check_values(ledger: Ledger, stored: Stored) -> None:
    for sample, payload in stored.payloads.items():
        assert payload.startswith(b'{"celsius":%.2f,' % ledger.value(sample)), sample


@pytest.mark.slow
async def test_under_every_fault_and_kill_nothing_acknowledged_is_missing_and_nothing_is_stored_twice(
    tmp_path: Path, port: int
) -> None:
    """QoS 0, 1 and 2 on a route with the payload's identity. `lost` has the dropped samples."""
    config = gateway_config(tmp_path, port)
    faults = ("--faults", "--fault", "duplicates=0.1", "--fault", "drop-outs=1", "--time-scale", "1200", "--seed", "1")
    with Fleet(tmp_path, port, "--sensors", "60", "--interval-ms", "50", *faults) as fleet:
        for _ in range(2):
            with daemon(config, port) as process:
                await asyncio.sleep(5)
                process.send_signal(signal.SIGKILL)
        with daemon(config, port):
            await asyncio.sleep(5)
            ledger, summary = await fleet.stop()
    stored = stored_in(tmp_path / "buffer.db")
    acknowledged = ledger.samples("acknowledged")
    assert len(acknowledged) > 2000
    assert acknowledged - set(stored.copies) == set()
    assert [sample for sample, copies in stored.copies.items() if copies > 1] == []
    known = acknowledged | ledger.samples("handed_over") | ledger.samples("vanished")
    assert set(stored.copies) - known == set()
    check_values(ledger, stored)
    assert summary["waiting"] == 0
    assert isinstance(summary["faults"], dict)
    assert set(summary["faults"]) == {"reboots", "drop_outs", "half_open", "slow_reads"}
    assert summary["duplicates"]

    assert sum(stored.lost.values()) > 100
    last_boots = set({device: (device, boot) for device, boot in ledger.lines}.values())
    for of, line in ledger.lines.items():
        reported, dropped = ledger.numbers(of, "reported"), ledger.numbers(of, "dropped")
        if line["qos"] == 0:
            assert stored.lost[of] <= len(reported)  # nobody knows what of QoS 0 arrived
        elif ledger.numbers(of, "vanished"):
            assert len(reported) <= stored.lost[of] <= len(dropped)  # the PUBACK of the last report may have vanished
        else:
            assert stored.lost[of] == len(reported)
            # After a reboot, a kept ring may have no sample of the old boot left that could report the last drops.
            assert reported == dropped or of not in last_boots


@pytest.mark.slow
async def test_with_qos_2_nothing_is_stored_twice_although_no_identity_is_read(tmp_path: Path, port: int) -> None:
    """Exactly once by the exchange alone: half-open connections, drop-outs, and kill -9 of the gateway."""
    config = gateway_config(tmp_path, port, identity="none")
    faults = ("qos2=1", "half-open=2", "drop-outs=1", "drop-out-minutes=20", "slow-reads=1", "reordering=0.5")
    arguments = ("--sensors", "40", "--interval-ms", "50", "--time-scale", "1200", "--seed", "2")
    with Fleet(tmp_path, port, *arguments, *(word for fault in faults for word in ("--fault", fault))) as fleet:
        for _ in range(3):
            with daemon(config, port) as process:
                await asyncio.sleep(3)
                process.send_signal(signal.SIGKILL)
        with daemon(config, port):
            await asyncio.sleep(2)
            ledger, _ = await fleet.stop()
    stored = stored_in(tmp_path / "buffer.db")
    acknowledged = ledger.samples("acknowledged")
    assert len(acknowledged) > 2000
    assert acknowledged == set(stored.copies)
    assert set(stored.copies.values()) == {1}
    check_values(ledger, stored)


@pytest.mark.slow
async def test_sensors_roam_between_two_gateways_and_one_of_them_has_each_acknowledged_sample(tmp_path: Path) -> None:
    ports = free_port(), free_port()
    configs = [gateway_config(tmp_path / name, port) for name, port in zip(("home", "away"), ports, strict=True)]
    arguments = ("--sensors", "40", "--interval-ms", "50", "--faults", "--time-scale", "1200", "--seed", "3")
    roaming = ("--roam", f"127.0.0.1:{ports[1]}", "--fault", "roams=5")
    with (
        daemon(configs[0], ports[0]),
        daemon(configs[1], ports[1]),
        Fleet(tmp_path, ports[0], *arguments, *roaming) as fleet,
    ):
        await asyncio.sleep(8)
        ledger, summary = await fleet.stop()
    home, away = (stored_in(config.with_name("buffer.db")) for config in configs)
    for stored in (home, away):
        assert len(stored.copies) > 500
        assert set(stored.copies.values()) == {1}
        check_values(ledger, stored)
    assert ledger.samples("acknowledged") - set(home.copies) - set(away.copies) == set()
    assert isinstance(summary["faults"], dict)
    assert summary["faults"]["roams"] > 20


# --- the command --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        (["--fault", "reboots"], "'reboots' is not NAME=NUMBER"),
        (["--fault", "explosions=1"], "there is no fault 'explosions'"),
        (["--fault", "roams=1"], "give the other gateway by --roam"),
        (["--roam", "elsewhere"], "'elsewhere' is not HOST:PORT"),
        (["--time-scale", "60"], "--time-scale compresses the time of faults, but there are none"),
    ],
)
def test_an_option_that_makes_no_sense_is_refused_with_exit_code_2(arguments: list[str], why: str) -> None:
    result = CliRunner().invoke(main, ["fleet", "--seconds", "0.1", *arguments])
    assert result.exit_code == 2
    assert why in result.output


def test_a_fleet_that_nobody_let_in_ends_with_exit_code_1_and_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sluice_sim.fleet.DRAIN_S_MAX", 0.2)
    port = free_port()
    result = CliRunner().invoke(
        main, ["fleet", "--port", str(port), "--sensors", "1", "--seconds", "0.2", "--interval-ms", "5000"]
    )
    assert result.exit_code == 1
    assert f"no sensor was ever let in: 127.0.0.1:{port}: Connection refused" in result.output


def test_a_host_whose_name_is_not_known_is_told_in_words(monkeypatch: pytest.MonkeyPatch) -> None:
    def unknown(*_arguments: object, **_others: object) -> None:
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

    monkeypatch.setattr("sluice_sim.fleet.DRAIN_S_MAX", 0.2)
    monkeypatch.setattr("socket.getaddrinfo", unknown)
    result = CliRunner().invoke(
        main, ["fleet", "--host", "nosuch.example", "--sensors", "1", "--seconds", "0.2", "--interval-ms", "5000"]
    )
    assert result.exit_code == 1
    assert "no sensor was ever let in: nosuch.example:1883: Name or service not known. See --host" in result.output


async def test_the_end_does_not_say_that_nobody_is_connected() -> None:
    async with listening(RecordingIntake()) as listener:
        command = ("fleet", "--port", str(listener.port), "--sensors", "2", "--seconds", "0.5", "--interval-ms", "50")
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "sluice_sim", *command), stdout=asyncio.subprocess.PIPE
        )
        said, _ = await process.communicate()
    assert process.returncode == 0
    assert re.search(
        rb"^end: \d+ s  2 sensors  \d+ readings/s  20 acknowledged  0 waiting  0 dropped$", said, re.MULTILINE
    )
    assert b"0/2 connected" not in said


def test_help_lists_every_fault_with_what_faults_makes_of_it() -> None:
    text = CliRunner().invoke(main, ["fleet", "--help"]).output
    for name, usual in (("drift-ppm", "100"), ("qos2", "0.2"), ("drop-out-minutes", "120"), ("half-open", "1")):
        assert re.search(rf"^ +{name} +{usual} \(", text, re.MULTILINE), name


def test_the_bar_is_as_long_as_the_share() -> None:
    assert bar(0) == f"[{'.' * BAR_CHARACTERS}]"
    assert bar(0.5) == f"[{'#' * (BAR_CHARACTERS // 2)}{'.' * (BAR_CHARACTERS // 2)}]"
    assert bar(1.7) == f"[{'#' * BAR_CHARACTERS}]"


def test_the_terminals_line_is_written_over_and_never_wraps(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "50")
    zeros: dict[str, Any] = {each.name: 0 for each in fields(Progress)}
    progress = Progress(**{**zeros, "seconds": 5.0, "sensors": 4, "faults": {}, "last_error": "x" * 99})
    _shown_on_terminal(10.0)(progress)
    shown = capsys.readouterr().out
    assert shown.startswith(f"\r{bar(0.5)}      5 s  0/4 connected")
    assert len(shown) == len("\r") + 49 + len("\x1b[K")
