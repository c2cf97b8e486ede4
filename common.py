"""What no strategy changes: options, data, model, schedule, evaluation, checkpoints and log lines."""
import argparse
import json
import math
import os
import sys
import tempfile
import time
from contextlib import contextmanager, suppress
from datetime import timedelta
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
import torchvision
from PIL import Image
from torch import nn
from torch.nn.functional import cross_entropy, interpolate, pad
from torchvision import transforms
from torchvision.datasets import CIFAR10, ImageFolder

SMALL_IMAGE = 64  # pixels; above it folders get random resized crops, and the network has the ImageNet stem
DEFAULTS = {  # those that --data changes
    "synthetic": {"image_size": 16, "epochs": 4, "batch_size": 64, "weight_decay": 5e-4, "log_every": 10},
    "cifar10": {"image_size": 32, "epochs": 15, "batch_size": 256, "weight_decay": 1e-3, "log_every": 50},
    "folder": {"image_size": 224, "epochs": 90, "batch_size": 256, "weight_decay": 1e-4, "log_every": 50},
}
LEAST = {"image_size": 16, "epochs": 1, "batch_size": 1, "accum": 1, "lr": 0, "warmup_epochs": 0, "weight_decay": 0,
         "label_smoothing": 0, "seed": 0, "workers": 0, "log_every": 1, "timeout": 1, "nproc_per_node": 1}
REDUCED = []  # tensors kept a while: with torch 2.6 a gloo thread that has to free one can hang a process at its end


# -- ranks and errors --------------------------------------------------------------------------------------------------
def get_rank():
    """This process's rank; 0 if it runs alone. Before there is a process group, torchrun's environment tells it."""
    if dist.is_initialized():
        return dist.get_rank()
    return int(os.environ["RANK"]) if dist.is_torchelastic_launched() else 0


def say(line, file=None):
    """Print a line, on rank 0 alone."""
    if get_rank() == 0:
        print(line, file=file, flush=True)


def fail(message):
    """End this process: one line on stderr, from rank 0 alone, and exit code 2 (SystemExit)."""
    say(f"error: {message}", file=sys.stderr)
    if dist.is_initialized():
        os._exit(2)  # an orderly exit waits for the other ranks or lets the group's threads abort this process
    raise SystemExit(2)


def gather(value):
    """Every rank's value (anything that can be pickled), in order of rank."""
    values = [value] * (dist.get_world_size() if dist.is_initialized() else 1)
    if dist.is_initialized():
        dist.all_gather_object(values, value)
    return values


@contextmanager
def fail_together(what):
    """A user's error inside, on any rank, ends all ranks with that one line. All ranks wait for each other here."""
    message = None
    try:
        yield
    except (OSError, RuntimeError, ValueError) as error:
        message = " ".join(f"{what}: {error}".split())[:300]  # one line
    if messages := list(filter(None, gather(message))):
        fail(messages[0])


def over_ranks(*values, device, op=dist.ReduceOp.SUM):
    """Each value (a number or a 0-d tensor) reduced over all ranks in float64, as a list: one all-reduce."""
    reduced = torch.stack([torch.as_tensor(value, dtype=torch.float64, device=device) for value in values])
    if dist.is_initialized():
        dist.all_reduce(reduced, op)
        REDUCED[:] = [*REDUCED[-99:], reduced]
    return reduced.tolist()


# -- options -----------------------------------------------------------------------------------------------------------
def parse_args(script, argv=None):
    """Read the command line, the same for all four scripts, and fill in the defaults that depend on --data.

    script: the caller's __file__; argv: a list of strings, None for sys.argv[1:]. Returns a Namespace of plain values.
    Raises SystemExit for a bad value (code 2, one line on stderr).
    """
    script = Path(script).name
    parser = argparse.ArgumentParser(
        usage=f"{'torchrun --nproc_per_node=N' if script == 'ddp_torchrun.py' else 'python'} {script} [options]",
        description="Trains a ResNet. All four scripts take these options, to the same effect. Defaults in brackets.",
        formatter_class=partial(argparse.HelpFormatter, max_help_position=32), allow_abbrev=False)
    parser.error = lambda message: fail(message.removeprefix("argument ") + " (--help shows all options)")
    resnets = torchvision.models.list_models(torchvision.models, include=["resne*", "wide_resne*"])
    modes = ["default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs"]
    add = parser.add_argument_group("data and model").add_argument
    add("--data", default="synthetic", help="synthetic, cifar10, or a folder with train/CLASS/, val/CLASS/ (synthetic)")
    add("--data-dir", default="./data", help="where cifar10 lies or is downloaded to (./data)")
    add("--image-size", type=int, help="pixels, with a small-image stem up to 64: 16 synthetic, 32 cifar10, 224 folder")
    add("--model", default="resnet18", choices=resnets, metavar="NAME", help="any torchvision ResNet (resnet18)")
    add("--norm", default="batch", choices=["batch", "sync", "group"], help="batch: statistics per device and "
        "micro-batch; sync: SyncBatchNorm, on GPUs; group: no batch statistics, so all strategies agree (batch)")
    add = parser.add_argument_group("training").add_argument
    add("--epochs", type=int, help="4 synthetic, 15 cifar10, 90 folder")
    add("--batch-size", type=int, help="images per optimizer step over ALL devices (256, 64 synthetic)")
    add("--accum", type=int, default=1, help="micro-batches that a step is cut into, to fit memory (1)")
    add("--lr", type=float, default=0.1, help="peak learning rate for 256 images a step (0.1)")
    add("--lr-scaling", default="linear", choices=["linear", "sqrt", "none"], help="its growth with batch/256 (linear)")
    add("--warmup-epochs", type=float, default=1.0, help="of linear warm-up, then cosine to 0 (1)")
    add("--weight-decay", type=float, help="on all parameters: 5e-4 synthetic, 1e-3 cifar10, 1e-4 folder")
    add("--label-smoothing", type=float, default=0.1, help="of the training loss (0.1)")
    add("--seed", type=int, default=0, help="of weights, order and augmentation (0)")
    add = parser.add_argument_group("speed").add_argument
    add("--precision", default="auto", choices=["auto", "fp64", "fp32", "bf16", "fp16"],
        help="auto: bf16 where the GPU has it, else fp32; fp16: with a loss scaler; fp64: to prove equality (auto)")
    add("--compile", nargs="?", const="default", choices=modes, metavar="MODE", help="torch.compile: %(choices)s (off)")
    add("--workers", type=int, help="loader processes per training process (CPUs / processes)")
    add("--deterministic", action="store_true", help="the same bits in every run, at some cost on a GPU")
    add = parser.add_argument_group("checkpoints, log and processes").add_argument
    add("--checkpoint", default="checkpoint.pt", help="file, written after each epoch (checkpoint.pt)")
    add("--resume", action="store_true", help="continue from --checkpoint if it is there")
    add("--eval-only", action="store_true", help="evaluate --checkpoint and exit")
    add("--log-every", type=int, help="steps between lines (50, 10 synthetic)")
    add("--log-file", help="file for the same records as JSON lines; appended to with --resume or --eval-only")
    add("--timeout", type=int, default=600, help="seconds until a silent peer ends the job (600; heeded by ddp_*.py)")
    add("--nproc-per-node", "--nproc_per_node", type=int, default=torch.cuda.device_count() or 2, metavar="N",
        help="processes to start (GPUs, or 2 on a CPU; heeded by ddp_spawn.py, torchrun has its own)")
    args = parser.parse_args(argv, argparse.Namespace(script=script))

    for option, value in DEFAULTS.get(args.data, DEFAULTS["folder"]).items():
        if getattr(args, option) is None:
            setattr(args, option, value)
    for option, least in LEAST.items():
        value, most = getattr(args, option), 1 if option == "label_smoothing" else 2**31
        if value is not None and not least <= value <= most:
            fail(f"--{option.replace('_', '-')} {value} is out of range: give {least} to {most}")
    for folder in (Path(args.data, "train"), Path(args.data, "val")):
        if args.data not in ("synthetic", "cifar10") and get_rank() == 0 and not folder.is_dir():
            fail(f"--data {args.data}: there is no folder {folder}; give a folder that has it, synthetic or cifar10")
    for option, file in (("--checkpoint", args.checkpoint), ("--log-file", args.log_file)):
        need = os.R_OK if args.eval_only and file == args.checkpoint else os.W_OK
        if file is not None and get_rank() == 0 and (Path(file).is_dir() or not os.access(Path(file).parent, need)):
            fail(f"{option} {file}: give the name of a file in a folder that exists and can be written to")
    return args


def check_args(args, world_size, local_world_size, gpus_per_process=1):
    """Refuse what these processes cannot do, and fill in the defaults that depend on the machine. It starts nothing.

    world_size: processes in all; local_world_size: those on this machine; gpus_per_process: 1, but for nn.DataParallel.
    Raises SystemExit (code 2, one line on stderr).
    """
    gpus, shares = torch.cuda.device_count(), world_size * args.accum
    bf16 = gpus > 0 and torch.cuda.is_bf16_supported(including_emulation=False)
    if args.precision == "auto":
        args.precision = "bf16" if bf16 else "fp32"
    if dist.is_torchelastic_launched() and ("spawn" in args.script or os.environ["WORLD_SIZE"] != str(world_size)):
        fail(f"{args.script} is one process to start with: use python, not torchrun")
    if gpus and local_world_size > gpus:
        fail(f"{local_world_size} processes need {local_world_size} GPUs, and there are {gpus}: use "
             f"--nproc_per_node={gpus}, or put CUDA_VISIBLE_DEVICES= in front of the command to train on the CPU")
    if args.batch_size % shares:
        fail(f"--batch-size {args.batch_size} is not divisible by {world_size} processes x --accum {args.accum}: "
             f"use {math.ceil(args.batch_size / shares) * shares}")
    if args.norm == "sync" and (not gpus or gpus_per_process > 1):
        fail(f"--norm sync needs GPUs, and a process for each of them ({gpus} here): use --norm group")
    if args.precision == "fp16" and not gpus or args.precision == "bf16" and gpus and not bf16:
        fail(f"--precision {args.precision} is not for this device; use fp32")
    if args.compile in ("reduce-overhead", "max-autotune") and args.accum > 1:
        # A CUDA graph's gradients lie in its own memory: the next micro-batch would overwrite them, silently.
        fail(f"--compile {args.compile} uses CUDA graphs, which cannot do --accum {args.accum}; use --compile default")
    cpus = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    args.cpus = max(1, cpus // local_world_size)
    args.workers = args.cpus if args.workers is None else min(args.workers, args.cpus)
    args.world_size, args.local_world_size, args.gpus_per_process = world_size, local_world_size, gpus_per_process


def set_up_torch(args):
    """Seed this process, and choose its kernels and its number of threads."""
    torch.manual_seed(args.seed)
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # cuBLAS needs it to be deterministic
    torch.use_deterministic_algorithms(args.deterministic)
    torch.backends.cudnn.benchmark = not args.deterministic
    if args.local_world_size > 1:  # otherwise torchrun's processes have one thread each, mp.spawn's one per CPU
        torch.set_num_threads(args.cpus)


# -- data --------------------------------------------------------------------------------------------------------------
class ImagesInMemory(torch.utils.data.Dataset):
    """Images that lie on the device as uint8 and are cropped and flipped there, a whole batch at once.

    images: uint8 [N, H, W, 3]; labels: int64 [N]; classes: names. Augmentation, of a training set alone, depends on
    (seed, epoch, index) and nothing else.
    """

    def __init__(self, images, labels, classes, args, device, train):
        self.classes, self.seed, self.size = classes, args.seed, args.image_size
        if images.shape[1:3] != (self.size, self.size):
            images = transforms.functional.resize(images.permute(0, 3, 1, 2), [self.size] * 2).permute(0, 2, 3, 1)
        self.margin = self.size // 8 if train else 0
        self.images, self.labels = pad(images, (0, 0) + 4 * (self.margin,)).to(device), labels.to(device)
        self.rows = self.columns = torch.arange(self.size, device=device).expand(len(labels), -1)

    def set_epoch(self, epoch):
        """Pad, crop and flip anew: draw the rows and columns to read each image from, int64 [N, size]."""
        generator = torch.Generator().manual_seed(hash((self.seed, epoch)))  # Python hashes whole numbers always alike
        top, left = torch.randint(2 * self.margin + 1, (2, len(self), 1), generator=generator).to(self.images.device)
        flip = torch.rand(len(self), 1, generator=generator).to(self.images.device) < 0.5
        pixels = torch.arange(self.size, device=self.images.device)
        self.rows, self.columns = top + pixels, left + torch.where(flip, pixels.flip(0), pixels)

    def __len__(self):
        return len(self.labels)

    def __getitem__(self, index):
        """One image or a list of them, on the device: uint8 [..., 3, size, size], channels last; labels [...]."""
        index = torch.tensor(index).to(self.images.device, non_blocking=True)
        rows, columns = self.rows[index].unsqueeze(-1), self.columns[index].unsqueeze(-2)
        return self.images[index[..., None, None], rows, columns].movedim(-1, -3), self.labels[index]

    __getitems__ = __getitem__  # a DataLoader then asks for a whole batch at once


class Folder(ImageFolder):
    """A folder with a sub-folder of images per class: items are (uint8 [3, size, size], int).

    part: train or val; classes: those of the training set, of which val may lack some. Augmentation, of train alone,
    depends on (seed, epoch, index) and nothing else. Raises ValueError, which names the folder, for a bad class.
    """

    def __init__(self, args, part, classes=None):
        self.seed, self.known_classes = args.seed, classes
        self.epoch = torch.zeros((), dtype=torch.int64).share_memory_()  # loader workers that live on see it change
        super().__init__(Path(args.data, part), build_transform(args.image_size, part == "train"), loader=load_image,
                         allow_empty=True)
        for name in set(self.classes) - {self.classes[label] for label in set(self.targets)}:
            if Path(self.root, name).is_dir():
                raise ValueError(f"{Path(self.root, name)} holds no images; fill it or remove it")

    def find_classes(self, directory):
        found = sorted(path.name for path in Path(directory).iterdir() if path.is_dir() and path.name[0] != ".")
        if not found:
            raise ValueError(f"{directory} has no class folders")
        classes = self.known_classes or found
        if unknown := set(found) - set(classes):
            raise ValueError(f"{Path(directory, min(unknown))} is a class that train/ does not have")
        return classes, {name: label for label, name in enumerate(classes)}

    def set_epoch(self, epoch):
        """Give every image new random numbers, in running loader workers too."""
        self.epoch.fill_(epoch)

    def __getitem__(self, index):
        generator = torch.default_generator  # torch.manual_seed would seed all GPUs too, and take 400 us
        state = generator.get_state()
        generator.manual_seed(hash((self.seed, int(self.epoch), index)))
        try:
            return super().__getitem__(index)
        finally:
            generator.set_state(state)


def load_image(path):
    """The image file as a PIL image in RGB. Raises RuntimeError, which names the file, if that cannot be."""
    try:
        with Image.open(path) as image:
            if image.mode[0] in "IF":
                raise ValueError(f"more than 8 bits a channel (mode {image.mode}); convert it to 8 bits")
            return (image.convert("RGBA") if "transparency" in image.info else image).convert("RGB")
    except Exception as error:  # Pillow raises OSError, SyntaxError, ValueError, ... for a broken file
        raise RuntimeError(f"{path}: cannot read this image: {error}") from None


def build_transform(size, train):
    """From a PIL image to a uint8 tensor [3, size, size], augmented for training."""
    steps = [transforms.Resize(size if size <= SMALL_IMAGE else size * 256 // 224), transforms.CenterCrop(size)]
    if train and size <= SMALL_IMAGE:
        steps += [transforms.RandomCrop(size, padding=size // 8), transforms.RandomHorizontalFlip()]
    elif train:
        steps = [transforms.RandomResizedCrop(size), transforms.RandomHorizontalFlip()]
    return transforms.Compose([*steps, transforms.PILToTensor()])


def synthetic_images(args, train):
    """Ten coarse patterns under noise, in changing brightness and contrast: images, labels, classes."""
    count, seed = (1024, 1) if train else (512, 2)
    patterns = torch.randn(10, 3, 4, 4, generator=torch.Generator().manual_seed(0))
    patterns = interpolate(patterns, size=[args.image_size] * 2, mode="bilinear").permute(0, 2, 3, 1)
    generator, labels = torch.Generator().manual_seed(seed), torch.arange(count) % 10
    contrast, brightness = torch.rand(2, count, 1, 1, 1, generator=generator)
    images = 98 + 60 * brightness + (25 + 50 * contrast) * patterns[labels]
    images += 60 * torch.randn(images.shape, generator=generator)
    return images.clamp(0, 255).byte(), labels, [f"pattern {label}" for label in range(10)]


def cifar10_images(args, train):
    """CIFAR-10 as torchvision reads it: images, labels, classes."""
    part = CIFAR10(args.data_dir, train)
    return torch.from_numpy(part.data), torch.tensor(part.targets), part.classes


def download_cifar10(folder):
    """Download CIFAR-10 unless it is there: beside its place, then renamed, so that nobody ever reads half of it."""
    target = Path(folder, CIFAR10.base_folder)
    if not target.is_dir():
        Path(folder).mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder) as temporary:
            CIFAR10(temporary, download=True)
            with suppress(OSError):  # another machine that shares this disk was faster
                os.rename(Path(temporary, CIFAR10.base_folder), target)


def build_datasets(args, device):
    """The training and the validation set. To train on your own data, change this function.

    Both have `classes` (names) and give (image, label): uint8 [3, size, size] and int. The training set has
    `set_epoch(epoch)`. Raises SystemExit (code 2) on every rank alike.
    """
    if args.data == "cifar10":
        with fail_together(f"--data cifar10: no download; put {CIFAR10.base_folder} into {args.data_dir} yourself"):
            if int(os.environ.get("LOCAL_RANK", get_rank())) == 0:  # one process on each machine
                download_cifar10(args.data_dir)
    with fail_together(f"--data {args.data}"):
        if args.data in ("synthetic", "cifar10"):
            load = synthetic_images if args.data == "synthetic" else cifar10_images
            train_set, val_set = (ImagesInMemory(*load(args, train), args, device, train) for train in (True, False))
        else:
            train_set = Folder(args, "train")
            val_set = Folder(args, "val", train_set.classes)
        if len(train_set) < args.batch_size:
            raise ValueError(f"--batch-size {args.batch_size} is more than the {len(train_set)} training images")
    return train_set, val_set


def loader_options(args, dataset):
    """Arguments for the DataLoader of a data set."""
    if isinstance(dataset, ImagesInMemory):  # gives whole batches, which are on the device
        return {"collate_fn": lambda batch: batch}
    return dict(num_workers=args.workers, persistent_workers=args.workers > 0, pin_memory=torch.cuda.is_available(),
                worker_init_fn=None if torch.multiprocessing.get_start_method() == "forkserver" else exit_if_orphaned)


def exit_if_orphaned(worker):
    """End a worker whose process died while it started; torch cannot see it. (A fork server's have another parent.)"""
    if os.getppid() != torch.multiprocessing.parent_process().pid:
        os._exit(1)


# -- model -------------------------------------------------------------------------------------------------------------
class Classifier(nn.Module):
    """From uint8 images [B, 3, H, W] to logits [B, classes]: float32, or float64 if the network is. It converts, which
    moves a quarter of the bytes, and autocasts, as nn.DataParallel's threads do not inherit the dtype from outside."""

    def __init__(self, net, mean, std, autocast_dtype):
        super().__init__()
        self.net, self.autocast_dtype = net, autocast_dtype
        # Padded to 16 bytes: nn.DataParallel sends all buffers in one piece, and cuDNN wants those that follow aligned.
        self.register_buffer("mean", 255 * torch.tensor([*mean, 0]), persistent=False)
        self.register_buffer("std", 255 * torch.tensor([*std, 1]), persistent=False)

    def forward(self, images):
        images = images.to(self.mean.dtype, memory_format=torch.channels_last)
        with torch.autocast(images.device.type, self.autocast_dtype, enabled=self.autocast_dtype is not None):
            logits = self.net((images - self.mean[:3, None, None]) / self.std[:3, None, None])
        return logits.to(self.mean.dtype)


def build_model(args, num_classes):
    """The model, on the CPU. To train your own network (from float [B, 3, H, W] to logits), change this function."""
    norm_layer = {"batch": nn.BatchNorm2d, "sync": nn.SyncBatchNorm, "group": partial(nn.GroupNorm, 32)}[args.norm]
    net = torchvision.models.get_model(args.model, num_classes=num_classes, norm_layer=norm_layer,
                                       zero_init_residual=args.image_size > SMALL_IMAGE)  # Goyal et al. 2017, 5.1
    if args.image_size <= SMALL_IMAGE:  # the ImageNet stem would shrink a small image to a quarter at once
        net.conv1 = nn.Conv2d(3, 64, kernel_size=3, padding=1, bias=False)
        nn.init.kaiming_normal_(net.conv1.weight, mode="fan_out", nonlinearity="relu")
        net.maxpool = nn.Identity()
    mean, std = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
    if args.data == "cifar10":
        mean, std = (0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)
    model = Classifier(net, mean, std, {"bf16": torch.bfloat16, "fp16": torch.float16}.get(args.precision))
    return model.double() if args.precision == "fp64" else model


# -- schedule and evaluation -------------------------------------------------------------------------------------------
def peak_lr(args):
    """The learning rate after warm-up: --lr is for 256 images a step. linear: Goyal et al. 2017, "Accurate, large
    minibatch SGD"; sqrt: Krizhevsky 2014, "One weird trick for parallelizing convolutional neural networks"."""
    return args.lr * (args.batch_size / 256) ** {"linear": 1, "sqrt": 0.5, "none": 0}[args.lr_scaling]


def learning_rate(args, step, steps_per_epoch):
    """The learning rate of a step, counted from 1: linear warm-up (Goyal et al. 2017), then cosine to 0 (Loshchilov and
    Hutter 2017, "SGDR"). It depends on nothing but the step, so a resumed run has no scheduler to restore."""
    warmup, total = args.warmup_epochs * steps_per_epoch, args.epochs * steps_per_epoch
    if step <= warmup:
        return peak_lr(args) * step / warmup
    return peak_lr(args) * 0.5 * (1 + math.cos(math.pi * (step - 1 - warmup) / (total - warmup)))


@torch.no_grad()
def evaluate(model, loader, device):
    """Evaluate the bare model on the images in loader: under DDP this rank's share, of any size. Returns, on all ranks
    alike, val_loss (mean cross-entropy), val_top1 and val_top5 (0 to 1, over min(5, classes)) and their val_images."""
    if dist.is_initialized():
        for buffer in model.buffers():  # BatchNorm statistics differ between ranks; rank 0's are the ones saved
            dist.broadcast(buffer, src=0)
    model.eval()
    loss, top1, top5, count = torch.zeros(4, dtype=torch.float64, device=device)
    for images, labels in loader:
        images, labels = images.to(device, non_blocking=True), labels.to(device, non_blocking=True)
        logits = model(images).double()
        hits = logits.topk(min(5, logits.shape[1])).indices == labels[:, None]
        loss += cross_entropy(logits, labels, reduction="sum")
        top1 += hits[:, 0].sum()
        top5 += hits.sum()
        count += len(labels)
    loss, top1, top5, count = over_ranks(loss, top1, top5, count, device=device)
    return {"val_loss": loss / count, "val_top1": top1 / count, "val_top5": top5 / count, "val_images": int(count)}


# -- checkpoints -------------------------------------------------------------------------------------------------------
def save_checkpoint(args, epoch, model, optimizer, scaler):
    """Replace --checkpoint, wholly or not at all. Call it on one rank. Raises SystemExit (code 2)."""
    parts = {"net": model.net, "optimizer": optimizer, **({"scaler": scaler} if scaler.is_enabled() else {})}
    states = {name: part.state_dict() for name, part in parts.items()}
    try:
        with open(f"{args.checkpoint}.tmp", "wb") as file:
            torch.save({**states, "epoch": epoch, "args": vars(args)}, file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(f"{args.checkpoint}.tmp", args.checkpoint)
    except (OSError, RuntimeError) as error:
        fail(f"--checkpoint {args.checkpoint}: cannot write it after epoch {epoch}: {error}")


def load_checkpoint(args, model, optimizer, scaler):
    """Load --checkpoint if --resume or --eval-only say so: rank 0 reads the file, the others receive what is in it.

    Weights, momentum, scaler state and the epochs done come from the file, hyper-parameters from the command line.
    Returns the range of epochs left to train. Raises SystemExit (code 2), on all ranks, if the file cannot be used.
    """
    # Fused SGD leaves its momentum uninitialised if an fp16 overflow makes it skip the very first step.
    optimizer.state.update({weight: {"momentum_buffer": torch.zeros_like(weight)} for weight in model.parameters()})
    if not (args.resume or args.eval_only):
        return range(1, args.epochs + 1)
    received = [None]
    with fail_together(f"--checkpoint {args.checkpoint}"):
        if get_rank() == 0 and (args.eval_only or Path(args.checkpoint).exists()):
            try:
                received[0] = torch.load(args.checkpoint, map_location="cpu", weights_only=True)
                received[0]["net"], received[0]["optimizer"], received[0]["epoch"], received[0]["args"]["model"]
            except Exception as error:  # a damaged file makes torch.load raise nearly anything
                raise error if isinstance(error, OSError) else ValueError("damaged, or no checkpoint of these scripts")
    if dist.is_initialized():
        dist.broadcast_object_list(received, src=0)
    checkpoint = received[0]
    if checkpoint is None:
        say(f"there is no {args.checkpoint} to resume from, so training starts anew")
        return range(1, args.epochs + 1)
    held = " ".join(f"{name} {checkpoint['args'].get(name)}" for name in ("data", "image_size", "model", "norm"))
    with fail_together(f"--checkpoint {args.checkpoint} holds another network ({held})"):
        model.net.load_state_dict(checkpoint["net"])
    # Without its param_groups, which would bring the old learning rate and weight decay back.
    optimizer.load_state_dict({**checkpoint["optimizer"], "param_groups": optimizer.state_dict()["param_groups"]})
    if scaler.is_enabled() and "scaler" in checkpoint:
        scaler.load_state_dict(checkpoint["scaler"])
    first = checkpoint["epoch"] + 1
    say(f"{args.checkpoint}: {first - 1} of {args.epochs} epochs are trained")
    return range(first, first if args.eval_only else args.epochs + 1)


# -- log ---------------------------------------------------------------------------------------------------------------
class Log:
    """What a run tells: printed lines, and the same as JSON in --log-file. Every rank calls it, rank 0 alone writes."""

    def __init__(self, args, device, steps_per_epoch):
        self.args, self.device, self.steps_per_epoch = args, device, steps_per_epoch
        self.steps_done, self.run_started, self.file = 0, time.perf_counter(), None
        if args.log_file and get_rank() == 0:
            self.file = open(args.log_file, "a" if args.resume or args.eval_only else "w")
        gpus = range(args.gpus_per_process) if args.gpus_per_process > 1 else [device]
        devices = sum(gather([torch.cuda.get_device_name(gpu) if device.type == "cuda" else "cpu" for gpu in gpus]), [])
        self.write("start", script=args.script, devices=devices, world_size=args.world_size,
                   global_batch=args.batch_size, per_device_batch=math.ceil(args.batch_size / len(devices)),
                   lr=peak_lr(args), lr_for_256=args.lr, precision=args.precision,
                   epochs=args.epochs, steps=args.epochs * steps_per_epoch)

    def write(self, event, **facts):
        """Print the facts by name and append them to --log-file. A loss that is not finite ends all ranks (code 2)."""
        floats = {name: fact for name, fact in facts.items() if isinstance(fact, float)}
        shown = {**facts, **{name: f"{fact:.0f}" if fact >= 1000 else f"{fact:.4g}" for name, fact in floats.items()}}
        say(", ".join(f"{name} {fact}" for name, fact in shown.items() if fact is not None))
        if self.file:
            print(json.dumps({"event": event, **facts}), file=self.file, flush=True)
        for name, fact in floats.items():
            if not math.isfinite(fact):
                fail(f"{name} is {fact}: lower --lr or raise --warmup-epochs; {self.args.checkpoint} stays as it was")

    def start_epoch(self, epoch):
        self.epoch, self.epoch_loss, self.epoch_started = epoch, 0.0, time.perf_counter()
        self.loss, self.steps, self.line_ended = 0.0, 0, self.epoch_started

    def step(self, step, loss, lr):
        """Note a step, counted from 1 over all epochs. loss: its mean over this rank's images, a 0-d tensor."""
        self.loss += loss.double()  # added up on the device: nothing waits for the GPU until a line is due
        self.steps += 1
        self.steps_done += 1
        if step % self.args.log_every and step % self.steps_per_epoch:
            return
        loss_sum, now = over_ranks(self.loss, device=self.device)[0] / self.args.world_size, time.perf_counter()
        seconds_left = (self.args.epochs * self.steps_per_epoch - step) * (now - self.run_started) / self.steps_done
        self.write("step", epoch=self.epoch, step=step, loss=loss_sum / self.steps, lr=lr,
                   images_per_s=self.steps * self.args.batch_size / (now - self.line_ended),
                   eta=str(timedelta(seconds=round(seconds_left))))
        self.epoch_loss += loss_sum
        self.loss, self.steps, self.line_ended = 0.0, 0, now

    def end_epoch(self, result):
        """Note what the epoch's training came to, and what `evaluate` returned after it."""
        seconds, eval_seconds = self.line_ended - self.epoch_started, time.perf_counter() - self.line_ended
        peak = max((torch.cuda.max_memory_allocated(gpu) for gpu in range(torch.cuda.device_count())), default=0)
        peak = over_ranks(peak / 2**20, device=self.device, op=dist.ReduceOp.MAX)[0]
        self.write("epoch", epoch=self.epoch, train_loss=self.epoch_loss / self.steps_per_epoch, **result,
                   seconds=seconds, images_per_s=self.steps_per_epoch * self.args.batch_size / seconds,
                   peak_memory_mb=peak or None, eval_seconds=eval_seconds)
