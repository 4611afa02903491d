"""paho with QoS 2, as it is: it sends all that it holds at CONNACK, without DUP, and now and then after its PUBREL."""

import contextlib
import random
import signal
import sqlite3
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from paho.mqtt.client import Client
from paho.mqtt.enums import CallbackAPIVersion

from gateway.buffer.rows import Doubt
from tests.support.gateways import daemon, free_port, write_config
from tests.support.waiting import patience

BACKLOG = 10_000
"""Nearly three hours of a reading each second."""
READING_BYTES = 300
SENSORS = 4
READINGS_PER_S = 120
"""Of each."""
SECONDS_PER_CYCLE_MAX = 3.0
FINISH_S = 120.0
"""How long the sensors may take at the end, with the daemon left alone."""


class Sensor:
    """A paho client in its own thread, with a kept session and what it was told."""

    def __init__(self, device: str) -> None:
        self.topic = f"device/{device}/thermo"
        self.sent: list[str] = []
        self.finished = 0
        """Messages whose PUBCOMP came."""
        self.connections = 0
        self.client = Client(CallbackAPIVersion.VERSION2, client_id=device, clean_session=False)
        self.client.reconnect_delay_set(1, 1)
        self.client.on_connect = self._on_connect
        self.client.on_publish = self._on_publish

    def _on_connect(self, _client: Client, _data: Any, _flags: Any, reason: Any, _properties: Any) -> None:
        self.connections += not reason.is_failure

    def _on_publish(self, *_: Any) -> None:
        self.finished += 1

    def publish(self, payload: str) -> None:
        self.sent.append(payload)
        self.client.publish(self.topic, payload, qos=2)

    @property
    def left(self) -> int:
        """Messages that are not finished."""
        return len(self.sent) - self.finished

    def start(self, port: int) -> None:
        """Connect, now or once there is something to connect to."""
        self.client.connect_async("127.0.0.1", port)
        self.client.loop_start()

    def stop(self) -> None:
        self.client.disconnect()
        self.client.loop_stop()


def finish(sensors: Sequence[Sensor], seconds: float) -> None:
    """Wait until the sensors have finished. Raises TimeoutError."""
    began = time.monotonic()
    while any(sensor.left for sensor in sensors):
        if time.monotonic() - began > patience(seconds):
            raise TimeoutError(f"unfinished after {seconds:.0f} s: {[sensor.left for sensor in sensors]}")
        time.sleep(0.05)


class Stored(NamedTuple):
    """How often each payload is stored."""

    all: Counter[str]
    unmarked: Counter[str]
    """Without those that are marked as possible copies."""


def stored_in(folder: Path) -> Stored:
    with contextlib.closing(sqlite3.connect(folder / "buffer.db")) as connection:
        rows = connection.execute(
            "SELECT CAST(payload AS TEXT), doubt FROM reading JOIN series ON series.number = reading.series"
            " WHERE series.type = 'sluice.reading'"
        ).fetchall()
    return Stored(
        Counter(payload for payload, _ in rows),
        Counter(payload for payload, doubt in rows if doubt != Doubt.REDELIVERED),
    )


def test_a_backlog_of_ten_thousand_comes_through_on_one_connection(tmp_path: Path) -> None:
    port = free_port()
    config = write_config(tmp_path, f"127.0.0.1:{free_port()}", port, "backlog")
    sensor = Sensor("m001")
    for number in range(BACKLOG):
        sensor.publish(f"{number:0{READING_BYTES}}")
    with daemon(config, port):
        try:
            sensor.start(port)
            finish([sensor], 100)
        finally:
            sensor.stop()
    assert sensor.connections == 1
    assert stored_in(tmp_path).all == Counter(sensor.sent)


@pytest.mark.parametrize(
    "kills",
    [
        3,
        pytest.param(20, marks=pytest.mark.long(seconds=80)),
    ],
)
def test_kills_lose_nothing_and_double_nothing_without_a_mark(kills: int, tmp_path: Path) -> None:
    seed = kills
    chance = random.Random(seed)  # noqa: S311 - repeatable is the point
    port = free_port()
    config = write_config(tmp_path, f"127.0.0.1:{free_port()}", port, "kills")
    sensors = [Sensor(f"m{number}") for number in range(SENSORS)]
    try:
        for cycle in range(kills + 1):
            with daemon(config, port) as process:
                if cycle == 0:
                    for sensor in sensors:
                        sensor.start(port)
                if cycle == kills:
                    finish(sensors, FINISH_S)
                    continue
                publish_for(sensors, 1.0 + chance.uniform(0, SECONDS_PER_CYCLE_MAX - 1.0))
                process.send_signal(signal.SIGKILL)
    finally:
        for sensor in sensors:
            sensor.stop()
    sent = Counter(payload for sensor in sensors for payload in sensor.sent)
    stored = stored_in(tmp_path)
    assert sent - stored.all == Counter(), "missing"
    assert stored.unmarked - sent == Counter(), "doubled, and not marked"
    assert sent.total() > kills * SENSORS * READINGS_PER_S


def publish_for(sensors: Sequence[Sensor], seconds: float) -> None:
    """Have each sensor publish READINGS_PER_S, whether it is connected or not."""
    began = time.monotonic()
    count = 0
    while time.monotonic() < began + seconds:
        for sensor in sensors:
            sensor.publish(f"{sensor.topic} {len(sensor.sent)}")
        count += 1
        time.sleep(max(0.0, began + count / READINGS_PER_S - time.monotonic()))
