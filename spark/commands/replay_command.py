"""`sluice-cloud replay`: rebuilds all tables."""

import json
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

import click

from gateway.host.terminal import say
from spark.commands.cli_options import (
    expect_kafka,
    kafka_config_option,
    kafka_option,
    kafka_settings,
    streams_option,
    warehouse_option,
)
from spark.commands.command_session import session
from spark.engine.warehouse_folder import only_replay, only_writer
from spark.source.topic_changes import offsets_of

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from spark.decode.codec_declarations import Streams
    from spark.log.warehouse_version import Version
    from spark.source.topic_changes import TopicOffsets
    from spark.upkeep.replay_job import FromKafka, ReplayProgress


def starting(_context: click.Context, _parameter: click.Parameter, since: str | None) -> "int | TopicOffsets | None":
    """Read --since: a time, returned in milliseconds since 1970, or offsets."""
    if since is None:
        return None
    return _offsets(since) if since.lstrip().startswith("{") else _time_ms(since)


@click.command("replay", short_help="Rebuild all tables, from `log` or from Kafka.")
@warehouse_option
@streams_option
@click.option(
    "--bootstrap",
    metavar="HOST:PORT",
    help="Addresses of Kafka brokers. Their records are read again, instead of those in `log`.",
)
@click.option(
    "--since",
    metavar="TIME|OFFSETS",
    callback=starting,
    help="With --bootstrap: where reading begins. A time by Kafka's clock, such as 2026-03-14T12:00:00Z, or offsets, "
    'such as {"device-thermo": {"0": 1200}}. Earlier records come from `log`.',
)
@kafka_config_option
@kafka_option
def replay_command(  # noqa: PLR0913, PLR0917 - one argument for each option
    warehouse: str,
    streams: "Streams | None",
    bootstrap: str | None,
    since: "int | TopicOffsets | None",
    kafka_config: Path | None,
    kafka_options: tuple[str, ...],
) -> None:
    """Rebuild all tables from `log`: after you correct streams.toml, or with a newer program.

    The new tables are made beside the ones that readers see. `ingest` may go on meanwhile. When all is made, `replay`
    waits until you stop `ingest`. It catches up on what came, and in one commit readers see the new tables. Then start
    `ingest` again: it goes on where it stopped. The old tables stay in the folder of their version until you remove
    them with `sluice-cloud maintain --old-versions`.
    """
    if (bootstrap is None) != (since is None):
        raise click.UsageError("--bootstrap and --since go together: give both to read from Kafka, or none of them")
    options = kafka_settings(kafka_options, kafka_config)
    if bootstrap is not None:
        expect_kafka(bootstrap)
    spark = session("sluice-replay")
    from spark.log.warehouse_version import open_version  # noqa: PLC0415
    from spark.upkeep.replay_job import replay  # noqa: PLC0415

    told = ""

    def report(progress: "ReplayProgress") -> None:
        nonlocal told
        line = _progress_line(progress)
        if line != told:
            say(line)
        told = line

    before = open_version(spark, warehouse)
    kafka = None
    if bootstrap is not None and since is not None:
        kafka = _from_kafka(spark, warehouse, bootstrap, options, since)
    with only_replay(warehouse):
        version = replay(spark, warehouse, streams, kafka, only_writer, report)
    say(f"readers see v{version.number} now, made by declarations {version.streams.version}")
    for line in _rejects_lines(spark, warehouse, before, version):
        say(line)


def _progress_line(progress: "ReplayProgress") -> str:
    if progress.is_waiting:
        return f"v{progress.version} is complete: stop `ingest` now, so that readers can see it"
    total = f"at most {progress.total}" if progress.is_bound else progress.total
    line = f"v{progress.version}: {progress.rows} of {total} records after {progress.seconds:.0f} s"
    return f"{line}, {progress.rejected} of them rejected" if progress.rejected else line


def _rejects_lines(spark: "SparkSession", warehouse: str, before: "Version", after: "Version") -> Iterator[str]:
    """Lines that count the rejects, and say what to do if there are more than before."""
    from spark.log.quarantine_view import rejects_by_kind  # noqa: PLC0415
    from spark.log.warehouse_version import tables_of  # noqa: PLC0415

    were, are = (rejects_by_kind(spark, tables_of(warehouse, version)) for version in (before, after))
    kinds = f" ({', '.join(f'{count} {kind}' for kind, count in are.items())})" if are else ""
    had = sum(were.values())
    yield f"rejects in v{after.number}: {sum(are.values())}{kinds}; in v{before.number}: {had}"
    if sum(are.values()) > had:
        yield (
            "`sluice-cloud quarantine list` says why. If the declarations are wrong, correct them and replay again: "
            "`log` still has these records"
        )


def _from_kafka(
    spark: "SparkSession", warehouse: str, bootstrap: str, options: dict[str, str], since: "int | TopicOffsets"
) -> "FromKafka":
    """Find the offsets where reading begins, and check that Kafka's topics are those that `log` was read from."""
    from spark.log.warehouse_version import open_version  # noqa: PLC0415
    from spark.source.kafka_options import check_options  # noqa: PLC0415
    from spark.source.kafka_source import KafkaSource  # noqa: PLC0415
    from spark.source.topic_watch import TopicWatch  # noqa: PLC0415
    from spark.upkeep.replay_job import FromKafka, topics_in_log  # noqa: PLC0415

    check_options(spark, bootstrap, options)
    read = topics_in_log(spark, warehouse, open_version(spark, warehouse))
    pattern = "|".join(f"\\Q{topic}\\E" for topic in sorted(read)) or "-"
    with TopicWatch(spark, bootstrap, options, pattern) as watch:
        now = watch.ask()
        starting = watch.offsets_at(since) if isinstance(since, int) else since
    for topic in sorted(starting):
        if topic not in now or read.get(topic) != now[topic].topic_id:
            raise click.ClickException(
                f"Kafka's topic {topic} is not the one that `log` was last read from: it was made anew, or there is "
                "none. Give offsets in --since, and leave this topic out."
            )
        for partition, offset in starting[topic].items():
            earliest = now[topic].earliest.get(partition)
            if earliest is None:
                raise click.ClickException(f"partition {partition} of {topic} is not in Kafka: leave it out of --since")
            if offset < earliest:
                raise click.ClickException(
                    f"partition {partition} of {topic} begins at offset {earliest} in Kafka, so it cannot be read from "
                    f"offset {offset} on: write {earliest} or more in --since. `log` has the earlier records"
                )
    source = KafkaSource(bootstrap, pattern, options)
    return FromKafka(source, starting, {topic: now[topic].topic_id for topic in starting})


def _offsets(since: str) -> dict[str, dict[int, int]]:
    try:
        found = offsets_of(json.loads(since))
    except (ValueError, AttributeError, TypeError) as error:
        words = 'is not written as {"device-thermo": {"0": 1200}}: topic, partition, offset'
        raise click.BadParameter(f"{since!r} {words}", param_hint="--since") from error
    if not found:
        raise click.BadParameter("names no topic: write a topic that is to be read from Kafka", param_hint="--since")
    return found


def _time_ms(since: str) -> int:
    try:
        time = datetime.fromisoformat(since)
    except ValueError as error:
        words = "is neither a time such as 2026-03-14T12:00:00Z nor offsets"
        raise click.BadParameter(f"{since!r} {words}", param_hint="--since") from error
    if time.tzinfo is None:
        raise click.BadParameter(f"{since!r} says no time zone: write Z behind it for UTC", param_hint="--since")
    return round((time - datetime(1970, 1, 1, tzinfo=UTC)).total_seconds() * 1_000)
