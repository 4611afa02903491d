"""Explains to a person those errors of Spark that lack of memory caused."""

from spark.source.kafka_failures import told_by

OUT_OF_MEMORY = "java.lang.OutOfMemoryError"


def explain_memory(error: BaseException) -> str | None:
    """Say what to do if Java ran out of memory; None if the cause is another."""
    if not type(error).__module__.startswith(("py4j.", "pyspark.")) or OUT_OF_MEMORY not in told_by(error):
        return None
    return (
        "Java's memory did not suffice. Give it more, as with SPARK_DRIVER_MEMORY=6g in the environment. A compressed "
        "record may be a thousand times as long once it is unpacked, and 500 are unpacked at a time: where `ingest` or "
        "`replay` meets such records, --kafka-option max.poll.records=16 needs less memory and takes longer"
    )
