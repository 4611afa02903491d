"""The job of `tests/support/mqtt_programs.py`, done by paho of Python."""

import os
import sys
import threading
from typing import Any

from paho.mqtt.client import Client, MQTTMessage
from paho.mqtt.enums import CallbackAPIVersion, MQTTProtocolVersion
from paho.mqtt.packettypes import PacketTypes
from paho.mqtt.properties import Properties

HOST, PORT, NAME, SECRET, TOPIC, QOS, COMMANDS = (
    os.environ[f"MQTT_{name}"] for name in ("HOST", "PORT", "NAME", "SECRET", "TOPIC", "QOS", "COMMANDS")
)
LEVEL = MQTTProtocolVersion(int(os.environ["MQTT_LEVEL"]))
IS_5 = LEVEL is MQTTProtocolVersion.MQTTv5
client = Client(CallbackAPIVersion.VERSION2, client_id=NAME, protocol=LEVEL, clean_session=None if IS_5 else False)
lock = threading.Lock()
unfinished: dict[int, str] = {}
"""Readings by packet identifier."""
finished: set[int] = set()
"""Packet identifiers whose reading was finished before `publish` returned."""


def say(words: str) -> None:
    """Print a line in one piece: two threads speak."""
    sys.stdout.write(f"{words}\n")
    sys.stdout.flush()


def on_publish(_client: Client, _data: Any, packet_id: int, _reason: Any, _properties: Any) -> None:
    with lock:
        if packet_id in unfinished:
            say(f"acknowledged {unfinished.pop(packet_id)}")
        else:
            finished.add(packet_id)


def on_connect(_client: Client, _data: Any, _flags: Any, reason: Any, _properties: Any) -> None:
    say("refused" if reason.is_failure else "connected")
    if COMMANDS:
        client.subscribe(COMMANDS, int(QOS))


def on_subscribe(_client: Client, _data: Any, _packet_id: int, reasons: list[Any], _properties: Any) -> None:
    say("refused" if reasons[0].is_failure else "subscribed")


def on_message(_client: Client, _data: Any, message: MQTTMessage) -> None:
    say(f"command {message.payload.decode()}")


client.on_publish = on_publish
client.on_connect = on_connect
client.on_subscribe = on_subscribe
client.on_message = on_message
client.username_pw_set(NAME, SECRET)
client.reconnect_delay_set(1, 1)
if IS_5:
    kept = Properties(PacketTypes.CONNECT)  # type: ignore[no-untyped-call]
    kept.SessionExpiryInterval = 3_600
    client.connect_async(HOST, int(PORT), clean_start=False, properties=kept)
else:
    client.connect_async(HOST, int(PORT))
client.loop_start()
for line in sys.stdin:
    reading = line.strip()
    packet_id = client.publish(TOPIC, reading, int(QOS)).mid
    with lock:
        if packet_id in finished:
            finished.remove(packet_id)
            say(f"acknowledged {reading}")
        else:
            unfinished[packet_id] = reading
