"""Counts what an Ethernet cable of its own carries between a gateway's place and the machine that it sends to."""

import json
import subprocess
from dataclasses import dataclass

from tests.support.netns import Namespace, Network

ETHERNET_BYTES = 14
"""Bytes of each packet's Ethernet header. Another link has another header."""


@dataclass(frozen=True, slots=True)
class Carried:
    """Packets that an interface has sent and received, and their bytes without Ethernet headers."""

    bytes: int
    packets: int

    def since(self, before: "Carried") -> "Carried":
        """The traffic between two moments."""
        return Carried(self.bytes - before.bytes, self.packets - before.packets)


def carried(place: Namespace) -> Carried:
    """The count of the kernel, at the interface of a gateway's place."""
    command = ["ip", "-n", place.name, "-s", "-j", "link", "show", "eth0"]
    (link,) = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    ways = link["stats64"]["rx"], link["stats64"]["tx"]
    packets = sum(way["packets"] for way in ways)
    return Carried(sum(way["bytes"] for way in ways) - ETHERNET_BYTES * packets, packets)


def have_real_packets(network: Network) -> None:
    """Have packets go over these cables as over real ones: the kernel would hand on 64 kB at a time as one."""
    network.gateway.ip("link", "set", "eth0", "gso_max_segs", "1")
    network.brokers.ip("link", "set", "eth0", "gso_max_segs", "1")
    for interface in ("lan0", "wan0"):
        network.router.ip("link", "set", interface, "gso_max_segs", "1")
