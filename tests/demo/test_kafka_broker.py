import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from aiokafka import AIOKafkaConsumer, AIOKafkaProducer
from aiokafka.admin import AIOKafkaAdminClient, NewTopic

from demo import child_process, kafka_broker
from demo.kafka_broker import BrokerError
from tests.support.waiting import patience


async def create_topic(bootstrap: str, name: str, **settings: str) -> None:
    admin = AIOKafkaAdminClient(bootstrap_servers=bootstrap)
    await admin.start()
    try:
        await admin.create_topics([NewTopic(name, num_partitions=1, replication_factor=1, topic_configs=settings)])
    finally:
        await admin.close()


def alive(pid: int) -> bool:
    """Whether the process runs: one that ended and waits for its parent does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def eventually(condition: Callable[[], bool]) -> bool:
    deadline = time.monotonic() + patience(10)
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.02)
    return True


@pytest.mark.kafka
async def test_what_is_produced_is_consumed_and_nothing_is_left_running(tmp_path: Path) -> None:
    with kafka_broker.kafka_broker(tmp_path) as broker:
        # The broker unpacks one codec and packs the other: both of their jars fit.
        await create_topic(broker.bootstrap, "device-thermo", **{"compression.type": "gzip"})
        async with AIOKafkaProducer(bootstrap_servers=broker.bootstrap, acks="all", compression_type="lz4") as producer:
            await producer.send_and_wait("device-thermo", b"21.5", key=b"42")
        async with AIOKafkaConsumer(
            "device-thermo", bootstrap_servers=broker.bootstrap, auto_offset_reset="earliest"
        ) as consumer:
            record = await consumer.getone()
        assert (record.key, record.value) == (b"42", b"21.5")
        assert alive(broker.process.pid)
    assert not alive(broker.process.pid)


@pytest.mark.kafka
def test_no_jar_is_older_than_the_one_that_closed_its_known_holes() -> None:
    jars = {
        name: tuple(map(int, version.removesuffix(".jar").split(".")))
        for name, _, version in (path.name.rpartition("-") for path in kafka_broker.JARS.glob("l*4*.jar"))
    }
    assert jars.keys() == {"lz4-java", "log4j-api", "log4j-core"}
    # CVE-2025-12183, CVE-2025-66566, CVE-2026-59949; CVE-2025-68161, CVE-2026-34477, CVE-2026-49844.
    assert jars["lz4-java"] >= (1, 11, 2)
    assert min(jars["log4j-api"], jars["log4j-core"]) >= (2, 25, 5)


def test_the_java_of_java_home_comes_before_that_on_the_path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JAVA_HOME", "/no/such/java")
    assert kafka_broker.java_program() == "/no/such/java/bin/java"
    with pytest.raises(BrokerError, match="there is no `/no/such/java/bin/java`"):
        kafka_broker.require_kafka()
    monkeypatch.setenv("JAVA_HOME", "")
    assert kafka_broker.java_program() == "java"
    monkeypatch.delenv("JAVA_HOME")
    assert kafka_broker.java_program() == "java"


@pytest.mark.kafka
async def test_the_gateway_listener_sends_clients_to_the_advertised_port(tmp_path: Path) -> None:
    advertised = kafka_broker.free_ports(1)[0]
    with kafka_broker.kafka_broker(tmp_path, gateway_port=advertised) as broker:
        admin = AIOKafkaAdminClient(bootstrap_servers=f"127.0.0.1:{broker.gateway_listener_port}")
        # The first answer comes from where we asked; every later connection goes where that answer points.
        await admin._client.bootstrap()
        try:
            assert [node.port for node in admin._client.cluster.brokers()] == [advertised]
        finally:
            await admin._client.close()


def test_missing_jars_are_told_with_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kafka_broker, "JARS", tmp_path / "nowhere")
    with pytest.raises(BrokerError, match="make jars"):
        kafka_broker.format_storage(tmp_path)


@pytest.mark.kafka
def test_without_files_beside_the_jars_that_are_of_use_a_folder_is_formatted_as_with_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    jars = tmp_path / "jars"
    jars.mkdir()
    for jar in kafka_broker.JARS.glob("*.jar"):
        (jars / jar.name).symlink_to(jar)
    (jars / kafka_broker.CLASSES).write_bytes(b"of another Java")
    with monkeypatch.context() as elsewhere:
        elsewhere.setattr(kafka_broker, "JARS", jars)
        assert any(kafka_broker.CLASSES in str(word) for word in kafka_broker.java_command())
        told = kafka_broker.format_storage(tmp_path / "by_tool").log.read_text()
    assert "Formatting" in told
    assert "jsa" not in told
    kafka_broker.format_storage(tmp_path / "by_checkpoint")
    assert formatted(tmp_path / "by_checkpoint") == formatted(tmp_path / "by_tool")


def formatted(directory: Path) -> tuple[int, set[str]]:
    """How long the one file of a data folder is, and what the other tells."""
    (checkpoint,) = (directory / "data").glob("*.checkpoint")
    ids = (directory / "data" / "meta.properties").read_text().splitlines()
    return checkpoint.stat().st_size, {line.partition("=")[0] for line in ids if not line.startswith("#")}


@pytest.mark.kafka
def test_a_broker_that_cannot_start_says_why(tmp_path: Path) -> None:
    files = kafka_broker.format_storage(tmp_path)
    files.properties.write_text(files.properties.read_text() + "num.network.threads=0\n")
    broker = kafka_broker.launch_broker(files)
    try:
        with pytest.raises(BrokerError, match=r"num\.network\.threads"):
            kafka_broker.wait_until_ready(broker)
    finally:
        broker.stop()


def test_children_die_with_a_parent_that_is_killed(tmp_path: Path) -> None:
    parent = subprocess.Popen(
        [
            sys.executable,
            "-c",
            textwrap.dedent("""
                import sys, time
                from pathlib import Path
                from demo.child_process import spawn
                print(spawn(["sleep", "60"], Path(sys.argv[1])).pid, flush=True)
                time.sleep(60)
            """),
            tmp_path / "log",
        ],
        stdout=subprocess.PIPE,
    )
    with parent:
        assert parent.stdout is not None
        child = int(parent.stdout.readline())
        assert eventually(lambda: Path(f"/proc/{child}/comm").read_text() == "sleep\n")
        parent.send_signal(signal.SIGKILL)
    assert eventually(lambda: not alive(child))


@pytest.mark.parametrize("group", [None, 0], ids=["in its group", "in a group of its own"])
def test_stop_leaves_nothing_that_the_child_started(tmp_path: Path, group: int | None) -> None:
    log = tmp_path / "log"
    parent = f"""
        import subprocess, time
        print(subprocess.Popen(["sleep", "60"], process_group={group}).pid, flush=True)
        time.sleep(60)
    """
    process = child_process.spawn([sys.executable, "-c", textwrap.dedent(parent)], log)
    assert eventually(lambda: log.exists() and log.read_text().endswith("\n"))
    grandchild = int(log.read_text())
    assert child_process.stop(process) == -signal.SIGTERM
    assert not alive(grandchild)


def test_a_child_that_ignores_sigterm_is_killed(tmp_path: Path) -> None:
    log = tmp_path / "log"
    process = child_process.spawn(["sh", "-c", "trap '' TERM; echo ready; sleep 60; sleep 60"], log)
    assert eventually(lambda: log.exists() and "ready" in log.read_text())
    assert child_process.stop(process, patience_s=0.1) == -signal.SIGKILL


def test_a_program_that_does_not_exist_is_named_in_the_log(tmp_path: Path) -> None:
    process = child_process.spawn(["no-such-program"], tmp_path / "log")
    assert process.wait(10) == 127
    assert "cannot start no-such-program" in child_process.log_tail(tmp_path / "log")
