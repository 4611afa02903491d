"""A few thousand of the fuzzer's cases (the bench runs a million), and a test that it finds faults."""

import pytest

from gateway.mqtt import protocol
from tests.support.mqtt_fuzz import PACKET_BYTES_MAX, fuzz


@pytest.mark.parametrize("level", [4, 5])
def test_no_case_breaks_a_rule(level: int) -> None:
    outcome = fuzz(5_000, seed=20_141_029, level=level)
    assert outcome.failures == []
    assert outcome.cases == 5_000
    # The cases reach deep: many packets are sound, and most of the rules are broken by some case.
    assert outcome.packets > 5_000
    assert len(outcome.violations) > 15
    assert 100 < outcome.pending_bytes_max < PACKET_BYTES_MAX


def test_the_same_seed_gives_the_same_cases() -> None:
    assert fuzz(200, seed=1) == fuzz(200, seed=1) != fuzz(200, seed=2)


@pytest.mark.parametrize("level", [4, 5])
@pytest.mark.parametrize("broken", ["raises", "loses what a split leaves"])
def test_a_parser_with_a_defect_is_found(broken: str, level: int, monkeypatch: pytest.MonkeyPatch) -> None:
    if broken == "raises":
        monkeypatch.setattr(protocol, "decode_text", bytes.decode)
    else:
        monkeypatch.setattr(protocol.ServerProtocol, "receive", _forgetful)
    assert fuzz(2_000, seed=3, level=level).failures


def _forgetful(self: protocol.ServerProtocol, data: bytes) -> list[protocol.Event]:
    events: list[protocol.Event] = []
    try:
        self._parse(data, events)
    except protocol.ProtocolError as error:
        events.append(error.violation)
    return events
