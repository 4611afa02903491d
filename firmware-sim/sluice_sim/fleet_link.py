"""A sensor's connection and its faults: connects, sends, notices that the gateway is gone, and connects again."""

import asyncio
import contextlib
import os
import random
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Final

from sluice_sim.fleet_faults import Fault, FaultKind, boot_of, tick_ms
from sluice_sim.fleet_ledger import value_of
from sluice_sim.mqtt_sensor import DISCONNECT, KEEP_ALIVE_S, PINGREQ, LinkError, MqttSensor

CONNECT_TIMEOUT_S: Final = 5.0
BACKOFF_S_MIN: Final = 0.25
BACKOFF_S_MAX: Final = 5.0
SILENCE_S_MAX: Final = 20.0
"""Seconds that a sensor waits for a PUBACK or PINGRESP before it takes the connection for dead."""
ABANDONED_S: Final = 2.0 * KEEP_ALIVE_S
"""Seconds that a connection without its sensor stays open. The gateway ends it after 1.5 times the keep-alive."""
Address = tuple[str, int]
"""Host and port of a gateway."""


class _Connection(asyncio.Protocol):
    """One connection of a link. If the sensor vanishes without closing it, the link leaves it open."""

    __slots__ = ("closed", "link", "transport")

    def __init__(self, link: "SensorLink") -> None:
        self.link: SensorLink | None = link
        self.transport: asyncio.Transport | None = None
        self.closed = asyncio.Event()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)  # noqa: S101 - what create_connection makes
        self.transport = transport
        if self.link is not None:
            self.link.begin(self, transport)

    def data_received(self, data: bytes) -> None:
        if self.link is not None:
            self.link.receive(data)

    def pause_writing(self) -> None:
        if self.link is not None:
            self.link.sensor.can_write = False

    def resume_writing(self) -> None:
        if self.link is not None:
            self.link.sensor.can_write = True
            self.link.send(self.link.sensor.go_on())

    def connection_lost(self, exc: Exception | None) -> None:
        if self.link is not None:
            self.link.end("the gateway closed the connection" if exc is None else str(exc))
        self.closed.set()


class SensorLink:
    """A sensor, its connection, and its faults."""

    def __init__(  # noqa: PLR0913, PLR0917 - what makes a sensor one of a fleet
        self,
        sensor: MqttSensor,
        gateways: Sequence[Address],
        seed: int,
        faults: Iterator[Fault],
        struck: Counter[str],
        rng: random.Random,
        taken: Callable[[str, str, int, float], None],
    ) -> None:
        self.sensor = sensor
        self.connections = 0
        self.last_error: str | None = None
        self.is_off = False
        """Whether the sensor has no power and takes no samples."""
        self._gateways = gateways
        self._at = 0
        """Position in `gateways` of the gateway to connect to."""
        self._seed = seed
        self._faults = faults
        self._struck = struck
        self._rng = rng
        self._taken = taken
        """Called for each sample that is taken, with device, boot, sequence and monotonic time."""
        self._started_s = asyncio.get_running_loop().time()
        self._connection: _Connection | None = None
        self._abandoned: list[asyncio.Transport] = []
        self._timer: asyncio.TimerHandle | None = None
        self._fault_timer: asyncio.TimerHandle | None = None
        self._mend: Callable[[], None] | None = None
        """Ends the present fault."""
        self._may_connect = asyncio.Event()
        self._may_connect.set()
        self._heard = False
        self._pinged = False
        self._reads = True

    def sample(self) -> None:
        """Take a sample, unless there is no power."""
        if self.is_off:
            return
        sensor = self.sensor
        boot = sensor.boot
        celsius = value_of(self._seed, sensor.name, boot.boot, boot.taken)
        now_s = asyncio.get_running_loop().time()
        self._taken(sensor.name, boot.boot, boot.taken, now_s)
        elapsed_s = now_s - self._started_s
        self.send(sensor.sample(celsius, tick_ms(elapsed_s, sensor.traits.drift_ppm)))

    async def keep_connected(self, delay_s: float) -> None:
        """Connect after `delay_s`, and again whenever the connection is gone, with jittered back-off."""
        loop = asyncio.get_running_loop()
        backoff_s = BACKOFF_S_MIN
        await asyncio.sleep(delay_s)
        while True:
            await self._may_connect.wait()
            host, port = self._gateways[self._at]
            connection = self._connection = _Connection(self)
            try:
                async with asyncio.timeout(CONNECT_TIMEOUT_S):
                    await loop.create_connection(lambda made=connection: made, host, port)  # type: ignore[misc]
            except TimeoutError:
                self.last_error = f"no answer from {host}:{port} within {CONNECT_TIMEOUT_S:.0f} s"
            except OSError as error:
                # asyncio's own text repeats the address. An unknown name has no errno of the system.
                number = error.errno or 0
                why = os.strerror(number) if number > 0 else error.strerror or error
                self.last_error = f"{host}:{port}: {why}"
            else:
                before = self.connections
                await connection.closed.wait()
                if self.connections > before:
                    backoff_s = BACKOFF_S_MIN
            await asyncio.sleep(self._rng.uniform(0.5, 1.0) * backoff_s)
            backoff_s = min(2 * backoff_s, BACKOFF_S_MAX)

    async def disconnect(self) -> None:
        """End the present connection with DISCONNECT, as the standard wants it."""
        connection = self._connection
        if connection is None or connection.transport is None:
            return
        self.send(DISCONNECT)
        self.sensor.disconnected()
        self._stop_watching()
        connection.transport.close()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(1.0):
                await connection.closed.wait()
        self.cut()

    def cut(self) -> None:
        """End the present connection at once."""
        if self._connection is not None and self._connection.transport is not None:
            self._connection.transport.abort()

    def close(self) -> None:
        """End every connection at once, even those that the sensor left without closing them."""
        self._stop_watching()
        if self._fault_timer is not None:
            self._fault_timer.cancel()
        self.cut()
        for transport in self._abandoned:
            transport.abort()

    # --- the connection -------------------------------------------------------------------------------------

    def begin(self, connection: _Connection, transport: asyncio.Transport) -> None:
        """Begin a session on a new connection."""
        if connection is not self._connection or not self._may_connect.is_set():
            transport.abort()
            return
        self._heard = self._pinged = False
        self._reads = True
        transport.write(self.sensor.connect())
        self._watch_silence()

    def receive(self, data: bytes) -> None:
        """Take in bytes from the gateway."""
        self._heard = True
        was_accepted = self.sensor.accepted
        try:
            answer = self.sensor.receive(data)
        except LinkError as error:
            self._give_up(str(error))
            return
        if self.sensor.accepted and not was_accepted:
            self.connections += 1
            self.last_error = None
        self.send(answer)

    def end(self, why: str | None = None) -> None:
        """Record that the present connection is gone. Without a reason, the sensor itself left."""
        if self.sensor.accepted:
            self.last_error = why
        self.sensor.disconnected()
        self._stop_watching()

    def send(self, packets: bytes) -> None:
        """Write to the present connection."""
        transport = None if self._connection is None else self._connection.transport
        if packets and transport is not None and not transport.is_closing():
            transport.write(packets)

    def _watch_silence(self) -> None:
        self._stop_watching()
        self._timer = asyncio.get_running_loop().call_later(SILENCE_S_MAX, self._check_silence)

    def _stop_watching(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _check_silence(self) -> None:
        """Ask a silent gateway for a sign of life. If it owes an answer, leave it."""
        owes = self._pinged or self.sensor.unfinished or not self.sensor.accepted
        if not self._heard and owes and self._reads:
            self._give_up(f"nothing from the gateway for {SILENCE_S_MAX:.0f} s")
            return
        self._pinged = not self._heard
        if self._pinged:
            self.send(PINGREQ)
        self._heard = False
        self._watch_silence()

    def _give_up(self, why: str) -> None:
        self.last_error = why
        self.sensor.disconnected()
        self.cut()

    # --- faults ---------------------------------------------------------------------------------------------

    def expect_faults(self, began_s: float, scale: float) -> None:
        """Let the next fault come at its time, and all later ones.

        The faults' own time is 0 at `began_s` of the event loop's clock, and runs `scale` times as fast.
        """
        loop = asyncio.get_running_loop()
        fault = next(self._faults, None)
        if fault is None:
            return

        def strike() -> None:
            self._struck[fault.kind.value] += 1
            self._mend = self._strike(fault.kind)
            self._fault_timer = loop.call_at(began_s + fault.ends_s / scale, mend)

        def mend() -> None:
            self._end_fault()
            self.expect_faults(began_s, scale)

        self._fault_timer = loop.call_at(began_s + fault.begins_s / scale, strike)

    def settle(self) -> None:
        """Let no more faults come, and end the present one, so that held samples can be sent."""
        if self._fault_timer is not None:
            self._fault_timer.cancel()
        self._end_fault()

    def _end_fault(self) -> None:
        mend, self._mend = self._mend, None
        if mend is not None:
            mend()

    def _strike(self, kind: FaultKind) -> Callable[[], None]:
        """Let a fault begin; return the function that ends it."""
        if kind is FaultKind.ROAM:
            self._at = (self._at + 1) % len(self._gateways)
            self._leave()
            # A connection that is being made leads to the former gateway, and must not be used.
            self._connection = None
            self.sensor.roam()
            return lambda: None
        if kind is FaultKind.SLOW_READ:
            return self._stop_reading()
        self._may_connect.clear()
        if kind is FaultKind.DROP_OUT:
            self._leave()
            return self._may_connect.set
        self._abandon()
        if kind is FaultKind.HALF_OPEN:
            return self._may_connect.set
        self.is_off = True
        return self._power_on

    def _leave(self) -> None:
        self.end()
        self.cut()

    def _power_on(self) -> None:
        self.sensor.reboot(boot_of(self._seed, self.sensor.name, len(self.sensor.boots) + 1))
        self._started_s = asyncio.get_running_loop().time()
        self.is_off = False
        self._may_connect.set()

    def _stop_reading(self) -> Callable[[], None]:
        connection = self._connection
        if connection is None or connection.transport is None or not self.sensor.accepted:
            return lambda: None
        transport = connection.transport
        transport.pause_reading()
        self._reads = False

        def read_again() -> None:
            if self._connection is connection and not transport.is_closing():
                self._reads = True
                transport.resume_reading()

        return read_again

    def _abandon(self) -> None:
        """Vanish: the connection stays open, but nobody reads from it or writes to it any more."""
        self.end()
        connection, self._connection = self._connection, None
        if connection is None or connection.transport is None or connection.transport.is_closing():
            return
        connection.link = None
        transport = connection.transport
        if transport.is_reading():
            transport.pause_reading()
        self._abandoned.append(transport)
        asyncio.get_running_loop().call_later(ABANDONED_S, self._close_abandoned, transport)
        connection.closed.set()

    def _close_abandoned(self, transport: asyncio.Transport) -> None:
        transport.abort()
        self._abandoned.remove(transport)
