"""Puts Kafka's classes into one file, which a broker maps into memory instead of loading them from jars one by one.

A broker then starts with two thirds of the processor time. As with `spark.commands.class_archive`, the JVM passes the
file over if Java or the jars are others. Beside it stands what formats a data folder without another Java.
"""

import shutil
from pathlib import Path
from tempfile import TemporaryDirectory

from demo import child_process
from demo.kafka_broker import CHECKPOINT, CLASSES, JARS, format_storage, launch_broker, wait_until_ready

WRITE_S_MAX = 120.0
"""Seconds for the JVM to write the file at its end: four on an idle machine."""


def make_archive(path: Path) -> None:
    """Start a broker, and have its JVM write the classes that it loaded to a file. Raises BrokerError, OSError."""
    checkpoint = path.with_name(CHECKPOINT)
    for file in (path, checkpoint):
        file.unlink(missing_ok=True)
    unfinished = path.with_suffix(".part")
    # The JVM would warn of hundreds of classes that it cannot keep, which nobody needs to know.
    quietly = ("-Xlog:disable", "-Xlog:all=error:stderr")
    with TemporaryDirectory() as directory:
        files = format_storage(Path(directory))
        shutil.copyfile(Path(directory, "data", CHECKPOINT), checkpoint)
        broker = launch_broker(files, f"-XX:ArchiveClassesAtExit={unfinished}", *quietly)
        try:
            wait_until_ready(broker)
        finally:
            child_process.stop(broker.process, WRITE_S_MAX)
        unfinished.replace(path)


if __name__ == "__main__":
    make_archive(JARS / CLASSES)
