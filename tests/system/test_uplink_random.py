"""A random schedule of faults of the path, one after another; what comes out of it is compared with what was told.

SLUICE_TEST_SEED repeats a run.
"""

import time
from collections.abc import Iterator
from itertools import islice

import pytest

from tests.support.sizes import SEED, size
from tests.support.uplink_scene import (
    FAULTS,
    RECOVERY_S_MAX,
    Scene,
    inflict,
    random_steps,
    running_gateway,
    scene_or_skip,
)
from tests.support.waiting import patience

pytestmark = pytest.mark.kafka

FAULTS_COUNT = size(3, 12)


@pytest.fixture(scope="module")
def scene(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Scene]:
    with scene_or_skip(tmp_path_factory.mktemp("uplink")) as made:
        yield made


def test_the_same_seed_gives_the_same_schedule_and_every_fault_has_its_turn() -> None:
    steps = list(islice(random_steps(7), 2 * len(FAULTS)))
    assert steps == list(islice(random_steps(7), 2 * len(FAULTS)))
    assert steps != list(islice(random_steps(8), 2 * len(FAULTS)))
    assert {step.fault for step in steps[: len(FAULTS)]} == set(FAULTS)


@pytest.mark.campaign(seconds=240)
def test_faults_at_random(scene: Scene) -> None:
    """With `pytest -s` the seed and each fault are shown as it runs; without, when it fails."""
    seed = SEED
    # Before the first connection: the router cannot hide a gateway that others know already.
    scene.network.masquerade()
    with running_gateway(scene) as running:
        back_s = time.time()
        for step in islice(random_steps(seed), FAULTS_COUNT):
            print(step)  # noqa: T201
            back_s = inflict(scene, step)
        running.wait_until_calm(RECOVERY_S_MAX + 10)
        outcome = running.finish()
    recovery_s = outcome.recovery_s(back_s)
    print(f"a new reading was in Kafka {recovery_s:.1f} s after the last fault; {outcome.audit}")  # noqa: T201
    assert not outcome.audit.faults, f"seed {seed}: {outcome.audit}"
    assert recovery_s <= patience(RECOVERY_S_MAX), f"seed {seed}: no new reading for {recovery_s:.1f} s"
