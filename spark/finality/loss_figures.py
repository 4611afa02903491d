"""Figures of the view `losses`, with the times of a loss as its gateway's clock is known now. It needs no Spark."""

from typing import NamedTuple

from spark.finality.stream_proofs import DeviceLoss, timed_loss
from spark.log.edge_times import EARLIEST_US, LATEST_US, Clocks


class LossFigures(NamedTuple):
    """A row of `losses`. Times are in microseconds since 1970.

    The readings were taken between `from_us` and `to_us`; None if that is not known. `device` is None if nobody can say
    whose readings they were, and `size` is 0 if nobody can count them.
    """

    namespace: str
    gateway: str
    device: str | None
    reason: str
    size: int
    from_us: int | None
    to_us: int | None
    device_boot: str | None
    first_sequence: int | None
    last_sequence: int | None
    told_us: int
    told_error_us: int


def figures_of(clocks: Clocks, namespace: str, device: str | None, loss: DeviceLoss) -> LossFigures:
    """Return the figures of one loss."""
    timed = timed_loss(clocks, namespace, loss)
    return LossFigures(
        *(namespace, loss.gateway, device, loss.reason, loss.size),
        from_us=bounded(timed.from_us),
        to_us=bounded(timed.to_us),
        device_boot=loss.device_boot,
        first_sequence=loss.first_sequence,
        last_sequence=loss.last_sequence,
        told_us=loss.told_us,
        told_error_us=loss.told_error_us,
    )


def bounded(us: int) -> int | None:
    """A time of a span; None if it is no bound."""
    return us if EARLIEST_US <= us <= LATEST_US else None
