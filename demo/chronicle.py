"""Keeps what happened when in a run, and what was measured on the way, for the report."""

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Sample:
    """Figures at one moment. None is a figure that was not known."""

    at_us: int
    """Microseconds since 1970."""
    buffered: int | None
    in_kafka: int | None
    in_table: int | None


@dataclass(slots=True)
class Chronicle:
    """Moments in microseconds since 1970, filled in as they come. 0 is a moment that has not come."""

    sampling_from_us: int = 0
    sampling_until_us: int = 0
    cut_us: int = 0
    restored_us: int = 0
    killed_us: int = 0
    restarted_us: int = 0
    drained_us: int = 0
    samples: list[Sample] = field(default_factory=list)
    written: dict[int, int] = field(default_factory=dict)
    """Bytes that the gateway wrote to disk, as the kernel last counted them, by process id: a kill makes two."""

    @property
    def buffer_peak(self) -> int:
        """Greatest number of rows that waited in the buffer at once."""
        return max((sample.buffered or 0 for sample in self.samples), default=0)

    @property
    def outage_peak(self) -> int:
        """Greatest number of rows that waited at once while the uplink was cut."""
        during = (sample for sample in self.samples if self.cut_us <= sample.at_us <= self.restored_us)
        return max((sample.buffered or 0 for sample in during), default=0)
