"""nn.DataParallel: one process trains on all the GPUs of this machine, or on the CPU if there is none.

    python dataparallel.py
"""
import torch
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, RandomSampler

import common


def main(argv=None):
    args = common.parse_args(__file__, argv)

    # -- device --------------------------------------------------------------------------------------------------------
    # CHANGE 1: the one process drives every GPU; checks and log need their number
    common.check_args(args, world_size=1, local_world_size=1, gpus_per_process=torch.cuda.device_count())
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    common.set_up_torch(args)

    # -- data ----------------------------------------------------------------------------------------------------------
    train_set, val_set = common.build_datasets(args, device)
    options = common.loader_options(args, train_set)
    shuffle = torch.Generator()
    sampler = RandomSampler(train_set, generator=shuffle)
    train_loader = DataLoader(train_set, args.batch_size, sampler=sampler, drop_last=True, **options)
    val_loader = DataLoader(val_set, args.batch_size // args.accum, sampler=range(len(val_set)), **options)

    # -- model ---------------------------------------------------------------------------------------------------------
    model = common.build_model(args, num_classes=len(train_set.classes))
    model = model.to(device, memory_format=torch.channels_last)
    optimizer = torch.optim.SGD(model.parameters(), args.lr, momentum=0.9, nesterov=True,
                                weight_decay=args.weight_decay, fused=True)
    scaler = torch.amp.GradScaler(device.type, enabled=args.precision == "fp16")
    epochs = common.load_checkpoint(args, model, optimizer, scaler)
    # CHANGE 4: each forward copies the weights to all GPUs, scatters the batch, and gathers the logits on the first one
    train_model = torch.nn.DataParallel(model)  # this name is trained; the bare model is evaluated and saved
    if args.compile:
        train_model = torch.compile(train_model, mode=args.compile)

    # -- train ---------------------------------------------------------------------------------------------------------
    log = common.Log(args, device, steps_per_epoch=len(train_loader))
    for epoch in epochs:
        shuffle.manual_seed(args.seed + epoch)
        train_set.set_epoch(epoch)
        train_model.train()
        log.start_epoch(epoch)
        for step, (images, labels) in enumerate(train_loader, start=(epoch - 1) * len(train_loader) + 1):
            images, labels = images.to(device, non_blocking=True), labels.to(device, non_blocking=True)
            lr = common.learning_rate(args, step, steps_per_epoch=len(train_loader))
            for group in optimizer.param_groups:
                group["lr"] = lr
            step_loss = 0
            for micro_images, micro_labels in zip(images.chunk(args.accum), labels.chunk(args.accum)):
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
        common.save_checkpoint(args, epoch, model, optimizer, scaler)
    if not epochs:  # --eval-only, or --resume of a run that is done
        log.write("evaluation", **common.evaluate(model, val_loader, device))


if __name__ == "__main__":
    main()
