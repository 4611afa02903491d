"""Eclipse's conformance client for brokers, against the daemon from outside: which of its eleven cases can pass.

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
RUN = """
import functools, runpy, unittest
words = ["client_test.py", "--verbose", "--buffer", "Test", "Test.will_message_test"]
unittest.main = functools.partial(unittest.main, argv=words)
runpy.run_path("client_test.py", run_name="__main__")
"""
"""Runs the client. By itself it has unittest read its own options --hostname and --port, which unittest refuses. It
also leaves out the case of the will, whose name does not begin with `test`."""
PASSED = {"test_zero_length_clientid", "test_subscribe_failure", "test_dollar_topics"}
FAILED = {
    "testBasic": "a client is to get its own messages",
    "test_retained_messages": "retained messages are to be delivered",
    "test_offline_message_queueing": "messages of another client are to wait",
    "will_message_test": "another client is to get the will, which goes to Kafka as an event",
    "test_overlapping_subscriptions": "a client is to get its own message",
    "test_keepalive": "another client is to get the will of the one that was ended",
    "test_redelivery_on_reconnect": "a client is to get its own messages after its next CONNECT",
    "test_unsubscribe": "another client is to get messages on the topics that it still subscribes to",
}
"""Why each other case needs a delivery from device to device."""
SAID = re.compile(r"^(\w+) \(.+\) \.\.\. (ok|FAIL|ERROR)$", re.MULTILINE)


@pytest.mark.skipif(not SUITE.exists(), reason="no registry has Eclipse's client: clone paho.mqtt.testing into build/")
@pytest.mark.long(seconds=60)
def test_what_needs_no_delivery_between_clients_passes(tmp_path: Path, port: int) -> None:
    config = write_config(tmp_path, f"127.0.0.1:{free_port()}", port, "conformance")
    # The client reads no more 0.2 s after its last PUBLISH. While Kafka is away, PUBACK would take longer.
    config.write_text(config.read_text().replace("[buffer]", "[buffer]\ncommit_delay_ms = 0"))
    command = [sys.executable, "-c", RUN, "--hostname", "127.0.0.1", "--port", str(port)]
    with daemon(config, port):
        said = subprocess.run(
            command, cwd=SUITE.parent, capture_output=True, text=True, timeout=patience(180), check=False
        )
    outcomes = dict(SAID.findall(said.stderr))
    assert outcomes == dict.fromkeys(PASSED, "ok") | dict.fromkeys(FAILED, "FAIL"), said.stdout + said.stderr
