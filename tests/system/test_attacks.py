"""Hostile neighbours beside a good sensor, on the real daemon: none of its readings is refused, nor its log-ins.

How long its answers take beside each of them is measured by `make bench-gateway`.
"""

import asyncio
from pathlib import Path

import pytest

from tests.bench.processes import gateway, secrets_path, write_gateway
from tests.support.attacks import ATTACKS, CBOR_TOPIC, STREAMS
from tests.support.good_sensor import Good, attacked
from tests.support.sizes import size

ROUTES = f"""
[[routes]]
topic = "{CBOR_TOPIC}/{{device}}/{{stream}}"
kafka = "attacked"
content_type = "application/cbor"
identity = "cbor"

[[routes]]
topic = "{STREAMS}/{{device}}/{{stream}}"
kafka = "attacked-{{stream}}"
identity = "json"
"""
SECONDS = size(2.0, 15.0)
SETTLE_S = 2.0
"""Until the attack has what it wants: a full buffer, all places."""
BUFFER_BYTES_MAX = size(20_000_000, 200_000_000)
NO_KAFKA = "127.0.0.1:9"


@pytest.mark.campaign(seconds=20)
@pytest.mark.parametrize("attack", ATTACKS)
async def test_no_attack_costs_a_good_sensor_a_reading(tmp_path: Path, attack: str) -> None:
    config = write_gateway(tmp_path, NO_KAFKA, "attacked", devices=2, bytes_max=BUFFER_BYTES_MAX, extra=ROUTES)
    secret, stolen = secrets_path(tmp_path).read_text().split()
    async with gateway(config) as sluice:
        good = Good(sluice.port, secret)
        with attacked(attack, sluice.port, stolen, tmp_path):
            await asyncio.sleep(SETTLE_S)
            await good.measure(SECONDS)
        assert good.refused == 0, (tmp_path / "gateway.log").read_text()[-3000:]
        assert len(good.answered_ms) > SECONDS
