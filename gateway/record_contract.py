"""The contract of a Kafka record: its headers in order, and which series of numbers a sensor's number belongs to.

The gateway writes records by it, and the cloud reads them by it. Its page is docs/kafka-records.md.
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
"""They follow where the sensor sends them."""
COUNTER_HEADER = "ce_devicecounter"
"""It follows `DEVICE_HEADERS` where the device and the Kafka topic do not imply it (`implied_counter`)."""
DOUBT_HEADER = "ce_doubt"
"""It follows where a reading may be stored already (`redelivered`), or its number is (`conflict`)."""
BOOT_TIME_ERROR_HEADER = "ce_boottimeerror"
"""The last header of a record made before the gateway's clock was synced: a later correction of its time needs it."""
HEADER_NAMES = (*HEADERS, *DEVICE_HEADERS, COUNTER_HEADER, DOUBT_HEADER, BOOT_TIME_ERROR_HEADER)
"""All headers that a record may have, in the order on the wire, but for those of `VARIABLE_PREFIX`."""
VARIABLE_PREFIX = "route_"
"""So begin the headers of a route's variables (`route_site`). They follow `HEADERS`, and readers may pass over them."""
TIME_ERROR_UNKNOWN_US = 2**63 - 1
"""`ce_timeerror` and `ce_boottimeerror` where nothing bounds the error."""
USUAL_TOPICS = "device-.*|gateway-events"
"""The topics that `sluice-cloud ingest` reads at least where it is not told which."""


# A sensor's reading is named by device, counter, boot and number. The sensor names its counter by the MQTT topic that
# it publishes to: each of its topics may count for itself. A serial sensor has one counter for all its streams. Two
# readings of one name are the same reading, on the gateway and in the tables: were one side to name counters by a
# coarser rule than the other, it would take readings for copies that the other has acknowledged as two.
DEVICE_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}")
NAME_RULE = "1 to 63 letters (A to Z, a to z), digits, '.', '_' or '-', starting with a letter or digit"
"""`DEVICE_NAME` in words, for whoever is told that a name is none."""
DEVICE_PATH = re.compile(rf"{DEVICE_NAME.pattern}(?:/{DEVICE_NAME.pattern})*")
"""A device as the tables know it: one name, or several where a route's `key` puts others before it (`north/42`)."""
KAFKA_TOPIC = re.compile(r"(?!\.{1,2}$)[A-Za-z0-9._-]{1,249}")
"""What Kafka takes as a topic's name."""
INTERNAL_PREFIX = "__"
"""How the topics begin that Kafka keeps for itself (__consumer_offsets, __transaction_state)."""
DEVICE = "device"
"""`ce_timequality` where the sensor sent an absolute time that can be right."""


def implied_counter(device: str, kafka_topic: str) -> str:
    """Return the counter of a record without `ce_devicecounter`: the one topic that the default route leads there."""
    stream = kafka_topic.removeprefix("device-")
    return kafka_topic if stream == kafka_topic else f"device/{device}/{stream}"


def counter_of(topic: str, subject: str, device: str, kafka_topic: str) -> str:
    """Return the counter that a reading's number belongs to.

    `topic` is what was routed: the MQTT topic, which is then its `subject` too, or what `serial.topic` made of a serial
    sensor, whose `subject` is the port.
    """
    return topic if topic == subject else implied_counter(device, kafka_topic)
