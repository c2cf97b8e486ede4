"""What only a GPU can show. nn.DataParallel really scatters, replicates and gathers on one GPU with device_ids=[0, 0]."""
import functools
import math
import shutil
import sys

import pytest
from conftest import EXACT, GPUS, ROOT, WITH_GPUS, Run, execute, in_folder, largest_difference, launch, same_bits

pytestmark = pytest.mark.gpu(1)
DATA_PARALLEL = """
import functools, sys, torch
sys.path.insert(0, sys.argv.pop(1))
if torch.cuda.device_count() == 1:
    torch.nn.DataParallel = functools.partial(torch.nn.DataParallel, device_ids=[0, 0])
import common, dataparallel
dtypes, build_model = set(), common.build_model
def build(*arguments, **named):
    model = build_model(*arguments, **named)
    model.net.layer1.register_forward_hook(
        lambda module, inputs, output: dtypes.add((module.training, getattr(module, "_is_replica", False), str(output.dtype))))
    return model
common.build_model = build
dataparallel.main(sys.argv[1:])
print(sorted(dtypes))
"""

TWO_RANKS_ON_ONE_GPU = """
import sys, torch
import common, ddp_torchrun
check, start = common.check_args, torch.distributed.init_process_group
common.check_args = lambda args, world_size, local_world_size: check(args, world_size, local_world_size=1)
torch.cuda.set_device = lambda device: None
torch.distributed.init_process_group = lambda backend, **named: start("gloo", **named)  # NCCL refuses a shared GPU
ddp_torchrun.main(sys.argv[1:])
"""


@pytest.fixture(scope="module")
def gpu_run(tmp_path_factory, tiny):
    """gpu_run(script, *options): a run of one process on one GPU, made once; with another number, once more."""

    @functools.cache
    def make(script, *options, folder=None, spy=False, number=0):
        folder = folder or tmp_path_factory.mktemp("gpu")
        options = [*map(str, [*tiny, *options]), "--nproc-per-node=1"]
        run = launch(folder, script, *options, env=WITH_GPUS, processes=1, spy=spy)
        assert run.code == 0, run.err
        assert run.records("start")[0]["devices"][0] != "cpu"
        return run

    return make


@pytest.fixture
def data_parallel(tmp_path_factory, tiny):
    def make(*options):
        folder = tmp_path_factory.mktemp("data_parallel")
        command = [sys.executable, "-c", DATA_PARALLEL, ROOT, *in_folder(folder, map(str, [*tiny, *options]))]
        done = execute(command, folder, env=WITH_GPUS)
        assert done.returncode == 0, done.stderr
        return Run(folder, 0, done.stdout, done.stderr)

    return make


def test_dataparallel_trains_the_same_model_on_replicas(gpu_run, data_parallel):
    options = [*EXACT, "--batch-size", 13]  # 13 images: one replica has 7, the other 6
    single, replicas = gpu_run("single_gpu.py", *options), data_parallel(*options)
    assert "(True, True, 'torch.float64')" in replicas.out
    assert largest_difference(single, replicas) < 1e-10  # and the keys are the same: bare
    assert replicas.losses == pytest.approx(single.losses, abs=1e-10)


@pytest.mark.parametrize("precision, dtype", [("bf16", "bfloat16"), ("fp16", "float16"), ("fp32", "float32")])
def test_dataparallels_replicas_compute_in_the_precision_asked_for(data_parallel, precision, dtype):
    run = data_parallel("--precision", precision)
    assert f"(True, True, 'torch.{dtype}')" in run.out
    assert run.out.count("torch.") == run.out.count(f"torch.{dtype}")


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_half_precision_trains(gpu_run, precision):
    half, full = (gpu_run("single_gpu.py", "--precision", name, "--epochs", 8) for name in (precision, "fp32"))
    assert half.losses[0] == pytest.approx(full.losses[0], abs=0.05)
    assert half.records("epoch")[-1]["train_loss"] < 0.8 * half.losses[0]
    assert ("scaler" in half.checkpoint) == (precision == "fp16")


def test_the_scaler_skips_an_overflow_and_the_run_goes_on(tmp_path, tiny):
    code = """
import functools, sys, torch
sys.path.insert(0, sys.argv.pop(1))
torch.amp.GradScaler = functools.partial(torch.amp.GradScaler, init_scale=2.0**30)
import single_gpu
single_gpu.main(sys.argv[1:])
"""
    options = in_folder(tmp_path, map(str, [*tiny, "--epochs", 10, "--precision", "fp16", "--norm", "group", "--deterministic"]))
    done = execute([sys.executable, "-c", code, ROOT, *options], tmp_path, env=WITH_GPUS)
    run = Run(tmp_path, done.returncode, done.stdout, done.stderr)
    assert run.code == 0, run.err
    assert run.checkpoint["scaler"]["scale"] < 2.0**30  # halved at each overflow
    assert all(map(math.isfinite, run.losses)) and len(run.losses) == 40
    assert run.losses[-1] < run.losses[0]


@pytest.mark.parametrize("script", ["single_gpu.py", "ddp_torchrun.py"])
@pytest.mark.parametrize("options", [["--compile"], ["--compile", "--accum", 4], ["--compile", "reduce-overhead"]], ids=str)
def test_compile_gives_the_same_losses(gpu_run, script, options):
    common = ["--norm", "group", "--precision", "fp32"]
    eager, compiled = gpu_run("single_gpu.py", *common), gpu_run(script, *common, *options)
    assert compiled.losses == pytest.approx(eager.losses, rel=0.02)
    assert compiled.losses[0] == pytest.approx(eager.losses[0], abs=1e-3)
    assert compiled.checkpoint["net"].keys() == eager.checkpoint["net"].keys()


@pytest.mark.parametrize("model, size", [("resnet18", 16), ("resnet50", 80)])
def test_deterministic_runs_and_resumes_bit_equal_over_nccl(gpu_run, tmp_path, model, size):
    options = ["--epochs", 4, "--deterministic", "--model", model, "--image-size", size]
    first, second = (gpu_run("ddp_torchrun.py", *options, spy=True, number=number) for number in range(2))
    assert same_bits(first, second)
    shutil.copy(first.folder / "epoch2.pt", tmp_path / "checkpoint.pt")
    resumed = gpu_run("ddp_torchrun.py", *options, "--resume", folder=tmp_path)
    assert same_bits(resumed, first)
    single = gpu_run("single_gpu.py", *options)
    assert single.losses[0] == pytest.approx(first.losses[0], abs=1e-3)


def test_more_processes_than_gpus_get_one_line(tmp_path):
    done = execute([sys.executable, ROOT / "ddp_spawn.py", f"--nproc-per-node={GPUS + 1}"], tmp_path, env=WITH_GPUS)
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1 and f"--nproc_per_node={GPUS}" in done.stderr and "CUDA_VISIBLE_DEVICES=" in done.stderr


def test_syncbatchnorm_over_two_ranks_is_the_batchnorm_of_one_process(gpu_run, tmp_path, tiny):
    script = ROOT / "ddp_torchrun.py"
    if GPUS == 1:
        (script := tmp_path / "two_ranks.py").write_text(TWO_RANKS_ON_ONE_GPU)
    options = in_folder(tmp_path, map(str, [*tiny, "--norm", "sync", "--precision", "fp64"]))
    command = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", script, *options]
    done = execute([sys.executable, *command], tmp_path, env={**WITH_GPUS, "PYTHONPATH": str(ROOT)})
    assert done.returncode == 0, done.stderr
    two_ranks, one_process = Run(tmp_path, 0, done.stdout, done.stderr), gpu_run("single_gpu.py", "--precision", "fp64")
    assert largest_difference(two_ranks, one_process) < 1e-10
    assert two_ranks.losses == pytest.approx(one_process.losses, abs=1e-10)


@pytest.mark.gpu(2)
def test_each_rank_trains_on_a_gpu_of_its_own_over_nccl(gpu_run, tmp_path, tiny):
    for more in ([], ["--epochs", "3", "--resume"]):
        ranks = launch(tmp_path, "ddp_torchrun.py", *map(str, tiny), *EXACT, *more, env=WITH_GPUS, spy=True)
        assert ranks.code == 0, ranks.err
        assert ("2 of 3 epochs are trained" in ranks.out) == bool(more)
        for rank, note in enumerate(ranks.notes):
            assert [gpu for gpu, memory in enumerate(note["gpu_memory"]) if memory] == [rank]
        assert more or largest_difference(ranks, gpu_run("single_gpu.py", *EXACT)) < 1e-10
