"""The real daemon, stopped and killed: what it had learnt of a serial sensor's clock is there when it starts again."""

import asyncio
import signal
import sqlite3
import subprocess
import termios
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, closing
from pathlib import Path

import pytest

from gateway.clock.kernel_clock import boottime_us
from gateway.serial_lines.frames import Ack, Data, Hello, Probe, Reply
from tests.gateway.serial_lines.test_ingress_serial import INCARNATION, PtySensor
from tests.support.gateways import SLUICE
from tests.support.waiting import patience

CONFIG = """\
[gateway]
id = "gw1"
[buffer]
path = "{folder}/buffer.db"
[serial]
ports = ["{folder}/ttyUSB0"]
scan_interval_s = 0.2
[kafka]
bootstrap = ["127.0.0.1:1"]
[[routes]]
topic = "device/{{device}}/{{stream}}"
kafka = "device-{{stream}}"
"""
APART_US_MAX = 100
FAST = 1.005
"""The sensor's clock runs by 5,000 ppm too fast."""


class Sensor(PtySensor):
    """Its tick is its own; it remembers when each sample was taken."""

    def __init__(self, port: Path) -> None:
        super().__init__(port)
        self.began_us = boottime_us()
        self.taken_us: list[int] = []

    def tick(self) -> tuple[int, int]:
        return divmod(int((boottime_us() - self.began_us) * FAST), 1000)

    def expect_opening(self) -> None:
        """Have `opened` wait for the next opening, and forget what the former one brought."""
        self.heard.clear()
        attributes = termios.tcgetattr(self._slave)
        attributes[2] |= termios.HUPCL
        termios.tcsetattr(self._slave, termios.TCSAFLUSH, attributes)

    async def say_hello(self) -> None:
        await self.opened()
        held = len(self.taken_us)
        await self.send(Hello(self.boot, INCARNATION, 2, held, held, self.device, "1.0", ("thermo",)))

    async def answer_probe(self) -> None:
        probe = await self.expect(Probe)
        await self.send(Reply(probe.nonce, *self.tick()))

    async def sample(self) -> None:
        """Take one and have it acknowledged; no PROBE is answered meanwhile."""
        sequence = len(self.taken_us)
        apart_us = APART_US_MAX + 1
        while apart_us > APART_US_MAX:
            # Something else may run between the two.
            before_us = boottime_us()
            tick_ms, _ = self.tick()
            apart_us = boottime_us() - before_us
        self.taken_us.append(before_us)
        await self.send(Data(self.run, sequence, sequence, tick_ms, 0, b"21.5"))
        while (await self.expect(Ack)).next <= sequence:
            pass


@asynccontextmanager
async def daemon(folder: Path) -> AsyncIterator[subprocess.Popen[bytes]]:
    config = folder / "gateway.toml"
    config.write_text(CONFIG.format(folder=folder))
    with (folder / "log").open("ab") as log:
        process = subprocess.Popen([SLUICE, "run", "--config", config], stderr=log)  # noqa: ASYNC220 - a moment
        try:
            yield process
        finally:
            process.kill()
            await asyncio.to_thread(process.wait, patience(20))


def stored(folder: Path) -> list[tuple[int, int | None, int]]:
    with closing(sqlite3.connect(folder / "buffer.db")) as connection:
        return connection.execute(
            "SELECT device_sequence, event_us, event_error_us FROM reading "
            "WHERE device_sequence IS NOT NULL ORDER BY device_sequence"
        ).fetchall()


@pytest.mark.parametrize("end", [signal.SIGTERM, signal.SIGKILL])
async def test_after_a_restart_readings_have_a_time_before_the_first_probe_is_answered(
    tmp_path: Path, end: signal.Signals
) -> None:
    sensor = Sensor(tmp_path / "ttyUSB0")
    async with daemon(tmp_path) as process:
        await sensor.say_hello()
        # An answer that is late, on a busy machine, is none: the gateway has asked anew.
        while not (found := stored(tmp_path)) or found[-1][1] is None:
            await sensor.answer_probe()
            await sensor.sample()
        # More is learnt, and not stored by a commit: a stop keeps that too.
        await sensor.answer_probe()
        process.send_signal(end)
        await asyncio.to_thread(process.wait, patience(20))
    sensor.expect_opening()
    async with daemon(tmp_path) as process:
        await sensor.say_hello()
        await sensor.expect(Ack)
        await sensor.sample()
        process.send_signal(signal.SIGTERM)
        await asyncio.to_thread(process.wait, patience(20))
    sensor.unplug()
    found = stored(tmp_path)
    assert [sequence for sequence, _, _ in found] == list(range(len(sensor.taken_us)))
    # The last one before the restart, and the one after it.
    for (_, event_us, error_us), true_us in zip(found[-2:], sensor.taken_us[-2:], strict=True):
        assert event_us is not None
        assert abs(event_us - true_us) <= error_us
