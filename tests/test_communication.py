"""Gradients travel once per optimizer step, whatever --accum, and leave every rank with the same weights."""
import pytest
from conftest import EXACT


@pytest.fixture(params=["accum 1", "accum 2"])
def notes(request, run):
    if request.param == "accum 1":
        return run("ddp_torchrun.py", *EXACT, processes=3, spy=True).notes
    return run("ddp_torchrun.py", "--epochs", 4, "--accum", 2, spy=True).notes


def test_each_step_sends_every_gradient_exactly_once(notes):
    for rank in notes:
        assert rank["gradients_sent"] == [rank["parameters"]] * len(rank["gradients_sent"])


def test_ranks_are_bit_equal_after_every_step(notes):
    assert len(set(notes[0]["weights"])) == len(notes[0]["weights"]) > 1
    assert all(rank["weights"] == notes[0]["weights"] for rank in notes)


def test_ranks_draw_different_random_numbers(notes):
    """A dropout layer in your own network would drop different activations on each rank."""
    assert len({rank["random"][0] for rank in notes}) == len(notes)


def test_rank_0_writes_once_an_epoch_and_nobody_else_does(notes):
    assert notes[0]["saved"] == list(range(1, len(notes[0]["random"]) + 1))
    assert all(rank["saved"] == [] for rank in notes[1:])
