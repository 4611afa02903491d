"""Wires the way of a reading: ingress → front door → buffer → forwarder → Kafka. Read this file first.

    serial ports ──▶ SerialIngress ─┐                                   ┌──▶ readings' topics
                                    ├──▶ FrontDoor ──▶ Buffer ──▶ Forwarder ──▶ gateway-events
    MQTT sensors ──▶ MqttListener ──┤        ▲ done ◀──┘ (SQLite)       └──▶ gateway-quarantine
    site's broker ─▶ BrokerIngress ─┘

A reading travels with the callback that acknowledges it: `done(True)` is called once a durable copy exists.
Commands go the other way: Kafka ──▶ CommandConsumer ──▶ Downlink ──▶ the ingress of their device.
"""

import asyncio
import gc
import importlib
import random
import secrets
import time
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import structlog

from gateway.buffer.buffer import Buffer
from gateway.clock.floor import CLOCK_MARKS, ClockFloor
from gateway.clock.kernel_clock import ClockWatch, boot_id, boottime_us
from gateway.clock.sensor_clocks import DeviceClocks
from gateway.config import running_settings
from gateway.config.config_file import route_table
from gateway.daemon import control, service_notify
from gateway.daemon.service_notify import service_words
from gateway.host import network_watch
from gateway.host.name_lookup import bound_look_ups
from gateway.host.systemd_notify import notify
from gateway.intake.front_door import BrokerDoor, FrontDoor
from gateway.intake.kept_clocks import keep_clocks, recall_clocks
from gateway.listener.credentials import file_of
from gateway.reading import BufferFileError
from gateway.settings import NO_SOURCE, Settings, StatusPageSettings
from gateway.site_broker.deliveries import BROKER_MARKS, removed_sessions
from gateway.tls.dates import CertificateDates

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from gateway.command import CommandWay
    from gateway.daemon.housekeeping import Housekeeping
    from gateway.downlink.command_consumer import CommandConsumer
    from gateway.health.survey import Survey
    from gateway.listener.listener import MqttListener
    from gateway.page.server import StatusPage
    from gateway.serial_lines.serial_ingress import SerialIngress
    from gateway.site_broker.broker_ingress import BrokerIngress
    from gateway.uplink.forwarder import Forwarder

PAGE_RETRY_S = 60.0
"""Seconds until a status page that failed is started anew."""

log = structlog.get_logger()


async def run(settings: Settings, config: Path | None = None) -> None:
    """Run the gateway until cancelled; `config` is the file of the settings.

    Raises BufferFileError or ListenError if it cannot start.
    """
    bound_look_ups()
    clock = ClockWatch(settings.gateway)
    buffer = Buffer(settings.buffer, boot_id(), clock.now, clock.resume)
    dates = CertificateDates(clock.now, ClockFloor())
    clocks = DeviceClocks(boot_id())
    listening = settings.mqtt_listener
    routes, has_secrets = route_table(settings), listening is not None and not listening.anonymous
    front_door = FrontDoor(
        buffer, routes, settings.gateway, settings.kafka, boottime_us, clocks, has_secrets=has_secrets
    )
    buffer.open()
    _log_opening(settings, buffer)
    waiting = buffer.state.rows
    try:
        await _recall(buffer, front_door, dates)
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(buffer.watch(), name="buffer")
            # An ingress is imported only if it is configured: a gateway without serial lines never loads pyserial.
            listener = _mqtt_listener(settings, front_door, dates)
            commands: dict[str, control.Handler] = {"devices-changed": listener.devices_changed} if listener else {}
            complete = asyncio.Event()
            tasks.create_task(
                control.serve(control.socket_path(settings.buffer.path), commands, complete), name="control"
            )
            if listener:
                tasks.create_task(listener.run(), name="mqtt-listener")
                await listener.listening.wait()
            brokers = await _begin_brokers(tasks, settings, front_door, dates)
            serial = _serial(settings, front_door, clocks)
            if serial:
                tasks.create_task(serial.run(), name="serial")
            # Readings are taken in from here on. The uplink takes as long to load as everything above.
            await asyncio.to_thread(_load_uplink)
            front_door.event(
                "boot", None, version=importlib.metadata.version("sluice"), buffer=buffer.id, rows_waiting=waiting
            )
            forwarder, housekeeping = _uplink(settings, front_door, buffer, clock, dates)
            consumer = _consumer(settings, front_door, buffer, clock, _ways(listener, serial))
            if consumer:
                tasks.create_task(consumer.downlink.run(), name="downlink")
                forwarder.beside = consumer.run
            tasks.create_task(forwarder.run(), name="forwarder")
            tasks.create_task(network_watch.watch(forwarder.network_changed), name="network")
            tasks.create_task(housekeeping.run(), name="housekeeping")
            parts = control.Parts(
                uplink=forwarder.report,
                clock=housekeeping.clock_report.view,
                settings=partial(running_settings.of, settings),
                mqtt_listener=listener.counts.copy if listener else None,
                logins=listener.logins.state if listener else None,
                log_ins_refused=listener.refusals.lately if listener else None,
                mqtt_brokers=(lambda: {broker.name: broker.state() for broker in brokers}) if brokers else None,
                serial=serial.state if serial else None,
                commands=consumer.state if consumer else None,
            )
            commands |= control.handlers(front_door, buffer, parts)
            complete.set()
            _tell(tasks, settings, config, front_door, buffer, parts)
            tasks.create_task(
                service_notify.watch(buffer.answers, lambda: service_words(forwarder.report(), buffer.state)),
                name="service",
            )
    finally:
        notify("STOPPING=1")
        keep_clocks(buffer, clocks, boottime_us())
        await buffer.close()
        log.info("stopped", rows_waiting=buffer.state.rows)


def _log_opening(settings: Settings, buffer: Buffer) -> None:
    log.info("buffer is open", path=str(settings.buffer.path), rows_waiting=buffer.state.rows, lane=buffer.lane.name)
    if not settings.has_source:
        log.warning(NO_SOURCE)


def _load_uplink() -> None:
    """Load the uplink on a thread, so that readings are acknowledged meanwhile."""
    for module in ("importlib.metadata", "gateway.daemon.housekeeping", "gateway.health.state_watch"):
        importlib.import_module(module)
    gc.freeze()


def _uplink(
    settings: Settings, front_door: FrontDoor, buffer: Buffer, clock: ClockWatch, dates: CertificateDates
) -> "tuple[Forwarder, Housekeeping]":
    from gateway.daemon.housekeeping import Housekeeping, LaneTurns  # noqa: PLC0415
    from gateway.uplink.forwarder import Forwarder  # noqa: PLC0415
    from gateway.uplink.lane_policy import LanePolicy  # noqa: PLC0415

    lanes = LaneTurns(front_door, buffer, LanePolicy(settings.kafka, time.monotonic()))
    forwarder = Forwarder(buffer, front_door, settings.gateway, settings.kafka, clock.now, lanes.session_begins, dates)
    return forwarder, Housekeeping(front_door, buffer, forwarder, clock, lanes, dates.floor)


def _ways(listener: "MqttListener | None", serial: "SerialIngress | None") -> "list[CommandWay]":
    """The ways of commands to devices. A broker of the site has none."""
    ways: list[CommandWay] = []
    if listener:
        ways.append(listener.shared.cloud)
    if serial:
        ways.append(serial.commands)
    return ways


def _consumer(
    settings: Settings, front_door: FrontDoor, buffer: Buffer, clock: ClockWatch, ways: "Sequence[CommandWay]"
) -> "CommandConsumer | None":
    if settings.commands is None:
        return None
    from gateway.downlink.command_consumer import CommandConsumer  # noqa: PLC0415
    from gateway.downlink.downlink import Downlink  # noqa: PLC0415

    downlink = Downlink(settings.commands, settings.gateway, front_door, buffer, clock.now, ways)
    return CommandConsumer(downlink, settings.gateway.id, settings.kafka)


async def _recall(buffer: Buffer, front_door: FrontDoor, dates: CertificateDates) -> None:
    """Load what the buffer file keeps of earlier starts."""
    with suppress(BufferFileError):  # if the disk fails now, Housekeeping tries again
        # Before any connection, so that nobody with an expired certificate is trusted.
        dates.floor.recall(await buffer.run(lambda file: file.marks(CLOCK_MARKS)))
        await buffer.transact(lambda file: file.report_lanes("start", front_door.events.lane_entry))
    await recall_clocks(buffer, front_door.clocks)


def _mqtt_listener(settings: Settings, front_door: FrontDoor, dates: CertificateDates) -> "MqttListener | None":
    if settings.mqtt_listener is None:
        return None
    from gateway.listener.listener import MqttListener  # noqa: PLC0415

    checks, devices_file = front_door.checks, file_of(settings)
    return MqttListener(settings.mqtt_listener, front_door, boottime_us, dates, checks, devices_file=devices_file)


async def _begin_brokers(
    tasks: asyncio.TaskGroup, settings: Settings, front_door: FrontDoor, dates: CertificateDates
) -> "list[BrokerIngress]":
    await _forget_removed_brokers(settings, front_door)
    if not settings.mqtt_brokers:
        return []
    from gateway.site_broker.broker_ingress import BrokerIngress  # noqa: PLC0415

    brokers = [
        BrokerIngress(of_broker, settings.gateway.id, BrokerDoor(front_door), boottime_us, random.random, dates)
        for of_broker in settings.mqtt_brokers
    ]
    for broker in brokers:
        tasks.create_task(broker.run(), name=f"mqtt-broker {broker.name}")
    return brokers


async def _forget_removed_brokers(settings: Settings, front_door: FrontDoor) -> None:
    """Forget the sessions of brokers that were removed from the settings."""
    strays = removed_sessions(await front_door.marks(BROKER_MARKS), settings.mqtt_brokers, settings.gateway.id)
    if strays:
        front_door.take((), lambda _: None, strays)


def _serial(settings: Settings, front_door: FrontDoor, clocks: DeviceClocks) -> "SerialIngress | None":
    if settings.serial is None:
        return None
    from gateway.serial_lines.serial_ingress import SerialIngress  # noqa: PLC0415

    return SerialIngress(settings.serial, front_door, boottime_us, lambda: secrets.randbits(32), clocks)


async def _keep_up(page: "Callable[[], StatusPage]") -> None:
    """Serve the status page until cancelled. Whatever it fails by, even by its own files, readings are taken."""
    while True:
        try:
            await page().run()
        except Exception:
            log.exception(
                "the status page has failed, and is begun anew before long; readings are taken and forwarded all the "
                "same, and sluice status tells what it would show",
                again_in_s=PAGE_RETRY_S,
            )
        await asyncio.sleep(PAGE_RETRY_S)


def _tell(  # noqa: PLR0913, PLR0917 - the parts of which is told
    tasks: asyncio.TaskGroup,
    settings: Settings,
    config: Path | None,
    front_door: FrontDoor,
    buffer: Buffer,
    parts: control.Parts,
) -> None:
    """Tell how the gateway is: by the event `state`, and on the status page."""
    from gateway.health.state_watch import StateWatch  # noqa: PLC0415
    from gateway.health.survey import Survey  # noqa: PLC0415

    file = None if config is None else running_settings.SettingsFile(config, settings)
    survey = Survey(settings, front_door, buffer, parts, file)
    tasks.create_task(StateWatch(survey).run(), name="state")
    if settings.status_page is not None:
        tasks.create_task(_keep_up(partial(_status_page, settings.status_page, survey)), name="status-page")


def _status_page(section: StatusPageSettings, survey: "Survey") -> "StatusPage":
    from gateway.page.server import StatusPage  # noqa: PLC0415
    from gateway.page.view import StatusView  # noqa: PLC0415

    return StatusPage(section, StatusView(survey))
