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
"""Of a session in which one process does all: Spark's own default, 1 GB, fills, and is collected all the time. With
2 GB a compressed record of 101 MB, among 60 of 8 MB, passed or not as it happened."""
COMPILE_ALL = "-XX:-DontCompileHugeMethods"
"""HotSpot compiles no method of more than 8,000 bytes, and Spark makes a method of a whole chain of columns: those of
the headers and payloads are longer, and ran five times as slowly, interpreted for ever."""
COLLECT_IN_PAUSES = "-XX:+UseParallelGC"
"""G1 collects beside the work, for short pauses that nobody needs here: 1 to 2 s of CPU for 100,000 records."""
JAVA_OPTIONS = (COMPILE_ALL, COLLECT_IN_PAUSES)
WORDS_TO_STDERR = "-XX:+DisplayVMOutputToStderr"
"""Why Java does not start it may else say on standard output, which is for what was asked."""
SHORT_LIVED = "-XX:TieredStopAtLevel=1 -XX:ReservedCodeCacheSize=256m"
"""For sessions of a few minutes: the optimising compiler takes more time than it gives back, a quarter of a small
batch's. The first compiler alone would get 48 MB for its code, which Spark fills in a minute."""
CLASSES = "classes.jsa"
"""Beside the jars, if somebody made it: see `spark.commands.class_archive`."""
CLASSES_QUIETLY = "-Xlog:cds*=off"
"""That this archive is of another Java, or of other jars, is no news for whoever calls a command."""


ERRORS = "errors.log"
"""In the folder of a command's temporary files: what Java logs."""
PR_SET_PDEATHSIG = 1
"""prctl(2): the signal that a process gets when its parent ends."""


class JarsMissingError(Exception):
    """The connector jars are not where the session looks for them; the message says what to do."""


def jars_folder() -> Path:
    """Return where the jars that PySpark lacks are: `SLUICE_SPARK_JARS`, or `build/jars/spark`."""
    return Path(os.environ.get("SLUICE_SPARK_JARS") or JARS_DEFAULT)


def connector_jars() -> list[Path]:
    """Return the jars that PySpark lacks. Raises JarsMissingError when one of them is not there."""
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
    """Start Spark, or return the session that is running; one that `is_brief` compiles nothing for long work.

    `master` is Spark's master URL; without it `SLUICE_SPARK_MASTER`, and without that all cores of this machine. What
    `spark-submit` was told, master and settings, comes before all that is said here.
    `SLUICE_SPARK_JAVA_OPTIONS` goes to the driver's JVM; see SHORT_LIVED. With `scratch`, the folder of a command's
    temporary files, Java has its own there (unless Spark was told of another folder), logs its errors there and not on
    standard error, and ends only with this process. Raises JarsMissingError.
    """
    given = _submitted()
    # Whoever submits names the jars himself, or has them in his cluster.
    jars = [] if given else connector_jars()
    # Imported late: a second and 50 MB, which `--help` need not cost.
    from pyspark.sql import SparkSession  # noqa: PLC0415

    classes = jars_folder() / CLASSES
    log_settings = (Path(__file__).parent / "log4j2.properties").as_uri()
    settings = {
        "spark.sql.extensions": "io.delta.sql.DeltaSparkSessionExtension",
        "spark.sql.catalog.spark_catalog": "org.apache.spark.sql.delta.catalog.DeltaCatalog",
        # Event times are UTC; a session time zone would move readings to other days.
        "spark.sql.session.timeZone": "UTC",
        # A value that does not fit is an error, never a silent null; what may fail says so with `try_`.
        "spark.sql.ansi.enabled": "true",
        # The defaults of 50 and 200 are for clusters: on two cores a count took 22 s with them.
        "spark.databricks.delta.snapshotPartitions": "2",
        "spark.sql.shuffle.partitions": "2",
        # Delta's vacuum lists a table's folders in so many tasks, however few they are: by default 10,000.
        "spark.sql.sources.parallelPartitionDiscovery.parallelism": "16",
        # Nothing is kept there; Spark makes the folder all the same, by default wherever a command is called.
        "spark.sql.warehouse.dir": Path(gettempdir()).as_uri(),
        "spark.ui.enabled": "false",
        # Without a page to show them on, Spark still keeps the plans of the last 1,000 queries, and all jobs' tasks.
        "spark.sql.ui.retainedExecutions": "5",
        "spark.ui.retainedJobs": "20",
        "spark.ui.retainedStages": "20",
        "spark.ui.retainedTasks": "200",
        "spark.sql.ui.explainMode": "simple",
        "spark.sql.maxPlanStringLength": "65536",
        "spark.ui.showConsoleProgress": "false",
        # How large a file's part has become is looked at from the first row on. By default it is from the hundredth: a
        # hundred large records would fill the memory before.
        "spark.hadoop.parquet.page.size.row.check.min": "1",
        # Code that a query was compiled to is kept for the next batch. Of the default, 100, a batch alone needs more:
        # each had its code compiled anew.
        "spark.sql.codegen.cache.maxEntries": "1000",
        # Above 128 groups Spark sorts all rows by their group, to collect what is in it; a batch has thousands.
        "spark.sql.objectHashAggregate.sortBased.fallbackThreshold": "65536",
        # A job killed while it wrote what its first batch is to read leaves a part of that file: Spark then refused the
        # checkpoint for ever. What else it looks for there, `ingest` does (and no query of ours keeps state).
        "spark.sql.streaming.verifyCheckpointDirectoryEmptyOnStart": "false",
        # Else each call that builds a query looks up where in Python it was made: a tenth of a small batch's time.
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
        # Nobody else joins a local session: it need not depend on this machine's name or address.
        settings |= {"spark.driver.bindAddress": LOOPBACK, "spark.driver.host": LOOPBACK}
        # Java looks up this machine's name before it reads those, and ends if nothing resolves that name.
        os.environ.setdefault("SPARK_LOCAL_IP", LOOPBACK)
        # The `python3` on the PATH may be of another minor version, and Spark refuses such a worker.
        os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
        # A task that gets no memory fails as others do, and its error is told. By default Spark ends the process.
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
    """Start the Java of the next session as a process that only this one ends.

    It is in a session of its own and ignores SIGTERM: a signal to this process's group or control group asks this
    process to end, and Java must still do what is begun.
    """
    from pyspark import SparkConf, SparkContext, java_gateway  # noqa: PLC0415

    conf = SparkConf(loadDefaults=False)
    conf.setAll(list(settings.items()))
    usual = java_gateway.Popen  # type: ignore[attr-defined]
    # PySpark lets nobody choose what the process does before it becomes Java.
    java_gateway.Popen = _own_session  # type: ignore[attr-defined, assignment]
    try:
        gateway = java_gateway.launch_gateway(conf)  # type: ignore[no-untyped-call]
        SparkContext._ensure_initialized(gateway=gateway)  # noqa: SLF001 - as above
    finally:
        java_gateway.Popen = usual  # type: ignore[attr-defined]


def _own_session(command: list[str], *, preexec_fn: Callable[[], None], **options: Any) -> "Popen[bytes]":
    prctl = ctypes.CDLL(None, use_errno=True).prctl
    # It counts the end of the thread that has started the process.
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
    """Whether a session's work is all done in its own process."""
    return master == "local" or master.startswith("local[")


def _submitted() -> dict[str, str]:
    """What `spark-submit` was told; nothing where this process starts Spark by itself."""
    if "PYSPARK_GATEWAY_PORT" not in os.environ:
        return {}
    from pyspark import SparkConf, SparkContext  # noqa: PLC0415

    # It is the JVM that knows; it runs already.
    SparkContext._ensure_initialized()  # noqa: SLF001
    return dict(SparkConf().getAll())
