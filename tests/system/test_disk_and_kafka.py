"""A disk that dies while Kafka answers, Kafka that dies while the disk is dead, and both come back in either order."""

import asyncio
import json
import random
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Literal

import pytest

from demo.kafka_broker import kafka_broker
from demo.uplink import Uplink
from tests.support.gateways import consume, daemon, uplink_told, write_config
from tests.support.kill_loop import KINDS, LedgerSensor, serve
from tests.support.sizes import SEED
from tests.support.waiting import patience
from tests.system.test_disk_faults import SYNCS, WRITES, failing, identities, logged, needs_strace

CALM_S = 2.0
"""Time for acknowledgements without a copy, if there are any."""
Reading = tuple[str, int]
"""Device and number."""


async def reached(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(patience(40)):
        while not condition():
            await asyncio.sleep(0.05)


async def in_kafka(bootstrap: str) -> set[Reading]:
    records = await consume(bootstrap, *(f"both-{kind}" for kind in KINDS))
    return {(record.key.decode(), int(json.loads(record.value)["n"])) for record in records}


@needs_strace
@pytest.mark.kafka
@pytest.mark.parametrize("first_back", ["kafka", "disk"])
async def test_whichever_comes_back_first_has_what_is_acknowledged(
    tmp_path: Path, port: int, first_back: Literal["kafka", "disk"]
) -> None:
    sensors = [LedgerSensor(kind, kind) for kind in KINDS]
    by_kind = {sensor.kind: sensor for sensor in sensors}
    chance = random.Random(SEED)  # noqa: S311 - repeatable is the point
    finishing = asyncio.Event()

    def acknowledged() -> set[Reading]:
        return {(sensor.device, number) for sensor in sensors for number in sensor.acknowledged}

    def is_direct() -> bool:
        with suppress(OSError):
            return bool(uplink_told(tmp_path / "buffer.db")["direct_topics"] >= len(KINDS))
        return False

    async def grows() -> None:
        before = len(by_kind["qos1-sequence"].acknowledged)
        await reached(lambda: len(by_kind["qos1-sequence"].acknowledged) > before + 50)

    async with Uplink() as uplink:
        with kafka_broker(tmp_path / "kafka", gateway_port=uplink.port) as broker:
            assert broker.gateway_listener_port is not None
            uplink.open(broker.gateway_listener_port)
            config = write_config(tmp_path, f"127.0.0.1:{uplink.port}", port, "both")
            with daemon(config, port) as process:
                async with asyncio.TaskGroup() as tasks:
                    for sensor in sensors:
                        tasks.create_task(serve(sensor, port, chance, finishing))
                    await reached(is_direct)
                    with failing(process, f"{WRITES},{SYNCS}", "EIO"):
                        await logged(config, "buffer cannot be read or written")
                        await grows()  # Kafka is enough
                        await uplink.cut()
                        await asyncio.sleep(CALM_S)
                        while_both_are_away = acknowledged()
                        on_disk = set(identities(tmp_path / "buffer.db").values())
                        assert while_both_are_away <= await in_kafka(broker.bootstrap) | on_disk
                        if first_back == "kafka":
                            await uplink.restore()
                            await grows()
                    if first_back == "disk":
                        await grows()
                        await uplink.restore()
                    await grows()
                    finishing.set()
                    await reached(lambda: not any(sensor.in_flight for sensor in sensors))
                await reached(lambda: uplink_told(tmp_path / "buffer.db")["up"])
            with daemon(config, port):
                # What the end has left to the disk goes out too.
                async with asyncio.timeout(patience(40)):
                    while not acknowledged() <= await in_kafka(broker.bootstrap):
                        await asyncio.sleep(0.2)
