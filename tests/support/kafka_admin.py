"""Requests of tests to a running Kafka cluster: topics, leaders, ACLs, passwords.

aiokafka's admin client knows only some of these requests; the others are written down here as the protocol has them
(Kafka's message definitions, `clients/src/main/resources/common/message`).
"""

import asyncio
import hashlib
import os
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from typing import Any, Literal

from aiokafka import AIOKafkaProducer
from aiokafka.admin import AIOKafkaAdminClient, NewTopic
from aiokafka.errors import KafkaError, MessageSizeTooLargeError, for_code
from aiokafka.protocol.admin import (
    AlterPartitionReassignmentsRequest,
    CreateAclsRequest,
    CreateTopicsRequest,
    DeleteAclsRequest,
    DeleteTopicsRequest,
)
from aiokafka.protocol.api import RequestStruct, Response
from aiokafka.protocol.metadata import MetadataRequest
from aiokafka.protocol.types import (
    Array,
    Boolean,
    CompactArray,
    CompactBytes,
    CompactString,
    Float64,
    Int8,
    Int16,
    Int32,
    Schema,
    String,
    TaggedFields,
)

from tests.support.waiting import patience

TIMEOUT_MS = 20_000
SCRAM_ITERATIONS = 4096
"""The fewest that Kafka takes; these users live for the length of a test."""
SCRAM_NUMBERS = {"SCRAM-SHA-256": 1, "SCRAM-SHA-512": 2}
NO_ELECTION_NEEDED = 84

Operation = Literal["READ", "WRITE", "CREATE", "DESCRIBE", "DESCRIBE_CONFIGS"]
OPERATIONS: dict[Operation, int] = {"READ": 3, "WRITE": 4, "CREATE": 5, "DESCRIBE": 8, "DESCRIBE_CONFIGS": 10}
TOPIC, LITERAL, PREFIXED, ALLOW = 2, 3, 4, 3


@asynccontextmanager
async def administered(bootstrap: str) -> AsyncIterator[AIOKafkaAdminClient]:
    """An admin client at a plain listener, `host:port,host:port`."""
    admin = AIOKafkaAdminClient(bootstrap_servers=bootstrap.split(","), request_timeout_ms=TIMEOUT_MS)
    await admin.start()
    try:
        yield admin
    finally:
        await admin.close()


async def _ask(admin: AIOKafkaAdminClient, request: Any) -> Any:
    """Have a node answer that is up, whichever: each knows the way to the controller."""
    client = admin._client
    async with asyncio.timeout(patience(TIMEOUT_MS / 1000)):
        while True:
            for node in [broker.nodeId for broker in client.cluster.brokers()]:
                with suppress(KafkaError, OSError):
                    if await client.ready(node):
                        return await client.send(node, request)
            await asyncio.sleep(0.1)
            await client.force_metadata_update()


# -- topics ---------------------------------------------------------------------------------------


async def create_topic(bootstrap: str, topic: str, partitions: int = 1, replicas: int = 1, **config: str) -> None:
    """Make a topic that the gateway may write to; `_` in a setting's name stands for the dot."""
    await _create(bootstrap, NewTopic(topic, partitions, replicas, topic_configs=_topic_configs(config)))


async def create_topic_on(bootstrap: str, topic: str, *nodes: Sequence[int], **config: str) -> None:
    """Make a topic whose partitions are held by the nodes that are named for each, the leader first."""
    assigned = {partition: list(holders) for partition, holders in enumerate(nodes)}
    new = NewTopic(topic, -1, -1, replica_assignments=assigned, topic_configs=_topic_configs(config))
    await _create(bootstrap, new)


def _topic_configs(config: Mapping[str, str]) -> dict[str, str]:
    return {"message.timestamp.type": "LogAppendTime", **_dotted(config)}


def _dotted(config: Mapping[str, str]) -> dict[str, str]:
    return {name.replace("_", "."): value for name, value in config.items()}


async def _create(bootstrap: str, new: NewTopic) -> None:
    async with administered(bootstrap) as admin:
        described = [admin._convert_new_topic_request(new)]
        request = CreateTopicsRequest(create_topic_requests=described, timeout=TIMEOUT_MS, validate_only=False)
        for _, code, *rest in (await _ask(admin, request)).topic_errors:
            _raise(code, *rest)
        await _until(admin, lambda leaders: bool(leaders) and all(node >= 0 for node in leaders.values()), new.name)


async def delete_topic(bootstrap: str, topic: str) -> None:
    async with administered(bootstrap) as admin:
        for _, code in (await _ask(admin, DeleteTopicsRequest([topic], TIMEOUT_MS))).topic_error_codes:
            _raise(code)
        await _until(admin, lambda leaders: not leaders, topic)


async def alter_topic(bootstrap: str, topic: str, **config: str) -> None:
    """Set some of a topic's settings; `_` in a setting's name stands for the dot."""
    values = [(name, SET, value) for name, value in _dotted(config).items()]
    async with administered(bootstrap) as admin:
        response = await _ask(admin, INCREMENTAL_ALTER_CONFIGS([(TOPIC, topic, values)], False))
        for code, message, *_ in response.responses:
            _raise(code, message)


async def until_refused(bootstrap: str, topic: str, size: int) -> None:
    """Return once the broker refuses a record of so many bytes; those that it takes until then stand in the topic."""
    async with (
        asyncio.timeout(patience(TIMEOUT_MS / 1000)),
        AIOKafkaProducer(bootstrap_servers=bootstrap, acks="all") as producer,
    ):
        with suppress(MessageSizeTooLargeError):
            while True:
                await producer.send_and_wait(topic, bytes(size))
                await asyncio.sleep(0.05)


async def leaders_of(bootstrap: str, topic: str) -> dict[int, int]:
    """The leading node of each partition, -1 where there is none; nothing where there is no such topic."""
    async with administered(bootstrap) as admin:
        return await _leaders(admin, topic)


async def move_leader(bootstrap: str, topic: str, partition: int, node: int) -> None:
    """Have another node that holds the partition lead it, as an operator rebalances a cluster."""
    async with administered(bootstrap) as admin:
        (replicas,) = [each["replicas"] for each in await _partitions(admin, topic) if each["partition"] == partition]
        order = [node, *(each for each in replicas if each != node)]
        tags: dict[int, bytes] = {}
        request = AlterPartitionReassignmentsRequest(
            TIMEOUT_MS,
            [(topic, [(partition, order, tags)], tags)],
            tags,
        )
        response = await _ask(admin, request)
        _raise(response.error_code, response.error_message)
        for _, partitions, _ in response.responses:
            for _, code, message, _ in partitions:
                _raise(code, message)
        elected = await _ask(admin, ELECT_LEADERS([(topic, [partition])], TIMEOUT_MS))
        for _, partitions in elected.replica_election_results:
            for _, code, message in partitions:
                if code != NO_ELECTION_NEEDED:
                    _raise(code, message)
        await _until(admin, lambda leaders: leaders.get(partition) == node, topic)


async def _leaders(admin: AIOKafkaAdminClient, topic: str) -> dict[int, int]:
    return {each["partition"]: each["leader"] for each in await _partitions(admin, topic)}


async def _partitions(admin: AIOKafkaAdminClient, topic: str) -> list[dict[str, Any]]:
    (described,) = (await _ask(admin, MetadataRequest([topic]))).to_object()["topics"]
    partitions: list[dict[str, Any]] = described["partitions"]
    return partitions


async def _until(admin: AIOKafkaAdminClient, reached: Any, topic: str) -> None:
    """Wait until a topic's leaders are as wanted, as one node sees them."""
    async with asyncio.timeout(patience(TIMEOUT_MS / 1000)):
        while not reached(await _leaders(admin, topic)):
            await asyncio.sleep(0.1)


# -- who may do what ------------------------------------------------------------------------------


async def set_password(bootstrap: str, user: str, mechanism: str, password: str) -> None:
    """Make a SCRAM user, or give it another password; whoever is logged in stays so (RFC 5802, section 3)."""
    digest = mechanism.removeprefix("SCRAM-").replace("-", "").lower()
    salt = os.urandom(16)
    salted = hashlib.pbkdf2_hmac(digest, password.encode(), salt, SCRAM_ITERATIONS)
    upsertion: tuple[object, ...] = (user, SCRAM_NUMBERS[mechanism], SCRAM_ITERATIONS, salt, salted, {})
    async with administered(bootstrap) as admin:
        response = await _ask(admin, ALTER_USER_SCRAM_CREDENTIALS([], [upsertion], {}))
        for _, code, message, _ in response.results:
            _raise(code, message)


async def allow(bootstrap: str, user: str, topic: str, *operations: Operation, prefixed: bool = False) -> None:
    """Let a user do something to a topic, or to all whose names begin so.

    With a topic's first ACL, all that none of its ACLs allows is refused.
    """
    pattern = PREFIXED if prefixed else LITERAL
    async with administered(bootstrap) as admin:
        for operation in operations:
            request = CreateAclsRequest(TOPIC, topic, pattern, f"User:{user}", "*", OPERATIONS[operation], ALLOW)
            for code, message in (await _ask(admin, request)).creation_responses:
                _raise(code, message)


async def forbid(bootstrap: str, user: str, topic: str, operation: Operation) -> None:
    """Take back what `allow` gave."""
    async with administered(bootstrap) as admin:
        request = DeleteAclsRequest(TOPIC, topic, LITERAL, f"User:{user}", "*", OPERATIONS[operation], ALLOW)
        for code, message, _ in (await _ask(admin, request)).filter_responses:
            _raise(code, message)


async def limit_producer(bootstrap: str, client_id: str, bytes_per_s: float) -> None:
    """Set the quota of a client identifier."""
    entry = ([("client-id", client_id)], [("producer_byte_rate", bytes_per_s, False)])
    async with administered(bootstrap) as admin:
        for code, message, _ in (await _ask(admin, ALTER_CLIENT_QUOTAS([entry], False))).entries:
            _raise(code, message)


def _raise(code: int, message: str | None = None, *_more: object) -> None:
    if code:
        raise for_code(code)(message or "")


# -- requests that aiokafka does not know ---------------------------------------------------------

SET = 0
"""IncrementalAlterConfigs: what is done to a setting."""


class VersionZero:
    """Version 0 of a request, as aiokafka's client sends one; calling it with its fields gives one to send."""

    def __init__(self, api_key: int, request: Schema, response: Schema, *, flexible: bool = False) -> None:
        of = {"API_KEY": api_key, "API_VERSION": 0}
        answer = type("Answer", (Response,), {**of, "SCHEMA": response})
        told = {"FLEXIBLE_VERSION": flexible, "RESPONSE_TYPE": answer, "SCHEMA": request}
        self._struct = type("Asked", (RequestStruct,), {**of, **told})

    def __call__(self, *fields: object) -> "PreparedRequest":
        return PreparedRequest(self._struct(*fields))


class PreparedRequest:
    """The interface of a request that aiokafka's client needs."""

    def __init__(self, struct: object) -> None:
        self._struct = struct

    def prepare(self, _versions: object) -> object:
        return self._struct


INCREMENTAL_ALTER_CONFIGS = VersionZero(
    44,
    Schema(
        (
            "resources",
            Array(
                ("resource_type", Int8),
                ("resource_name", String("utf-8")),
                ("configs", Array(("name", String("utf-8")), ("operation", Int8), ("value", String("utf-8")))),
            ),
        ),
        ("validate_only", Boolean),
    ),
    Schema(
        ("throttle_time_ms", Int32),
        (
            "responses",
            Array(
                ("error_code", Int16),
                ("error_message", String("utf-8")),
                ("resource_type", Int8),
                ("resource_name", String("utf-8")),
            ),
        ),
    ),
)
_ENTITY = Array(("entity_type", String("utf-8")), ("entity_name", String("utf-8")))
ALTER_CLIENT_QUOTAS = VersionZero(
    49,
    Schema(
        (
            "entries",
            Array(
                ("entity", _ENTITY),
                ("ops", Array(("key", String("utf-8")), ("value", Float64), ("remove", Boolean))),
            ),
        ),
        ("validate_only", Boolean),
    ),
    Schema(
        ("throttle_time_ms", Int32),
        ("entries", Array(("error_code", Int16), ("error_message", String("utf-8")), ("entity", _ENTITY))),
    ),
)
ELECT_LEADERS = VersionZero(
    # The preferred replica of each partition, which is the first, is to lead it.
    43,
    Schema(
        ("topic_partitions", Array(("topic", String("utf-8")), ("partitions", Array(Int32)))),
        ("timeout_ms", Int32),
    ),
    Schema(
        ("throttle_time_ms", Int32),
        (
            "replica_election_results",
            Array(
                ("topic", String("utf-8")),
                (
                    "partition_result",
                    Array(("partition_id", Int32), ("error_code", Int16), ("error_message", String("utf-8"))),
                ),
            ),
        ),
    ),
)
ALTER_USER_SCRAM_CREDENTIALS = VersionZero(
    51,
    Schema(
        ("deletions", CompactArray(("name", CompactString("utf-8")), ("mechanism", Int8), ("tags", TaggedFields))),
        (
            "upsertions",
            CompactArray(
                ("name", CompactString("utf-8")),
                ("mechanism", Int8),
                ("iterations", Int32),
                ("salt", CompactBytes),
                ("salted_password", CompactBytes),
                ("tags", TaggedFields),
            ),
        ),
        ("tags", TaggedFields),
    ),
    Schema(
        ("throttle_time_ms", Int32),
        (
            "results",
            CompactArray(
                ("user", CompactString("utf-8")),
                ("error_code", Int16),
                ("error_message", CompactString("utf-8")),
                ("tags", TaggedFields),
            ),
        ),
        ("tags", TaggedFields),
    ),
    flexible=True,
)
