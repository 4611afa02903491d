"""The formats that come with the gateway, by their names in `[[serial.format]]`."""

from collections.abc import Callable
from typing import Final

from gateway.formats.dsmr import Dsmr
from gateway.formats.dust import Pms5003, Sds011
from gateway.formats.piece import Format

BUILT_IN: Final[dict[str, Callable[[], Format]]] = {"dsmr": Dsmr, "pms5003": Pms5003, "sds011": Sds011}
BAUD: Final = {"dsmr": 115_200, "pms5003": 9_600, "sds011": 9_600}
"""Bits a second at which their sensors send."""
