"""What a box tells of itself: memory and addresses."""

import socket
from pathlib import Path

import pytest

from gateway.host import box
from gateway.host.box import read_box
from gateway.host.own_addresses import ipv4_addresses, ipv6_addresses


def test_memory_is_what_the_kernel_says() -> None:
    found = read_box()
    assert found.memory_bytes is not None
    assert found.memory_free_bytes is not None
    assert found.own_bytes is not None
    assert found.own_bytes < found.memory_bytes
    assert 0 < found.memory_free_bytes <= found.memory_bytes


def test_what_cannot_be_read_is_not_known(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def none() -> None:
        raise OSError

    monkeypatch.setattr(box, "ipv4_addresses", none)
    monkeypatch.setattr(box, "_OWN_MEMORY", tmp_path / "none")
    found = read_box(tmp_path / "none")
    assert (found.memory_bytes, found.memory_free_bytes, found.own_bytes, found.addresses) == (None, None, None, ())
    odd = tmp_path / "meminfo"
    odd.write_text("MemTotal: many\n")
    assert read_box(odd).memory_bytes is None


def test_addresses_are_those_that_can_be_bound_to() -> None:
    for address in ipv4_addresses():
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as bound:
            bound.bind((address, 0))


def test_of_ipv6_those_are_told_that_lead_across_routers_and_stay(tmp_path: Path) -> None:
    table = tmp_path / "if_inet6"
    table.write_text(
        "00000000000000000000000000000001 01 80 10 80       lo\n"
        "20010db8000000000000000000000007 02 40 00 80     eth0\n"
        "20010db8000000000000000000000099 02 40 00 01     eth0\n"
        "fe800000000000000000000000000001 02 40 20 80     eth0\n"
    )
    assert [*ipv6_addresses(table)] == ["2001:db8::7"]
    assert [*ipv6_addresses(tmp_path / "none")] == []
