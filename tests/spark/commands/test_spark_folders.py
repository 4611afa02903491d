"""Checks of `sluice-cloud` before it starts Spark: the folder of the tables, and whether Kafka answers."""

import errno
import socket
from pathlib import Path

import pytest
from click.testing import CliRunner
from pyspark.errors import PySparkException

from spark.cli import FAILED, main
from spark.engine.warehouse_folder import (
    LITTLE_BYTES_MAX,
    WarehouseInUseError,
    absolute,
    holds_little,
    only_replay,
    only_writer,
)
from spark.source.kafka_failures import explain_failure
from spark.source.kafka_reach import unreachable
from spark.source.storage_failures import explain_storage


def test_a_relative_folder_is_made_absolute_and_a_uri_is_left_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert absolute("wh") == str(tmp_path / "wh")
    assert absolute("s3a://bucket/wh") == "s3a://bucket/wh"
    # This file system has locks, however it is named.
    assert absolute("file:///data/wh") == absolute("file:/data/wh") == "/data/wh"


def test_a_warehouse_has_one_writer_at_a_time(tmp_path: Path) -> None:
    warehouse = str(tmp_path / "new" / "warehouse")
    with only_writer(warehouse), pytest.raises(WarehouseInUseError, match="stop it first"), only_writer(warehouse):
        pass
    with only_writer(warehouse):
        pass


def test_a_warehouse_has_one_replay_at_a_time_beside_its_writer(tmp_path: Path) -> None:
    warehouse = str(tmp_path)
    refused = pytest.raises(WarehouseInUseError, match="another replay")
    with only_writer(warehouse), only_replay(warehouse), refused, only_replay(warehouse):
        pass
    with only_replay(warehouse):
        pass


def test_a_warehouse_is_small_by_all_the_files_in_it(tmp_path: Path) -> None:
    parts = [tmp_path / "versions" / "part", tmp_path / "v1" / "log" / "part"]
    for part in parts:
        part.parent.mkdir(parents=True)
        with part.open("wb") as file:
            file.truncate(LITTLE_BYTES_MAX // 2)
    assert holds_little(str(tmp_path))
    with parts[0].open("ab") as file:
        file.write(b"1")
    assert not holds_little(str(tmp_path))


def test_a_warehouse_of_unknown_size_does_not_pass_for_a_small_one(tmp_path: Path) -> None:
    (tmp_path / "v1").symlink_to(tmp_path.parent)
    assert not holds_little(str(tmp_path))
    assert not holds_little("s3a://bucket/warehouse")


@pytest.mark.parametrize(
    ("said", "words"),
    [
        ("java.io.IOException: No space left on device\n\tat org.apache.hadoop.fs.X.write(X.java:1)", "/wh is full"),
        ("java.io.IOException: No space left on device\n\tat org.apache.spark.storage.X(X.java:1)", "/spill is full"),
        (
            "java.io.IOException: Disk quota exceeded\n\tat org.apache.hadoop.fs.X",
            "quota on the disk of /wh is used up",
        ),
        ("Caused by: X: Read-only file system\n\tat org.apache.hadoop.fs.X", "the disk of /wh can only be read"),
        ("java.io.IOException: Input/output error\n\tat org.apache.hadoop.fs.X", "the disk of /wh fails"),
        ("Mkdirs failed to create file:/proc/none/v1 (exists=false)", "the disk of /wh is full"),
        ("Mkdirs failed to create file:/no/such/v1 (exists=false)", "may this user write there"),
        (
            "[FAILED_READ_FILE.FILE_NOT_EXIST] Encountered error while reading file file:/wh/log/part-1.parquet. It",
            "the file file:/wh/log/part-1.parquet is gone: does something else clean up this folder",
        ),
        (
            "java.io.FileNotFoundException: \nFile s3a://b/wh/part-2.parquet does not exist",
            "the file s3a://b/wh/part-2.parquet is gone",
        ),
        ("AccessDeniedException: bucket", "this user may not read or write there"),
        (
            "java.net.UnknownHostException: node\n\tat org.apache.hadoop.ipc.X",
            "the warehouse's host node cannot be found",
        ),
    ],
)
def test_what_a_disk_refuses_is_told_in_words(said: str, words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPARK_LOCAL_DIRS", "/spill")
    assert words in (explain_storage(PySparkException(said), "/wh") or "")


def test_a_host_of_kafkas_settings_is_not_told_as_the_warehouses() -> None:
    said = "java.net.UnknownHostException: login.invalid\n\tat java.base/X\n\tat org.apache.kafka.common.security.X"
    assert explain_storage(PySparkException(said), "/wh") is None
    assert "the host login.invalid, which the settings of Kafka's client name" in (
        explain_failure(PySparkException(said)) or ""
    )


def test_a_disk_that_refuses_python_is_told_in_the_same_words() -> None:
    assert explain_storage(OSError(errno.ENOSPC, "No space"), "/wh") == "the disk of /wh is full: make room there"
    assert explain_storage(OSError(errno.ENOENT, "None", "/wh/x"), "/wh") == "/wh/x: None"
    assert explain_storage(ValueError("No space left on device"), "/wh") is None


def test_kafka_is_reached_where_one_of_the_brokers_answers() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
        assert unreachable(f"127.0.0.1:1,{address}") is None
    assert "Connection refused" in (unreachable("127.0.0.1:1") or "")


@pytest.mark.parametrize("bootstrap", ["kafka", "kafka:x", "kafka:70000", "a..b:9092", ""])
def test_what_is_no_address_is_said_to_be_none(bootstrap: str) -> None:
    assert unreachable(bootstrap)


def test_an_unreachable_broker_is_one_line_and_not_a_java_stack(tmp_path: Path) -> None:
    command = ["ingest", "--bootstrap", "127.0.0.1:1", "--warehouse", str(tmp_path), "--once"]
    ended = CliRunner().invoke(main, command)
    assert ended.exit_code == FAILED
    assert ended.output.splitlines() == [
        "Error: Kafka cannot be reached (127.0.0.1:1: Connection refused): check --bootstrap, and that the broker runs"
    ]
