"""The event `state` of a real daemon: at each start, on a change, in order, and small on the wire."""

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
from aiokafka import ConsumerRecord

from demo.kafka_broker import Broker
from gateway.record_contract import GATEWAY_TYPES
from tests.support.gateways import consume, daemon, header, publish, write_config
from tests.support.waiting import patience

pytestmark = pytest.mark.kafka
BYTES_MAX = 1_500
"""Bytes of key, headers and value of a usual state."""


async def states(bootstrap: str, topic: str, count: int) -> list[ConsumerRecord]:
    """The states in a topic, once there are so many."""
    async with asyncio.timeout(patience(120)):
        while True:
            found = [
                record
                for record in await consume(bootstrap, topic)
                if header(record, "ce_type") == f"{GATEWAY_TYPES}state"
            ]
            if len(found) >= count:
                return found
            await asyncio.sleep(0.5)


def size_of(record: ConsumerRecord) -> int:
    headers = sum(len(name) + len(value) for name, value in record.headers)
    return len(record.key) + len(record.value) + headers


def order_of(record: ConsumerRecord) -> tuple[int, int]:
    return json.loads(record.value)["lane_number"], int(header(record, "ce_boottime"))


async def test_each_start_tells_the_state_of_the_box(kafka: Broker, tmp_path: Path, port: int) -> None:
    config = write_config(tmp_path, kafka.bootstrap, port, "state")
    told: list[dict[str, Any]] = []
    for count in (1, 2):
        with daemon(config, port):
            publish(port, "device/42/thermo", '{"celsius": 21.5}')
            found = await states(kafka.bootstrap, "state-events", count)
        assert len(found) == count, "one at each start"
        told = [json.loads(record.value) for record in found]
    first, second = told
    assert first["clock"]["source"] == "system"
    assert second["devices"]["known"] == 1
    assert first["settings"] == second["settings"]
    assert first["disk"]["free_bytes"] > 0
    assert first["memory"]["own_bytes"] > 0
    assert [order_of(record) for record in found] == sorted(order_of(record) for record in found)
    assert second["lane_number"] > first["lane_number"]
    assert max(map(size_of, found)) <= BYTES_MAX


@pytest.mark.long(seconds=75)
async def test_a_change_is_told_within_two_minutes(kafka: Broker, tmp_path: Path, port: int) -> None:
    config = write_config(tmp_path, kafka.bootstrap, port, "changed")
    with daemon(config, port):
        await states(kafka.bootstrap, "changed-events", 1)
        config.write_text(config.read_text().replace("heartbeat_interval_s = 0.5", "heartbeat_interval_s = 0.6"))
        *_, last = await states(kafka.bootstrap, "changed-events", 2)
    assert "settings-changed" in json.loads(last.value)["conditions"]["warn"]
