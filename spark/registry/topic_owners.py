"""Judges by the registry which gateway may speak in which topic: a topic's writer can write any `ce_source` there.

A gateway with `topics` may speak only in these, and in these only such gateways may speak. All other gateways share
the other topics. Kafka's ACLs guard the topics themselves. Both together make a record's source true.
"""

from collections import defaultdict
from dataclasses import dataclass
from functools import reduce
from operator import or_

from pyspark.sql import Column, DataFrame, SparkSession
from pyspark.sql import functions as F  # noqa: N812 - its customary name

from spark.decode.payload_decode import NOT_THEIRS
from spark.engine.built_once import recorded
from spark.registry.registry_table import has_registry, open_gateway_registry

FAULT = f"{NOT_THEIRS}the registry has others speak here, or this gateway elsewhere"
ANY = "*"


@dataclass(frozen=True, slots=True)
class TopicOwners:
    """Gateways with topics of their own. If there are none, nothing is judged."""

    topics: tuple[tuple[str, tuple[str, ...]], ...] = ()
    """Pairs of a `ce_source` and its topics: names, or beginnings of names with `*`."""


def read_owners(spark: SparkSession, warehouse: str) -> TopicOwners:
    """Read the owners from the warehouse's present registry."""
    if not has_registry(spark, warehouse):
        return TopicOwners()
    registered = open_gateway_registry(spark, warehouse)
    rows = registered.where(F.size("topics") > 0).select("namespace", "gateway", "topics").collect()
    return TopicOwners(tuple(sorted((f"/{row.namespace}/{row.gateway}", tuple(row.topics)) for row in rows)))


@recorded
def judged_sources(typed: DataFrame, owners: TopicOwners) -> DataFrame:
    """Give rows of `typed_records` a `header_fault` if their source may not speak in their topic.

    Such a row loses its `ce_id`: else the true gateway's record with this id would count as a copy. A retry gives it
    back.
    """
    if not owners.topics:
        return typed
    speakers: dict[str, list[str]] = defaultdict(list)
    for gateway, topics in owners.topics:
        for topic in topics:
            speakers[topic].append(gateway)
    source = F.concat(F.lit("/"), F.col("namespace"), F.lit("/"), F.col("gateway"))
    fits = {topic: _fits(topic) for topic in sorted(speakers)}
    may_speak = reduce(or_, (is_fit & source.isin(*speakers[topic]) for topic, is_fit in fits.items()))
    is_owned = reduce(or_, fits.values())
    has_topics = source.isin(*(each for each, _ in owners.topics))
    fault = F.coalesce(F.col("header_fault"), F.when((is_owned | has_topics) & ~may_speak, FAULT))
    return typed.withColumn("header_fault", fault).withColumn(
        "ce_id", F.when(~F.coalesce(F.col("header_fault") == FAULT, F.lit(False)), F.col("ce_id"))
    )


def _fits(topic: str) -> Column:
    return F.col("topic").startswith(topic.removesuffix(ANY)) if topic.endswith(ANY) else F.col("topic") == topic
