"""Readings by which a device tells of its numbers, as columns of `log`."""

from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any

import numpy as np
import pyarrow as pa

from spark.arrow_pass.device_rows import Folded, device_rows
from spark.decode.record_columns import type_of

Reading = dict[str, Any]


def reading(number: int | None, error_us: int = 5, **others: Any) -> Reading:
    return {
        "namespace": "plant",
        "device": "42",
        "stream": "device-thermo",
        "device_counter": None,
        "device_boot": "7-1a2b3c4d",
        "device_sequence": number,
        "event_time": datetime(2026, 3, 14, 12, tzinfo=UTC),
        "time_error_us": error_us,
        "time_quality": "estimated",
        "gateway": "gw-1",
        "gateway_boot": "boot",
        "boot_time_us": 7,
        "boot_time_error_us": None,
        "is_dated": True,
        **others,
    }


def made(readings: Sequence[Reading], ordinal: int = 3) -> Folded:
    names = [name for name in reading(0) if name != "is_dated"]
    columns = {name: pa.array([each[name] for each in readings], type_of(name)) for name in names}
    return device_rows(columns, np.array([each["is_dated"] for each in readings], dtype=np.bool_), ordinal)
