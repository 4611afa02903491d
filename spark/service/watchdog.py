"""Feeds systemd's watchdog by the job's progress alone: a batch that ended, or no records while Kafka answers."""

from collections.abc import Callable
from dataclasses import replace

from gateway.host.systemd_notify import notify
from spark.ingest_job import BatchReport, Begun, Listener


def feeding(told: Listener, words: Callable[[BatchReport], str]) -> Listener:
    """Return a listener that tells systemd of progress, and then calls `told`. `words` tell of a batch."""

    def ready(begun: Begun) -> None:
        _step("STATUS=reads Kafka")
        told.ready(begun)

    def report(batch: BatchReport) -> None:
        _step(f"STATUS={words(batch)}")
        told.report(batch)

    def idle() -> None:
        _step()
        told.idle()

    return replace(told, ready=ready, report=report, idle=idle)


def _step(*status: str) -> None:
    # READY each time: if systemd's queue was full, the message was lost.
    notify("READY=1", "WATCHDOG=1", *status)
