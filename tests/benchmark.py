"""Measures the scripts as a user runs them, each in processes of its own, and prints a Markdown table.

    python tests/benchmark.py [--data-dir DIR] [--folder DIR] [--only NAME] [--json FILE]

On a CPU it takes about two minutes. With GPUs it trains on CIFAR-10, which --data-dir holds or takes the download of,
and on --folder, a folder of photographs with train/ and val/, if one is given. The ceiling of each row group is the
bare step: forward, backward and optimizer step on random images that lie on the device, with no data to wait for. The
plain loop is the same network in the loop that most tutorials show.
"""
import argparse
import json
import multiprocessing
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import torch  # noqa: E402
import torchvision  # noqa: E402
from torchvision import transforms  # noqa: E402

import common  # noqa: E402

COLUMNS = {"images/s": ".0f", "of the bare step": ".1%", "ms a step": ".1f", "peak memory, MB": ".0f", "start, s": ".1f",
           "evaluation, s": ".2f"}


def bare_step(options):
    """Images a second of the training step alone, on one device; the median of five rounds after a first one."""
    args = common.parse_args("single_gpu.py", options)
    common.check_args(args, world_size=1, local_world_size=1)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    common.set_up_torch(args)
    model = common.build_model(args, num_classes=10).to(device, memory_format=torch.channels_last)
    optimizer = torch.optim.SGD(model.parameters(), 0.01, momentum=0.9, nesterov=True, fused=True)
    train_model = torch.compile(model, mode=args.compile) if args.compile else model
    images = torch.randint(256, (args.batch_size, args.image_size, args.image_size, 3), dtype=torch.uint8, device=device)
    images, labels = images.permute(0, 3, 1, 2), torch.randint(10, (args.batch_size,), device=device)
    rates, steps = [], 50 if device.type == "cuda" else 8
    for _ in range(6):
        started = time.perf_counter()
        for _ in range(steps):
            loss = torch.nn.functional.cross_entropy(train_model(images), labels, label_smoothing=0.1)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        loss.item()  # wait for the device
        rates.append(steps * args.batch_size / (time.perf_counter() - started))
    return statistics.median(rates[1:])


def plain_loop(options):
    """Images a second of the usual loop on one GPU: float32, images made floats by the loader's workers, loss.item() in
    every step. The median of two epochs after a first one."""
    args = common.parse_args("single_gpu.py", options)
    common.check_args(args, world_size=1, local_world_size=1)
    crop = transforms.RandomCrop(32, padding=4) if args.data == "cifar10" else transforms.RandomResizedCrop(args.image_size)
    transform = transforms.Compose([crop, transforms.RandomHorizontalFlip(), transforms.ToTensor(),
                                    transforms.Normalize((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))])
    dataset = (torchvision.datasets.CIFAR10(args.data_dir, transform=transform) if args.data == "cifar10" else
               torchvision.datasets.ImageFolder(Path(args.data, "train"), transform))
    loader = torch.utils.data.DataLoader(dataset, args.batch_size, shuffle=True, num_workers=args.workers,
                                         pin_memory=True, drop_last=True)
    torch.backends.cudnn.benchmark = True
    net = common.build_model(args, len(dataset.classes)).net.cuda()
    optimizer = torch.optim.SGD(net.parameters(), 0.01, momentum=0.9)
    rates = []
    for _ in range(3):
        started, loss_sum = time.perf_counter(), 0
        for images, labels in loader:
            images, labels = images.cuda(non_blocking=True), labels.cuda(non_blocking=True)
            loss = torch.nn.functional.cross_entropy(net(images), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            loss_sum += loss.item()
        rates.append(len(loader) * args.batch_size / (time.perf_counter() - started))
    return statistics.median(rates[1:])


def run(script, devices, options):
    """Run a script on that many GPUs (processes, on a CPU) and read its log: the median of all epochs but the first."""
    command = [sys.executable]
    if script == "ddp_torchrun.py":
        command += ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={devices}"]
    visible = os.environ.get("CUDA_VISIBLE_DEVICES") or ",".join(map(str, range(torch.cuda.device_count())))
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": ",".join(visible.split(",")[:devices])}
    with tempfile.TemporaryDirectory() as folder:
        command += [str(ROOT / script), *options, f"--nproc-per-node={devices}", f"--checkpoint={folder}/checkpoint.pt",
                    f"--log-file={folder}/log"]
        started, first_epoch_ended = time.perf_counter(), None
        process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment)
        for line in process.stdout:
            if "train_loss" in line and not first_epoch_ended:
                first_epoch_ended = time.perf_counter()
        if process.wait():
            raise SystemExit(f"{script} ended with code {process.returncode}")
        records = [json.loads(line) for line in Path(folder, "log").read_text().splitlines()]
    epochs = [record for record in records if record["event"] == "epoch"][1:]
    rate, training, evaluation, memory = (statistics.median(epoch[name] or 0 for epoch in epochs)
                                          for name in ("images_per_s", "seconds", "eval_seconds", "peak_memory_mb"))
    return {"images/s": rate, "ms a step": 1000 * records[0]["global_batch"] / rate, "peak memory, MB": memory,
            "start, s": first_epoch_ended - started - training - evaluation, "evaluation, s": evaluation}


def workloads(args):
    """Names and options of what is measured on this machine."""
    if not torch.cuda.is_available():
        return {"ResNet-18, 16 px, synthetic, batch 64": ["--epochs", "3"]}
    small = ["--data", "cifar10", "--data-dir", args.data_dir, "--epochs", "9", "--batch-size", "512"]
    large = ["--model", "resnet50", "--image-size", "224", "--batch-size", "256", "--log-every", "50", "--compile", "default"]
    photographs = {"ResNet-50, 224 px, JPEG folder, batch 256, compiled": [*large, "--epochs", "4", "--data", args.folder]}
    return {"ResNet-18, 32 px, cifar10, batch 512, eager": small,
            "ResNet-18, 32 px, cifar10, batch 512, reduce-overhead": [*small, "--compile", "reduce-overhead"],
            "ResNet-50, 224 px, synthetic, batch 256, compiled": [*large, "--epochs", "30"],
            **(photographs if args.folder else {})}


def strategies():
    """Scripts and numbers of devices: all GPUs that there are, or two processes on a CPU."""
    gpus = torch.cuda.device_count()
    yield "single_gpu.py", 1
    yield "dataparallel.py", 1
    for devices in [n for n in (1, 2, 4, 8) if n <= gpus] or [2]:
        if 1 < devices <= gpus:
            yield "dataparallel.py", devices
        yield "ddp_spawn.py", devices
        yield "ddp_torchrun.py", devices


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data-dir", default="./data", help="where CIFAR-10 lies or is downloaded to (./data)")
    parser.add_argument("--folder", help="a folder of photographs with train/CLASS/ and val/CLASS/")
    parser.add_argument("--only", default="", help="measure the workloads that have this in their name")
    parser.add_argument("--weak", action="store_true", help="let the global batch grow with the number of GPUs")
    parser.add_argument("--json", help="file for the same figures")
    args = parser.parse_args()
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else platform.machine()
    machine = (f"{torch.cuda.device_count() or os.cpu_count()} x {device}, {os.cpu_count()} CPU cores, "
               f"torch {torch.__version__}, torchvision {torchvision.__version__}, Python {platform.python_version()}")
    print(f"{machine}\n\n| what | script | devices | {' | '.join(COLUMNS)} |\n{'|---' * (len(COLUMNS) + 3)}|", flush=True)
    rows = []
    for name, options in workloads(args).items():
        if args.only not in name:
            continue
        loops = {"bare step": bare_step}
        if "--data" in options and "reduce-overhead" not in options:  # it has neither synthetic images nor compiles
            loops["plain loop"] = plain_loop
        for script, devices in [*((loop, 1) for loop in loops), *strategies()]:
            if script in loops:
                with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
                    figures = {"images/s": pool.submit(loops[script], options).result()}
                ceiling = figures["images/s"] if script == "bare step" else ceiling
            else:
                batch = common.parse_args(script, options).batch_size * (devices if args.weak else 1)
                figures = run(script, devices, [*options, f"--batch-size={batch}"])
            figures["of the bare step"] = figures["images/s"] / ceiling
            cells = [f"{figures[column]:{form}}" if figures.get(column) else "" for column, form in COLUMNS.items()]
            print(f"| {name} | {script} | {devices} | {' | '.join(cells)} |", flush=True)
            rows.append({"what": name, "script": script, "devices": devices, **figures})
    if args.json:
        Path(args.json).write_text(json.dumps({"machine": machine, "rows": rows}, indent=1))


if __name__ == "__main__":
    main()
