"""Reads from the registry which gateways have topics of their own: see `topic_speakers`."""

from pyspark.sql import SparkSession
from pyspark.sql import functions as F  # noqa: N812 - its customary name

from spark.decode.topic_speakers import TopicOwners
from spark.registry.registry_table import has_registry, open_gateway_registry


def read_owners(spark: SparkSession, warehouse: str) -> TopicOwners:
    """Read the owners from the warehouse's present registry."""
    if not has_registry(spark, warehouse):
        return TopicOwners()
    registered = open_gateway_registry(spark, warehouse)
    rows = registered.where(F.size("topics") > 0).select("namespace", "gateway", "topics").collect()
    return TopicOwners(tuple(sorted((f"/{row.namespace}/{row.gateway}", tuple(row.topics)) for row in rows)))
