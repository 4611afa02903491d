"""`python -m sluice_sim` is `sluice-sim`."""

from sluice_sim.cli import main

main()
