"""All four scripts take the same options, and a bad value gets one line and exit code 2 before anything starts."""
import importlib

import ddp_torchrun
import pytest
from conftest import SCRIPTS, launch

BAD = [
    (["--model", "resnet19"], "resnet19", "resnet18"), (["--batch-size", "0"], "--batch-size 0", "1"),
    (["--batch-size", "many"], "--batch-size", "many"), (["--accum", "0"], "--accum 0", "1"),
    (["--batch-size", "12", "--accum", "5"], "--batch-size 12", "use "), (["--epochs", "-1"], "--epochs -1", "1"),
    (["--image-size", "7"], "--image-size 7", "16"), (["--lr", "nan"], "--lr nan", "0"), (["--lr", "-1"], "--lr -1", "0"),
    (["--warmup-epochs", "-1"], "--warmup-epochs -1", "0"), (["--label-smoothing", "1.5"], "--label-smoothing 1.5", "1"),
    (["--weight-decay", "inf"], "--weight-decay inf", "0"), (["--lr-scaling", "cubic"], "cubic", "linear"),
    (["--norm", "layer"], "layer", "group"), (["--norm", "sync"], "--norm sync", "--norm group"),
    (["--precision", "fp16"], "--precision fp16", "fp32"), (["--precision", "int8"], "int8", "bf16"),
    (["--compile", "fast"], "fast", "reduce-overhead"), (["--compile", "reduce-overhead", "--accum", "2"], "--accum 2", "default"),
    (["--workers", "-1"], "--workers -1", "0"), (["--seed", "-1"], "--seed -1", "0"), (["--timeout", "0"], "--timeout 0", "1"),
    (["--log-every", "0"], "--log-every 0", "1"), (["--nproc-per-node", "0"], "--nproc-per-node 0", "1"),
    (["--data", "no/such/folder"], "no/such/folder/train", "synthetic"), (["--checkpoint", "no/such/c.pt"], "no/such/c.pt", "folder"),
    (["--data", "folder"], "folder/train", "cifar10"), (["--checkpoint", ""], "--checkpoint", "name of a file"),
    (["--log-file", "no/such/log"], "no/such/log", "folder"), (["--frobnicate"], "--frobnicate", "--help"),
]


@pytest.fixture(params=SCRIPTS)
def main(request, monkeypatch):
    for name, value in {"RANK": 0, "LOCAL_RANK": 0, "WORLD_SIZE": 2, "LOCAL_WORLD_SIZE": 2, "TORCHELASTIC_RUN_ID": 1}.items():
        if request.param == "ddp_torchrun.py":
            monkeypatch.setenv(name, str(value))
    return importlib.import_module(request.param.removesuffix(".py")).main


@pytest.mark.parametrize("options, value, remedy", BAD, ids=lambda part: " ".join(part) if isinstance(part, list) else "")
def test_a_bad_value_gets_one_line(main, capsys, monkeypatch, options, value, remedy):
    with pytest.raises(SystemExit, match="2"):
        main(options)
    out, err = capsys.readouterr()
    assert out == "" and err.startswith("error: ") and err.count("\n") == 1
    assert value in err and remedy in err
    if main is not ddp_torchrun.main or value.startswith(("no/such", "folder/train", "--checkpoint")):
        return  # one process; or rank 0 alone looks for a folder, since it alone writes
    monkeypatch.setenv("RANK", "1")  # rank 0 alone prints the line
    with pytest.raises(SystemExit, match="2"):
        main(options)
    assert capsys.readouterr().err == ""


def test_help_shows_every_option_on_a_page(main, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "100")
    with pytest.raises(SystemExit, match="0"):
        main(["--help"])
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) < 70
    assert all(len(line) <= 100 for line in lines)


@pytest.mark.parametrize("script", SCRIPTS[:3])
def test_a_single_process_script_under_torchrun_says_what_to_type(capsys, monkeypatch, script):
    for name, value in {"RANK": "0", "WORLD_SIZE": "2", "TORCHELASTIC_RUN_ID": "1"}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(SystemExit, match="2"):
        importlib.import_module(script.removesuffix(".py")).main([])
    assert "use python, not torchrun" in capsys.readouterr().err


def test_torchruns_script_without_torchrun_says_what_to_type(capsys, monkeypatch):
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    with pytest.raises(SystemExit, match="2"):
        ddp_torchrun.main([])
    assert "torchrun --nproc_per_node=2 ddp_torchrun.py" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.parametrize("script", SCRIPTS)
def test_the_default_command_learns_the_synthetic_data(tmp_path, script):
    run = launch(tmp_path, script)
    assert run.code == 0, run.err
    top1 = [epoch["val_top1"] for epoch in run.records("epoch")]
    assert top1[0] < 0.7 and top1[-1] >= 0.95
    assert all(word in run.out for word in ("loss", "images_per_s", "eta", "val_top1"))
