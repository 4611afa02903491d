"""`sluice-cloud command`: sends a command to a device, and tells what became of it."""

import asyncio
import uuid
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import click

from gateway.host.terminal import say
from gateway.host.terminal_text import escaped
from gateway.record_contract import COMMAND_ID, COMMAND_TOPIC, COMMANDS_TOPIC, DEVICE_NAME, NAME_RULE
from spark.commands.answers import beside, say_json
from spark.commands.asked_options import LastType
from spark.commands.cli_options import (
    FINDING,
    existing,
    expect_kafka,
    json_option,
    kafka_config_option,
    kafka_option,
    kafka_settings,
)
from spark.commands.desk_session import asking
from spark.desk.asked import text

_WORDS = {
    "delivered": "the device has acknowledged it",
    "expired": "it expired before the device acknowledged it",
    "refused": "it was refused",
    "unknown-device": "the gateway does not know the device",
}


def _named(_context: click.Context, _parameter: click.Parameter, name: str | None) -> str | None:
    if name is not None and DEVICE_NAME.fullmatch(name) is None:
        raise click.BadParameter(f"a name has {NAME_RULE}")
    return name


@click.command("command", short_help="Send a command to a device.")
@click.argument("device", callback=_named)
@click.argument("payload")
@click.option(
    "--bootstrap", required=True, metavar="HOST:PORT", help="Addresses of Kafka brokers, separated by commas."
)
@click.option("--gateway", callback=_named, help="The device's gateway. Without it, --warehouse finds it.")
@click.option(
    "--warehouse",
    metavar="PATH",
    callback=lambda context, option, path: path and existing(context, option, path),
    help="Folder of the tables: the gateway is the one that sent the device's latest record.",
)
@click.option("--namespace", default="default", show_default=True, callback=_named, help="The device's namespace.")
@click.option("--topic", metavar="LEVELS", help="MQTT levels below the device's. {id} in them stands for the id.")
@click.option(
    "--expires",
    "lasts",
    type=LastType(),
    default="10min",
    show_default=True,
    metavar="SPAN",
    help="Pass it on within this time or not at all: 30min, 2h, 7d.",
)
@click.option("--id", "command_id", help="Name of the command, 1 to 64 characters. Default: a random one.")
@click.option("--wait", is_flag=True, help="Wait until it has ended. Exit code 1: it was not delivered.")
@click.option(
    "--commands-topic", default=COMMANDS_TOPIC, show_default=True, metavar="TOPIC", help="The gateway's commands.topic."
)
@click.option(
    "--events-topic", default="gateway-events", show_default=True, metavar="TOPIC", help="Its kafka.events_topic."
)
@kafka_config_option
@kafka_option
@json_option
def command(  # noqa: PLR0913, PLR0917 - one argument for each option
    device: str,
    payload: str,
    bootstrap: str,
    gateway: str | None,
    warehouse: str | None,
    namespace: str,
    topic: str | None,
    lasts: timedelta,
    command_id: str | None,
    wait: bool,  # noqa: FBT001 - a flag of the command line
    commands_topic: str,
    events_topic: str,
    kafka_config: Path | None,
    kafka_options: tuple[str, ...],
    as_json: bool,  # noqa: FBT001
) -> None:
    """Send a command to a device by way of its gateway.

    The gateway passes PAYLOAD on as it is: over MQTT to command/DEVICE and the levels of --topic, or in a frame to a
    board on a serial line. It does so once the device can be reached, and never after --expires. Its [commands] section
    has to list the device. After a crash of the gateway, the device may get the command twice.
    """
    command_id = uuid.uuid4().hex if command_id is None else command_id
    if COMMAND_ID.fullmatch(command_id) is None:
        raise click.UsageError("--id has 1 to 64 letters, digits, '.', '_' or '-'")
    if topic is not None and COMMAND_TOPIC.fullmatch(topic) is None:
        raise click.UsageError("--topic has at most 128 characters, without '+' and '#'")
    if gateway is None:
        if warehouse is None:
            raise click.UsageError("give --gateway, or --warehouse to find the device's gateway")
        gateway = _gateway_of(warehouse, namespace, device)
    settings = kafka_settings(kafka_options, kafka_config)
    from spark.source.command_sender import Command, send, send_and_wait  # noqa: PLC0415 - aiokafka takes a while
    from spark.source.kafka_python import client_options  # noqa: PLC0415

    options, unused = client_options(settings)
    if unused:
        beside(f"of no use here, and passed over: {', '.join(unused)}")
    expect_kafka(bootstrap)
    asked = Command(
        id=command_id,
        kafka_topic=commands_topic.replace("{gateway}", gateway),
        key=f"{namespace}/{device}",
        payload=payload.encode(),
        expires=datetime.now(UTC) + lasts,
        topic=topic,
    )
    end: dict[str, Any] | None = None
    if wait:
        end = asyncio.run(send_and_wait(asked, bootstrap, options, events_topic))
    else:
        asyncio.run(send(asked, bootstrap, options))
    if as_json:
        say_json({"id": command_id, "gateway": gateway, "topic": asked.kafka_topic, "end": end})
    else:
        say(_told(asked.id, gateway, end, waited=wait))
    if wait and (end is None or end.get("outcome") != "delivered"):
        raise click.exceptions.Exit(FINDING)


def _gateway_of(warehouse: str, namespace: str, device: str) -> str:
    """The gateway that sent the latest record of a device."""
    with asking(warehouse) as tables:
        folder, _ = tables.version()
        limits = f'"min.device" <= {text(device)} AND "max.device" >= {text(device)}'
        log = tables.source.table(f"{folder}/log", files=limits)
        found = tables.source.rows(
            f"SELECT gateway FROM ({log}) WHERE device = {text(device)} AND namespace = {text(namespace)}"
            # Whoever may write to a topic can name any gateway. A refused record does not choose where a command goes.
            " AND gateway IS NOT NULL AND reject_reason IS NULL ORDER BY kafka_timestamp DESC LIMIT 1"
        )
    if not found:
        raise click.ClickException(
            f"the tables have no record of {namespace}/{device}: check its name and --namespace, or give --gateway"
        )
    (gateway,) = found[0]
    return str(gateway)


def _told(command_id: str, gateway: str, end: dict[str, Any] | None, *, waited: bool) -> str:
    if not waited:
        return f"command {command_id} is sent to gateway {gateway}"
    if end is None:
        return f"command {command_id}: gateway {gateway} has not said what became of it; is it connected to Kafka?"
    outcome = str(end.get("outcome"))
    words = _WORDS.get(outcome, f"it ended as {escaped(outcome)}")
    reason = end.get("reason")
    return f"command {command_id}: {words}" + (f" ({escaped(str(reason))})" if reason else "")
