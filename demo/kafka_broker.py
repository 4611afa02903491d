"""Runs a real single-node Kafka broker (KRaft, broker and controller in one) on loopback, for demo and tests."""

import base64
import fcntl
import os
import random
import shutil
import socket
import struct
import subprocess
import tempfile
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from demo import child_process

JARS = Path(__file__).resolve().parent.parent / "build" / "jars" / "kafka"
HOST = "127.0.0.1"
CLASSES = "classes.jsa"
"""File beside the jars, if somebody made it: see `demo.kafka_classes`."""
CHECKPOINT = "bootstrap.checkpoint"
"""File that StorageTool writes into each data folder. As `CLASSES`, it may be beside the jars."""
START_S_MAX = 60.0
"""Seconds for a broker to start: 5 on an idle machine, several times that on two busy cores."""

JVM_OPTIONS = (
    # A demo's worth of data: the default of 1 GB would be most of a small machine.
    "-Xms64m",
    "-Xmx256m",
    "-XX:+UseSerialGC",
    "-XX:TieredStopAtLevel=1",
    "-Djava.awt.headless=true",
    "-Dorg.slf4j.simpleLogger.defaultLogLevel=warn",
    "-Dorg.slf4j.simpleLogger.showDateTime=true",
    "-Dorg.slf4j.simpleLogger.dateTimeFormat=yyyy-MM-dd'T'HH:mm:ss.SSS",
)

PROPERTIES = """\
process.roles=broker,controller
node.id=1
controller.quorum.voters=1@{host}:{controller_port}
controller.listener.names=CONTROLLER
listeners={listeners}
advertised.listeners={advertised}
listener.security.protocol.map=CONTROLLER:PLAINTEXT,DIRECT:PLAINTEXT,GATEWAY:PLAINTEXT
inter.broker.listener.name=DIRECT
log.dirs={data}
auto.create.topics.enable={auto_create_topics}
num.partitions=1
# One node holds everything, the broker's own topics too.
default.replication.factor=1
offsets.topic.replication.factor=1
offsets.topic.num.partitions=1
transaction.state.log.replication.factor=1
transaction.state.log.min.isr=1
transaction.state.log.num.partitions=1
share.coordinator.state.topic.replication.factor=1
share.coordinator.state.topic.min.isr=1
# Nobody else will join a consumer group here: do not wait for them.
group.initial.rebalance.delay.ms=0
# An idle controller writes an empty record twice a second, from which only other nodes would learn anything.
metadata.max.idle.interval.ms=0
"""


class BrokerError(RuntimeError):
    """The broker cannot be started; the message says why and what to do."""


@dataclass(frozen=True, slots=True)
class Broker:
    """A broker on this machine, whoever started it."""

    port: int

    @property
    def bootstrap(self) -> str:
        """`host:port` of the listener that leads to the broker without a detour."""
        return f"{HOST}:{self.port}"


@dataclass(frozen=True, slots=True)
class OwnBroker(Broker):
    """A broker that this process started."""

    process: subprocess.Popen[bytes]
    gateway_listener_port: int | None
    """Port of the GATEWAY listener, to which a proxy at the advertised port forwards."""
    log: Path

    def stop(self) -> None:
        """Send SIGTERM (it closes its logs), and SIGKILL after ten seconds."""
        child_process.stop(self.process)


@contextmanager
def kafka_broker(
    directory: Path, *, auto_create_topics: bool = False, gateway_port: int | None = None
) -> Iterator[OwnBroker]:
    """Run a broker for the length of a `with`, up and answering. See `launch_broker`."""
    properties = format_storage(directory, auto_create_topics=auto_create_topics, gateway_port=gateway_port)
    broker = launch_broker(properties)
    try:
        wait_until_ready(broker)
        yield broker
    finally:
        broker.stop()


@dataclass(frozen=True, slots=True)
class BrokerFiles:
    """A formatted data folder and its configuration."""

    properties: Path
    log: Path
    port: int
    gateway_listener_port: int | None


def format_storage(
    directory: Path,
    *,
    auto_create_topics: bool = False,
    gateway_port: int | None = None,
    log: Path | None = None,
) -> BrokerFiles:
    """Choose free ports, write `kraft.properties` and format `directory`/data. The log is broker.log there, or `log`.

    With `gateway_port` the broker gets a second listener, GATEWAY. It is bound to a free port but advertised as
    `gateway_port`: clients that come in there keep coming through the program that listens at that port.

    Raises:
        BrokerError: no jars, no Java, or a folder that cannot be formatted.
    """
    require_kafka()
    direct, controller, gateway = free_ports(3)
    listeners = [f"DIRECT://{HOST}:{direct}"]
    advertised = list(listeners)
    if gateway_port is not None:
        listeners.append(f"GATEWAY://{HOST}:{gateway}")
        advertised.append(f"GATEWAY://{HOST}:{gateway_port}")
    listeners.append(f"CONTROLLER://{HOST}:{controller}")
    directory.mkdir(parents=True, exist_ok=True)
    properties = directory / "kraft.properties"
    properties.write_text(
        PROPERTIES.format(
            host=HOST,
            controller_port=controller,
            listeners=",".join(listeners),
            advertised=",".join(advertised),
            data=directory.resolve() / "data",
            auto_create_topics=str(auto_create_topics).lower(),
        )
    )
    cluster_id = new_id()
    log = log or directory / "broker.log"
    if not format_by_checkpoint(directory / "data", cluster_id, 1):
        tool = ("kafka.tools.StorageTool", "format", "--cluster-id", cluster_id, "--config", properties)
        process = child_process.spawn([*java_command(), *tool], log)
        if process.wait(START_S_MAX) != 0:
            raise BrokerError(f"StorageTool cannot format {directory}/data:\n{child_process.log_tail(log)}")
    return BrokerFiles(properties, log, direct, gateway if gateway_port is not None else None)


def new_id() -> str:
    """Draw one of Kafka's ids: 128 bits in base64. One that starts with `-` would read as an option."""
    return "A" + base64.urlsafe_b64encode(uuid.uuid4().bytes).decode()[1:22]


def format_by_checkpoint(data: Path, cluster_id: str, node: int) -> bool:
    """Format a data folder as StorageTool does, without a Java. False, and nothing is done, if CHECKPOINT is not there.

    A cluster's folders differ by their ids alone.
    """
    if not (JARS / CHECKPOINT).exists():
        return False
    data.mkdir(parents=True)
    shutil.copyfile(JARS / CHECKPOINT, data / CHECKPOINT)
    ids = f"version=1\ncluster.id={cluster_id}\nnode.id={node}\ndirectory.id={new_id()}\n"
    (data / "meta.properties").write_text(ids)
    return True


def require_kafka() -> None:
    """Check that a broker can be started. Raises BrokerError."""
    if not any(JARS.glob("kafka_2.13-*.jar")):
        raise BrokerError(f"Kafka's jars are not in {JARS}. Run `make jars`, which fetches them.")
    if shutil.which(java_program()) is None:
        raise BrokerError(
            f"there is no `{java_program()}`. Install a JDK 17 or 21, for example openjdk-17-jdk-headless, and let "
            "JAVA_HOME name its folder, or be unset."
        )


def java_program() -> str:
    """Return the `java` of JAVA_HOME, else the one on the PATH: Spark and Maven choose by the same rule."""
    home = os.environ.get("JAVA_HOME")
    return f"{home}/bin/java" if home else "java"


def java_command(*options: str) -> list[str | Path]:
    """Return the command of Java with Kafka's jars: the name of a class and its arguments follow."""
    classes = JARS / CLASSES
    # A file of another Java is not worth a warning: the jars have the classes too.
    shared = [f"-XX:SharedArchiveFile={classes}", "-Xlog:cds*=off"] if classes.exists() else []
    return [java_program(), *JVM_OPTIONS, *shared, *options, "-cp", f"{JARS}/*"]


def launch_broker(files: BrokerFiles, *java_options: str) -> OwnBroker:
    """Start the broker and return at once. It dies with the calling thread at the latest."""
    process = child_process.spawn([*java_command(*java_options), "kafka.Kafka", files.properties], files.log)
    return OwnBroker(files.port, process, files.gateway_listener_port, files.log)


def wait_until_ready(broker: OwnBroker, patience_s: float = START_S_MAX) -> None:
    """Wait until the broker names itself as a member of its cluster.

    Raises:
        BrokerError: it ended, or took longer than `patience_s`.
    """
    deadline = time.monotonic() + patience_s
    while True:
        if broker.process.poll() is not None:
            raise BrokerError(f"the Kafka broker ended while starting:\n{child_process.log_tail(broker.log)}")
        if _broker_count(broker.port) > 0:
            return
        if time.monotonic() > deadline:
            raise BrokerError(
                f"the Kafka broker was not ready within {patience_s:.0f} s:\n{child_process.log_tail(broker.log)}"
            )
        time.sleep(0.1)


_given: set[int] = set()


def free_ports(count: int) -> list[int]:
    """Find loopback ports that nobody has now, and that no process of this user that runs was given before.

    They are below those that the system gives to outgoing connections, which would take one before it is used.
    """
    ports: list[int] = []
    while len(ports) < count:
        port = random.randrange(15_000, 32_000)  # noqa: S311 - a port, not a secret
        with socket.socket() as probe, suppress(OSError):
            probe.bind((HOST, port))
            # The byte with the port's number. The kernel takes the lock off a process that ends.
            fcntl.lockf(_claims(), fcntl.LOCK_EX | fcntl.LOCK_NB, 1, port)
            if port not in _given:
                _given.add(port)
                ports.append(port)
    return ports


@cache
def _claims() -> int:
    # No file object: those complain when they are still open at the process's end, where the locks are to last.
    return os.open(Path(tempfile.gettempdir()) / f"sluice-ports-{os.getuid()}", os.O_RDWR | os.O_CREAT, 0o600)


def _broker_count(port: int) -> int:
    """Count the brokers in the answer to a Metadata request (version 1, of no topics); 0 if there is no answer.

    An open port is not enough: a broker listens before it has joined its cluster, and is then fenced for a while.
    """
    request = struct.pack(">hhihi", 3, 1, 1, -1, 0)  # api key, version, correlation id, no client id, no topics
    try:
        with socket.create_connection((HOST, port), timeout=2.0) as connection:
            connection.sendall(struct.pack(">i", len(request)) + request)
            answer = b""
            while len(answer) < 12:  # length, correlation id, number of brokers
                received = connection.recv(4096)
                if not received:
                    return 0
                answer += received
    except OSError:
        return 0
    return int(struct.unpack_from(">i", answer, 8)[0])
