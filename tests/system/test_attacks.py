"""Hostile neighbours beside a good sensor, on the real daemon: none of its readings is refused, nor its log-ins.

Nor is a monitor on the box left without an answer.

How long its answers take beside each of them is measured by `make bench-gateway`.
"""

import asyncio
from pathlib import Path

import pytest

from tests.bench.parts_attacks import NO_KAFKA, write_attacked
from tests.bench.processes import gateway
from tests.support.attacks import ATTACKS
from tests.support.good_sensor import attacked
from tests.support.sizes import size

SECONDS = size(2.0, 15.0)
SETTLE_S = 2.0
"""Until the attack has what it wants: a full buffer, all places."""
BUFFER_BYTES_MAX = size(20_000_000, 200_000_000)


@pytest.mark.campaign(seconds=20)
@pytest.mark.parametrize("attack", ATTACKS)
async def test_no_attack_costs_a_good_sensor_a_reading(tmp_path: Path, attack: str) -> None:
    site = write_attacked(tmp_path, NO_KAFKA, "attacked", BUFFER_BYTES_MAX)
    async with gateway(site.config):
        good = site.good(attack)
        await good.begin()
        with attacked(attack, site.target, tmp_path):
            await asyncio.sleep(SETTLE_S)
            await good.measure(SECONDS)
        assert good.refused == 0, (tmp_path / "gateway.log").read_text()[-3000:]
        assert good.unheard == 0, "a monitor on this box is answered"
        assert len(good.answered_ms) > SECONDS
