"""Builds the Spark session that every job runs in: Kafka and Delta on the class path, UTC, quiet."""

import ctypes
import os
import signal
import sys
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from subprocess import Popen
from tempfile import gettempdir
from typing import TYPE_CHECKING, Any

from spark.engine.told_error import ToldError

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

PROJECT = Path(__file__).parents[2]
JARS_DEFAULT = PROJECT / "build" / "jars" / "spark"
JARS_NEEDED = (
    "spark-sql-kafka",
    "spark-token-provider-kafka",
    "kafka-clients",
    "commons-pool2",
    "delta-spark",
    "delta-storage",
)
MASTER_DEFAULT = "local[*]"
LOOPBACK = "127.0.0.1"
MEMORY_DEFAULT = "3g"
"""Memory of a session in one process. With Spark's default, 1 GB, the JVM collects garbage all the time. With 2 GB, a
compressed record of 101 MB among 60 of 8 MB sometimes failed."""
COMPILE_ALL = "-XX:-DontCompileHugeMethods"
"""Compile methods of more than 8,000 bytes too. Spark makes one method of a whole chain of columns. The methods for
headers and payloads are longer, and interpreted they ran five times as slowly."""
COLLECT_IN_PAUSES = "-XX:+UseParallelGC"
"""Collect garbage in pauses. G1 collects beside the work, which took 1 to 2 s of CPU for 100,000 records. It keeps
pauses short, which nobody needs here."""
JAVA_OPTIONS = (COMPILE_ALL, COLLECT_IN_PAUSES)
WORDS_TO_STDERR = "-XX:+DisplayVMOutputToStderr"
"""Print errors of Java's start to standard error. Standard output is for a command's answer alone."""
SHORT_LIVED = "-XX:TieredStopAtLevel=1 -XX:ReservedCodeCacheSize=256m"
"""Java options of a session that lasts a few minutes. In it, the optimising compiler takes more time than it saves: a
quarter of a small batch's. With the first compiler alone, the code cache would be 48 MB, which Spark fills in a
minute."""
CLASSES = "classes.jsa"
"""Archive of Spark's classes beside the jars, if somebody made it with `spark.commands.class_archive`."""
CLASSES_QUIETLY = "-Xlog:cds*=off"
"""Do not warn if the archive is of another Java or of other jars: it is then only ignored."""
ERRORS = "errors.log"
"""File of Java's log in the folder of a command's temporary files."""
PR_SET_PDEATHSIG = 1
"""prctl(2): sets the signal that a process gets when its parent ends."""


class JarsMissingError(ToldError):
    """The connector jars are missing. The message says what to do."""


def jars_folder() -> Path:
    """Return the folder of the jars that PySpark lacks: `SLUICE_SPARK_JARS`, or `build/jars/spark`."""
    return Path(os.environ.get("SLUICE_SPARK_JARS") or JARS_DEFAULT)


def connector_jars() -> list[Path]:
    """Return the jars that PySpark lacks. Raises JarsMissingError if one of them is missing."""
    folder = jars_folder()
    jars = sorted(folder.glob("*.jar"))
    missing = [name for name in JARS_NEEDED if not any(jar.name.startswith(name) for jar in jars)]
    if missing:
        raise JarsMissingError(
            f"{folder} lacks the jars {', '.join(missing)}: Spark cannot read Kafka or write Delta tables "
            "without them. Run `make jars`, or point SLUICE_SPARK_JARS at a folder that holds them."
        )
    return jars


def open_session(
    application: str, master: str | None = None, *, is_brief: bool = False, scratch: Path | None = None
) -> "SparkSession":
    """Start Spark, or return the session that is running.

    `master` is Spark's master URL. Its default is `SLUICE_SPARK_MASTER`, or else all cores of this machine. The master
    and the settings of `spark-submit` override all others. `is_brief` adds SHORT_LIVED to the options of the driver's
    JVM, and `SLUICE_SPARK_JAVA_OPTIONS` adds more. `scratch` is the folder of a command's temporary files. With it,
    Java puts its temporary files and its error log there, and ends only with this process. Raises JarsMissingError.
    """
    given = _submitted()
    # With `spark-submit`, the jars are named there or are in the cluster.
    jars = [] if given else connector_jars()
    # Imported late: it takes a second and 50 MB, which `--help` should not.
    from pyspark.sql import SparkSession  # noqa: PLC0415

    classes = jars_folder() / CLASSES
    log_settings = (Path(__file__).parent / "log4j2.properties").as_uri()
    settings = {
        "spark.sql.extensions": "io.delta.sql.DeltaSparkSessionExtension",
        "spark.sql.catalog.spark_catalog": "org.apache.spark.sql.delta.catalog.DeltaCatalog",
        # Event times are UTC. Another time zone would move readings to other days.
        "spark.sql.session.timeZone": "UTC",
        # By default Spark writes 96 bits without statistics. By these, DuckDB and Spark skip parts of files.
        "spark.sql.parquet.outputTimestampType": "TIMESTAMP_MICROS",
        # A value that does not fit is an error, never a silent null. Expressions that may fail use `try_` functions.
        "spark.sql.ansi.enabled": "true",
        # The defaults, 50 and 200, are for clusters. With them a count took 22 s on two cores.
        "spark.databricks.delta.snapshotPartitions": "2",
        "spark.sql.shuffle.partitions": "2",
        # Delta's vacuum lists a table's folders in this many tasks, however few there are. The default is 10,000.
        "spark.sql.sources.parallelPartitionDiscovery.parallelism": "16",
        # We keep nothing there, but Spark makes the folder: by default in the working directory of a command.
        "spark.sql.warehouse.dir": Path(gettempdir()).as_uri(),
        "spark.ui.enabled": "false",
        # Although the page is off, Spark would keep the plans of the last 1,000 queries, and the tasks of all jobs.
        "spark.sql.ui.retainedExecutions": "5",
        "spark.ui.retainedJobs": "20",
        "spark.ui.retainedStages": "20",
        "spark.ui.retainedTasks": "200",
        "spark.sql.ui.explainMode": "simple",
        "spark.sql.maxPlanStringLength": "65536",
        "spark.ui.showConsoleProgress": "false",
        # Parquet checks a page's size from this row on. The default is the hundredth row: before it, a hundred large
        # records would fill the memory.
        "spark.hadoop.parquet.page.size.row.check.min": "1",
        # Rows go to Python in portions. By default only their number has a bound, and a value may have a megabyte.
        "spark.sql.execution.arrow.maxBytesPerBatch": str(64 * 1_048_576),
        # Keep the compiled code of queries for the next batch. One batch needs more entries than the default, 100:
        # each batch then compiled its code anew.
        "spark.sql.codegen.cache.maxEntries": "1000",
        # Above 128 groups, the default, Spark sorts all rows by their group to aggregate them. A batch has thousands.
        "spark.sql.objectHashAggregate.sortBased.fallbackThreshold": "65536",
        # If a job is killed while it writes the offsets of its first batch, a part of that file remains. Spark would
        # then refuse the checkpoint for ever. `ingest` checks the checkpoint itself, and no query of ours keeps state.
        "spark.sql.streaming.verifyCheckpointDirectoryEmptyOnStart": "false",
        # If true, each call that builds a query looks up its line in Python: a tenth of a small batch's time.
        "spark.python.sql.dataFrameDebugging.enabled": "false",
        "spark.driver.extraJavaOptions": " ".join(
            [
                f"-Dlog4j2.configurationFile={log_settings}",
                WORDS_TO_STDERR,
                *JAVA_OPTIONS,
                *([SHORT_LIVED] if is_brief else []),
                *([f'"-Djava.io.tmpdir={scratch}"', "-Dsluice.errors=file"] if scratch is not None else []),
                *([f'"-Dsluice.errors.file={scratch / ERRORS}"'] if scratch is not None else []),
                *([f'"-XX:SharedArchiveFile={classes}"', CLASSES_QUIETLY] if classes.exists() else []),
                os.environ.get("SLUICE_SPARK_JAVA_OPTIONS", ""),
            ]
        ).strip(),
        "spark.executor.extraJavaOptions": " ".join(JAVA_OPTIONS),
    }
    if jars:
        settings["spark.jars"] = ",".join(str(jar) for jar in jars)
    master = given.get("spark.master") or master or os.environ.get("SLUICE_SPARK_MASTER") or MASTER_DEFAULT
    if is_on_this_machine(master):
        # Nobody else joins a local session, so it need not depend on the host's name or address.
        settings |= {"spark.driver.bindAddress": LOOPBACK, "spark.driver.host": LOOPBACK}
        # Java looks up the host's name before it reads these settings, and ends if the name does not resolve.
        os.environ.setdefault("SPARK_LOCAL_IP", LOOPBACK)
        # The `python3` on the PATH may have another minor version. Spark refuses workers of another version.
        os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
        # A task that gets no memory then fails like any other, with its error. By default Spark ends the process.
        settings["spark.executor.killOnFatalError.depth"] = "0"
        if "SPARK_DRIVER_MEMORY" not in os.environ:
            settings["spark.driver.memory"] = MEMORY_DEFAULT
    settings = {name: value for name, value in settings.items() if name not in given}
    if scratch is not None and not given:
        _launch({**settings, "spark.master": master})
    builder = SparkSession.builder.appName(application).master(master)
    for name, value in settings.items():
        builder = builder.config(name, value)
    return builder.getOrCreate()


def _launch(settings: Mapping[str, str]) -> None:
    """Start the JVM of the next session as a process that only this process ends.

    The JVM ignores SIGTERM and is in a process session of its own. A signal to our process group or control group asks
    us to end, and we still need the JVM to finish work that has begun.
    """
    from pyspark import SparkConf, SparkContext, java_gateway  # noqa: PLC0415

    conf = SparkConf(loadDefaults=False)
    conf.setAll(list(settings.items()))
    usual = java_gateway.Popen  # type: ignore[attr-defined]
    # PySpark gives no way to set what the process does before it becomes Java.
    java_gateway.Popen = _own_session  # type: ignore[attr-defined, assignment]
    try:
        gateway = java_gateway.launch_gateway(conf)  # type: ignore[no-untyped-call]
        SparkContext._ensure_initialized(gateway=gateway)  # noqa: SLF001 - as above
    finally:
        java_gateway.Popen = usual  # type: ignore[attr-defined]


def _own_session(command: list[str], *, preexec_fn: Callable[[], None], **options: Any) -> "Popen[bytes]":
    prctl = ctypes.CDLL(None, use_errno=True).prctl
    # The kernel sends the signal when the thread that started the process ends.
    dies_with_us = threading.current_thread() is threading.main_thread()
    parent = os.getpid()

    def prepare() -> None:
        preexec_fn()
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        if dies_with_us:
            prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
            if os.getppid() != parent:
                os._exit(1)

    return Popen(command, start_new_session=True, preexec_fn=prepare, **options)  # noqa: S603, PLW1509 - as PySpark


def is_on_this_machine(master: str) -> bool:
    """True if a session does all its work in its own process."""
    return master == "local" or master.startswith("local[")


def _submitted() -> dict[str, str]:
    """The settings of `spark-submit`; empty if this process starts Spark by itself."""
    if "PYSPARK_GATEWAY_PORT" not in os.environ:
        return {}
    from pyspark import SparkConf, SparkContext  # noqa: PLC0415

    # The JVM has the settings, and runs already.
    SparkContext._ensure_initialized()  # noqa: SLF001
    return dict(SparkConf().getAll())
