"""A gateway and its sensors on one side of a network that fails, a Kafka on the other, and the ledger between them."""

import asyncio
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any

from aiokafka import ConsumerRecord

from demo import child_process
from gateway.buffer.status import read_status
from tests.support.gateways import SLUICE, consume, header, wait_for_port, write_config
from tests.support.kafka_cluster import Cluster, Listener, kafka_cluster
from tests.support.netns import BROKERS_NET, BROKERS_NET6, Network, network_or_skip
from tests.support.uplink_ledger import Audit, acknowledged_in, audit, in_kafka
from tests.support.waiting import patience

KAFKA_NAME = "kafka.example"
LISTENER = "GATEWAY"
MQTT_PORT = 1883
"""The gateway's loopback is its own: no other test listens there."""
RECOVERY_S_MAX = 15.0
"""Seconds after the return of the path within which a new reading is in Kafka (docs/guarantees.md)."""
CALM_ROWS = 50
"""Fewer rows than this wait when nothing but live readings is on its way."""
SENSORS = 20
INTERVAL_MS = 200


@dataclass(slots=True)
class Scene:
    """The network and the Kafka in it, which several gateways may use one after the other."""

    network: Network
    cluster: Cluster
    directory: Path
    broker_host: int = 10
    """The last byte of the broker's present address."""
    ip_versions: tuple[int, ...] = (4,)
    """IP versions for which the broker's name has an address, the gateway's first choice first."""
    numbers: Iterator[int] = field(default_factory=lambda: count(1))
    """Numbers of the gateways that have run in it. Each has a folder and topics of its own."""

    @property
    def bootstrap(self) -> str:
        """Bootstrap address for the gateway's settings."""
        return f"{KAFKA_NAME}:{self.cluster.node(1).ports[LISTENER]}"

    def move_broker(self) -> None:
        """The broker has another address from now on; its name does not say so yet."""
        old, self.broker_host = self.broker_host, 21 - self.broker_host  # 10 and 11
        self.network.add_broker_address(self.broker_host)
        self.network.remove_broker_address(old)

    def name_follows(self) -> None:
        by_version = {4: f"{BROKERS_NET}.{self.broker_host}", 6: f"{BROKERS_NET6}::{self.broker_host}"}
        self.network.name(KAFKA_NAME, *(by_version[version] for version in self.ip_versions))

    def mend(self) -> None:
        """Path, link and names are well again, whatever was left of a fault."""
        self.network.heal()
        self.network.link_up()
        self.network.dns_alive()
        self.name_follows()

    def consume(self, *topics: str) -> list[ConsumerRecord]:
        """Everything that stands in the topics now, by the broker's own loopback, which no fault reaches."""
        return self.network.brokers.inside(lambda: asyncio.run(consume(self.cluster.bootstrap, *topics)))


@dataclass(frozen=True, slots=True)
class Fault:
    """A fault on the way to Kafka, and its end."""

    begin: Callable[[Scene], None]
    end: Callable[[Scene], None]


def _address_changed(scene: Scene) -> None:
    scene.network.change_address()
    scene.network.heal()


def _interface_changed(scene: Scene) -> None:
    scene.network.change_interface()
    scene.network.heal()


def _lookup_fails(silence: Callable[[Scene], None]) -> Callable[[Scene], None]:
    """A name is asked for again when the connections are lost."""

    def begin(scene: Scene) -> None:
        silence(scene)
        scene.network.change_address()

    return begin


def _nothing(_scene: Scene) -> None:
    pass


FAULTS = {
    # In both cases requests are under way when the address goes. Where the answers alone are lost Kafka has them: they
    # come again, for the broker or a consumer to recognise.
    "address-changed": Fault(lambda scene: scene.network.lose_answers(), _address_changed),
    "interface-changed": Fault(lambda scene: scene.network.blackhole(), _interface_changed),
    "link-down": Fault(lambda scene: scene.network.link_down(), lambda scene: scene.network.link_up()),
    "blackhole": Fault(lambda scene: scene.network.blackhole(), lambda scene: scene.network.heal()),
    "loss-30-percent": Fault(lambda scene: scene.network.lose(30), lambda scene: scene.network.heal()),
    "128-kbit": Fault(lambda scene: scene.network.slow(128), lambda scene: scene.network.heal()),
    "router-forgets": Fault(lambda scene: scene.network.forget_connections(), _nothing),
    "broker-moved": Fault(Scene.move_broker, Scene.name_follows),
    "dns-dead": Fault(_lookup_fails(lambda scene: scene.network.dns_dead()), lambda scene: scene.network.dns_alive()),
    "name-unknown": Fault(_lookup_fails(lambda scene: scene.network.name(KAFKA_NAME)), Scene.name_follows),
}
"""Faults by name. Each leaves the path whole, but the gateway may be elsewhere."""


@dataclass(frozen=True, slots=True)
class Step:
    """A fault, how long it lasts, and how long the path is whole after it."""

    fault: str
    fault_s: float
    whole_s: float


def random_steps(seed: int, *, fault_s_max: float = 6.0, whole_s_max: float = 3.0) -> Iterator[Step]:
    """An endless schedule of faults: the same for the same seed. Each kind comes before any comes again."""
    rng = random.Random(seed)  # noqa: S311 - a schedule, no secret
    while True:
        for name in rng.sample(sorted(FAULTS), len(FAULTS)):
            yield Step(name, rng.uniform(0.2, fault_s_max), rng.uniform(0.0, whole_s_max))


def inflict(scene: Scene, step: Step) -> float:
    """One step of a schedule, from its beginning until the next one may begin; when the path was back (Unix time)."""
    FAULTS[step.fault].begin(scene)
    time.sleep(step.fault_s)
    FAULTS[step.fault].end(scene)
    back_s = time.time()
    time.sleep(step.whole_s)
    return back_s


@dataclass(slots=True)
class RunningGateway:
    """One gateway with its fleet, running in the gateway's namespace, and what is to be known of them."""

    scene: Scene
    config: Path
    prefix: str
    daemon: subprocess.Popen[bytes]
    fleet: subprocess.Popen[bytes]

    @property
    def rows(self) -> int:
        """Rows that wait on disk."""
        return read_status(self.config.with_name("buffer.db")).rows

    def status(self) -> dict[str, Any]:
        """Output of `sluice status --json`."""
        command: list[str | Path] = [SLUICE, "status", "--config", self.config, "--json"]
        ended = subprocess.run(command, capture_output=True, timeout=patience(30), check=False)
        found: dict[str, Any] = json.loads(ended.stdout)
        return found

    def cpu_s(self) -> float:
        """CPU time of the daemon so far."""
        fields = Path(f"/proc/{self.daemon.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def log_lines(self) -> list[dict[str, Any]]:
        """Lines of the daemon's log. Raises ValueError for text that is no line of its own, such as a traceback."""
        return [json.loads(line) for line in self.config.with_suffix(".log").read_text().splitlines()]

    def log_texts(self, begin: int = 0) -> Counter[str]:
        """Number of times that each text was logged, from line `begin` on."""
        return Counter(line["event"] for line in self.log_lines()[begin:])

    def wait_until_calm(self, patience_s: float) -> bool:
        """Wait until no more than live readings wait on disk; whether it came to that."""
        deadline = time.monotonic() + patience(patience_s)
        while self.rows > CALM_ROWS:
            if time.monotonic() > deadline:
                return False
            time.sleep(0.2)
        return True

    def appended_since(self, begin_s: float) -> int:
        """Records in Kafka whose LogAppendTime is not before a Unix time."""
        return sum(record.timestamp / 1000 >= begin_s for record in self.scene.consume(f"{self.prefix}-thermo"))

    def finish(self, patience_s: float = 30.0) -> "Outcome":
        """Let the sensors end, the buffer drain, and compare. Raises AssertionError where it does not drain."""
        self.fleet.send_signal(signal.SIGTERM)
        self.fleet.wait(patience(patience_s))
        deadline = time.monotonic() + patience(patience_s)
        while self.rows:
            assert time.monotonic() < deadline, (
                f"{self.rows} rows still wait {patience_s:.0f} s after the last reading; the daemon says:\n"
                + "\n".join(map(str, self.log_lines()[-5:]))
            )
            time.sleep(0.2)
        records = self.scene.consume(f"{self.prefix}-thermo")
        ledger = self.config.with_name("fleet.ledger").read_text()
        return Outcome(records, audit(acknowledged_in(ledger), in_kafka(records)))


@dataclass(frozen=True, slots=True)
class Outcome:
    """Records in Kafka at the end."""

    records: Sequence[ConsumerRecord]
    audit: Audit

    def recovery_s(self, back_s: float) -> float:
        """From `back_s` (Unix time) until a reading that was taken in after it was in Kafka (its LogAppendTime).

        Infinite without one.
        """
        since = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(back_s)) + f"{back_s % 1:.6f}"[1:] + "Z"
        new = [record.timestamp for record in self.records if header(record, "ce_receivedtime") >= since]
        return min(new) / 1000 - back_s if new else float("inf")

    def appended_between(self, begin_s: float, end_s: float) -> int:
        """Records whose LogAppendTime lies between two Unix times."""
        return sum(begin_s <= record.timestamp / 1000 < end_s for record in self.records)


@contextmanager
def scene_in(network: Network, directory: Path) -> Iterator[Scene]:
    """One Kafka node in a network's brokers' namespace, for the length of a `with`."""
    listener = Listener(LISTENER, host=KAFKA_NAME, bind="[::]")
    with kafka_cluster(directory / "kafka", 1, [listener], command_prefix=network.brokers.prefix) as cluster:
        scene = Scene(network, cluster, directory)
        scene.name_follows()
        yield scene


@contextmanager
def scene_or_skip(directory: Path) -> Iterator[Scene]:
    """A scene with a network of its own. If there can be no namespaces, the tests are skipped."""
    with network_or_skip(directory) as network, scene_in(network, directory) as scene:
        yield scene


@contextmanager
def running_gateway(
    scene: Scene, settings: str = "", *, sensors: int = SENSORS, interval_ms: int = INTERVAL_MS
) -> Iterator[RunningGateway]:
    """A gateway and its fleet for the length of a `with`, with topics of their own, forwarding already.

    `settings` are lines of `[kafka]`.
    """
    prefix = f"path{next(scene.numbers)}"
    directory = scene.directory / prefix
    directory.mkdir()
    config = write_config(directory, scene.bootstrap, MQTT_PORT, prefix, '[log]\nformat = "json"\n')
    # Heartbeats as seldom as they are by default: a tenth of a slow link is not theirs.
    text = config.read_text().replace("heartbeat_interval_s = 0.5\n", "")
    config.write_text(text.replace("[kafka]\n", f"[kafka]\n{settings}\n"))
    network, inside = scene.network, scene.network.gateway
    daemon = network.run(inside, [SLUICE, "run", "--config", config], config.with_suffix(".log"))
    fleet: subprocess.Popen[bytes] | None = None
    try:
        inside.inside(lambda: wait_for_port(MQTT_PORT, daemon))
        command = [sys.executable, "-m", "sluice_sim", "fleet", "--port", str(MQTT_PORT), "--sensors", str(sensors)]
        command += ["--interval-ms", str(interval_ms), "--ledger", str(directory / "fleet.ledger"), "--json"]
        fleet = network.run(inside, command, directory / "fleet.log", output=directory / "fleet.out")
        running = RunningGateway(scene, config, prefix, daemon, fleet)
        _wait_for_first_record(running)
        yield running
    finally:
        for process in (fleet, daemon):
            if process is not None:
                child_process.stop(process)


def _wait_for_first_record(running: RunningGateway) -> None:
    deadline = time.monotonic() + patience(30)
    while not running.scene.consume(f"{running.prefix}-thermo"):
        assert time.monotonic() < deadline, f"nothing arrives:\n{running.log_lines()[-5:]}"
        time.sleep(0.3)
