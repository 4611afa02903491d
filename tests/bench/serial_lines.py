"""`make bench-serial`: the firmware's needs, its use of a noisy line, and the cost of serial ports for the gateway.

BENCH_ONLY=goodput,ports      only these parts (their names are in PARTS)
BENCH_QUICK=1                 everything shortened, to see that it runs: the figures mean nothing
BENCH_SECONDS=30              how long `ports` counts CPU
BENCH_BOARDS=16               how many boards `avr` runs at once
BENCH_PROFILE=out.svg         the last gateway under py-spy (out.txt: folded stacks)
"""

import sys

from tests.bench import parts_serial_boards, parts_serial_goodput, parts_serial_ports
from tests.bench.processes import NotMeasuredError
from tests.bench.runner import Part, Suite, run

PARTS: dict[str, Part] = {
    "size": parts_serial_boards.size,
    "stack": parts_serial_boards.stack,
    "goodput": parts_serial_goodput.goodput,
    "ports": parts_serial_ports.ports,
    "avr": parts_serial_boards.avr,
}


if __name__ == "__main__":
    sys.exit(run(Suite("serial", "run-serial", PARTS, (NotMeasuredError, TimeoutError))))
