"""Names of things that exist, from a real broker of a site to Kafka: MAC addresses, spaces, umlauts, two sites."""

import asyncio
import json
import shutil
import subprocess
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from demo.kafka_broker import Broker
from gateway.buffer.status import read_quarantine
from gateway.record_contract import COUNTER_HEADER, DEVICE_HEADERS, HEADERS
from tests.support.gateways import SLUICE, consume_until, daemon, free_port, header, publish, write_config
from tests.support.mosquitto import Mosquitto
from tests.support.waiting import patience

pytestmark = [
    pytest.mark.kafka,
    pytest.mark.skipif(shutil.which("mosquitto_pub") is None, reason="mosquitto-clients is not installed"),
]

MAC = "aa:bb:cc:dd:ee:ff"
ESCAPED_MAC = "x--aa-3A-bb-3A-cc-3A-dd-3A-ee-3A-ff"
TOO_LONG = "Датчик температуры на кухне"


def routes(prefix: str, broker_port: int) -> str:
    return f"""
[[mqtt_brokers]]
host = "127.0.0.1"
port = {broker_port}
topics = ["zigbee2mqtt/#", "application/#"]

[[routes]]
topic = "zigbee2mqtt/Living room"
device = "living-room"
kafka = "{prefix}-zigbee"

[[routes]]
topic = "zigbee2mqtt/{{device}}"
kafka = "{prefix}-zigbee"
names = "escape"

[[routes]]
topic = "application/{{site}}/device/{{device}}/up"
kafka = "{prefix}-ttn"
names = "escape"
key = "{{site}}/{{device}}"
identity = "json"
"""


@asynccontextmanager
async def broker(directory: Path) -> AsyncIterator[Mosquitto]:
    made = Mosquitto(directory)
    made.start()
    try:
        yield made
    finally:
        made.stop()


async def sluice(*words: str | Path) -> str:
    done = await asyncio.to_thread(
        subprocess.run, [SLUICE, *words], capture_output=True, text=True, check=False, timeout=patience(30)
    )
    return done.stdout


async def subscribed(mosquitto: Mosquitto) -> None:
    async with asyncio.timeout(patience(30)):
        while "application/#" not in mosquitto.log:
            await asyncio.sleep(0.05)


async def test_names_of_a_sites_broker_come_through_and_stay_known(kafka: Broker, tmp_path: Path) -> None:
    port, prefix = free_port(), "names"
    async with broker(tmp_path / "mosquitto") as mosquitto:
        config = write_config(tmp_path, kafka.bootstrap, port, prefix, routes(prefix, mosquitto.port))
        with daemon(config, port):
            await subscribed(mosquitto)
            for name in ("Wohnzimmer Lampe", "Küche", "Living room", "0x00124b0022", TOO_LONG):
                publish(mosquitto.port, f"zigbee2mqtt/{name}", json.dumps({"name": name}))
            for seq in (1, 1, 2):
                payload = json.dumps({"boot": "b1", "seq": seq, "celsius": 21.5})
                publish(mosquitto.port, f"application/app@ttn/device/{MAC}/up", payload)
                publish(mosquitto.port, f"application/app@other/device/{MAC}/up", payload)
            zigbee = await consume_until(kafka.bootstrap, 4, f"{prefix}-zigbee")
            ttn = await consume_until(kafka.bootstrap, 4, f"{prefix}-ttn")
            async with asyncio.timeout(patience(30)):
                while read_quarantine(config.with_name("buffer.db")) != {"device-name-too-long": 1}:
                    await asyncio.sleep(0.1)
            listed = json.loads(await sluice("devices", "--json", "--config", config))
            shown = await sluice("devices", "--config", config)
            mend = " ".join((await sluice("buffer", "quarantine", "ls", "--config", config)).split())

    by_name = {json.loads(record.value or b"")["name"]: record for record in zigbee}
    assert {name: record.key.decode() for name, record in by_name.items()} == {
        "Wohnzimmer Lampe": "x--Wohnzimmer-20-Lampe",
        "Küche": "x--K-C3BC-che",
        "Living room": "living-room",
        "0x00124b0022": "0x00124b0022",
    }
    for name, record in by_name.items():
        told = dict(record.headers).get("route_device")
        assert told == (name.encode() if record.key.startswith(b"x--") else None)
        assert header(record, "ce_subject") == f"zigbee2mqtt/{name}"

    # Sent twice, stored once for each of the two sites: equal names are two devices, with counters of their own.
    sites = {"app@ttn": "x--app-40-ttn", "app@other": "x--app-40-other"}
    assert sorted((record.key.decode(), header(record, "ce_devicesequence")) for record in ttn) == sorted(
        (f"{escaped}/{ESCAPED_MAC}", seq) for escaped in sites.values() for seq in ("1", "2")
    )
    for record in ttn:
        names = [name for name, _ in record.headers]
        assert names == [*HEADERS, "route_site", "route_device", *DEVICE_HEADERS, COUNTER_HEADER]
        site = header(record, "route_site")
        assert record.key.decode() == f"{sites[site]}/{ESCAPED_MAC}"
        assert header(record, "route_device") == MAC

    originals = {device["device"]: device["original"] for device in listed["devices"]}
    assert originals["x--Wohnzimmer-20-Lampe"] == "Wohnzimmer Lampe"
    assert originals[f"x--app-40-ttn/{ESCAPED_MAC}"] == f"app@ttn/{MAC}"
    assert originals["living-room"] is None
    assert "x--Wohnzimmer-20-Lampe: called Wohnzimmer Lampe" in shown
    assert "a name is 1 to 63 letters (A to Z, a to z), digits" in mend
    assert 'a route with this topic and device = "NAME"' in mend
