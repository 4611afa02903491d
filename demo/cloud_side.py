"""The cloud side of a demo: how far Kafka's topics and the ingest job's tables reach."""

import asyncio
import json
import os
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from aiokafka.errors import KafkaError

from demo.children import COMMANDS, INSTALL, Child, Children, DemoError
from demo.kafka_broker import OwnBroker
from demo.kafka_ends import KafkaEnds
from demo.progress import Figures

STREAMS = Path(__file__).parent / "streams.toml"
"""Declarations with windows of 10 s: a run would fill only two of the usual minute."""
KAFKA_SILENT_S_MAX = 20.0
"""Seconds that Kafka may leave a look without an answer: a machine short of CPU does not end the demo."""
STANDSTILL_S_MAX = 180.0
"""Seconds in which something must move. If the gateway has just started, a reading may wait up to a minute for its
sensor's clock; and on a busy machine Spark may write nothing for two minutes."""


class JsonLines:
    """Reads the lines that a program adds to a file of JSON lines, as they come."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._offset = 0

    def new(self) -> list[dict[str, object]]:
        """Return the whole lines since the last call that are JSON objects."""
        if not self._path.exists():
            return []
        with self._path.open("rb") as file:
            file.seek(self._offset)
            whole, newline, _ = file.read().rpartition(b"\n")
        self._offset += len(whole) + len(newline)
        objects = (json.loads(line) for line in whole.splitlines() if line.startswith(b"{"))
        return [each for each in objects if isinstance(each, dict)]


@dataclass(slots=True)
class CloudSide:
    """Kafka and the ingest job, as last seen."""

    broker: OwnBroker
    kafka: KafkaEnds
    warehouse: Path
    logs: Path
    figures: Figures
    advice: str
    """What to do on a machine that is too slow."""
    ends: dict[tuple[str, int], int] = field(default_factory=dict)
    """Kafka's end offsets, by topic and partition."""
    ingested: dict[tuple[str, int], int] = field(default_factory=dict)
    """Offsets that the ingest job last reported, by topic and partition."""
    looks: int = 0
    """Looks of a demo that Kafka has answered. Whoever looks counts them, once a look is whole."""
    silent_since_s: float | None = None
    """Monotonic time at which Kafka first did not answer; None once it has answered again."""
    _lines: JsonLines = field(init=False)

    def __post_init__(self) -> None:
        """Begin to read what the ingest job says."""
        self._lines = JsonLines(self.logs / "ingest.jsonl")

    def start_ingest(self, children: Children) -> Child:
        """Start the ingest job."""
        command = (COMMANDS / "sluice-cloud", "ingest", "--bootstrap", self.broker.bootstrap)
        return children.start(
            "ingest",
            (*command, "--warehouse", self.warehouse, "--streams", STREAMS, "--json"),
            INSTALL,
            output=self.logs / "ingest.jsonl",
        )

    async def look(self) -> bool:
        """Ask Kafka, read what the ingest job says, and renew the figures. Returns whether Kafka answered.

        Raises:
            DemoError: it has not answered for `KAFKA_SILENT_S_MAX`.
        """
        answered = await self._ask_kafka()
        for line in self._lines.new():
            self._note_batch(line)
        self.figures.in_kafka = sum(self.ends.values())
        return answered

    def is_ingested(self) -> bool:
        """Whether the ingest job has reported every offset that Kafka has. If all buffers are empty, no more come."""
        return bool(self.ends) and all(self.ingested.get(place, 0) >= end for place, end in self.ends.items())

    def in_words(self) -> str:
        """Say how far the ingest job has come. It reports only after each batch, so the files that it writes count."""
        figures = self.figures
        words = f"PySpark has told of {figures.in_table or 0:,} of {figures.in_kafka or 0:,} records, after each batch"
        written = files_written(self.warehouse)
        if not written:
            return f"{words}; it has written nothing yet"
        newest = max(written, key=written.__getitem__)
        ago_s = max(0.0, time.time() - written[newest])
        return f"{words}; it has written {len(written)} files, the last one {ago_s:.0f} s ago in {newest.parts[0]}/"

    async def until_ingested(self, ingest: Child) -> None:
        """Wait until the tables hold what Kafka holds. Raises DemoError."""
        await self.until(
            self.is_ingested,
            lambda: (dict(self.ingested), files_written(self.warehouse)),
            "the ingest job does not catch up with Kafka",
            ingest,
        )

    async def until(
        self, condition: Callable[[], bool], state: Callable[[], object], words: str, child: Child | None
    ) -> None:
        """Wait until a look fulfils a condition, for as long as the state changes now and then.

        Raises:
            DemoError: nothing changed for STANDSTILL_S_MAX.
        """
        last, changed = state(), time.monotonic()
        # The look that is under way may have seen an earlier state; the next one has not.
        fresh = self.looks + 2
        while self.looks < fresh or not condition():
            if (now := state()) != last:
                last, changed = now, time.monotonic()
            if time.monotonic() - changed > STANDSTILL_S_MAX:
                raise DemoError(
                    f"{words}: for {STANDSTILL_S_MAX:.0f} s nothing has changed",
                    self.advice,
                    None if child is None else child.log,
                )
            await asyncio.sleep(0.5)

    async def _ask_kafka(self) -> bool:
        try:
            ends = await self.kafka.read()
        except KafkaError as error:
            now_s = time.monotonic()
            if self.silent_since_s is None:
                self.silent_since_s = now_s
            if now_s - self.silent_since_s < KAFKA_SILENT_S_MAX:
                return False
            words = f"Kafka has not answered for {KAFKA_SILENT_S_MAX:.0f} s: {error!r}"
            raise DemoError(words, "See what the broker says.", self.broker.log) from error
        self.silent_since_s = None
        self.ends = {tuple(place): end for place, end in ends.items()}
        return True

    def _note_batch(self, line: dict[str, object]) -> None:
        """Take in one line of `sluice-cloud ingest --json`."""
        offsets = line.get("end_offsets")
        if not isinstance(offsets, dict):  # it says that it has started
            return
        for topic, partitions in offsets.items():
            for partition, offset in partitions.items():
                self.ingested[(topic, int(partition))] = offset
        self.figures.in_table = sum(offset for place, offset in self.ingested.items() if place in self.ends)


def files_written(folder: Path) -> dict[Path, float]:
    """Find the files below a folder that are not hidden, with the last write of each in seconds since 1970."""
    written = {}
    # Not Path.rglob, which raises if a folder goes away meanwhile, as Spark's temporary ones do.
    for parent, _, names in os.walk(folder):
        for path in (Path(parent, name) for name in names if not name.startswith(".")):
            with suppress(FileNotFoundError):  # it got its final name just now
                written[path.relative_to(folder)] = path.stat().st_mtime
    return written
