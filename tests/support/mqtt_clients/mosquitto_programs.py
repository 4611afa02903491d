"""The job of `tests/support/mqtt_programs.py`, done by mosquitto_pub and mosquitto_sub."""

import os
import re
import signal
import subprocess
import sys
import threading

HOST, PORT, NAME, SECRET, TOPIC, QOS, COMMANDS = (
    os.environ[f"MQTT_{name}"] for name in ("HOST", "PORT", "NAME", "SECRET", "TOPIC", "QOS", "COMMANDS")
)
VERSION = ["-V", "5", "-x", "3600"] if os.environ["MQTT_LEVEL"] == "5" else ["-V", "311"]
FINISHED = re.compile(r"received (?:PUBACK|PUBCOMP) \(Mid: (\d+)")


def say(words: str) -> None:
    """Print a line in one piece: two threads speak."""
    sys.stdout.write(f"{words}\n")
    sys.stdout.flush()


def start(program: str, client_id: str, *arguments: str) -> subprocess.Popen[str]:
    """Start one with a kept session, that writes each line of its log at once."""
    command = ["stdbuf", "--output=L", program, "-d", "-c", "-i", client_id, "-h", HOST, "-p", PORT, *VERSION]
    command += ["-u", NAME, "-P", SECRET, "-q", QOS, *arguments]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


def receive() -> None:
    subscriber = start("mosquitto_sub", f"{NAME}-commands", "-t", COMMANDS, "-F", "command %p")
    assert subscriber.stdout is not None
    for line in subscriber.stdout:
        if line.startswith("command "):
            say(line.rstrip("\n"))
        elif line.startswith("Subscribed "):
            say("refused" if int(line.split()[-1]) >= 128 else "subscribed")


if COMMANDS:
    threading.Thread(target=receive, daemon=True).start()
publisher = start("mosquitto_pub", NAME, "-t", TOPIC, "-l")
assert publisher.stdout is not None
for line in publisher.stdout:
    if found := FINISHED.search(line):
        # Packet identifiers count from 1, readings from 0.
        say(f"acknowledged {int(found[1]) - 1}")
    elif "received CONNACK (0)" in line:
        say("connected")
say(f"mosquitto_pub ended with code {publisher.wait()}")
os.killpg(0, signal.SIGTERM)
