"""The same command line trains the same model with any script: the promise, in float64 and with GroupNorm."""
import pytest
from conftest import EXACT, largest_difference

OTHERS = {
    "dataparallel.py": ["dataparallel.py", {}],
    "ddp_spawn.py x 2": ["ddp_spawn.py", {"processes": 2}],
    "ddp_torchrun.py x 2": ["ddp_torchrun.py", {"processes": 2}],
    "ddp_torchrun.py x 3": ["ddp_torchrun.py", {"processes": 3, "spy": True}],
}


@pytest.mark.parametrize("script, how", OTHERS.values(), ids=OTHERS)
def test_every_script_trains_the_same_model(run, script, how):
    single, other = run("single_gpu.py", *EXACT), run(script, *EXACT, **how)
    assert largest_difference(single, other) < 1e-10
    assert other.losses == pytest.approx(single.losses, abs=1e-10)
    assert [step["lr"] for step in other.records("step")] == [step["lr"] for step in single.records("step")]
    assert [epoch["val_loss"] for epoch in other.records("epoch")] == pytest.approx(
        [epoch["val_loss"] for epoch in single.records("epoch")], abs=1e-10)


@pytest.mark.parametrize("accum", [2, 4])
def test_accumulation_does_not_change_the_model(run, accum):
    single, accumulated = run("single_gpu.py", *EXACT), run("single_gpu.py", *EXACT, "--accum", accum)
    assert largest_difference(single, accumulated) < 1e-10
    assert accumulated.losses == pytest.approx(single.losses, abs=1e-10)


def test_training_changes_the_model_and_seeds_differ(run):
    """The differences above are small because the runs agree, not because nothing happens in them."""
    single, other_seed = run("single_gpu.py", *EXACT), run("single_gpu.py", *EXACT, "--seed", 1)
    assert largest_difference(single, other_seed) > 1e-2
    assert len(set(single.losses)) == len(single.losses) == 8


@pytest.mark.parametrize("data", [(), pytest.param(("--data", "synthetic", "--batch-size", 512), marks=pytest.mark.slow)], ids=str)
def test_in_float32_the_first_steps_loss_agrees(run, data):
    options = ["--norm", "group", *data, "--epochs", 1]
    single, ranks = run("single_gpu.py", *options), run("ddp_spawn.py", *options)
    assert ranks.losses[0] == pytest.approx(single.losses[0], abs=1e-6)
    assert ranks.losses[1] == pytest.approx(single.losses[1], abs=1e-3)


@pytest.mark.slow
@pytest.mark.parametrize("script, processes", [("ddp_spawn.py", 2), ("ddp_torchrun.py", 2), ("ddp_torchrun.py", 3)])
@pytest.mark.parametrize("options", [(), ("--accum", 2), ("--workers", 1), ("--seed", 5, "--epochs", 4)], ids=str)
def test_the_full_matrix(run, script, processes, options):
    single, other = run("single_gpu.py", *EXACT, *options), run(script, *EXACT, *options, processes=processes)
    assert largest_difference(single, other) < 1e-10
    assert other.losses == pytest.approx(single.losses, abs=1e-10)
