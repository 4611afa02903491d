"""Types of the gateway's records, and how far its clock may be ahead of Kafka's. It needs no Spark."""

READING_TYPE = "sluice.reading"
GATEWAY_TYPES = "sluice.gateway."
HEARTBEAT_TYPE = "sluice.gateway.heartbeat"
SET_ASIDE_TYPE = "sluice.gateway.buffer-set-aside"
EVENT_TYPES = (HEARTBEAT_TYPE, SET_ASIDE_TYPE)
"""Types of events that the driver reads."""
KAFKA_SLACK_US = 60_000_000
"""Microseconds that Kafka's clock may be behind a gateway's. Under NTP both differ by far less than a minute. A clock
that is further off must be mended."""
