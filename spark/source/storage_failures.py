"""What errors mean whose cause is where the tables lie: a path, a disk, an object store."""

import re

from spark.source.kafka_failures import innermost, told_by

NO_JARS = re.compile(
    r"No FileSystem for scheme \"?(?P<scheme>\w+)|ClassNotFoundException: Class (?P<name>\S*FileSystem)"
)
NO_HOST = re.compile(r"java\.net\.UnknownHostException: (?P<host>[^\s:]+)")
REFUSED = re.compile(r"AccessDeniedException|AccessControlException|NoAuthWithAWSException|Permission denied")


def explain_storage(error: BaseException) -> str | None:
    """What an error means where the warehouse's place is its cause, and what to do; None where it is something else."""
    if isinstance(error, OSError) and error.filename is not None:
        return f"{error.filename}: {error.strerror or error}"
    if not type(error).__module__.startswith(("py4j.", "pyspark.")):
        return None
    text = told_by(error)
    if found := NO_JARS.search(text):
        missing = found["scheme"] or found["name"]
        return (
            f"Spark has no jars for a warehouse of this kind (it misses {missing}): docs/cluster.md says which these "
            "are for an object store, and where to put them"
        )
    if found := NO_HOST.search(text):
        return f"the warehouse's host {found['host']} cannot be found: is its name right, and does DNS answer?"
    if REFUSED.search(text):
        return f"what is read or written is not allowed to this user: {innermost(error)}"
    return None
