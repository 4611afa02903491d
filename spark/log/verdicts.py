"""Marks that tell rows of `log` apart. It needs no Spark."""

IMPLAUSIBLE_DATE = "1970-01-01"
"""Partition of records whose event time is missing, implausible or without a bound. Without it, one broken clock could
open a partition for every date that it shows."""
IMPLAUSIBLE_DAY = 0
"""The same date, as days since 1970."""
IMPLAUSIBLE = "implausible-time: too long before or after Kafka took the record in"
"""Reason of a reject whose gateway knew its clock."""
EXPIRED = "expired: measured longer before Kafka took it in than log keeps records"
"""Reason of a reading that came too late for retention."""
DELETED = "deleted: the data of this device was deleted"
"""Reason of a record of which only the place is left."""
EMPTIED = (
    *("key", "value", "headers", "subject", "event_time", "time_error_us", "time_quality", "received_time"),
    *("gateway_boot", "boot_time_us", "boot_time_error_us", "content_type", "device_boot", "device_sequence"),
    *("device_counter", "doubt"),
    *("metrics", "undeclared", "pack_span_us"),
)
"""Columns of `log` that say something about what the device measured, and when."""
CONFLICT = "conflict"
"""Kind of a reject whose number came before with another payload."""
RETRY = "retry-"
"""Prefix of the `ingest` of records that were read again from `log` itself."""
