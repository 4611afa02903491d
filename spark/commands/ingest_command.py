"""`sluice-cloud ingest`: its options, and its words about each batch."""

import signal
import threading
from contextlib import ExitStack, contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

import click

from gateway.host.systemd_notify import notify
from gateway.host.terminal import say
from gateway.host.terminal_text import counted, escaped
from gateway.record_contract import USUAL_TOPICS
from spark.commands.answers import say_json
from spark.commands.cli_options import (
    absolute_path,
    expect_kafka,
    json_option,
    kafka_config_option,
    kafka_option,
    kafka_settings,
    streams_option,
)
from spark.commands.command_session import ending, session
from spark.engine.warehouse_folder import absolute, only_writer

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from spark.decode.codec_declarations import Streams
    from spark.ingest_job import BatchReport, Begun
    from spark.service.job_figures import JobFigures
    from spark.source.kafka_source import KafkaSource
    from spark.source.open_transactions import OpenTransaction
    from spark.source.topic_changes import Loss


_COUNTS = ("rows", "duplicates", "rejected", "late", "revised", "unwindowed", "deleted", "corrections")
NAMES_TOLD_MAX = 20
"""Topics or transactions that one message names."""


@click.command(short_help="Read Kafka into the tables until stopped.")
@click.option(
    "--bootstrap", required=True, metavar="HOST:PORT", help="Addresses of Kafka brokers, separated by commas."
)
@click.option(
    "--warehouse",
    required=True,
    metavar="PATH",
    callback=absolute_path,
    help="Folder of the tables. It is made if it is not there.",
)
@streams_option
@click.option(
    "--checkpoint",
    metavar="PATH",
    help="Folder where Spark notes what was read.  [default: WAREHOUSE/_checkpoint]",
)
@click.option(
    "--topics",
    metavar="PATTERN",
    help="Read only topics whose whole name fits this regular expression, including topics that appear later.  "
    f"[default: {USUAL_TOPICS}, and every topic that gateways name in their heartbeats]",
)
@click.option(
    "--backlog-topics",
    metavar="PATTERN",
    help="Regular expression of the topics that hold gateways' backlogs. They are read beside the live topics.",
)
@click.option("--once", is_flag=True, help="Read what Kafka has now, then end.")
@click.option(
    "--go-on",
    is_flag=True,
    help="If Kafka no longer has the next records, read on from what it has, and record the rest as lost.",
)
@click.option(
    "--interval-s",
    type=click.FloatRange(0, 86_400),
    default=5.0,
    show_default=True,
    help="Seconds from the start of one batch to the start of the next.",
)
@click.option(
    "--batch-records-max",
    type=click.IntRange(1),
    default=200_000,
    show_default=True,
    help="Most records in one batch. Fewer records take less memory.",
)
@click.option(
    "--backlog-records-max",
    type=click.IntRange(1),
    default=50_000,
    show_default=True,
    help="Most records of the backlog topics in one batch. More records delay live readings for longer.",
)
@click.option(
    "--monitor-port",
    type=click.IntRange(0, 65_535),
    help="Port for /metrics (Prometheus) and /health, without a log-in; 0 for a free one.  [default: none]",
)
@click.option(
    "--monitor-host",
    metavar="ADDRESS",
    default="127.0.0.1",
    show_default=True,
    help="Address of this machine to serve them on; 0.0.0.0 for all.",
)
@kafka_config_option
@kafka_option
@json_option
def ingest(  # noqa: PLR0913, PLR0917 - one argument for each option
    bootstrap: str,
    warehouse: str,
    streams: "Streams | None",
    checkpoint: str | None,
    topics: str | None,
    backlog_topics: str | None,
    once: bool,  # noqa: FBT001 - a flag of the command line
    go_on: bool,  # noqa: FBT001
    interval_s: float,
    batch_records_max: int,
    backlog_records_max: int,
    monitor_port: int | None,
    monitor_host: str,
    kafka_config: Path | None,
    kafka_options: tuple[str, ...],
    as_json: bool,  # noqa: FBT001
) -> None:
    """Read Kafka into the tables until SIGTERM, SIGHUP or Ctrl-C. The running batch is finished first.

    The next start goes on where this one stopped. Only one `ingest` at a time may write a warehouse.
    """
    options = kafka_settings(kafka_options, kafka_config)
    expect_kafka(bootstrap)
    from spark.service.job_figures import JobFigures  # noqa: PLC0415

    figures = JobFigures()
    click.get_current_context().with_resource(_monitor_page(monitor_host, monitor_port, figures))
    spark = session("sluice-ingest")
    from spark.ingest_job import IngestSettings, Listener, run_ingest  # noqa: PLC0415
    from spark.service.watchdog import feeding  # noqa: PLC0415
    from spark.source.kafka_options import check_options  # noqa: PLC0415
    from spark.source.kafka_source import KafkaSource  # noqa: PLC0415
    from spark.windows.windows_table import WindowLengthError  # noqa: PLC0415

    source = KafkaSource(
        bootstrap,
        topics or USUAL_TOPICS,
        options,
        batch_records_max=batch_records_max,
        backlog_topics=backlog_topics,
        backlog_records_max=backlog_records_max,
        named=() if topics is None else None,
    )
    settings = IngestSettings(
        source=source,
        warehouse=warehouse,
        checkpoint=absolute(checkpoint) if checkpoint else f"{warehouse.rstrip('/')}/_checkpoint",
        streams=streams,
        interval_s=interval_s,
        once=once,
        go_on=go_on,
    )
    stop = threading.Event()
    # Only after the session: PySpark sets a handler for Ctrl-C that would cancel the running batch.
    for number in ending():
        signal.signal(number, lambda *_: _stop(stop))
    told: dict[str, set[str]] = {}

    def tell(members: "Mapping[str, object]", lines: "Sequence[str]") -> None:
        if as_json:
            say_json(members)
        else:
            say("\n".join(lines))

    def ready(begun: "Begun") -> None:
        tell(begun_members(begun), begun_lines(begun, source, warehouse))

    def leave_out(topics: "Mapping[str, str]") -> None:
        tell({"state": "left out", "topics": topics}, left_out_lines(topics))

    def hold_back(transactions: "Sequence[OpenTransaction]") -> None:
        tell(held_back_members(transactions), held_back_lines(transactions))

    def report(batch: "BatchReport") -> None:
        tell(batch_members(batch), [batch_line(batch), *undeclared_lines(batch, told)])

    def warn(words: str) -> None:
        say(f"warning: {words}", err=True)

    try:
        with only_writer(warehouse):
            check_options(spark, bootstrap, options)
            listener = Listener(ready, report, leave_out=leave_out, hold_back=hold_back, warn=warn)
            run_ingest(spark, settings, stop, feeding(figures.beside(listener), batch_line))
    except WindowLengthError as error:
        raise click.BadParameter(str(error), param_hint="--streams") from error


def _stop(stop: threading.Event) -> None:
    stop.set()
    notify("STOPPING=1", "STATUS=ends after the running batch")


@contextmanager
def _monitor_page(host: str, port: int | None, figures: "JobFigures") -> "Iterator[None]":
    """Serve the figures. Begin before Spark starts: so monitoring also sees a job that never comes up."""
    if port is None:
        yield
        return
    from spark.service.monitor_page import monitor_page  # noqa: PLC0415

    with ExitStack() as page:
        try:
            taken = page.enter_context(monitor_page(host, port, figures.text, figures.health))
        except OSError as error:
            raise click.BadParameter(
                f"port {port} of {host} cannot be had ({error.strerror}): name another one, or 0 for a free one",
                param_hint="--monitor-port",
            ) from error
        shown = f"[{host}]" if ":" in host else host
        say(f"monitoring: http://{shown}:{taken}/metrics and /health", err=True)
        yield


def batch_members(batch: "BatchReport") -> dict[str, object]:
    """One batch, as `--json` prints it."""
    from spark.arrow_pass.plan import UNDECLARED_NAMES_MAX  # noqa: PLC0415

    counts = batch.counts
    return {
        "batch": batch.batch,
        **{name: getattr(counts, name) for name in _COUNTS},
        "undeclared": {
            stream: sorted(names)[:UNDECLARED_NAMES_MAX] for stream, names in sorted(counts.undeclared.items())
        },
        "undeclared_more": sorted(s for s, names in counts.undeclared.items() if len(names) > UNDECLARED_NAMES_MAX),
        "lag": batch.lag,
        "behind_s": None if batch.behind_s is None else round(batch.behind_s, 1),
        "end_offsets": batch.end_offsets,
        "seconds": round(counts.seconds, 3),
    }


def batch_line(batch: "BatchReport") -> str:
    """One batch, as a person reads it."""
    counts = batch.counts
    line = f"batch {batch.batch}: {counted(counts.rows, 'record')} in {counts.seconds:.1f} s"
    if counts.seconds:
        line += f" ({counts.rows / counts.seconds:,.0f}/s)"
    if batch.lag is not None:
        line += f", {batch.lag} behind"
    if batch.behind_s is not None:
        line += f", {span_text(batch.behind_s)} after Kafka"
    asides = (
        (counts.duplicates, "seen before"),
        (counts.rejected, "rejected (`sluice-cloud quarantine list` says why)"),
        (counts.late, f"came more than a minute after the end of their windows ({counts.revised} of them)"),
        (counts.unwindowed, "in no window (their time is unknown or cannot be)"),
        (counts.deleted, "of devices whose data was deleted (their content is not kept)"),
        (counts.corrections, "put earlier times right"),
    )
    return "; ".join([line, *(f"{count} {meaning}" for count, meaning in asides if count)])


def undeclared_lines(batch: "BatchReport", told: dict[str, set[str]]) -> list[str]:
    """Lines that name undeclared numbers of payloads, each once. `told` has the names told before, by stream."""
    from spark.arrow_pass.plan import UNDECLARED_NAMES_MAX  # noqa: PLC0415

    lines = []
    for stream, names in sorted(batch.counts.undeclared.items()):
        before = told.setdefault(stream, set())
        new = sorted(names - before)
        room = UNDECLARED_NAMES_MAX - len(before)
        before.update(new[:room])
        if new and room:
            words = (
                "If you declare them, a replay makes metrics of them. A number that does not fit decimal(18,6) needs a "
                "scale (docs/streams.md), or its whole reading becomes a reject"
            )
            if len(new) >= room:
                words += f". These make {UNDECLARED_NAMES_MAX} names of this stream, and no more will be told"
            named = ", ".join(repr(name) for name in new[:room])
            lines.append(f"{escaped(stream)}: its payloads also have {named}, which stay in `log` alone. {words}")
    return lines


def begun_members(begun: "Begun") -> dict[str, object]:
    """The start of reading, as `--json` prints it."""
    members: dict[str, object] = {"state": "ready", "topics": begun.topics}
    if begun.losses:
        members["lost"] = [asdict(loss) for loss in begun.losses]
    if begun.shortened:
        members["shortened"] = begun.shortened
    if begun.anew:
        members["new_checkpoint"] = begun.anew
    return members


def begun_lines(begun: "Begun", source: "KafkaSource", warehouse: str) -> list[str]:
    """The start of reading, as a person reads it."""
    lines = [f"reading {_some(begun.topics)} from {source.bootstrap} into {warehouse}"]
    if not begun.topics:
        lines = [f"waiting for topics of {source.topics} on {source.bootstrap}, to read them into {warehouse}"]
    if begun.anew:
        lines.append(
            f"{begun.anew}: the checkpoint is damaged, older or newer than the tables, or another warehouse's. So a "
            "new one begins where the tables end, and nothing is passed over"
        )
    for topic, count in begun.shortened.items():
        lines.append(f"topic {topic} is new to the tables; Kafka has deleted its first {counted(count, 'record')}")
    return [*lines, *lost_lines(begun.losses)]


def left_out_lines(topics: "Mapping[str, str]") -> list[str]:
    """Lines about topics that gateways write to and `ingest` does not read."""
    if not topics:
        return ["all topics that gateways name are read now"]
    told = _some([f"{topic} ({why})" for topic, why in topics.items()])
    words = "The windows of these gateways' devices stay provisional: see `sluice-cloud gateways`"
    return [f"gateways name topics that are not read: {told}. {words}"]


def held_back_members(transactions: "Sequence[OpenTransaction]") -> dict[str, object]:
    """Other producers' long-open transactions, as `--json` prints them."""
    told = [asdict(found) | {"since": found.since.isoformat(timespec="seconds")} for found in transactions]
    return {"state": "held back", "transactions": told}


def held_back_lines(transactions: "Sequence[OpenTransaction]") -> list[str]:
    """Other producers' long-open transactions, a line for each."""
    from spark.source.open_transactions import abort_words  # noqa: PLC0415

    if not transactions:
        return ["no open transaction holds records back any more"]
    lines = [
        f"topic {found.topic}: {counted(found.records, 'record')} behind a transaction that has been open since "
        f"{found.since:%H:%M:%S} UTC or longer (partition {found.partition}, offset {found.offset}), to be read when "
        f"it ends. If its producer is gone, {abort_words(found.topic, found.partition, found.offset)}"
        for found in transactions[:NAMES_TOLD_MAX]
    ]
    more = len(transactions) - NAMES_TOLD_MAX
    return lines if more <= 0 else [*lines, f"partitions held back beside these: {more}"]


def _some(names: "Sequence[str]") -> str:
    told = ", ".join(names[:NAMES_TOLD_MAX])
    return told if len(names) <= NAMES_TOLD_MAX else f"{told} and {len(names) - NAMES_TOLD_MAX} more"


def lost_lines(losses: "Sequence[Loss]") -> list[str]:
    """Records that Kafka no longer had, a line for each topic."""
    counts: dict[str, list[int | None]] = {}
    for loss in losses:
        counts.setdefault(loss.topic, []).append(None if loss.end is None else loss.end - loss.first)
    return [
        f"lost in Kafka before it was read: topic {topic}: "
        + ("nobody knows how many records" if None in of_topic else counted(sum(filter(None, of_topic)), "record"))
        for topic, of_topic in sorted(counts.items())
    ]


def span_text(seconds: float) -> str:
    """`4 s`, `12 min`, `3.5 h`, `2.1 days`."""
    for unit, length, limit in (("s", 1, 120), ("min", 60, 7_200), ("h", 3_600, 172_800)):
        if seconds < limit:
            return f"{seconds / length:.1f} {unit}" if unit == "h" else f"{seconds / length:.0f} {unit}"
    return f"{seconds / 86_400:.1f} days"
