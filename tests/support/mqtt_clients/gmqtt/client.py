"""The job of `tests/support/mqtt_programs.py`, done by gmqtt."""

import asyncio
import os
import sys
from typing import Any

import gmqtt
from gmqtt.mqtt.constants import UNLIMITED_RECONNECTS
from gmqtt.storage import PersistentStorage

HOST, PORT, NAME, SECRET, TOPIC, QOS, COMMANDS = (
    os.environ[f"MQTT_{name}"] for name in ("HOST", "PORT", "NAME", "SECRET", "TOPIC", "QOS", "COMMANDS")
)


def say(words: str) -> None:
    sys.stdout.write(f"{words}\n")
    sys.stdout.flush()


class Storage(PersistentStorage):  # type: ignore[misc]
    """Messages that are not finished. gmqtt tells in no other way when one is."""

    def __init__(self) -> None:
        super().__init__()
        self.readings: dict[int, str] = {}
        self.reading = ""
        """The reading that is being published."""

    def push_message(self, mid: int, raw_package: bytes) -> None:
        # A PUBLISH is replaced by its PUBREL under the same identifier.
        self.readings.setdefault(mid, self.reading)
        super().push_message(mid, raw_package)

    def remove_message_by_mid(self, mid: int) -> None:
        super().remove_message_by_mid(mid)
        if mid in self.readings:
            say(f"acknowledged {self.readings.pop(mid)}")


async def main() -> None:
    storage = Storage()
    client = gmqtt.Client(NAME, clean_session=False, persistent_storage=storage, session_expiry_interval=3_600)
    client.set_auth_credentials(NAME, SECRET)
    client.set_config({"reconnect_retries": UNLIMITED_RECONNECTS, "reconnect_delay": 1})

    def on_connect(*_told: Any) -> None:
        say("connected")
        if COMMANDS:
            client.subscribe(COMMANDS, qos=int(QOS))

    def on_message(_client: Any, _topic: str, payload: bytes, _qos: int, _properties: Any) -> int:
        say(f"command {payload.decode()}")
        return 0

    client.on_connect = on_connect
    client.on_subscribe = lambda _client, _mid, codes, _properties: say("refused" if codes[0] >= 0x80 else "subscribed")
    client.on_message = on_message
    while True:
        try:
            await client.connect(HOST, int(PORT))
            break
        except OSError:
            await asyncio.sleep(0.2)
    loop, lines = asyncio.get_running_loop(), asyncio.StreamReader()
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(lines), sys.stdin)
    while line := await lines.readline():
        storage.reading = line.decode().strip()
        client.publish(TOPIC, storage.reading, qos=int(QOS))


asyncio.run(main())
