"""Reason codes of MQTT 5 (section 2.4), as far as this gateway sends or judges them."""

from enum import IntEnum


class ReasonCode(IntEnum):
    """Outcome of a request. Below 0x80 it succeeded."""

    SUCCESS = 0x00
    DISCONNECT_WITH_WILL = 0x04
    NO_MATCHING_SUBSCRIBERS = 0x10
    NO_SUBSCRIPTION_EXISTED = 0x11
    UNSPECIFIED_ERROR = 0x80
    MALFORMED_PACKET = 0x81
    PROTOCOL_ERROR = 0x82
    CLIENT_IDENTIFIER_NOT_VALID = 0x85
    BAD_USER_NAME_OR_PASSWORD = 0x86
    NOT_AUTHORIZED = 0x87
    SERVER_BUSY = 0x89
    SERVER_SHUTTING_DOWN = 0x8B
    BAD_AUTHENTICATION_METHOD = 0x8C
    KEEP_ALIVE_TIMEOUT = 0x8D
    SESSION_TAKEN_OVER = 0x8E
    TOPIC_FILTER_INVALID = 0x8F
    TOPIC_NAME_INVALID = 0x90
    PACKET_IDENTIFIER_NOT_FOUND = 0x92
    RECEIVE_MAXIMUM_EXCEEDED = 0x93
    TOPIC_ALIAS_INVALID = 0x94
    PACKET_TOO_LARGE = 0x95
    QUOTA_EXCEEDED = 0x97
    ADMINISTRATIVE_ACTION = 0x98
    RETAIN_NOT_SUPPORTED = 0x9A
    SHARED_SUBSCRIPTIONS_NOT_SUPPORTED = 0x9E
    SUBSCRIPTION_IDENTIFIERS_NOT_SUPPORTED = 0xA1


CONNACK_CODES = frozenset(
    {*range(0x80, 0x8B), 0x8C, 0x90, 0x95, 0x97, 0x99, 0x9A, 0x9B, 0x9C, 0x9D, 0x9F}  # all but 0x00
)
"""Reason codes of a CONNACK that refuses (section 3.2.2.2)."""
PUBACK_CODES = frozenset({0x00, 0x10, 0x80, 0x83, 0x87, 0x90, 0x91, 0x97, 0x99})
"""Reason codes of PUBACK and PUBREC (sections 3.4.2.1 and 3.5.2.1)."""
PUBREL_CODES = frozenset({0x00, 0x92})
"""Reason codes of PUBREL and PUBCOMP (sections 3.6.2.1 and 3.7.2.1)."""
DISCONNECT_CODES = frozenset({0x00, 0x04, 0x80, 0x81, 0x82, 0x83, 0x90, 0x93, 0x94, 0x95, 0x96, 0x97, 0x98, 0x99})
"""Reason codes of a client's DISCONNECT (section 3.14.2.1)."""
