"""Whatever ends one process ends the job: no rank waits for ever, no process is left, and the first error is what is read."""
import os
import re
import shutil
import signal
import socket
import sys
from pathlib import Path

import common
import pytest
import torch
from conftest import EXACT, ROOT, TORCHRUN, Run, Started, execute, in_folder, same_bits

SPAWN = [sys.executable, ROOT / "ddp_spawn.py"]
STANDALONE = [*TORCHRUN, "--standalone", "--nproc_per_node=2"]
LAUNCHERS = {"ddp_spawn.py": SPAWN, "ddp_torchrun.py": [*STANDALONE, ROOT / "ddp_torchrun.py"]}
slow = pytest.mark.slow


def long_run(images, folder, *more):
    """Options for a run of two processes that would go on for an hour, with loader workers."""
    return in_folder(folder, map(str, ["--data", images, "--image-size", 16, "--batch-size", 12, "--epochs", 9999,
                                       "--workers", 1, "--nproc-per-node", 2, *more]))


def to_all(started, number):
    os.killpg(started.process.pid, number)


def to_the_launcher(started, number):
    os.kill(started.process.pid, number)


def to_a_rank(started, number):
    spawned = [pid for pid in started.alive() if b"spawn_main" in Path(f"/proc/{pid}/cmdline").read_bytes()]
    os.kill(min(started.alive("LOCAL_RANK=1") or spawned), number)  # the others are its loader workers


@pytest.mark.parametrize("script, sent_to, number, ignore_sigint, seconds", [
    ("ddp_spawn.py", to_the_launcher, signal.SIGTERM, True, 10),
    pytest.param("ddp_spawn.py", to_all, signal.SIGINT, False, 10, marks=slow),
    pytest.param("ddp_spawn.py", to_the_launcher, signal.SIGINT, False, 10, marks=slow),
    pytest.param("ddp_spawn.py", to_the_launcher, signal.SIGTERM, False, 10, marks=slow),
    pytest.param("ddp_spawn.py", to_the_launcher, signal.SIGKILL, False, 10, marks=slow),
    pytest.param("ddp_spawn.py", to_a_rank, signal.SIGKILL, False, 30, marks=slow),
    pytest.param("ddp_torchrun.py", to_the_launcher, signal.SIGINT, False, 10, marks=slow),
    pytest.param("ddp_torchrun.py", to_the_launcher, signal.SIGTERM, False, 10, marks=slow),
    pytest.param("ddp_torchrun.py", to_all, signal.SIGINT, False, 10, marks=slow),
    pytest.param("ddp_torchrun.py", to_a_rank, signal.SIGKILL, False, 30, marks=slow)])
def test_a_signal_ends_every_process(images, tmp_path, script, sent_to, number, ignore_sigint, seconds):
    with Started([*LAUNCHERS[script], *long_run(images, tmp_path)], tmp_path, ignore_sigint=ignore_sigint) as started:
        started.wait_until_printed("epoch 1, step 2,")
        assert len(started.alive()) >= 5  # the launcher, two ranks, a loader worker of each
        sent_to(started, number)
        assert started.ends_within(seconds), started.alive()
        assert started.process.returncode != 0
        if script == "ddp_spawn.py":
            assert started.err().count("\n") <= 3


@slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_a_signal_while_loader_workers_start_leaves_none_behind(images, tmp_path, number):
    for attempt in range(3):
        with Started([*SPAWN, *long_run(images, tmp_path, "--workers", 2)], tmp_path) as started:
            assert started.wait_for(lambda: len(started.alive()) >= 5, 60)  # the first loader worker is there
            to_the_launcher(started, number)
            assert started.ends_within(15), started.alive()


@pytest.fixture
def one_broken_image(images, tmp_path):
    folder = tmp_path / "images"
    shutil.copytree(images, folder)
    broken = sorted(folder.glob("train/*/*.png"))[7]
    broken.write_bytes(broken.read_bytes()[:100])
    return folder, broken


@pytest.mark.parametrize("script", ["ddp_spawn.py", pytest.param("ddp_torchrun.py", marks=slow)])
@pytest.mark.parametrize("workers", [0, pytest.param(1, marks=slow)])
def test_a_rank_that_raises_ends_all_and_its_error_is_the_one_to_read(one_broken_image, tmp_path, script, workers):
    folder, broken = one_broken_image
    with Started([*LAUNCHERS[script], *long_run(folder, tmp_path, "--workers", workers)], tmp_path) as started:
        started.wait_until_printed("global_batch")
        assert started.ends_within(60)
        assert started.process.returncode != 0
        error = started.err()
    assert error.count(f"{broken}: cannot read this image") == 1
    assert "Connection closed" not in error.partition(str(broken))[0]  # no echo of it comes first


@slow
@pytest.mark.parametrize("script", LAUNCHERS)
def test_a_rank_that_stops_answering_ends_the_job_after_the_timeout(images, tmp_path, script):
    with Started([*LAUNCHERS[script], *long_run(images, tmp_path, "--timeout", 20)], tmp_path) as started:
        started.wait_until_printed("epoch 1, step 2,")
        to_a_rank(started, signal.SIGSTOP)
        assert started.ends_within(80)
        assert started.process.returncode != 0


NOT_FINITE = """
import sys
import ddp_torchrun, torch
calls, cross_entropy = [], ddp_torchrun.cross_entropy
def not_finite_in_step_6_of_rank_1(*arguments, **named):
    calls.append(1)
    loss = cross_entropy(*arguments, **named)
    return loss * float("nan") if len(calls) == 6 and torch.distributed.get_rank() == 1 else loss
ddp_torchrun.cross_entropy = not_finite_in_step_6_of_rank_1
ddp_torchrun.main(sys.argv[1:])
"""


def test_a_loss_that_is_not_finite_on_one_rank_stops_all_at_that_step(tiny, tmp_path):
    (tmp_path / "script.py").write_text(NOT_FINITE)
    options = in_folder(tmp_path, map(str, [*tiny, *EXACT]))
    done = execute([*STANDALONE, tmp_path / "script.py", *options], tmp_path, env={**os.environ, "PYTHONPATH": str(ROOT)})
    run = Run(tmp_path, done.returncode, done.stdout, done.stderr)
    assert run.code != 0
    assert run.records("step")[-1]["step"] == 6
    assert run.err.count("error: ") == run.err.count("error: loss is nan") == 1
    assert run.checkpoint["epoch"] == 1
    assert all(weight.isfinite().all() for weight in run.checkpoint["net"].values())


@slow
@pytest.mark.parametrize("attempt", range(5))
def test_restarts_by_torchrun_end_bit_equal_to_a_run_that_was_not_disturbed(run, tiny, tmp_path, attempt):
    [line] = re.findall(r"^TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 torchrun --standalone .*--resume.*$", (ROOT / "README.md").read_text(), re.MULTILINE)
    variable, _, *options = line.replace("ddp_torchrun.py", str(ROOT / "ddp_torchrun.py")).split()
    more = in_folder(tmp_path, map(str, [*tiny, "--epochs", 4]))
    environment = {**os.environ, **dict([variable.split("=")])}
    with Started([*TORCHRUN, *options, *more], tmp_path, environment) as started:
        for epoch in (2, 3):
            started.wait_until_printed(f"epoch {epoch}, step {4 * epoch - 3}")
            to_a_rank(started, signal.SIGKILL)
        assert started.process.wait(120) == 0, started.err()
    undisturbed = run("ddp_torchrun.py", "--epochs", 4)
    assert same_bits(Run(tmp_path, 0, "", ""), undisturbed)


def free_port():
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        return probe.getsockname()[1]


def node(number, port, folder, *options, restarts=0, rendezvous="c10d"):
    """One of two nodes of one process each, both on this machine."""
    place = {"c10d": ["--rdzv-backend=c10d", f"--rdzv-endpoint=localhost:{port}", "--rdzv-id=test"],
             "static": [f"--node-rank={number}", "--master-addr=localhost", f"--master-port={port}"]}[rendezvous]
    folder.mkdir(exist_ok=True)
    command = [*TORCHRUN, "--nnodes=2", "--nproc-per-node=1", f"--max-restarts={restarts}", *place, ROOT / "ddp_torchrun.py"]
    # As many threads as each of two processes on one node has: with others, sums over images have other last bits.
    threads = str(max(1, len(os.sched_getaffinity(0)) // 2))
    environment = {**os.environ, "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1", "OMP_NUM_THREADS": threads}
    return Started([*command, *map(str, options)], folder, environment)


@slow
def test_two_nodes_train_what_one_node_with_two_processes_trains(run, tiny, tmp_path):
    one_node, port = run("ddp_torchrun.py"), free_port()
    with (node(0, port, tmp_path / "a", *tiny, "--log-every", 1) as first,
          node(1, port, tmp_path / "b", *tiny, "--log-every", 1) as second):
        assert [started.process.wait(120) for started in (first, second)] == [0, 0], first.err() + second.err()
        assert sorted(len(started.out().splitlines()) for started in (first, second)) == [0, 1 + 2 * (4 + 1)]
    [checkpoint] = tmp_path.glob("*/checkpoint.pt")
    assert same_bits(Run(checkpoint.parent, 0, "", ""), one_node)


@slow
def test_two_nodes_resume_from_a_file_that_rank_0_alone_has(run, tiny, tmp_path):
    options, port = [*tiny, "--epochs", 4, "--log-every", 1, "--resume"], free_port()
    (tmp_path / "a").mkdir()
    whole = run("ddp_torchrun.py", "--epochs", 4, "--accum", 2, spy=True)
    shutil.copy(whole.folder / "epoch2.pt", tmp_path / "a/checkpoint.pt")
    with (node(0, port, tmp_path / "a", *options, "--accum", 2, rendezvous="static") as first,
          node(1, port, tmp_path / "b", *options, "--accum", 2, rendezvous="static") as second):
        assert [started.process.wait(120) for started in (first, second)] == [0, 0], first.err() + second.err()
        assert "2 of 4 epochs are trained" in first.out() and second.out() == ""
    assert same_bits(Run(tmp_path / "a", 0, "", ""), whole)


@slow
def test_two_nodes_restart_together(run, tiny, tmp_path):
    options = in_folder(tmp_path, map(str, [*tiny, "--epochs", 4, "--resume"]))
    port = free_port()
    with (node(0, port, tmp_path / "a", *options, restarts=2) as first, node(1, port, tmp_path / "b", *options, restarts=2) as second):
        def printed(words):
            return lambda: words in first.out() + second.out()

        assert first.wait_for(printed("epoch 2, step 5"), 120), first.err()
        os.kill(min(second.alive("LOCAL_RANK=0")), signal.SIGKILL)
        assert [started.process.wait(150) for started in (first, second)] == [0, 0], first.err() + second.err()
    assert same_bits(Run(tmp_path, 0, "", ""), run("ddp_torchrun.py", "--epochs", 4))


@slow
def test_four_jobs_at_once_finish_though_the_usual_ports_are_taken(tiny, tmp_path):
    with socket.socket() as first, socket.socket() as second:
        for taken, port in ((first, 12355), (second, 29500)):
            taken.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            taken.bind(("", port))
            taken.listen()
        jobs = []
        for number, command in enumerate([*LAUNCHERS.values()] * 2):
            (folder := tmp_path / str(number)).mkdir()
            jobs.append(Started([*command, *in_folder(folder, map(str, [*tiny, "--nproc-per-node", 2]))], folder))
        try:
            assert [job.process.wait(240) for job in jobs] == [0] * 4, [job.err() for job in jobs]
        finally:
            for job in jobs:
                job.__exit__()


def test_it_runs_from_anywhere_and_from_python_code(tiny, tmp_path):
    scripts, folder = tmp_path / "my scripts", tmp_path / "another folder"
    folder.mkdir()
    scripts.mkdir()
    for name in ("common.py", "ddp_spawn.py"):
        shutil.copy(ROOT / name, scripts)
    scripts.chmod(0o555)
    code = "import sys; sys.path.insert(0, sys.argv.pop(1)); import ddp_spawn; ddp_spawn.main(sys.argv[1:])"
    options = ["--nproc-per-node=2", "--epochs=1", "--checkpoint=my model.pt", "--log-file=my log"]
    done = execute([sys.executable, "-c", code, scripts, *tiny, *options], folder)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    assert {"my model.pt", "my log"} <= {path.name for path in folder.iterdir()}


def test_processes_share_the_cores_among_them(monkeypatch):
    args, threads = common.parse_args("ddp_spawn.py", []), torch.get_num_threads()
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: range(6))
    try:
        common.check_args(args, world_size=4, local_world_size=2)
        common.set_up_torch(args)
        assert torch.get_num_threads() == args.workers == 3
    finally:
        torch.set_num_threads(threads)


@slow
def test_a_host_name_that_cannot_be_resolved_does_no_harm(tiny, tmp_path):
    if os.geteuid() != 0 or shutil.which("unshare") is None:
        pytest.skip("needs unshare, as root")
    torchrun = [*STANDALONE, "--local-addr=localhost", ROOT / "ddp_torchrun.py"]  # else its ranks look for it under that name
    for command in (SPAWN, torchrun):
        words = [*map(str, [*command, *tiny, "--epochs", 1, "--nproc-per-node", 2, "--checkpoint", tmp_path / "checkpoint.pt"])]
        done = execute(["unshare", "--uts", "sh", "-c", 'hostname nowhere.invalid && exec "$@"', "sh", *words], tmp_path)
        assert done.returncode == 0, done.stderr


LEAVE_THE_GROUP = """
import sys, tempfile, torch, torch.distributed as dist
import common
def train(init_method):
    dist.init_process_group("gloo", init_method, world_size=1, rank=0)
    model = torch.nn.Linear(2, 2)
    train_model = torch.nn.parallel.DistributedDataParallel(model)
    train_model(torch.ones(1, 2)).sum().backward()
    for _ in range(3):
        common.over_ranks(1.0, device="cpu")
    dist.destroy_process_group()
with tempfile.TemporaryDirectory() as folder:
    for attempt in range(500):
        train(f"file://{folder}/rendezvous{attempt}")
print("left")
"""


@slow
def test_a_process_that_leaves_its_group_does_not_wait_for_a_tensor_of_its_own(tmp_path):
    """With torch 2.6, and without what over_ranks keeps, it hangs within 100 attempts."""
    done = execute([sys.executable, "-c", LEAVE_THE_GROUP], tmp_path, env={**os.environ, "PYTHONPATH": str(ROOT)}, timeout=200)
    assert (done.returncode, done.stdout) == (0, "left\n"), done.stderr


FORK_SERVER = """
import multiprocessing, sys
if __name__ == "__main__":
    multiprocessing.set_start_method("forkserver")
    import single_gpu
    single_gpu.main(sys.argv[1:])
"""


@slow
def test_loader_workers_of_a_fork_server_are_no_orphans(run, tiny, tmp_path):
    """Python 3.14 starts processes so: a worker's parent is then not the process that it works for."""
    options = in_folder(tmp_path, map(str, [*tiny, "--workers", 1]))
    done = execute([sys.executable, "-c", FORK_SERVER, *options], tmp_path, env={**os.environ, "PYTHONPATH": str(ROOT)})
    assert done.returncode == 0, done.stderr
    assert same_bits(Run(tmp_path, 0, done.stdout, done.stderr), run("single_gpu.py", "--workers", 1))
