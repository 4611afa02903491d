"""Sensors of many gateways in one process: `python -m demo.fleet_sensors SENSORS LEDGERS PORT …`.

Each port has so many sensors and, in the folder of ledgers, PORT.jsonl. The sums are printed as JSON once a second.
"""

import asyncio
import json
import signal
import sys
from functools import partial
from pathlib import Path

from sluice_sim.fleet import FleetOptions, Progress, run_fleet

INTERVAL_MS = 1_000


async def run(sensors: int, ledgers: Path, ports: list[int]) -> None:
    """Measure until SIGTERM, then wait for what is not acknowledged."""
    stopping = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stopping.set)
    last: dict[int, Progress] = {}

    async def tell() -> None:
        while True:
            await asyncio.sleep(1)
            acknowledged = sum(each.acknowledged for each in last.values())
            print(json.dumps({"sensors": sensors * len(ports), "acknowledged": acknowledged}), flush=True)

    teller = asyncio.create_task(tell())
    async with asyncio.TaskGroup() as fleets:
        for port in ports:
            options = FleetOptions("127.0.0.1", port, sensors, INTERVAL_MS, ledger=ledgers / f"{port}.jsonl")
            fleets.create_task(run_fleet(options, stopping, partial(last.__setitem__, port)))
    teller.cancel()


if __name__ == "__main__":
    asyncio.run(run(int(sys.argv[1]), Path(sys.argv[2]), [int(port) for port in sys.argv[3:]]))
