"""The learning rate of every step, against tables worked by hand."""
import argparse

import common
import pytest


def trace(**options):
    args = argparse.Namespace(**{"lr": 0.1, "batch_size": 256, "lr_scaling": "linear", "warmup_epochs": 1.0, "epochs": 4, **options})
    return [common.learning_rate(args, step, steps_per_epoch=2) for step in range(1, args.epochs * 2 + 1)]


# Two steps up; then six along a cosine: (1 + cos(k * 30 degrees)) / 2 for k = 0 ... 5.
SHAPE = [0.5, 1, 1, 0.9330127, 0.75, 0.5, 0.25, 0.0669873]


@pytest.mark.parametrize("batch, scaling, peak", [
    (256, "linear", 0.1), (512, "linear", 0.2), (64, "linear", 0.025), (1024, "sqrt", 0.2), (64, "sqrt", 0.05),
    (1024, "none", 0.1)])
def test_warm_up_then_cosine_to_a_peak_that_follows_the_batch(batch, scaling, peak):
    assert trace(batch_size=batch, lr_scaling=scaling) == pytest.approx([peak * part for part in SHAPE], abs=1e-8)


def test_without_warm_up_the_first_step_has_the_peak():
    assert trace(warmup_epochs=0.0)[:2] == pytest.approx([0.1, 0.1 * 0.96193977])


def test_a_warm_up_longer_than_the_run_only_climbs():
    assert trace(warmup_epochs=8.0) == pytest.approx([0.1 * step / 16 for step in range(1, 9)])


def test_part_of_an_epoch_can_be_warm_up():
    assert trace(warmup_epochs=0.5)[:2] == pytest.approx([0.1, 0.1])


def test_no_step_is_wasted_at_a_rate_of_zero():
    for warmup in (0.0, 0.3, 1.0, 4.0):
        assert min(trace(warmup_epochs=warmup)) > 0


def test_the_scripts_train_at_these_rates(run):
    steps = run("single_gpu.py", "--norm", "group", "--precision", "fp64").records("step")
    args = argparse.Namespace(lr=0.1, batch_size=12, lr_scaling="linear", warmup_epochs=1.0, epochs=2)
    assert [step["lr"] for step in steps] == [common.learning_rate(args, step, 4) for step in range(1, 9)]
    assert [step["step"] for step in steps] == list(range(1, 9))
