"""The daemon in a box whose clock is wrong: it takes readings, holds or sends them, and each time is true by its bound.

The true time is this machine's, by which Kafka runs and the tests judge; the gateway alone sees another (`fake_clock`).
"""

import asyncio
import json
import shutil
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from aiokafka import ConsumerRecord

from gateway.record_contract import TIME_ERROR_UNKNOWN_US
from tests.support import gateways
from tests.support.certificates import Authority, make_authority
from tests.support.fake_clock import YEAR_2000, FakeClock
from tests.support.gateways import SLUICE, consume, consume_until, free_port, header
from tests.support.kafka_cluster import Cluster, Listener, kafka_cluster
from tests.support.waiting import patience

pytestmark = [
    pytest.mark.kafka,
    pytest.mark.skipif(shutil.which("mosquitto_pub") is None, reason="mosquitto-clients is not installed"),
    pytest.mark.skipif(shutil.which("openssl") is None, reason="openssl is not installed"),
]
UNREACHABLE = "127.0.0.1:1"
SYNC_MS = 5.0
"""Bound that the kernel gives once it is synced, in milliseconds."""
KNOWN_US_MAX = 60_000_000
"""A bound below this is one of a clock, and not of an interval between boots."""
PATIENCE_S = 30.0


@dataclass(frozen=True, slots=True)
class Brokers:
    """A node with a listener for each kind of certificate."""

    cluster: Cluster
    authority: Authority

    @property
    def plain(self) -> str:
        return self.cluster.bootstrap

    def at(self, listener: str) -> str:
        (address,) = self.cluster.addresses(listener)
        return address


@pytest.fixture(scope="module")
def brokers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Brokers]:
    folder = tmp_path_factory.mktemp("brokers")
    authority = make_authority(folder / "ca")
    now = datetime.now(UTC)
    long_ago = datetime(2025, 1, 1, tzinfo=UTC) - now, datetime(2026, 1, 1, tzinfo=UTC) - now
    lately = timedelta(days=-2), timedelta(minutes=-30)
    listeners = [
        Listener("VALID", "SSL", key_store=authority.sign("valid").key_store),
        Listener("ENDED", "SSL", key_store=authority.sign("ended", valid=long_ago).key_store),
        Listener("LATELY", "SSL", key_store=authority.sign("lately", valid=lately).key_store),
    ]
    with kafka_cluster(folder / "nodes", 1, listeners) as cluster:
        yield Brokers(cluster, authority)


@dataclass(slots=True)
class Box:
    """A gateway with a clock of its own, and what its sensor was told."""

    folder: Path
    prefix: str
    brokers: Brokers
    clock: FakeClock
    listener: str | None = None
    """Kafka's, over TLS; without it Kafka cannot be reached."""
    hold_s: float = 600.0
    port: int = field(default_factory=free_port)
    taken: list[tuple[float, float]] = field(default_factory=list)
    """Between which true times each reading was handed over, in seconds since 1970; they are numbered so."""

    @property
    def config(self) -> Path:
        return self.folder / "gateway.toml"

    @property
    def log(self) -> str:
        return self.config.with_suffix(".log").read_text()

    @property
    def topic(self) -> str:
        return f"{self.prefix}-thermo"

    @contextmanager
    def daemon(self) -> Iterator[None]:
        """`sluice run` in this box, for the length of the block."""
        bootstrap = UNREACHABLE if self.listener is None else self.brokers.at(self.listener)
        tls = f'\n[kafka.tls]\nca = "{self.brokers.authority.certificate}"\n'
        config = gateways.write_config(self.folder, bootstrap, self.port, self.prefix, tls)
        text = config.read_text().replace('clock = "system"', f"hold_unsynced_s = {self.hold_s}")
        config.write_text(text.replace("[kafka]", "[kafka]\nbackoff_s_max = 1.0"))
        with gateways.daemon(config, self.port, self.clock.environment()):
            yield

    def publish(self) -> None:
        """One reading of one sensor; returns after its PUBACK."""
        begin_s, number = time.time(), len(self.taken)
        gateways.publish(self.port, "device/42/thermo", json.dumps({"boot": "1-0000beef", "seq": number}))
        self.taken.append((begin_s, time.time()))

    def command(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        """One of `sluice`'s commands in this box."""
        command = [str(SLUICE), *arguments, "--config", str(self.config)]
        environment = self.clock.environment()
        return subprocess.run(
            command, capture_output=True, text=True, timeout=patience(60), check=False, env=environment
        )

    async def uplink(self, **wanted: object) -> dict[str, Any]:
        """The daemon's report on the uplink for `sluice status`, once it has all wanted values."""
        found: dict[str, Any] = {}
        async with asyncio.timeout(patience(PATIENCE_S)):
            while not found or {name: found[name] for name in wanted} != wanted:
                await asyncio.sleep(0.1)
                found = await asyncio.to_thread(gateways.uplink_told, self.folder / "buffer.db")
        return found

    async def says(self, words: str) -> None:
        """Wait until the log has it."""
        async with asyncio.timeout(patience(PATIENCE_S)):
            while words not in self.log:
                await asyncio.sleep(0.1)

    async def records(self) -> list[ConsumerRecord]:
        """Records of the sensor in Kafka, once all are there. None of them was refused."""
        found = await consume_until(self.brokers.plain, len(self.taken), self.topic)
        assert await consume(self.brokers.plain, f"{self.prefix}-quarantine") == []
        return found


@pytest.fixture
def clock(tmp_path: Path) -> FakeClock:
    return FakeClock(tmp_path)


def time_of(record: ConsumerRecord) -> tuple[int, int]:
    """Event time and its bound in microseconds."""
    told = datetime.fromisoformat(header(record, "ce_time"))
    return round(told.timestamp() * 1e6), int(header(record, "ce_timeerror"))


def assert_true(box: Box, records: Sequence[ConsumerRecord]) -> None:
    """Each time lies within its bound of when that reading was taken, whatever the box's clock said then."""
    for record in records:
        begin_s, end_s = box.taken[int(header(record, "ce_devicesequence"))]
        time_us, error_us = time_of(record)
        assert begin_s * 1e6 - error_us <= time_us <= end_s * 1e6 + error_us


async def test_started_in_the_year_2000_and_synced_later_every_reading_has_the_true_time(
    brokers: Brokers, clock: FakeClock, tmp_path: Path
) -> None:
    """It reaches Kafka by a certificate that holds 26 years later, holds what it takes, and sends it when synced."""
    box = Box(tmp_path, "later", brokers, clock, "VALID")
    with box.daemon():
        for _ in range(3):
            box.publish()
        uplink = await box.uplink(up=True, waits_for_clock=True)
        assert uplink["dates_passed"] >= datetime(2026, 11, 22, tzinfo=UTC).timestamp()
        assert "certificates that ended before" in box.log
        status = " ".join(box.command("status").stdout.split())
        assert "Readings wait on this box for it" in status
        assert "Only certificates that ended before" in status
        assert await consume(brokers.plain, box.topic) == []
        clock.sync(SYNC_MS)
        await box.uplink(up=True, waits_for_clock=False, dates_passed=None)
        await box.says("another clock judges the dates of Kafka's certificates now")
        for _ in range(2):
            box.publish()
        records = await box.records()
    assert_true(box, records)
    assert all(time_of(record)[1] <= KNOWN_US_MAX for record in records)
    assert {header(record, "ce_timequality") for record in records} == {"received"}
    assert box.log.count("uplink is down") == 0, "who connects anew by its own will is not down"


async def test_a_certificate_that_ended_before_the_latest_known_time_is_not_let_in(
    brokers: Brokers, clock: FakeClock, tmp_path: Path
) -> None:
    box = Box(tmp_path, "ended", brokers, clock, "ENDED", hold_s=0)
    with box.daemon():
        box.publish()
        await box.says(f"the certificate of {brokers.at('ENDED')} has expired on 2026-01-01, and it is 2026-11-22 at")
        found = box.command("check", "--json")
        words = {finding["subject"]: finding["words"] for finding in json.loads(found.stdout)}
        assert found.returncode == 1
        assert "has expired on 2026-01-01" in words[f"TLS with {brokers.at('ENDED')}"]
        assert "Only certificates that ended before 2026-11-22 are refused" in words["certificates"]
        assert await consume(brokers.plain, box.topic) == []
        assert (await box.uplink(up=False))["barred"]


async def test_a_boxs_knowledge_of_the_time_outlives_a_reboot_for_certificates_alone(
    brokers: Brokers, clock: FakeClock, tmp_path: Path
) -> None:
    """A certificate that ended half an hour ago: a new box cannot know; one that was synced since does, and says so."""
    box = Box(tmp_path, "floor", brokers, clock, "LATELY")
    refused = f"the certificate of {brokers.at('LATELY')} has expired on"
    with box.daemon():
        await box.uplink(up=True)
        assert refused not in box.log
        clock.sync(SYNC_MS)
        await box.says(f"{refused}")
        await box.uplink(up=False)
    before = box.log.count("at least, although this box's own clock is not to be trusted")
    assert before == 0, "it was the clock that told"
    clock.reboot()
    box.hold_s = 0
    with box.daemon():
        box.publish()
        await box.says("at least, although this box's own clock is not to be trusted")
        assert await consume(brokers.plain, box.topic) == []
    # And where it gets through, what it says of the time has nothing of that.
    clock.reboot()
    box.listener = "VALID"
    with box.daemon():
        box.publish()
        records = await box.records()
    assert clock.wall() < YEAR_2000.timestamp() + 3600
    newest = time_of(records[-1])
    assert datetime.fromtimestamp(newest[0] / 1e6, UTC).year == 2000
    assert newest[1] == TIME_ERROR_UNKNOWN_US


@pytest.mark.parametrize("year", [1970, 2000, 2106, 2200])
async def test_never_synced_nothing_is_refused_lost_or_made_up(
    brokers: Brokers, clock: FakeClock, tmp_path: Path, year: int
) -> None:
    """Linux lets nobody set a clock beyond 2232."""
    clock.set(datetime(year, 2, 1, tzinfo=UTC))
    box = Box(tmp_path, f"never{year}", brokers, clock, "VALID", hold_s=1)
    with box.daemon():
        for _ in range(3):
            box.publish()
        records = await box.records()
    assert [header(record, "ce_devicesequence") for record in records] == ["0", "1", "2"]
    assert all(time_of(record)[1] == TIME_ERROR_UNKNOWN_US for record in records)
    assert {header(record, "ce_timequality") for record in records} == {"received"}
    assert all(abs(record.timestamp / 1000 - time.time()) < 3600 for record in records), "Kafka's own time is its own"


async def test_a_clock_that_is_set_by_hand_forward_and_back_moves_no_reading(
    brokers: Brokers, clock: FakeClock, tmp_path: Path
) -> None:
    """Before it is synced, and after: once known, the time is that which was synced, and not what somebody sets."""
    box = Box(tmp_path, "steps", brokers, clock, "VALID")
    with box.daemon():
        box.publish()
        clock.set(datetime(2033, 5, 1, tzinfo=UTC))
        box.publish()
        clock.step(-40 * 365 * 86_400.0)
        box.publish()
        await box.uplink(up=True, waits_for_clock=True)
        clock.sync(SYNC_MS, ahead_ms=-2)
        await box.uplink(up=True, waits_for_clock=False, dates_passed=None)
        box.publish()
        for wall in (datetime(2033, 5, 1, tzinfo=UTC), YEAR_2000):
            clock.set(wall)
            # The session goes on by a certificate whose dates the system's clock would have refused.
            uplink: dict[str, Any] = {}
            while not uplink.get("dates_passed"):
                uplink = await box.uplink(up=True)
            assert abs(uplink["dates_passed"] - time.time()) < KNOWN_US_MAX / 1e6
            box.publish()
        records = await box.records()
    assert len(records) == 6
    assert_true(box, records)
    assert all(time_of(record)[1] <= KNOWN_US_MAX for record in records)


async def test_boots_that_were_never_synced_keep_their_order_between_those_that_were(
    brokers: Brokers, clock: FakeClock, tmp_path: Path
) -> None:
    """A synced boot, two without a network whose clocks begin anywhere, and one that is synced again."""
    box = Box(tmp_path, "boots", brokers, clock, "VALID")
    clock.sync(SYNC_MS)
    with box.daemon():
        box.publish()
        await box.records()
    known_s = box.taken[0][0]
    box.listener = None
    for year in (2044, 2000):
        clock.reboot(datetime(year, 1, 1, tzinfo=UTC))
        with box.daemon():
            box.publish()
            box.publish()
    clock.reboot()
    box.listener = "VALID"
    with box.daemon():
        box.publish()
        await box.uplink(up=True)
        clock.sync(SYNC_MS)
        records = await box.records()
    # What waited is sent beside what is new (`live-first`): the order is that of their times.
    records.sort(key=lambda record: int(header(record, "ce_devicesequence")))
    assert len(records) == len(box.taken) == 6
    assert_true(box, records)
    first, *between, last = records
    assert time_of(first)[1] <= KNOWN_US_MAX
    assert time_of(last)[1] <= KNOWN_US_MAX
    assert {header(record, "ce_timequality") for record in between} == {"bounded"}
    # Nowhere but between the two times that are known, with room for what those are not known by.
    assert all(time_of(record)[1] <= (time.time() - known_s) * 1e6 + KNOWN_US_MAX for record in between)
    times = [time_of(record)[0] for record in records]
    assert times == sorted(times)


async def test_a_correction_puts_right_readings_sent_before_the_clock_was_known(
    brokers: Brokers, clock: FakeClock, tmp_path: Path
) -> None:
    box = Box(tmp_path, "corrected", brokers, clock, "VALID", hold_s=1)
    with box.daemon():
        for _ in range(3):
            box.publish()
        records = await box.records()
        assert all(time_of(record)[1] == TIME_ERROR_UNKNOWN_US for record in records)
        clock.sync(SYNC_MS)
        events: list[ConsumerRecord] = []
        async with asyncio.timeout(patience(PATIENCE_S)):
            while not events:
                await asyncio.sleep(0.2)
                found = await consume(brokers.plain, f"{box.prefix}-events")
                events = [each for each in found if header(each, "ce_type") == "sluice.gateway.time-correction"]
    correction = max((json.loads(event.value) for event in events), key=lambda body: int(body["version"]))
    assert (correction["boot"], correction["quality"]) == (clock.boot_id, "synced")
    for record in records:
        assert header(record, "ce_gatewayboot") == correction["boot"]
        far_us = int(header(record, "ce_boottime")) - correction["boottime_us"]
        boottime_us = int(header(record, "ce_boottime"))
        time_us = boottime_us + correction["offset_us"] + far_us * correction["rate_ppm"] / 1e6
        own_us = int(header(record, "ce_boottimeerror"))
        error_us = correction["error_us"] + abs(far_us) * correction["error_growth_ppm"] / 1e6 + own_us
        begin_s, end_s = box.taken[int(header(record, "ce_devicesequence"))]
        assert begin_s * 1e6 - error_us <= time_us <= end_s * 1e6 + error_us
        assert error_us <= KNOWN_US_MAX
