"""Runs a script and notes what its processes do: spy.py FOLDER SCRIPT [options of the script]

Nothing that it watches is replaced: it notes the images read, the gradients sent and the weights after each step, the
all-reduces of each evaluation, who writes checkpoints, what random numbers each rank has and what memory of each GPU it
took. FOLDER/rank<N>.json holds the notes of a process, FOLDER/epoch<N>.pt the checkpoint as it was after each epoch.
"""
import hashlib
import importlib
import json
import os
import shutil
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook  # noqa: E402

import common  # noqa: E402

notes = {"train": [], "val": [], "gradients_sent": [], "weights": [], "evaluations": [], "saved": [], "random": []}
seen = {"gradients": 0, "all_reduces": 0}


def after(owner, name, note):
    """Call note(result, *arguments) after each call of owner.name."""
    original = getattr(owner, name)

    def watched(*arguments, **named):
        result = original(*arguments, **named)
        note(result, *arguments)
        return result

    setattr(owner, name, watched)


def note_image(item, dataset, index):
    pixels = hashlib.sha1(item[0].numpy().tobytes()).hexdigest()
    notes[Path(dataset.root).name].append([int(dataset.epoch), index, pixels])


def note_wrapper(ddp, model):
    def hook(state, bucket):
        seen["gradients"] += bucket.buffer().numel()
        return allreduce_hook(state, bucket)

    ddp.register_comm_hook(None, hook)
    seen["model"] = model
    notes["parameters"] = sum(parameter.numel() for parameter in model.parameters())


def note_step(result, *arguments):
    weights = hashlib.sha1(b"".join(parameter.detach().cpu().numpy().tobytes() for parameter in seen["model"].parameters()))
    notes["weights"].append(weights.hexdigest())
    notes["gradients_sent"].append(seen["gradients"])
    seen["gradients"] = 0


def note_all_reduce(result, *arguments):
    seen["all_reduces"] += 1


def note_epoch(result, log, epoch):
    notes["random"].append(torch.rand(1).item())


def note_evaluation(result, *arguments):
    before = seen.pop("before_evaluation")
    notes["evaluations"].append({**result, "all_reduces": seen["all_reduces"] - before})


def note_evaluation_start(result, model, mode=True):
    if not mode:  # model.eval(), which evaluate calls first
        seen["before_evaluation"] = seen["all_reduces"]


def note_save(result, args, epoch, *arguments):
    notes["saved"].append(epoch)
    shutil.copy(args.checkpoint, Path(args.checkpoint).with_name(f"epoch{epoch}.pt"))


folder, script = Path(sys.argv[1]), importlib.import_module(sys.argv[2].removesuffix(".py"))
after(common.Folder, "__getitem__", note_image)
after(common.Log, "start_epoch", note_epoch)
after(common.Log, "step", note_step)
after(common.Classifier, "train", note_evaluation_start)
after(common, "evaluate", note_evaluation)
after(common, "save_checkpoint", note_save)
after(dist, "all_reduce", note_all_reduce)
after(script, "DistributedDataParallel", note_wrapper)
script.main(sys.argv[3:])
notes["gpu_memory"] = [torch.cuda.max_memory_reserved(gpu) for gpu in range(torch.cuda.device_count())]
(folder / f"rank{os.environ['RANK']}.json").write_text(json.dumps(notes))
os._exit(0)  # a communication hook in Python can make gloo's threads abort the interpreter's own exit
