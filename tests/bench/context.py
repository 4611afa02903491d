"""Shared by the parts of a bench: their folders, their time-outs, and the words for their progress."""

import time
from dataclasses import dataclass
from pathlib import Path

import click

from demo.kafka_broker import OwnBroker


@dataclass(frozen=True, slots=True)
class Bench:
    """One run of a bench."""

    directory: Path
    """On a real file system: on tmpfs nothing is written to disk, and nothing waits for it."""
    quick: bool
    broker: OwnBroker | None

    @property
    def kafka(self) -> OwnBroker:
        """The broker, of a bench that has one."""
        assert self.broker is not None
        return self.broker

    def pick(self, whole: int, quick: int) -> int:
        """A duration or a count: `quick` where BENCH_QUICK asks for it."""
        return quick if self.quick else whole


def say(text: str) -> None:
    """A line about the progress, for who waits."""
    click.echo(f"{time.strftime('%H:%M:%S')}  {text}", err=True)
