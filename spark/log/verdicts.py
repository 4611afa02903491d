"""Marks that tell rows of `log` apart. It needs no Spark."""

IMPLAUSIBLE_DATE = "1970-01-01"
"""Partition of records whose event time is missing, implausible or without a bound. Without it, one broken clock could
open a partition for every date that it shows."""
IMPLAUSIBLE = "implausible-time: too long before or after Kafka took the record in"
"""Reason of a reject whose gateway knew its clock."""
DELETED = "deleted: the data of this device was deleted"
"""Reason of a record of which only the place is left."""
CONFLICT = "conflict"
"""Kind of a reject whose number came before with another payload."""
RETRY = "retry-"
"""Prefix of the `ingest` of records that were read again from `log` itself."""
