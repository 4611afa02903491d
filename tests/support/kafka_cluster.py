"""A real Kafka cluster of one to three KRaft nodes, each of which can be stopped, killed, replaced and started again.

What is asked of a running one, topics and users, is in `kafka_admin`. Nodes die with the thread that starts them: start
them from the main one.
"""

import shutil
import signal
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from demo import child_process
from demo.kafka_broker import BrokerError, format_by_checkpoint, free_ports, java_command, new_id, require_kafka
from tests.support.waiting import patience

LOOPBACK = "127.0.0.1"
DIRECT = "DIRECT"
"""The plain listener that every node has on its loopback: for the other nodes, and for tests that look on."""
START_S_MAX = 90.0
"""Three nodes are up in 10 s on two idle cores; busy ones take several times that."""
STOP_S_MAX = 20.0
"""A node that is asked to end hands its partitions over first, and waits for its controller where there is none."""
STARTED = "Kafka Server started"
"""Log line of a node once the cluster has taken it in and it answers."""

LOGGED = (
    # `java` in a namespace cannot be asked whether it is up from without: its log says it.
    "-Dorg.slf4j.simpleLogger.log.kafka.server.KafkaRaftServer=info",
    # The throw-away clusters of tests are fenced and elect anew all the time.
    "-Dorg.slf4j.simpleLogger.log.org.apache.kafka.clients=error",
    "-Dorg.slf4j.simpleLogger.log.org.apache.kafka.raft=error",
)

PROPERTIES = """\
process.roles=broker,controller
node.id={node}
controller.quorum.voters={voters}
controller.listener.names=CONTROLLER
listeners={listeners}
advertised.listeners={advertised}
listener.security.protocol.map={protocols}
inter.broker.listener.name=DIRECT
log.dirs={data}
auto.create.topics.enable=false
num.partitions=1
default.replication.factor={replicas}
min.insync.replicas={in_sync}
offsets.topic.replication.factor={replicas}
offsets.topic.num.partitions=1
transaction.state.log.replication.factor={replicas}
transaction.state.log.min.isr={in_sync}
transaction.state.log.num.partitions=1
share.coordinator.state.topic.replication.factor={replicas}
share.coordinator.state.topic.min.isr={in_sync}
group.initial.rebalance.delay.ms=0
# A node that was killed is missed after this: the default of 9 s is long in a test, less would fence busy ones.
broker.session.timeout.ms=5000
broker.heartbeat.interval.ms=500
# Whoever comes in without logging in may do everything; others too, but for topics that have ACLs.
authorizer.class.name=org.apache.kafka.metadata.authorizer.StandardAuthorizer
super.users=User:ANONYMOUS
allow.everyone.if.no.acl.found=true
"""

Protocol = Literal["PLAINTEXT", "SSL", "SASL_PLAINTEXT", "SASL_SSL"]


_LOGIN_MODULES = {"PLAIN": "plain.PlainLoginModule", "OAUTHBEARER": "oauthbearer.OAuthBearerLoginModule"}


@dataclass(frozen=True, slots=True)
class Listener:
    """A listener that every node has beside DIRECT, each at a port of its own."""

    name: str
    """Capital letters and digits."""
    protocol: Protocol = "PLAINTEXT"
    host: str = LOOPBACK
    """Address or name for clients. All nodes have the same, and differ by port."""
    bind: str = LOOPBACK
    """Address to listen on: [::], for IPv4 too, in a namespace whose addresses change."""
    key_store: Path | None = None
    """PEM: the private key and its certificate in one file."""
    client_ca: Path | None = None
    """PEM: with it every client needs a certificate of this CA."""
    mechanisms: tuple[str, ...] = ()
    """PLAIN, SCRAM-SHA-256, SCRAM-SHA-512."""
    plain_users: tuple[tuple[str, str], ...] = ()
    """User and password; those of SCRAM are set by `kafka_admin.set_password`."""
    more: tuple[str, ...] = ()
    """More lines of `kraft.properties`, without the listener's prefix."""

    def properties(self) -> Iterator[str]:
        """Lines of `kraft.properties`, without the addresses."""
        prefix = f"listener.name.{self.name.lower()}"
        if self.key_store is not None:
            yield f"{prefix}.ssl.keystore.type=PEM"
            yield f"{prefix}.ssl.keystore.location={self.key_store}"
        if self.client_ca is not None:
            yield f"{prefix}.ssl.client.auth=required"
            yield f"{prefix}.ssl.truststore.type=PEM"
            yield f"{prefix}.ssl.truststore.location={self.client_ca}"
        if self.mechanisms:
            yield f"{prefix}.sasl.enabled.mechanisms={','.join(self.mechanisms)}"
        for mechanism in self.mechanisms:
            module = _LOGIN_MODULES.get(mechanism, "scram.ScramLoginModule")
            users = self.plain_users if mechanism == "PLAIN" else ()
            options = "".join(f' user_{user}="{password}"' for user, password in users)
            yield (
                f"{prefix}.{mechanism.lower()}.sasl.jaas.config="
                f"org.apache.kafka.common.security.{module} required{options};"
            )
        for line in self.more:
            yield f"{prefix}.{line}"


@dataclass(slots=True)
class Node:
    """One broker and controller, with a folder of its own that outlives its process."""

    number: int
    """Kafka's node.id, from 1."""
    directory: Path
    ports: dict[str, int]
    """Ports by listener: DIRECT, CONTROLLER, and those of the cluster."""
    command_prefix: tuple[str, ...] = ()
    process: subprocess.Popen[bytes] | None = None
    _log_from: int = 0
    """Place in the log where the present process began."""

    @property
    def log(self) -> Path:
        return self.directory / "node.log"

    @property
    def properties(self) -> Path:
        return self.directory / "kraft.properties"

    def launch(self) -> None:
        """Start it and return at once; it dies with the calling thread at the latest."""
        self._log_from = self.log.stat().st_size if self.log.exists() else 0
        self.process = self._spawn("kafka.Kafka", self.properties)

    def wait_until_ready(self, patience_s: float = START_S_MAX) -> None:
        """Return once the cluster has taken it in. Raises BrokerError where it ended or took longer."""
        deadline = time.monotonic() + patience(patience_s)
        while STARTED not in self._logged():
            if self.process is None or self.process.poll() is not None:
                raise BrokerError(f"node {self.number} ended while starting:\n{child_process.log_tail(self.log)}")
            if time.monotonic() > deadline:
                raise BrokerError(
                    f"node {self.number} was not ready in {patience_s:.0f} s:\n{child_process.log_tail(self.log)}"
                )
            time.sleep(0.1)

    def start(self) -> None:
        """Start it and wait until it is a member of its cluster, which needs a majority of nodes up."""
        self.launch()
        self.wait_until_ready()

    def stop(self) -> None:
        """End it as a rolling restart does: it hands over what it leads and closes its logs."""
        self._end(signal.SIGTERM)

    def kill(self) -> None:
        """End it as a power cut does."""
        self._end(signal.SIGKILL)

    def format(self, cluster_id: str) -> subprocess.Popen[bytes] | None:
        """Begin to make its data folder anew, as a member of `cluster_id`, for `formatted` to wait for."""
        data = self.directory / "data"
        shutil.rmtree(data, ignore_errors=True)
        if format_by_checkpoint(data, cluster_id, self.number):
            return None
        return self._spawn("kafka.tools.StorageTool", "format", "--cluster-id", cluster_id, "--config", self.properties)

    def formatted(self, process: subprocess.Popen[bytes] | None) -> None:
        """Wait for the end of `format`. Raises BrokerError."""
        if process is not None and process.wait(START_S_MAX) != 0:
            raise BrokerError(f"StorageTool cannot format node {self.number}:\n{child_process.log_tail(self.log)}")

    def _end(self, number: signal.Signals) -> None:
        if self.process is not None:
            self.process.send_signal(number)
            child_process.stop(self.process, STOP_S_MAX)
            self.process = None

    def _spawn(self, *command: str | Path) -> subprocess.Popen[bytes]:
        return child_process.spawn([*self.command_prefix, *java_command(*LOGGED), *command], self.log)

    def _logged(self) -> str:
        with self.log.open("rb") as file:
            file.seek(self._log_from)
            return file.read().decode(errors="replace")


@dataclass(slots=True)
class Cluster:
    """Nodes that know one another; made by `make_cluster`."""

    nodes: tuple[Node, ...]
    listeners: tuple[Listener, ...] = ()

    @property
    def bootstrap(self) -> str:
        """`host:port,host:port` of the plain listeners, for aiokafka; from within the cluster's namespace."""
        return ",".join(self.addresses())

    def addresses(self, listener: str = DIRECT) -> list[str]:
        """`host:port` of one listener on each node, as clients are told it."""
        (host,) = [each.host for each in self.listeners if each.name == listener] or [LOOPBACK]
        return [f"{host}:{node.ports[listener]}" for node in self.nodes]

    def node(self, number: int) -> Node:
        return self.nodes[number - 1]

    def format(self) -> None:
        """Give all nodes empty disks, as members of a new cluster: what was in the old one is gone.

        None may be running. Raises BrokerError.
        """
        cluster_id = new_id()
        for node, process in [(node, node.format(cluster_id)) for node in self.nodes]:
            node.formatted(process)

    def configure(self, *listeners: Listener) -> None:
        """Give the listeners of these names other settings, from each node's next start on."""
        others = {listener.name: listener for listener in listeners}
        self.listeners = tuple(others.get(listener.name, listener) for listener in self.listeners)
        for node in self.nodes:
            node.properties.write_text(_properties(self, node))

    def start(self) -> None:
        """Start the nodes that are not running, and wait until all are members. Raises BrokerError."""
        started = [node for node in self.nodes if node.process is None]
        for node in started:
            node.launch()
        for node in started:
            node.wait_until_ready()

    def kill(self) -> None:
        """End all nodes as a power cut of the whole site does."""
        for node in self.nodes:
            node.kill()


@contextmanager
def kafka_cluster(
    directory: Path, count: int = 3, listeners: Sequence[Listener] = (), *, command_prefix: Sequence[str] = ()
) -> Iterator[Cluster]:
    """A started cluster for the length of a `with`. See `make_cluster`."""
    cluster = make_cluster(directory, count, listeners, command_prefix=command_prefix)
    try:
        cluster.start()
        yield cluster
    finally:
        cluster.kill()


def make_cluster(
    directory: Path, count: int = 3, listeners: Sequence[Listener] = (), *, command_prefix: Sequence[str] = ()
) -> Cluster:
    """Choose ports, write each node's configuration and format its disk; nothing is started.

    Topics get as many replicas as there are nodes, and `min.insync.replicas` 2 where there are several. With a
    `command_prefix`, such as `["ip", "netns", "exec", NAME]`, every node runs behind it: the loopback, which DIRECT
    and the controllers use, is then the namespace's, and has to be up.

    Raises:
        BrokerError: no jars, no Java, or a folder that cannot be formatted.
    """
    require_kafka()
    names = [DIRECT, "CONTROLLER", *(listener.name for listener in listeners)]
    ports = iter(free_ports(count * len(names)))
    nodes = tuple(
        Node(
            number, directory.resolve() / f"node{number}", {name: next(ports) for name in names}, tuple(command_prefix)
        )
        for number in range(1, count + 1)
    )
    cluster = Cluster(nodes, tuple(listeners))
    for node in nodes:
        node.directory.mkdir(parents=True)
    cluster.configure()
    cluster.format()
    return cluster


def _properties(cluster: Cluster, node: Node) -> str:
    """`kraft.properties` of one node."""
    bound = [f"{DIRECT}://{LOOPBACK}:{node.ports[DIRECT]}", f"CONTROLLER://{LOOPBACK}:{node.ports['CONTROLLER']}"]
    advertised = bound[:1]
    protocols = [f"{DIRECT}:PLAINTEXT", "CONTROLLER:PLAINTEXT"]
    more: list[str] = []
    for listener in cluster.listeners:
        port = node.ports[listener.name]
        bound.append(f"{listener.name}://{listener.bind}:{port}")
        advertised.append(f"{listener.name}://{listener.host}:{port}")
        protocols.append(f"{listener.name}:{listener.protocol}")
        more += listener.properties()
    fixed = PROPERTIES.format(
        node=node.number,
        voters=",".join(f"{each.number}@{LOOPBACK}:{each.ports['CONTROLLER']}" for each in cluster.nodes),
        listeners=",".join(bound),
        advertised=",".join(advertised),
        protocols=",".join(protocols),
        data=node.directory / "data",
        replicas=len(cluster.nodes),
        in_sync=min(2, len(cluster.nodes)),
    )
    return fixed + "".join(f"{line}\n" for line in more)
