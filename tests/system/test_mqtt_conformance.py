"""Eclipse's conformance client for brokers, against the daemon from outside: which of its ten cases can pass.

The gateway is no broker: it delivers nothing from one client to another, but commands. No package registry has that
client, and nothing here fetches it. Whoever wants to run it puts a clone of `paho.mqtt.testing` into `build/`.
"""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.gateways import daemon, free_port, write_config
from tests.support.waiting import patience

SUITE = Path(__file__).parents[2] / "build" / "paho.mqtt.testing" / "interoperability" / "client_test.py"
PASSED = {"Zero length clientid", "Subscribe failure", "$ topics"}
FAILED = {
    "Basic": "a client is to get its own messages",
    "Retained message": "retained messages are to be delivered",
    "Offline message queueing": "messages of another client are to wait",
    "Will message": "another client is to get the will, which goes to Kafka as an event",
    "Overlapping subscriptions": "a client is to get its own message",
    "Keepalive": "another client is to get the will of the one that was ended",
    "Redelivery on reconnect": "a client is to get its own messages after its next CONNECT",
}
"""Why each other case needs a delivery from device to device."""
SAID = re.compile(r"^(.+) test (succeeded|failed)$", re.MULTILINE)


@pytest.mark.skipif(not SUITE.exists(), reason="no registry has Eclipse's client: clone paho.mqtt.testing into build/")
@pytest.mark.long(seconds=60)
def test_what_needs_no_delivery_between_clients_passes(tmp_path: Path, port: int) -> None:
    command = [sys.executable, str(SUITE), "--hostname", "127.0.0.1", "--port", str(port)]
    command += ["--zero_length_clientid", "--subscribe_failure", "--dollar_topics"]
    with daemon(write_config(tmp_path, f"127.0.0.1:{free_port()}", port, "conformance"), port):
        said = subprocess.run(
            command, cwd=SUITE.parent, capture_output=True, text=True, timeout=patience(180), check=False
        )
    outcomes = dict(SAID.findall(said.stdout))
    assert outcomes == dict.fromkeys(PASSED, "succeeded") | dict.fromkeys(FAILED, "failed"), said.stdout + said.stderr
