"""A real daemon with its status page, and sensors that speak to it: for tests, and for the bench."""

import json
import random
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.client import HTTPConnection, HTTPResponse
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlencode

from paho.mqtt.client import Client
from paho.mqtt.enums import CallbackAPIVersion

from gateway.page.password import make_password_line
from tests.support.gateways import daemon, free_port, wait_for_port, write_config

if TYPE_CHECKING:
    from subprocess import Popen

PASSWORD = "meadow gate"  # noqa: S105 - of daemons that live for a test
HASHED = make_password_line(PASSWORD)
UNREACHABLE = "127.0.0.1:1"


@dataclass
class Site:
    """Address of the page."""

    port: int
    mqtt_port: int
    config: Path
    process: "Popen[bytes]"
    cookie: str = ""
    sensors: list["Sensor"] = field(default_factory=list)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def ask(self, path: str, method: str = "GET", body: str = "", **headers: str) -> tuple[HTTPResponse, bytes]:
        """One request, with the session where there is one."""
        connection = HTTPConnection("127.0.0.1", self.port, timeout=20)
        try:
            given = {name.replace("_", "-"): value for name, value in headers.items()}
            if self.cookie:
                given.setdefault("Cookie", self.cookie)
            connection.request(method, path, body or None, given)
            answer = connection.getresponse()
            return answer, answer.read()
        finally:
            connection.close()

    def log_in(self, password: str = PASSWORD) -> HTTPResponse:
        answer, _ = self.ask("/login", "POST", urlencode({"password": password}))
        cookie = answer.getheader("Set-Cookie", "")
        if answer.status == 303:
            self.cookie = cookie.partition(";")[0]
        return answer

    def state(self, query: str = "") -> dict[str, Any]:
        answer, body = self.ask(f"/api/state?{query}")
        assert answer.status == 200, body
        found: dict[str, Any] = json.loads(body)
        return found

    def log(self) -> str:
        return self.config.with_suffix(".log").read_text()


class Sensor:
    """Publishes a reading now and then, by paho, on a thread of its own."""

    def __init__(self, port: int, topic: str, measure: tuple[str, float], every_s: float) -> None:
        """`measure`: what it is called in the reading, and around which value it is."""
        self._topic = topic
        self._client = Client(CallbackAPIVersion.VERSION2, topic)
        self._client.connect("127.0.0.1", port)
        self._client.loop_start()
        self._member, self._value = measure
        self._every_s = every_s
        self._sequence = 0
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        dice = random.Random(self._topic)  # noqa: S311 - a sensor's noise
        while not self._stopping.wait(self._every_s):
            self._value += dice.gauss(0, 0.2)
            reading = {self._member: round(self._value, 2), "boot": "1-0000beef", "seq": self._sequence}
            self._client.publish(self._topic, json.dumps(reading), qos=1)
            self._sequence += 1

    def skip(self, count: int) -> None:
        """Lose some."""
        self._sequence += count

    def stop(self) -> None:
        self._stopping.set()
        self._thread.join(10)
        self._client.disconnect()
        self._client.loop_stop()


def page_config(directory: Path, bootstrap: str, mqtt_port: int, page_port: int, extra: str = "") -> Path:
    """The settings of a gateway with a page, whose password is `PASSWORD`."""
    directory.mkdir(exist_ok=True)
    password = directory / "status-page"
    password.write_text(HASHED + "\n")
    password.chmod(0o400)
    page = f'\n[status_page]\nhost = "127.0.0.1"\nport = {page_port}\npassword_file = "{password}"\n{extra}'
    return write_config(directory, bootstrap, mqtt_port, "page", page)


@contextmanager
def site(directory: Path, bootstrap: str = UNREACHABLE, extra: str = "") -> Iterator[Site]:
    """The daemon, until the block ends."""
    mqtt_port, page_port = free_port(), free_port()
    config = page_config(directory, bootstrap, mqtt_port, page_port, extra)
    with daemon(config, mqtt_port) as process:
        wait_for_port(page_port, process)
        found = Site(page_port, mqtt_port, config, process)
        try:
            yield found
        finally:
            for sensor in found.sensors:
                sensor.stop()


def add_sensors(found: Site, count: int = 4, every_s: float = 0.5) -> None:
    kinds = (("thermo", "celsius", 21.5), ("hygro", "percent", 48.0), ("baro", "hPa", 1013.2), ("level", "mm", 812.0))
    for number in range(count):
        stream, member, around = kinds[number % len(kinds)]
        topic = f"device/{stream}-{number + 1}/{stream}"
        found.sensors.append(Sensor(found.mqtt_port, topic, (member, around), every_s))
