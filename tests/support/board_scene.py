"""Real firmware in simavr, a real gateway and a real Kafka: what boards were told, against what stands in Kafka."""

import asyncio
import json
import signal
import subprocess
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import cast

from aiokafka import ConsumerRecord

from demo.kafka_broker import Broker
from gateway.buffer.status import read_status
from sluice_sim.avr import AvrOptions, Board, Network, inhibit_sampling, start_boards, stop_boards
from tests.support.board_audit import (
    Account,
    Known,
    heard_in,
    in_kafka,
    known_of,
    lost_in,
    perhaps_lost_in,
    settle,
)
from tests.support.gateways import SLUICE, consume, free_port, uplink_told, wait_for_port, write_config
from tests.support.waiting import patience

SETTLE_S_MAX = 120.0
"""Most seconds until boards that no longer measure have all their samples acknowledged."""
ARRIVE_S_MAX = 30.0
UNCLOCKLIKE = ("ppm ", "its clock stood still")
"""Faults by which a board's rate jumps as no oscillator's does: what the gateway proves of times is not for those."""


@dataclass
class Scene:
    """Boards, each with its way to one gateway, and the gateway, which may be killed and started again."""

    directory: Path
    kafka: Broker
    name: str
    port: int = field(default_factory=free_port)
    boards: list[Board] = field(default_factory=list)
    _gateway: subprocess.Popen[bytes] | None = None

    @property
    def config(self) -> Path:
        return self.directory / "gateway.toml"

    @property
    def topic(self) -> str:
        return f"{self.name}-thermo"

    async def start_gateway(self) -> None:
        """Start `sluice run`, and wait until its listener accepts."""
        with self.config.with_suffix(".log").open("ab") as log:
            self._gateway = subprocess.Popen([SLUICE, "run", "--config", self.config], stderr=log)  # noqa: ASYNC220
        await asyncio.to_thread(wait_for_port, self.port, self._gateway)

    async def until_direct(self) -> None:
        """Wait until the gateway gives readings to Kafka before the disk."""
        async with asyncio.timeout(patience(SETTLE_S_MAX)):
            while not await asyncio.to_thread(self._is_direct):
                await asyncio.sleep(0.1)

    def _is_direct(self) -> bool:
        with suppress(Exception):
            # The topics of readings and of events.
            return bool(uplink_told(self.directory / "buffer.db")["direct_topics"] > 1)
        return False

    def end_gateway(self, by: signal.Signals = signal.SIGKILL) -> None:
        """End it by `kill -9`, or cleanly by another signal."""
        assert self._gateway is not None
        self._gateway.send_signal(by)
        self._gateway.wait(20)

    async def switch_on(
        self, count: int, prefix: str, *, interval_ms: int = 50, options: AvrOptions | None = None
    ) -> list[Board]:
        """Switch on so many boards more, called `prefix` and a number."""
        chosen = options or AvrOptions()
        boards = await asyncio.to_thread(
            start_boards, self.directory, count, interval_ms=interval_ms, prefix=prefix, options=chosen
        )
        self.boards += boards
        return boards

    def on_mqtt(self) -> AvrOptions:
        """Settings by which boards with a modem find the gateway."""
        return AvrOptions("mqtt", Network(port=self.port))

    async def until_acknowledged(self, count: int) -> None:
        """Wait until each board has had so many acknowledgements, in whichever of its boots."""
        async with asyncio.timeout(patience(SETTLE_S_MAX)):
            while min(len(known(board).acknowledged) for board in self.boards) < count:
                await asyncio.sleep(0.1)

    async def finish(self) -> Account:
        """Stop measuring, let everything arrive, and compare. What is wrong after `ARRIVE_S_MAX` stays wrong."""
        inhibit_sampling(self.boards)
        async with asyncio.timeout(patience(SETTLE_S_MAX)):
            while not all(is_settled(board) for board in self.boards):
                await asyncio.sleep(0.2)
        stop_boards(self.boards)
        loop = asyncio.get_running_loop()
        deadline = loop.time() + patience(ARRIVE_S_MAX)
        # Losses are counted, then reported, each within a second or so.
        while (account := await self.compare()).faults_of_killed or read_status(self.directory / "buffer.db").rows:
            if loop.time() > deadline:
                break
            await asyncio.sleep(0.5)
        return account

    async def compare(self) -> Account:
        """Compare the boards' account with Kafka as it stands."""
        all_known = Known()
        for board in self.boards:
            all_known.add(known(board))
        events = await self.events()
        told = lost_in(events), heard_in(events), perhaps_lost_in(events)
        return settle(all_known, in_kafka(await self.records()), *told)

    async def records(self) -> list[ConsumerRecord]:
        """The readings in Kafka."""
        return await consume(self.kafka.bootstrap, self.topic)

    async def events(self) -> list[ConsumerRecord]:
        """Events of the gateway about itself and its devices."""
        return await consume(self.kafka.bootstrap, f"{self.name}-events")

    def close(self) -> None:
        """End everything."""
        stop_boards([board for board in self.boards if board.process.poll() is None])
        if self._gateway is not None and self._gateway.poll() is None:
            self._gateway.send_signal(signal.SIGTERM)
            self._gateway.wait(20)


@asynccontextmanager
async def scene(directory: Path, kafka: Broker, name: str) -> AsyncIterator[Scene]:
    """A gateway that runs, on a port of its own and with topics of its own, without boards yet."""
    # One broker serves all tests.
    name = f"boards-{name}"
    made = Scene(directory, kafka, name)
    # A board's link ends with a digit; the one that is being made, with .new.
    ports = f'[serial]\nports = ["{directory}/tty-*[0-9]"]\nscan_interval_s = 0.1\n'
    commands = f'[commands]\ndevices = ["*"]\ntopic = "{name}-commands.{{gateway}}"\n'
    write_config(directory, kafka.bootstrap, made.port, name, ports + commands)
    try:
        await made.start_gateway()
        yield made
    finally:
        made.close()


def known(board: Board) -> Known:
    """A board's account, at most half a second old while it runs."""
    if not board.ledger.exists() or not board.samples.exists():
        return Known()
    found = known_of(board.ledger.read_text(), board.samples.read_text())
    # With a modem nothing is proven, but assumed that some readings are quick: test_clock_avr.py judges that.
    has_modem = "--modem" in cast("tuple[str, ...]", board.process.args)
    if has_modem or any(fault["fault"].startswith(UNCLOCKLIKE) for fault in board.faults()):
        found.taken_us.clear()
    return found


def is_settled(board: Board) -> bool:
    """Whether a board holds nothing any more that is not acknowledged. What an earlier boot held went with its RAM."""
    last = json.loads(board.ledger.read_text().splitlines()[-1])
    done = sum(end - first + 1 for kind in ("acknowledged", "dropped") for first, end in last[kind])
    return bool(done == last["taken"])
