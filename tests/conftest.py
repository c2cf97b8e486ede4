"""What the tests share: a tiny data set of images, and runs of the scripts, each made once however many tests read it.

Everything runs on the CPU, also where there are GPUs: only what launches with env=WITH_GPUS sees them.
"""
import functools
import importlib
import json
import os
import signal
import subprocess
import sys
import time
import uuid
from pathlib import Path

import pytest
import torch
from torchvision.transforms.functional import to_pil_image

ROOT = Path(__file__).resolve().parent.parent
SCRIPTS = ["single_gpu.py", "dataparallel.py", "ddp_spawn.py", "ddp_torchrun.py"]
TORCHRUN = [sys.executable, "-m", "torch.distributed.run"]
EXACT = ["--norm", "group", "--precision", "fp64"]  # with these the strategies agree to rounding
GPUS = torch.cuda.device_count()
WITH_GPUS = dict(os.environ)
os.environ["CUDA_VISIBLE_DEVICES"] = ""
sys.path.insert(0, str(ROOT))


def pytest_configure(config):
    config.addinivalue_line("markers", "slow: takes long; run with -m slow")
    config.addinivalue_line("markers", "gpu(count): needs that many GPUs; skipped where there are fewer")
    if not config.option.markexpr:
        config.option.markexpr = "not slow"


def pytest_runtest_setup(item):
    for mark in item.iter_markers("gpu"):
        if GPUS < mark.args[0]:
            pytest.skip(f"needs {mark.args[0]} GPUs, there are {GPUS}")


class Run:
    """A finished run of a script, in a folder of its own."""

    def __init__(self, folder, code, out, err):
        self.folder, self.code, self.out, self.err = folder, code, out, err

    def records(self, event):
        lines = (self.folder / "log.jsonl").read_text().splitlines()
        return [record for record in map(json.loads, lines) if record["event"] == event]

    @property
    def losses(self):
        return [record["loss"] for record in self.records("step")]

    @property
    def checkpoint(self):
        return torch.load(self.folder / "checkpoint.pt", map_location="cpu", weights_only=True)

    @property
    def notes(self):
        """What tests/spy.py noted, a dict for each rank."""
        return [json.loads(path.read_text()) for path in sorted(self.folder.glob("rank*.json"))]


def in_folder(folder, options):
    return [*options, "--checkpoint", f"{folder}/checkpoint.pt", "--log-file", f"{folder}/log.jsonl", "--log-every", "1"]


def launch(folder, script, *options, processes=2, env=None, spy=False):
    """Run a script as a user does, with its checkpoint and its log in folder. spy: let tests/spy.py watch it."""
    watched = [ROOT / "tests" / "spy.py", folder, script] if spy else [ROOT / script]
    starter = [*TORCHRUN, "--standalone", f"--nproc-per-node={processes}"] if script == "ddp_torchrun.py" else [sys.executable]
    done = execute([*starter, *watched, *in_folder(folder, options)], folder, env=env)
    return Run(folder, done.returncode, done.stdout, done.stderr)


class Started:
    """A command started in a process group of its own, SIGINT at its default. Its output goes to files in folder."""

    def __init__(self, command, folder, env=None, ignore_sigint=False):
        self.mark, self.folder, self.number = f"MARK_OF_THIS_TEST={uuid.uuid4()}", Path(folder), uuid.uuid4().hex[:8]
        handler = signal.SIG_IGN if ignore_sigint else signal.SIG_DFL
        with open(self.path("out"), "w") as out, open(self.path("err"), "w") as err:
            self.process = subprocess.Popen(
                list(map(str, command)), cwd=folder, env={**(env or os.environ), **dict([self.mark.split("=")])}, stdout=out,
                stderr=err, stdin=subprocess.DEVNULL, start_new_session=True, preexec_fn=lambda: signal.signal(signal.SIGINT, handler))

    def path(self, stream):
        return self.folder / f"{self.number}.{stream}"

    def out(self):
        return self.path("out").read_text()

    def err(self):
        return self.path("err").read_text()

    def alive(self, *words):
        """Process ids of all that runs of it, grandchildren in other process groups too; with these words in their environment."""
        found = []
        for folder in Path("/proc").glob("[0-9]*"):
            try:
                if all(word.encode() in (folder / "environ").read_bytes() for word in (self.mark, *words)):
                    if "\nState:\tZ" not in (folder / "status").read_text():
                        found.append(int(folder.name))
            except OSError:
                pass  # it ended meanwhile, or is another user's
        return found

    def wait_for(self, condition, seconds):
        """Whether condition() comes true in time."""
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            if condition():
                return True
            time.sleep(0.05)
        return False

    def wait_until_printed(self, words):
        assert self.wait_for(lambda: words in self.out() or self.process.poll() is not None, 120) and words in self.out(), self.err()

    def ends_within(self, seconds):
        """Whether the command and all that it started are gone in time."""
        return self.wait_for(lambda: self.process.poll() is not None and not self.alive(), seconds)

    def __enter__(self):
        return self

    def __exit__(self, *error):
        while pids := self.alive():
            for pid in pids:
                os.kill(pid, signal.SIGKILL)
            self.process.wait()
            time.sleep(0.05)


def execute(command, folder, env=None, timeout=300):
    """Run a command to its end; nothing of it is left when this returns."""
    with Started(command, folder, env) as started:
        code = started.process.wait(timeout)
        return subprocess.CompletedProcess(command, code, started.out(), started.err())


def run_here(folder, script, *options):
    """Run a script that needs no torchrun from inside this process, which has torch in memory already."""
    importlib.import_module(script.removesuffix(".py")).main(in_folder(folder, options))
    return Run(folder, 0, "", "")


@pytest.fixture(scope="session")
def images(tmp_path_factory):
    """A folder data set: 59 training and 11 validation images of 16 x 16 pixels in 3 classes."""
    folder = tmp_path_factory.mktemp("images")
    generator = torch.Generator().manual_seed(0)
    for split, count in (("train", 59), ("val", 11)):
        for index in range(count):
            path = folder / split / f"class{index % 3}" / f"{index:02}.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            pixels = 100 * torch.rand(3, 16, 16, generator=generator)
            pixels[index % 3] += 100
            to_pil_image(pixels.byte()).save(path)
    return folder


@pytest.fixture(scope="session")
def tiny(images):
    """Options for a run of seconds: 4 steps an epoch, of 12 of the 59 images each."""
    return ["--data", images, "--image-size", "16", "--batch-size", "12", "--epochs", "2", "--workers", "0"]


@pytest.fixture(scope="session")
def run(tmp_path_factory, tiny):
    """run(script, *options, processes=2, spy=False): a run on the tiny data, made once and then shared."""

    @functools.cache
    def make(script, options, processes, spy):
        folder = tmp_path_factory.mktemp(script.removesuffix(".py"))
        options = [str(option) for option in (*tiny, *options, "--nproc-per-node", processes)]
        if script != "ddp_torchrun.py":
            return run_here(folder, script, *options)
        done = launch(folder, script, *options, processes=processes, spy=spy)
        assert done.code == 0, done.err
        return done

    return lambda script, *options, processes=2, spy=False: make(script, options, processes, spy)


def largest_difference(first, second):
    """The largest absolute difference between two runs' weights (buffers included)."""
    first, second = first.checkpoint["net"], second.checkpoint["net"]
    assert first.keys() == second.keys()
    return max((first[name].double() - second[name].double()).abs().max().item() for name in first)


def same_bits(first, second):
    """Whether two runs ended in the same network and the same momentum, to the last bit."""
    def tensors(run):
        momentum = [state["momentum_buffer"] for state in run.checkpoint["optimizer"]["state"].values()]
        return [*run.checkpoint["net"].values(), *momentum]

    return all(torch.equal(a, b) for a, b in zip(tensors(first), tensors(second), strict=True))
