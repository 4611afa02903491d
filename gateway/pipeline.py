"""The way of a reading, wired: ingress → front door → buffer → forwarder → Kafka. Read this file first.

    serial ports ──▶ SerialIngress ─┐                                   ┌──▶ readings' topics
                                    ├──▶ FrontDoor ──▶ Buffer ──▶ Forwarder ──▶ gateway-events
    MQTT sensors ──▶ MqttListener ──┘        ▲ done ◀──┘ (SQLite)       └──▶ gateway-quarantine

An item travels with the callback that acknowledges it: `done(True)` comes back after the commit is on disk.
"""

import asyncio
import secrets
from collections import Counter
from importlib.metadata import version

import structlog

from gateway.buffer import Buffer
from gateway.clock_gateway import ClockWatch, boot_id, boottime_us
from gateway.config_file import route_table
from gateway.forward_kafka import Forwarder
from gateway.intake import FrontDoor
from gateway.settings import Settings

HOUSEKEEPING_INTERVAL_S = 1.0

log = structlog.get_logger()


async def run(settings: Settings) -> None:
    """Run the gateway until cancelled. Raises BufferFileError or ListenError where it cannot start."""
    clock = ClockWatch(settings.gateway.clock, int(settings.gateway.system_clock_error_ms * 1000))
    buffer = Buffer(settings.buffer, boot_id(), clock.now)
    front_door = FrontDoor(buffer, route_table(settings), settings.gateway, settings.kafka, boottime_us)
    forwarder = Forwarder(buffer, front_door, settings.gateway, settings.kafka, clock.now)
    buffer.open()
    log.info("buffer is open", path=str(settings.buffer.path), rows_waiting=buffer.state.rows, lane=buffer.lane.name)
    front_door.event("boot", None, version=version("sluice"), buffer=buffer.id, rows_waiting=buffer.state.rows)
    front_door.event("lane-opened", None, lane=buffer.lane.name, buffer=buffer.id)
    try:
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(forwarder.run(), name="forwarder")
            tasks.create_task(_housekeeping(front_door, buffer, clock), name="housekeeping")
            # An ingress is imported where it is configured: a gateway without serial lines never loads pyserial.
            if settings.mqtt_listener is not None:
                from gateway.ingress_mqtt_listener import MqttListener  # noqa: PLC0415

                listener = MqttListener(settings.mqtt_listener, front_door, boottime_us)
                tasks.create_task(listener.run(), name="mqtt-listener")
            if settings.serial is not None:
                from gateway.ingress_serial import SerialIngress  # noqa: PLC0415

                serial = SerialIngress(settings.serial, front_door, boottime_us, lambda: secrets.randbits(32))
                tasks.create_task(serial.run(), name="serial")
    finally:
        front_door.flush_losses()
        await buffer.close()
        log.info("stopped", rows_waiting=buffer.state.rows)


async def _housekeeping(front_door: FrontDoor, buffer: Buffer, clock: ClockWatch) -> None:
    """Flush loss records, watch the wall clock, tell of replaced files: small things, once a second."""
    overflow = 0
    said: Counter[str] = Counter()
    lane = buffer.lane
    while True:
        await asyncio.sleep(HOUSEKEEPING_INTERVAL_S)
        before, now = clock.look()
        if now.synced and not before.synced:
            log.info("the wall clock is synced", error_us=now.error_us)
            front_door.event("clock-learnt", None, offset_us=now.offset_us, error_us=now.error_us)
        if buffer.counts["quarantine-overflow"] > overflow:
            front_door.lost(None, "quarantine-overflow", buffer.counts["quarantine-overflow"] - overflow)
            overflow = buffer.counts["quarantine-overflow"]
        for reason, count in (front_door.quarantined - said).items():
            log.warning("input quarantined: no route could take it", reason=reason, count=count)
        said = front_door.quarantined.copy()
        while buffer.set_aside:
            aside = buffer.set_aside.popleft()
            front_door.event("buffer-set-aside", None, file=aside.name, buffer=aside.buffer_id, rows=aside.rows)
            if aside.rows:
                front_door.lost(None, "buffer-set-aside", aside.rows)
        if buffer.lane != lane:
            lane = buffer.lane
            front_door.event("lane-opened", None, lane=lane.name, buffer=buffer.id)
        front_door.flush_losses()
