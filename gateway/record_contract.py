"""The contract of a Kafka record: its headers in order, and the counter that a sensor's number belongs to.

The gateway writes records by it and the cloud reads them by it, so each rule stands here once. docs/kafka-records.md
describes it.
"""

import re

HEADERS = (
    "ce_specversion",
    "ce_id",
    "ce_source",
    "ce_type",
    "ce_subject",
    "ce_time",
    "ce_timeerror",
    "ce_timequality",
    "ce_receivedtime",
    "ce_gatewayboot",
    "ce_boottime",
    "ce_lane",
    "ce_lanesequence",
    "content-type",
)
"""Headers of every record, in this order. Readers may take them by position, checking the name."""
DEVICE_HEADERS = ("ce_deviceboot", "ce_devicesequence")
"""Headers that follow `HEADERS` if the sensor sends them."""
COUNTER_HEADER = "ce_devicecounter"
"""Header that follows `DEVICE_HEADERS` if device and Kafka topic do not imply the counter (`implied_counter`)."""
DOUBT_HEADER = "ce_doubt"
"""Header that follows if a reading may be stored already. It is one of `DOUBTS`."""
BOOT_TIME_ERROR_HEADER = "ce_boottimeerror"
"""The last header of a record made before the gateway's clock was synced: a later correction of its time needs it."""
HEADER_NAMES = (*HEADERS, *DEVICE_HEADERS, COUNTER_HEADER, DOUBT_HEADER, BOOT_TIME_ERROR_HEADER)
"""All headers that a record may have, in the order on the wire, except headers with `VARIABLE_PREFIX`."""
VARIABLE_PREFIX = "route_"
"""Prefix of the headers of a route's variables (`route_site`). They follow `HEADERS`, and readers may skip them."""
EVENT_CONTENT_TYPE = "application/cloudevents+json"
"""`content-type` of a record whose value is a structured event. It is such a record's only header. The event has the
texts of all other headers as attributes (`attribute_of`), and the payload as `data` or `data_base64`."""
DEVICE_ATTRIBUTE, STREAM_ATTRIBUTE = "device", "stream"
"""Further attributes of a structured event: the device, and the Kafka topic of its binary records. Series, copies and
counters (`implied_counter`) go by that topic, whatever topic the event itself is in."""
USER_PREFIX = "mqtt_"
"""Prefix of the headers of a message's user properties (`mqtt_unit`). They are the last ones, and readers may skip
them."""
USER_ATTRIBUTE = "mqttproperties"
"""Attribute of a structured event for all user properties: a text, which is a JSON array of `[name, value]`.
CloudEvents allows neither their names as attributes, nor a name twice."""
READING_TYPE = "sluice.reading"
"""`ce_type` of a sensor's reading."""
GATEWAY_TYPES = "sluice.gateway."
"""Prefix of `ce_type` of a gateway's own events."""
HEARTBEAT_TYPE = f"{GATEWAY_TYPES}heartbeat"
STATE = "state"
"""Kind of the event that tells what runs on a gateway, how its box is, and what is not well."""
COMMAND_ENDED = "command-ended"
"""Kind of the event in which each command from the cloud ends."""
REDELIVERED, CONFLICT = "redelivered", "conflict"
"""Values of `ce_doubt`: the gateway may have the reading already, or has another payload of its number."""
DOUBTS = (REDELIVERED, CONFLICT)
TIME_ERROR_UNKNOWN_US = 2**63 - 1
"""Value of `ce_timeerror` and `ce_boottimeerror` if nothing bounds the error."""
USUAL_TOPICS = "device-.*|gateway-events"
"""Pattern of topics that `sluice-cloud ingest` reads by default. It also reads topics named in heartbeats."""


def attribute_of(header: str) -> str:
    """The name that a header of `HEADER_NAMES`, or of a route's variable, has in a structured event.

    CloudEvents allows lower-case letters and digits there, so a variable's name loses its `_`.
    """
    return "datacontenttype" if header == "content-type" else header.removeprefix("ce_").replace("_", "")


# A sensor's reading is named by device, counter, boot and number. An MQTT sensor's counter is the topic that it
# publishes to, because each of its topics may count for itself. A serial sensor has one counter for all its streams.
# Two readings with one name count as one reading, on the gateway and in the tables. If one side had a coarser rule for
# counters than the other, it would take two readings for copies although the other has acknowledged both.
DEVICE_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}")
NAME_RULE = "1 to 63 letters (A to Z, a to z), digits, '.', '_' or '-', starting with a letter or digit"
"""`DEVICE_NAME` in words, for messages about invalid names."""
DEVICE_PATH = re.compile(rf"{DEVICE_NAME.pattern}(?:/{DEVICE_NAME.pattern})*")
"""A device in the tables: one name, or several if a route's `key` puts others before it (`north/42`)."""
KAFKA_TOPIC = re.compile(r"(?!\.{1,2}$)[A-Za-z0-9._-]{1,249}")
"""A valid name of a Kafka topic."""
INTERNAL_PREFIX = "__"
"""Prefix of Kafka's own topics (__consumer_offsets, __transaction_state)."""
DEVICE = "device"
"""Value of `ce_timequality` if the sensor sent an absolute time that can be right."""


def says_json(content_type: str) -> bool:
    """Whether a content type promises JSON: `application/json`, `application/senml+json`."""
    media_type = content_type.partition(";")[0].strip().lower()
    return media_type in {"application/json", "text/json"} or media_type.endswith("+json")


def implied_counter(device: str, kafka_topic: str) -> str:
    """Return the counter of a record without `ce_devicecounter`: the one topic that the default route leads here."""
    stream = kafka_topic.removeprefix("device-")
    return kafka_topic if stream == kafka_topic else f"device/{device}/{stream}"


def counter_of(topic: str, subject: str, device: str, kafka_topic: str) -> str:
    """Return the counter that a reading's number belongs to.

    `topic` is the routed topic. It is the MQTT topic, which then is its `subject` too, or the topic that `serial.topic`
    made for a serial sensor, whose `subject` is the port.
    """
    return topic if topic == subject else implied_counter(device, kafka_topic)


# -- commands from the cloud ----------------------------------------------------------------------

COMMANDS_TOPIC = "gateway-commands.{gateway}"
"""Default of the Kafka topic from which a gateway reads commands. The key of a record is `namespace/device`."""
COMMAND_ID_HEADER = "id"
"""The sender's name for the command (`COMMAND_ID`)."""
COMMAND_EXPIRES_HEADER = "expires"
"""The time after which the command must not be passed on: RFC 3339 with an offset, or `Z`."""
COMMAND_TOPIC_HEADER = "topic"
"""Levels of the MQTT topic below the device's. `COMMAND_ID_PLACE` in them stands for the id. It may be missing."""
COMMAND_ID = re.compile(r"[A-Za-z0-9._-]{1,64}")
COMMAND_TOPIC = re.compile(r"[^\0+#]{0,128}")
COMMAND_ID_PLACE = "{id}"
COMMAND_BYTES_MAX = 16_384
"""Bytes of a command's payload."""
