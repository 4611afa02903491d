"""What there is to choose from: sites and devices."""

from typing import Final

import msgspec

from spark.desk.asked import text, where
from spark.desk.evidence import device_parts
from spark.desk.kept_tables import KeptTables
from spark.page.questions import SIZES_S, Question

DEVICES_MAX: Final = 1_000
"""Devices that are listed. Of more, a person types the name."""


class Choices(msgspec.Struct, frozen=True, kw_only=True):
    """Names that a question may have. Times are in microseconds since 1970."""

    warehouse: str
    sites: list[str]
    devices: list[str]
    devices_more: int
    """How many are not listed."""
    sizes_s: list[int]
    """Lengths of windows that can be made from the table's."""


def choices(tables: KeptTables, asked: Question) -> Choices:
    """List what can be chosen, with the devices of one site if it is named."""
    site = asked.asked.site
    base_s = tables.window_seconds()
    heard = device_parts(tables.source, tables.version()[0])
    limits = [] if site is None else [f"device IN ({', '.join(map(text, tables.devices_at(site))) or 'NULL'})"]
    rows = tables.source.rows(f"SELECT DISTINCT device FROM ({heard}) {where(limits)} ORDER BY device")
    devices = [device for (device,) in rows]
    return Choices(
        warehouse=tables.warehouse,
        sites=tables.sites(),
        devices=devices[:DEVICES_MAX],
        devices_more=max(0, len(devices) - DEVICES_MAX),
        sizes_s=[size for size in SIZES_S if size >= base_s and size % base_s == 0],
    )
