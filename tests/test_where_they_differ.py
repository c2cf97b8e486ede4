"""BatchNorm is the one honest exception: each rank normalises its own share of the batch by that share's statistics."""
import common
import pytest
import torch
from conftest import largest_difference, run_here

FP64 = ["--precision", "fp64"]


@pytest.fixture
def one_process_that_normalises_each_ranks_share_by_itself(tmp_path, tiny, monkeypatch):
    class Shares(common.Classifier):
        def forward(self, images):
            if not self.training:
                return super().forward(images)
            logits = [super(Shares, self).forward(images[rank::2]) for rank in (1, 0)]
            return torch.stack(logits[::-1], dim=1).flatten(0, 1)

    monkeypatch.setattr(common, "Classifier", Shares)
    return run_here(tmp_path, "single_gpu.py", *map(str, tiny), *FP64)


def test_with_batchnorm_two_ranks_differ_from_one_process_by_far_more_than_rounding(run):
    single, ranks = run("single_gpu.py", *FP64), run("ddp_spawn.py", *FP64)
    assert largest_difference(single, ranks) > 1e-3
    assert abs(single.losses[0] - ranks.losses[0]) > 1e-3  # from the very first forward pass on


def test_and_agree_with_one_process_that_normalises_each_share_by_itself(
        run, one_process_that_normalises_each_ranks_share_by_itself):
    ranks, shares = run("ddp_spawn.py", *FP64), one_process_that_normalises_each_ranks_share_by_itself
    assert ranks.losses == pytest.approx(shares.losses, abs=1e-10)
    ranks, shares = ranks.checkpoint["net"], shares.checkpoint["net"]
    for name in ranks:
        if "running" not in name and "tracked" not in name:
            assert torch.allclose(ranks[name], shares[name], rtol=0, atol=1e-10), name


def test_accumulation_with_batchnorm_differs_too_since_statistics_are_per_micro_batch(run):
    assert largest_difference(run("single_gpu.py", *FP64), run("single_gpu.py", *FP64, "--accum", 2)) > 1e-3
