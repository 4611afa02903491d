"""Nothing is lost and nothing stands twice, whatever ends: the gateway (`kill -9`), the broker, the link between."""

import asyncio
import contextlib
import random
import re
import signal
import sqlite3
import subprocess
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from gateway.site_broker.deliveries import BROKER_MARKS, Deliveries
from tests.support.broker_intake import MemoryIntake, numbered, published, reading_from
from tests.support.broker_loss import readings_left_after_kill
from tests.support.gateways import SLUICE
from tests.support.mosquitto import Link, Mosquitto, link_to, mosquitto
from tests.support.waiting import until

# --- stopped, cut off --------------------------------------------------------------------------------------


async def flowing(port: int, enough: asyncio.Event, lot_size: int, qos: int = 1) -> list[str]:
    """Publish in lots, each acknowledged before the next, until told to stop; what was published."""
    sent: list[str] = []
    while not enough.is_set():
        lot = numbered(len(sent), len(sent) + lot_size)
        await published(port, lot, qos=qos)
        sent += lot
    return sent


def assert_once(payloads: list[str], sent: list[str]) -> None:
    times = Counter(payloads)
    assert [payload for payload in sent if not times[payload]] == [], "missing"
    assert [payload for payload, count in times.items() if count > 1] == [], "stored twice"


async def test_a_broker_that_is_stopped_and_started_loses_and_doubles_nothing(tmp_path: Path) -> None:
    intake = MemoryIntake()
    settings = ("allow_anonymous true", "max_queued_messages 0", "max_inflight_messages 20")
    sent: list[str] = []
    with mosquitto(tmp_path / "broker", *settings) as broker:
        async with reading_from(intake, broker.port) as ingress:
            await ingress.session.subscriptions.answered.wait()
            for _ in range(3):
                # The broker stops while what it delivered waits for its commit.
                intake.outcome = None
                lot = numbered(len(sent), len(sent) + 300)
                await published(broker.port, lot)
                sent += lot
                await until(lambda: intake.waiting)
                await asyncio.to_thread(broker.stop)
                intake.outcome = True
                while intake.waiting:
                    intake.decide(True)
                await asyncio.to_thread(broker.start)
                await until(ingress.session.subscriptions.answered.is_set)
            await until(lambda: len(set(intake.payloads())) == len(sent))
            assert ingress.session.counts["recognised"]
    assert_once(intake.payloads(), sent)


@pytest.mark.parametrize("black_hole", [False, True])
async def test_a_link_that_fails_loses_and_doubles_nothing(tmp_path: Path, *, black_hole: bool) -> None:
    """Reset in full flow; or silent, while TCP is confirmed all the same, so that only a missing PINGRESP tells."""
    intake = MemoryIntake()
    settings = ("allow_anonymous true", "max_queued_messages 0", "max_inflight_messages 20")
    with mosquitto(tmp_path / "broker", *settings) as broker:
        async with link_to(broker.port) as link, reading_from(intake, link.port, keep_alive_s=1) as ingress:
            await ingress.session.subscriptions.answered.wait()
            rounds = 1 if black_hole else 8
            enough = asyncio.Event()
            publishing = asyncio.create_task(flowing(broker.port, enough, 200))
            for connections in range(1, rounds + 1):
                await carried(link, 5_000)
                # Of a broker that was not seen to count yet, what comes again is stored again, and marked.
                await until(lambda: ingress.session.deliveries.counts_up)
                if black_hole:
                    link.swallow()
                else:
                    link.cut()
                await until(lambda: ingress.session.counts["connections"] > connections)  # noqa: B023 - used at once
            enough.set()
            sent = await publishing
            await until(lambda: len(set(intake.payloads())) == len(sent))
            assert ingress.session.counts["connections"] > rounds
    assert_once(intake.payloads(), sent)


async def carried(link: Link, more_bytes: int) -> None:
    enough = link.carried_bytes + more_bytes
    await until(lambda: link.carried_bytes >= enough)


# --- the whole daemon --------------------------------------------------------------------------------------


def write_config(directory: Path, *ports: int) -> Path:
    sections = "".join(
        f'\n[[mqtt_brokers]]\nhost = "127.0.0.1"\nport = {port}\ntopics = ["device/#"]\nbackoff_s_min = 0.1\n'
        for port in ports
    )
    path = directory / "gateway.toml"
    path.write_text(
        f'[gateway]\nid = "gw1"\nclock = "system"\n[buffer]\npath = "{directory}/buffer.db"\n'
        f'[kafka]\nbootstrap = ["127.0.0.1:1"]\n{sections}'
    )
    return path


def stored_payloads(directory: Path) -> list[str]:
    return [payload.decode() for (payload,) in select("payload", directory)]


def stored_count(directory: Path) -> int:
    """Number of stored readings, quick enough to be asked two hundred times a second."""
    ((count,),) = select("count(*)", directory)
    return int(count)


def select(what: str, directory: Path) -> list[tuple[Any, ...]]:
    return rows(f"SELECT {what} FROM reading JOIN series ON series = number WHERE topic = 'device-thermo'", directory)


def rows(query: str, directory: Path) -> list[tuple[Any, ...]]:
    with contextlib.closing(sqlite3.connect(f"file:{directory}/buffer.db?mode=ro", uri=True)) as connection:
        return connection.execute(query).fetchall()


def seen_to_count(directory: Path) -> bool:
    """Whether the buffer says of its one broker that its packet identifiers count up."""
    kept: dict[str, bytes] = dict(rows(f"SELECT key, value FROM mark WHERE key GLOB '{BROKER_MARKS}*/ids'", directory))
    return any(Deliveries(key.removesuffix("ids"), kept).counts_up for key in kept)


async def start(config: Path, *brokers: Mosquitto) -> subprocess.Popen[bytes]:
    """`sluice run`, subscribed at the brokers."""

    def subscriptions() -> list[int]:
        return [len(re.findall(r" sluice-gw1 \d ", broker.log)) for broker in brokers]

    before = subscriptions()
    with config.with_suffix(".log").open("ab") as log:
        process = subprocess.Popen([SLUICE, "run", "--config", config], stderr=log)  # noqa: ASYNC220 - a fork
    await until(lambda: all(now > seen for now, seen in zip(subscriptions(), before, strict=True)), 20)
    return process


async def end(process: subprocess.Popen[bytes], number: signal.Signals) -> None:
    process.send_signal(number)
    await asyncio.to_thread(process.wait, 20)


@pytest.mark.parametrize("qos", [1, 2])
async def test_kill_9_of_the_gateway_loses_and_doubles_nothing(tmp_path: Path, qos: int) -> None:
    """Readings without a sequence: what the broker delivered stands once, by its packet identifiers alone."""
    settings = ("allow_anonymous true", "max_queued_messages 0")
    with mosquitto(tmp_path / "broker", *settings) as broker:
        config = write_config(tmp_path, broker.port)
        config.write_text(config.read_text() + f"qos = {qos}\n")
        process = await start(config, broker)
        enough = asyncio.Event()
        publishing = asyncio.create_task(flowing(broker.port, enough, 3_000, qos))
        try:
            for _ in range(2):
                # What came before a kill is delivered again first. One that comes before that is stored may double it.
                before = stored_count(tmp_path)
                await until(lambda before=before: stored_count(tmp_path) >= before + 100, 60)  # type: ignore[misc]
                # Of a broker that was not seen to count yet, what comes again is stored again, and marked.
                await until(lambda: seen_to_count(tmp_path), 60)
                await asyncio.sleep(random.random() * 0.3)  # noqa: S311 - a moment to be killed in
                await end(process, signal.SIGKILL)
                process = await start(config, broker)
            enough.set()
            sent = await publishing
            await until(lambda: stored_count(tmp_path) >= len(sent), 30)
            await until(lambda: len(set(stored_payloads(tmp_path))) >= len(sent), 30)
        finally:
            enough.set()
            await end(process, signal.SIGTERM)
    assert_once(stored_payloads(tmp_path), sent)


async def test_two_brokers_are_read_side_by_side(tmp_path: Path) -> None:
    with mosquitto(tmp_path / "one") as one, mosquitto(tmp_path / "two") as two:
        process = await start(write_config(tmp_path, one.port, two.port), one, two)
        try:
            await published(one.port, ["one"])
            await until(lambda: "one" in stored_payloads(tmp_path))
            one.stop()
            await published(two.port, ["two"])
            await until(lambda: "two" in stored_payloads(tmp_path))
        finally:
            await end(process, signal.SIGTERM)
    assert process.returncode == 0


def test_what_a_killed_broker_loses_is_measured(tmp_path: Path) -> None:
    """By default, nothing acknowledged is on disk. With a save at every change, nearly everything is."""
    assert readings_left_after_kill(tmp_path / "default", 200) == 0
    assert readings_left_after_kill(tmp_path / "saving", 200, save_on_every_change=True) >= 198
