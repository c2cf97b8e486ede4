"""DistributedDataParallel: one process per GPU of this machine, started by this script with mp.spawn.

    python ddp_spawn.py
"""
import signal
import tempfile
from contextlib import nullcontext
from datetime import timedelta

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler

import common


def train(rank, world_size, args, init_method):  # CHANGE 1: mp.spawn calls this once in each process
    # -- device --------------------------------------------------------------------------------------------------------
    # CHANGE 1: a GPU for each process, and a process group for all
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C ends a rank at once, without a traceback from each
    if not mp.parent_process().is_alive():
        return  # killed before it could take this process along
    backend = "nccl" if torch.cuda.is_available() else "gloo"
    if backend == "nccl":
        torch.cuda.set_device(rank)
    dist.init_process_group(backend, init_method, timedelta(seconds=args.timeout), world_size, rank)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    common.set_up_torch(args)

    # -- data ----------------------------------------------------------------------------------------------------------
    train_set, val_set = common.build_datasets(args, device)
    options = common.loader_options(args, train_set)
    # CHANGE 3: each rank reads its own share of every global batch, and of the validation images
    share = args.batch_size // world_size
    sampler = DistributedSampler(train_set, world_size, rank, seed=args.seed, drop_last=True)
    train_loader = DataLoader(train_set, share, sampler=sampler, drop_last=True, **options)
    val_loader = DataLoader(val_set, share // args.accum, sampler=range(rank, len(val_set), world_size), **options)

    # -- model ---------------------------------------------------------------------------------------------------------
    model = common.build_model(args, num_classes=len(train_set.classes))
    torch.manual_seed(args.seed + rank)  # CHANGE 2: the same first weights, but dropout of its own on each rank
    model = model.to(device, memory_format=torch.channels_last)
    optimizer = torch.optim.SGD(model.parameters(), args.lr, momentum=0.9, nesterov=True,
                                weight_decay=args.weight_decay, fused=True)
    scaler = torch.amp.GradScaler(device.type, enabled=args.precision == "fp16")
    epochs = common.load_checkpoint(args, model, optimizer, scaler)
    # CHANGE 4: a backward pass averages the gradients over all ranks, outside no_sync
    train_model = DistributedDataParallel(model)  # this name is trained; the bare model is evaluated and saved
    if args.compile:
        train_model = torch.compile(train_model, mode=args.compile)

    # -- train ---------------------------------------------------------------------------------------------------------
    log = common.Log(args, device, steps_per_epoch=len(train_loader))
    for epoch in epochs:
        sampler.set_epoch(epoch)  # CHANGE 5: the sampler seeds itself, with seed + epoch
        train_set.set_epoch(epoch)
        train_model.train()
        log.start_epoch(epoch)
        for step, (images, labels) in enumerate(train_loader, start=(epoch - 1) * len(train_loader) + 1):
            images, labels = images.to(device, non_blocking=True), labels.to(device, non_blocking=True)
            lr = common.learning_rate(args, step, steps_per_epoch=len(train_loader))
            for group in optimizer.param_groups:
                group["lr"] = lr
            step_loss = 0
            micro_batches = zip(images.chunk(args.accum), labels.chunk(args.accum))
            for micro_step, (micro_images, micro_labels) in enumerate(micro_batches, start=1):
                # CHANGE 6: gradients travel once a step, in the last backward pass
                with nullcontext() if micro_step == args.accum else train_model.no_sync():
                    logits = train_model(micro_images)
                    loss = cross_entropy(logits, micro_labels, label_smoothing=args.label_smoothing) / args.accum
                    scaler.scale(loss).backward()
                step_loss += loss.detach()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            log.step(step, step_loss, lr)

        # -- evaluate and save -----------------------------------------------------------------------------------------
        log.end_epoch(common.evaluate(model, val_loader, device))
        if rank == 0:  # CHANGE 7: all ranks hold the same weights, one writes them
            common.save_checkpoint(args, epoch, model, optimizer, scaler)
    if not epochs:  # --eval-only, or --resume of a run that is done
        log.write("evaluation", **common.evaluate(model, val_loader, device))
    dist.destroy_process_group()  # CHANGE 8: leave together


def main(argv=None):
    args = common.parse_args(__file__, argv)
    world_size = args.nproc_per_node
    common.check_args(args, world_size, world_size)
    # CHANGE 1: start the processes; they meet in a file, so no port has to be free
    with tempfile.TemporaryDirectory() as folder:
        ranks = mp.spawn(train, (world_size, args, f"file://{folder}/rendezvous"), world_size, join=False)
        try:  # and pass on how a rank failed, in its own words, without a traceback from here
            while not ranks.join(grace_period=5):
                pass
        except (KeyboardInterrupt, mp.ProcessExitedException, mp.ProcessRaisedException) as error:
            raise SystemExit(2 if getattr(error, "exit_code", 0) == 2 else str(error).strip() or 130)
        finally:
            for process in ranks.processes:
                process.terminate()


if __name__ == "__main__":
    main()
