"""Finds in the registry which gateways have topics of their own: see `topic_speakers`."""

from collections.abc import Iterable

from spark.decode.topic_speakers import TopicOwners
from spark.registry.registry_table import RegisteredGateway


def owners_of(registered: Iterable[RegisteredGateway]) -> TopicOwners:
    """Return the owners among these gateways."""
    return TopicOwners(
        tuple(sorted((f"/{each.namespace}/{each.gateway}", each.topics) for each in registered if each.topics))
    )
