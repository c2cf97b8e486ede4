"""Each validation image counts once, for any number of images and processes, and what is printed is what is saved."""
import argparse
import shutil

import common
import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from conftest import EXACT, run_here
from torch.utils.data import DataLoader

SIZES = [1, 2, 7, 101]


def evaluate_all_sizes(rank, world_size, init_method, results):
    """As the scripts do it, with a model whose BatchNorm statistics differ from rank to rank."""
    args = argparse.Namespace(data="synthetic", image_size=16, seed=0, model="resnet18", norm="batch", precision="fp64")
    if world_size > 1:
        torch.set_num_threads(1)
        dist.init_process_group("gloo", init_method, world_size=world_size, rank=rank)
    torch.manual_seed(0)
    model = common.build_model(args, num_classes=10)
    torch.manual_seed(rank)
    for name, buffer in model.named_buffers():
        if name.endswith("running_mean"):
            buffer.copy_(torch.randn(buffer.shape))
    images, labels, classes = common.synthetic_images(args, False)
    for size in SIZES:
        val_set = common.ImagesInMemory(images[:size], labels[:size], classes, args, torch.device("cpu"), train=False)
        loader = DataLoader(val_set, 16, sampler=range(rank, size, world_size), **common.loader_options(args, val_set))
        results[rank, size] = common.evaluate(model, loader, torch.device("cpu"))
    if world_size > 1:
        dist.destroy_process_group()


@pytest.fixture(scope="module")
def alone():
    evaluate_all_sizes(0, 1, None, results := {})
    return results


@pytest.mark.parametrize("world_size", [pytest.param(2, marks=pytest.mark.slow), 3])
def test_sums_are_exact_for_any_size_and_the_same_on_every_rank(alone, world_size, tmp_path):
    with mp.Manager() as manager:
        results = manager.dict()
        mp.spawn(evaluate_all_sizes, (world_size, (tmp_path / "meet").as_uri(), results), nprocs=world_size)
        for size in SIZES:
            for rank in range(world_size):
                assert results[rank, size] == results[0, size]
                assert results[rank, size] == pytest.approx(alone[0, size], abs=1e-12)
                assert results[rank, size]["val_images"] == size


def test_alone_it_computes_what_the_definition_says(alone):
    args = argparse.Namespace(data="synthetic", image_size=16, seed=0, model="resnet18", norm="batch", precision="fp64")
    torch.manual_seed(0)
    model = common.build_model(args, num_classes=10).eval()
    torch.manual_seed(0)
    for name, buffer in model.named_buffers():
        if name.endswith("running_mean"):
            buffer.copy_(torch.randn(buffer.shape))
    images, labels, _ = common.synthetic_images(args, False)
    with torch.no_grad():
        logits = model(images[:101].permute(0, 3, 1, 2))
    ranks = (logits > logits.gather(1, labels[:101, None])).sum(1)  # how many classes were thought likelier
    loss = -logits.log_softmax(1).gather(1, labels[:101, None]).mean().item()
    expected = {"val_loss": loss, "val_top1": (ranks < 1).double().mean().item(), "val_top5": (ranks < 5).double().mean().item()}
    assert alone[0, 101] == pytest.approx({**expected, "val_images": 101}, abs=1e-12)


@pytest.mark.parametrize("processes, options", [(2, ["--epochs", 4, "--accum", 2]), (3, EXACT)])
def test_each_image_is_read_once_and_one_all_reduce_does_it(run, processes, options):
    notes = run("ddp_torchrun.py", *options, processes=processes, spy=True).notes
    epochs = len(notes[0]["evaluations"])
    read = sorted(index for rank in notes for _, index, _ in rank["val"])
    assert read == sorted(list(range(11)) * epochs)
    for rank in notes:
        assert rank["evaluations"] == notes[0]["evaluations"]
        assert [evaluation["all_reduces"] for evaluation in rank["evaluations"]] == [1] * epochs


def test_eval_only_prints_what_the_run_with_two_ranks_and_batchnorm_printed(run, tiny, tmp_path, capsys):
    ranks = run("ddp_spawn.py", "--precision", "fp64")
    shutil.copy(ranks.folder / "checkpoint.pt", tmp_path)
    capsys.readouterr()
    again = run_here(tmp_path, "single_gpu.py", *map(str, tiny), "--precision", "fp64", "--eval-only")
    printed = capsys.readouterr().out.splitlines()[-1]
    last, evaluation = ranks.records("epoch")[-1], again.records("evaluation")[0]
    assert {**last, **evaluation, "event": "epoch"} == pytest.approx(last, abs=1e-12)
    assert printed == ", ".join(f"{name} {last[name]:.4g}" for name in ("val_loss", "val_top1", "val_top5", "val_images"))
