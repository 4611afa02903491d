"""Types of events that the driver reads, and how far Kafka's clock may be behind a gateway's. It needs no Spark."""

from gateway.record_contract import GATEWAY_TYPES, HEARTBEAT_TYPE, STATE

SET_ASIDE_TYPE = f"{GATEWAY_TYPES}buffer-set-aside"
STATE_TYPE = f"{GATEWAY_TYPES}{STATE}"
EVENT_TYPES = (HEARTBEAT_TYPE, SET_ASIDE_TYPE, STATE_TYPE)
"""Types of events that the driver reads."""
KAFKA_SLACK_US = 60_000_000
"""Microseconds that Kafka's clock may be behind a gateway's. Under NTP both differ by far less than a minute. A clock
that is further off must be mended."""
