"""One file format for all four scripts; what is stopped and resumed ends as if it had never been stopped."""
import shutil

import common
import pytest
import torch
from conftest import EXACT, largest_difference, launch, run_here, same_bits
from torchvision.models import get_model

FOUR_EPOCHS = ["--epochs", 4, "--accum", 2]


def copy_of(run, folder, name="checkpoint.pt"):
    folder.mkdir(exist_ok=True)
    shutil.copy(run.folder / name, folder / "checkpoint.pt")
    return folder


def test_the_file_holds_plain_values_and_torchvisions_own_keys(run):
    for script in ("single_gpu.py", "dataparallel.py", "ddp_spawn.py", "ddp_torchrun.py"):
        checkpoint = run(script, *EXACT).checkpoint  # with weights_only=True
        assert checkpoint.keys() == {"net", "optimizer", "epoch", "args"}
        reference = get_model("resnet18", num_classes=3, norm_layer=lambda width: torch.nn.GroupNorm(32, width))
        assert checkpoint["net"].keys() == reference.state_dict().keys()
        assert checkpoint["epoch"] == 2
        assert checkpoint["args"]["lr"] == 0.1


@pytest.fixture(scope="module")
def never_stopped(run):
    return {1: run("single_gpu.py", "--epochs", 4), 2: run("ddp_torchrun.py", *FOUR_EPOCHS, spy=True)}


def test_one_process_stopped_after_two_epochs_and_resumed_ends_bit_equal(never_stopped, tiny, tmp_path, monkeypatch):
    options = [*map(str, tiny), "--epochs", "4"]

    def stop_after_two(log, epoch, start=common.Log.start_epoch):
        if epoch == 3:
            raise KeyboardInterrupt
        start(log, epoch)

    with monkeypatch.context() as patch:
        patch.setattr(common.Log, "start_epoch", stop_after_two)
        with pytest.raises(KeyboardInterrupt):
            run_here(tmp_path, "single_gpu.py", *options)
    assert torch.load(tmp_path / "checkpoint.pt")["epoch"] == 2
    resumed = run_here(tmp_path, "single_gpu.py", *options, "--resume")
    assert same_bits(resumed, never_stopped[1])
    for event in ("step", "epoch"):  # the log file goes on where it stopped: the same losses, rates and steps
        told = [[{k: v for k, v in record.items() if k in ("step", "epoch", "loss", "lr", "train_loss", "val_loss", "val_top1")}
                 for record in done.records(event)] for done in (resumed, never_stopped[1])]
        assert told[0] == told[1]


def test_two_ranks_resumed_after_the_second_epoch_end_bit_equal(never_stopped, tiny, tmp_path):
    whole = never_stopped[2]
    resumed = launch(copy_of(whole, tmp_path / "run", "epoch2.pt"), "ddp_torchrun.py", *map(str, [*tiny, *FOUR_EPOCHS]), "--resume")
    assert resumed.code == 0, resumed.err
    assert same_bits(resumed, whole)
    assert resumed.losses == whole.losses[8:]
    assert [step["lr"] for step in resumed.records("step")] == [step["lr"] for step in whole.records("step")][8:]


@pytest.mark.slow
def test_three_ranks_resumed_after_the_second_epoch_end_equal_to_rounding(run, tiny, tmp_path):
    options = [*EXACT, "--epochs", 4]
    whole = run("ddp_torchrun.py", *options, processes=3, spy=True)
    resumed = launch(copy_of(whole, tmp_path / "run", "epoch2.pt"), "ddp_torchrun.py", *map(str, [*tiny, *options]), "--resume",
                     processes=3)
    assert largest_difference(resumed, whole) < 1e-10


def test_hyper_parameters_come_from_the_command_line(run, tiny, tmp_path):
    done = run("single_gpu.py", *EXACT)
    options = [*map(str, tiny), *EXACT, "--resume", "--epochs", "3"]
    plain = run_here(copy_of(done, tmp_path / "plain"), "single_gpu.py", *options)
    faster = run_here(copy_of(done, tmp_path / "faster"), "single_gpu.py", *options, "--lr", "0.2")
    decayed = run_here(copy_of(done, tmp_path / "decayed"), "single_gpu.py", *options, "--weight-decay", "0.1")
    assert plain.losses[0] == faster.losses[0] == decayed.losses[0]  # the same weights at the start
    assert [step["step"] for step in plain.records("step")] == [9, 10, 11, 12]  # epoch 3 of 3, and nothing before it
    assert faster.records("step")[0]["lr"] == pytest.approx(2 * plain.records("step")[0]["lr"])
    assert faster.losses[1] != plain.losses[1] != decayed.losses[1]
    group = decayed.checkpoint["optimizer"]["param_groups"][0]
    assert group["weight_decay"] == 0.1


def test_a_finished_run_says_so_and_evaluates(run, tiny, tmp_path, capsys):
    done = run("single_gpu.py", *EXACT)
    again = run_here(copy_of(done, tmp_path / "again"), "single_gpu.py", *map(str, tiny), *EXACT, "--resume")
    assert "2 of 2 epochs are trained" in capsys.readouterr().out
    assert again.records("evaluation")[0]["val_loss"] == done.records("epoch")[-1]["val_loss"]
    assert again.records("step") == []


def test_resume_without_a_file_starts_anew_and_says_so(tiny, tmp_path, capsys):
    fresh = run_here(tmp_path, "single_gpu.py", *map(str, tiny), "--epochs", "1", "--resume")
    assert "starts anew" in capsys.readouterr().out
    assert fresh.checkpoint["epoch"] == 1


def test_without_resume_an_old_file_is_replaced(tiny, tmp_path):
    (tmp_path / "checkpoint.pt").write_bytes(b"damaged, but nobody reads it")
    fresh = run_here(tmp_path, "single_gpu.py", *map(str, tiny), "--epochs", "1")
    assert fresh.checkpoint["epoch"] == 1


@pytest.mark.parametrize("content, options", [
    (b"", []), (b"not a checkpoint", []), ("truncated", []), ({"epoch": 1}, []),
    ("whole", ["--norm", "batch"]), ("whole", ["--model", "resnet34"]), ("whole", ["--image-size", "65"]),
    ("whole", ["--data", "synthetic"])], ids=str)  # of 10 classes; the file is of 3
def test_a_file_that_cannot_be_used_is_named_in_one_line(run, tiny, tmp_path, capsys, content, options):
    path = tmp_path / "checkpoint.pt"
    whole = (run("single_gpu.py", *EXACT).folder / "checkpoint.pt").read_bytes()
    if isinstance(content, dict):
        torch.save(content, path)
    else:
        path.write_bytes({"whole": whole, "truncated": whole[:len(whole) // 2]}.get(content, content))
    before = path.read_bytes()
    with pytest.raises(SystemExit, match="2"):
        run_here(tmp_path, "single_gpu.py", *map(str, tiny), *EXACT, "--resume", *options)
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and str(path) in error
    assert path.read_bytes() == before


def test_eval_only_needs_a_file(tiny, tmp_path, capsys):
    with pytest.raises(SystemExit, match="2"):
        run_here(tmp_path, "single_gpu.py", *map(str, tiny), "--eval-only")
    assert str(tmp_path / "checkpoint.pt") in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.parametrize("saved_by", ["single_gpu.py", "dataparallel.py", "ddp_spawn.py", "ddp_torchrun.py", "single_gpu.py --compile"])
@pytest.mark.parametrize("resumed_by, processes", [
    ("single_gpu.py", 1), ("dataparallel.py", 1), ("ddp_spawn.py", 3), ("ddp_torchrun.py", 2), ("single_gpu.py --compile", 1)])
def test_any_script_resumes_any_others_file(run, tiny, tmp_path, saved_by, resumed_by, processes):
    saved = run(*saved_by.split(), *EXACT)
    script, *more = resumed_by.split()
    options = [*map(str, tiny), *EXACT, *more, "--resume", "--epochs"]
    evaluated = launch(copy_of(saved, tmp_path / "evaluated"), script, *options, "2", f"--nproc-per-node={processes}",
                       processes=processes)
    assert evaluated.code == 0, evaluated.err
    expected = saved.records("epoch")[-1]
    assert evaluated.records("evaluation")[0] == pytest.approx(
        {"event": "evaluation", **{name: expected[name] for name in ("val_loss", "val_top1", "val_top5", "val_images")}}, abs=1e-10)
    trained = launch(copy_of(saved, tmp_path / "trained"), script, *options, "3", f"--nproc-per-node={processes}", processes=processes)
    reference = run_here(copy_of(run("single_gpu.py", *EXACT), tmp_path / "reference"), "single_gpu.py", *map(str, tiny), *EXACT,
                         "--resume", "--epochs", "3")
    assert largest_difference(trained, reference) < 1e-8
