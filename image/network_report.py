#!/usr/bin/python3 -IS
"""Writes what became of the network onto the boot partition, for an installer who cannot reach the box.

The image has this file as /usr/lib/sluice-image/network-report. It needs Python's own library alone.
"""

import json
import re
import socket
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

NO_ADDRESS = "no address: it is connected, but nothing there gives addresses (DHCP)"
WRONG_PASSWORD = "no address: the password is not the one of this Wi-Fi"  # noqa: S105 - words about one
NOT_FOUND = "no address: no access point with this name is in reach. Names have capital and small letters"
NOT_CONNECTED = "no address: it is not connected to the access point"
NO_CABLE = "no address: no cable, or nothing at its other end"


@dataclass(frozen=True, slots=True)
class Interface:
    """A cable's or a Wi-Fi's interface."""

    name: str
    is_wifi: bool
    has_carrier: bool
    addresses: Sequence[str]
    """Addresses that others reach it by."""
    wifi_name: str = ""


def interfaces(told: str, wifi: Sequence[str], names: Sequence[str] = ()) -> Iterator[Interface]:
    """Read the output of `ip -json address`. `wifi` names the interfaces that are of Wi-Fi, `names` their networks."""
    for link in json.loads(told):
        if link["link_type"] == "ether":
            addresses = [found["local"] for found in link["addr_info"] if found["scope"] == "global"]
            is_wifi = link["ifname"] in wifi
            carrier = "LOWER_UP" in link["flags"]
            yield Interface(link["ifname"], is_wifi, carrier, addresses, " or ".join(names) if is_wifi else "")


def text(host: str, found: Sequence[Interface], said: str) -> str:
    """Describe the network in words. `said` is what wpa_supplicant said since the start."""
    lines = [f"Name of this box: {host} (on this network {host}.local)"]
    for interface in found:
        if interface.is_wifi and not interface.wifi_name:
            continue
        kind = f'Wi-Fi "{interface.wifi_name}"' if interface.is_wifi else "cable"
        lines.append(f"{interface.name}, {kind}: {', '.join(interface.addresses) or _why_none(interface, said)}")
    return "\n".join(lines) + "\n"


def _why_none(interface: Interface, said: str) -> str:
    if interface.has_carrier:
        return NO_ADDRESS
    if not interface.is_wifi:
        return NO_CABLE
    # The last of these events counts.
    events = re.findall(r"WRONG_KEY|CTRL-EVENT-NETWORK-NOT-FOUND", said)
    if not events:
        return NOT_CONNECTED
    return WRONG_PASSWORD if events[-1] == "WRONG_KEY" else NOT_FOUND


def wifi_names(configuration: str) -> list[str]:
    """Read the networks' names in wpa_supplicant's configuration as netplan writes it."""
    return re.findall(r'(?m)^\s*ssid=P?"(.*)"$', configuration)


def _output(*command: str) -> str:
    return subprocess.run(command, capture_output=True, text=True, errors="replace", check=False).stdout


def main(file: Path) -> None:
    """Write the report, if it says something else than the one that is there."""
    wifi = [place.parent.name for place in Path("/sys/class/net").glob("*/phy80211")]
    names = [name for place in Path("/run/netplan").glob("wpa-*.conf") for name in wifi_names(place.read_text())]
    said = _output("journalctl", "--boot", "--output=cat", "--unit=netplan-wpa-*")
    told = text(socket.gethostname(), list(interfaces(_output("ip", "-json", "address"), wifi, names)), said)
    # A card is not worn by words that are there already.
    if not file.exists() or file.read_text(encoding="utf-8", errors="replace") != told:
        file.write_text(told, encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
