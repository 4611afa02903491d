"""Shared by the serial bench's parts: a gateway with serial ports, and the comparison of samples with Kafka."""

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from sluice_sim.avr import Network
from tests.bench.context import Bench, say
from tests.bench.kafka_watch import KafkaTopic
from tests.bench.processes import Measured, NotMeasuredError, gateway, secrets_path, write_gateway
from tests.support.board_audit import EXAMPLES_MAX, Account, Known, heard_in, in_kafka, lost_in, settle
from tests.support.gateways import consume

BAUD = 38_400
LINE_BYTES_PER_S = BAUD // 10
"""8N1: ten bits a byte."""
FRAME_BYTES_BESIDE_PAYLOAD = 24
"""Bytes of a DATA frame beside its payload: 18 of header, 4 of CRC, 1 of COBS (up to 254 bytes), the zero at its
end."""
ARRIVED_S_MAX = 15.0
"""From the last acknowledgement until the last reading is in Kafka."""


@dataclass(frozen=True, slots=True)
class Site:
    """A gateway, with the folder where its ports are and the topic where its readings go."""

    sluice: Measured
    directory: Path
    topic: str
    bootstrap: str

    @property
    def ports(self) -> Path:
        """Folder in which the gateway looks for ports."""
        return self.directory / "ports"

    def network(self, device: str) -> Network:
        """Settings for a board of the MQTT build. The listener knows the devices `d000` to `d099`."""
        secrets = secrets_path(self.directory).read_text().split()
        return Network(port=self.sluice.port, secret=secrets[int(device.removeprefix("d"))])

    async def settle(self, known: Known) -> Account:
        """Compare the sensors' samples with Kafka, once all are there or no more can come.

        Raises NotMeasuredError where nothing was acknowledged.
        """
        if not known.acknowledged:
            raise NotMeasuredError("nothing was acknowledged: the link between board and gateway does not work")
        end = time.monotonic() + ARRIVED_S_MAX
        while True:
            readings = in_kafka(await consume(self.bootstrap, self.topic))
            events = await consume(self.bootstrap, f"{self.topic}-events")
            account = settle(known, readings, lost_in(events), heard_in(events))
            if not account.missing or time.monotonic() > end:
                return account
            await asyncio.sleep(0.5)


def tell_faults(account: Account) -> None:
    """Examples of missing, wrong, doubled and made-up readings."""
    for kind in ("missing", "wrong", "twice", "made_up"):
        for fault in getattr(account, kind)[:EXAMPLES_MAX]:
            say(f"  {kind}: {fault}")


@asynccontextmanager
async def serial_site(bench: Bench, name: str) -> AsyncIterator[Site]:
    """A gateway that serves every port `tty-*` of a folder, for the length of a block; Kafka topic `NAME-thermo`."""
    directory = bench.directory / name
    (directory / "ports").mkdir(parents=True)
    topic = f"{name.replace('_', '-').replace('/', '-')}-thermo"
    section = f'\n[serial]\nports = ["{directory}/ports/tty-*"]\nbaud = {BAUD}\nscan_interval_s = 0.2\n'
    config = write_gateway(directory, bench.kafka.bootstrap, topic, extra=section)
    async with KafkaTopic(bench.kafka.bootstrap, topic), gateway(config) as sluice:
        yield Site(sluice, directory, topic, bench.kafka.bootstrap)
