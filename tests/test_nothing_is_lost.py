"""Whatever happens while a checkpoint is written, the last good one stays; data are downloaded once and never read by halves."""
import argparse
import multiprocessing
import os
import random
import time
from pathlib import Path

import common
import pytest
import torch
import torch.distributed as dist
from conftest import EXACT, run_here
from torchvision.datasets import CIFAR10


@pytest.fixture
def training(tmp_path):
    """Arguments for common.save_checkpoint but the epoch: options, and a small model with its optimizer and scaler."""
    args = common.parse_args("single_gpu.py", ["--checkpoint", str(tmp_path / "checkpoint.pt")])
    common.check_args(args, world_size=1, local_world_size=1)
    model = common.build_model(args, num_classes=10)
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9, fused=True)
    common.load_checkpoint(args, model, optimizer, None)  # so that there is momentum to save
    return args, model, optimizer, torch.amp.GradScaler("cpu", enabled=False)


def save_for_ever(second_began, first_epoch, args, *parts):
    common.save_checkpoint(args, first_epoch, *parts)
    second_began.set()
    for epoch in range(first_epoch + 1, 10**9):
        common.save_checkpoint(args, epoch, *parts)


def kill_while_saving(training, times):
    args, *parts = training
    began = time.perf_counter()
    common.save_checkpoint(args, 1, *parts)
    one_save = time.perf_counter() - began
    context, leftovers = multiprocessing.get_context("fork"), 0
    for first_epoch in range(1000, 1000 * (times + 1), 1000):
        second_began = context.Event()
        saving = context.Process(target=save_for_ever, args=(second_began, first_epoch, args, *parts))
        saving.start()
        assert second_began.wait(60)
        time.sleep(random.uniform(0, one_save))
        saving.kill()
        saving.join()
        checkpoint = torch.load(args.checkpoint, weights_only=True)
        assert checkpoint["epoch"] >= first_epoch  # the last that was written whole, and not one before it
        assert checkpoint["net"].keys() == parts[0].net.state_dict().keys()
        leftovers += Path(f"{args.checkpoint}.tmp").exists()
    assert leftovers > 0  # some were killed in the middle of a save
    common.save_checkpoint(args, 77, *parts)  # what they left behind does no harm
    assert torch.load(args.checkpoint, weights_only=True)["epoch"] == 77


def test_a_kill_while_saving_leaves_a_file_that_loads(training):
    kill_while_saving(training, times=5)


@pytest.mark.slow
def test_thirty_kills_while_saving_leave_a_file_that_loads(training):
    kill_while_saving(training, times=30)


def test_a_full_disk_leaves_the_last_checkpoint_and_gets_one_line(training, capsys):
    args, *parts = training
    common.save_checkpoint(args, 1, *parts)
    os.symlink("/dev/full", f"{args.checkpoint}.tmp")  # each write to it fails for want of space
    with pytest.raises(SystemExit, match="2"):
        common.save_checkpoint(args, 2, *parts)
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and args.checkpoint in error and "epoch 2" in error
    assert torch.load(args.checkpoint, weights_only=True)["epoch"] == 1


def test_a_damaged_file_ends_all_ranks_with_one_line(tiny, tmp_path, capfd):
    (tmp_path / "checkpoint.pt").write_bytes(b"not a checkpoint")
    options = map(str, [*tiny, *EXACT, "--resume", "--nproc-per-node=2"])
    with pytest.raises(SystemExit, match="2"):
        run_here(tmp_path, "ddp_spawn.py", *options)
    error = capfd.readouterr().err
    assert error.count("\n") == 1 and str(tmp_path / "checkpoint.pt") in error


def build_cifar10(rank, world_size, folder, results):
    dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=world_size)
    args = argparse.Namespace(data="cifar10", data_dir=str(folder / "data"), image_size=32, seed=0, batch_size=1)
    train_set, _ = common.build_datasets(args, torch.device("cpu"))
    results.put(len(train_set))
    dist.destroy_process_group()


def three_ranks(monkeypatch, tmp_path, fails):
    """What three ranks find and how they end, where CIFAR-10 has to be downloaded first, slowly."""

    class SlowCIFAR10:
        def __init__(self, folder, train=True, download=False):
            file = Path(folder, CIFAR10.base_folder, "images")
            if download:
                (tmp_path / f"download by {os.getpid()}").touch()
                file.parent.mkdir()
                file.write_text("1")
                time.sleep(0.5)
                if fails:
                    raise OSError("no network")
                file.write_text("12345")
            count = len(file.read_text())
            self.data, self.targets, self.classes = torch.zeros(count, 32, 32, 3).byte().numpy(), [0] * count, ["a"]

    SlowCIFAR10.base_folder = CIFAR10.base_folder
    monkeypatch.setattr(common, "CIFAR10", SlowCIFAR10)
    context = multiprocessing.get_context("fork")
    results = context.Queue()
    ranks = [context.Process(target=build_cifar10, args=(rank, 3, tmp_path, results)) for rank in range(3)]
    for rank in ranks:
        rank.start()
    for rank in ranks:
        rank.join(60)
    assert len(list(tmp_path.glob("download by *"))) == 1
    assert [path.name for path in (tmp_path / "data").iterdir()] == ([] if fails else [CIFAR10.base_folder])
    return [rank.exitcode for rank in ranks], [] if fails else [results.get() for _ in ranks]


def test_cifar10_is_downloaded_once_and_whole(monkeypatch, tmp_path):
    assert three_ranks(monkeypatch, tmp_path, fails=False) == ([0, 0, 0], [5, 5, 5])


def test_a_failed_download_ends_all_ranks_with_one_line(monkeypatch, tmp_path, capfd):
    assert three_ranks(monkeypatch, tmp_path, fails=True) == ([2, 2, 2], [])
    error = capfd.readouterr().err
    assert error.count("\n") == 1 and "no network" in error and CIFAR10.base_folder in error


def test_two_machines_that_download_to_one_disk_both_go_on(monkeypatch, tmp_path):
    class Raced:
        def __init__(self, folder, download):
            for place in (folder, tmp_path):  # the other machine is ready first
                Path(place, CIFAR10.base_folder).mkdir()
                Path(place, CIFAR10.base_folder, "images").touch()

    Raced.base_folder = CIFAR10.base_folder
    monkeypatch.setattr(common, "CIFAR10", Raced)
    common.download_cifar10(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == [CIFAR10.base_folder]
