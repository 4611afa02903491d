"""A front door, a buffer and their survey, without anybody in front or behind."""

import asyncio
from pathlib import Path
from typing import Any

from gateway.buffer.buffer import Buffer
from gateway.clock.gateway_clock import BootClock
from gateway.clock.kernel_clock import boot_id, boottime_us
from gateway.clock.report import ClockView
from gateway.config import running_settings
from gateway.config.config_file import route_table
from gateway.daemon.control import Parts
from gateway.health.survey import Survey
from gateway.intake.front_door import FrontDoor
from gateway.settings import (
    BufferSettings,
    GatewaySettings,
    KafkaSettings,
    ListenerSettings,
    Settings,
    StatusPageSettings,
)
from gateway.uplink.state import UplinkState
from tests.support.buffers import reading_of


class QuietGateway:
    """A gateway that a test moves by hand. Close its buffer at the end."""

    def __init__(self, folder: Path, page: StatusPageSettings | None = None) -> None:
        self.settings = Settings(
            GatewaySettings("barn-1", clock="system"),
            KafkaSettings(("127.0.0.1:1",)),
            BufferSettings(folder / "buffer.db"),
            ListenerSettings(anonymous=True),
            status_page=page,
        )
        self.buffer = Buffer(self.settings.buffer, boot_id(), lambda: BootClock.constant(0, 1_000))
        self.front_door = FrontDoor(
            self.buffer, route_table(self.settings), self.settings.gateway, self.settings.kafka, boottime_us
        )
        self.uplink = UplinkState(up=True)
        self.serial: dict[str, Any] = {}
        self.commands: dict[str, Any] = {}
        self.refused: list[dict[str, object]] = []
        self.survey = Survey(
            self.settings,
            self.front_door,
            self.buffer,
            Parts(
                uplink=lambda: self.uplink,
                clock=lambda: ClockView(synced=True, error_us=1_000, since_us=0),
                settings=lambda: running_settings.of(self.settings),
                mqtt_listener=lambda: {"connected": 1},
                log_ins_refused=lambda: self.refused,
                serial=lambda: self.serial,
                commands=lambda: self.commands,
            ),
        )
        self.buffer.open()

    async def take(self, device: str, payload: str = '{"celsius": 21.5}', ago_s: float = 0) -> None:
        """Store a reading."""
        topic = f"device/{device}/thermo"
        stored: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        reading = reading_of(topic, payload.encode(), boottime_us() - int(ago_s * 1e6))
        self.front_door.take([reading], stored.set_result)
        assert await stored
