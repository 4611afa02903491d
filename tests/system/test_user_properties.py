"""User properties from mosquitto's client through the daemon to the headers in a real Kafka."""

import asyncio
import shutil
import subprocess
from pathlib import Path

import pytest

from demo.kafka_broker import Broker
from tests.support.gateways import consume, daemon, write_config
from tests.support.waiting import patience

pytestmark = [
    pytest.mark.kafka,
    pytest.mark.skipif(shutil.which("mosquitto_pub") is None, reason="mosquitto-clients is not installed"),
]


async def test_user_properties_become_headers_behind_the_gateways(kafka: Broker, tmp_path: Path, port: int) -> None:
    told = ("unit", "°C"), ("unit", "K"), ("traceparent", "00-1")
    each = [word for name, value in told for word in ("-D", "PUBLISH", "user-property", name, value)]
    publish = ["mosquitto_pub", "-V", "5", "-h", "127.0.0.1", "-p", str(port), "-q", "1", "-t", "device/42/thermo"]
    with daemon(write_config(tmp_path, kafka.bootstrap, port, "users"), port):
        for more in ([], each):
            command = [*publish, "-m", '{"celsius": 21.5}', *more]
            await asyncio.to_thread(subprocess.run, command, check=True, timeout=patience(30))
        async with asyncio.timeout(patience(30)):
            while len(records := await consume(kafka.bootstrap, "users-thermo")) < 2:
                await asyncio.sleep(0.3)
    plain, found = records
    names = [name for name, _ in plain.headers]
    assert [name for name, _ in found.headers[: len(names)]] == names
    assert list(found.headers[len(names) :]) == [(f"mqtt_{name}", value.encode()) for name, value in told]
    assert found.value == plain.value
