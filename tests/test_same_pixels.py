"""Every step sees the same images with the same pixels, however many processes and loader workers there are."""
import argparse

import common
import pytest
import torch
from conftest import EXACT
from torch.utils.data import DataLoader
from torchvision.transforms.functional import crop, hflip, pad, resize

BATCH, TRAIN = 12, 59  # as in conftest's data set


@pytest.fixture(scope="module")
def worlds(run):
    """The notes of each rank for 1, 2 and 3 processes, from the real scripts."""
    return {1: run("ddp_torchrun.py", processes=1, spy=True).notes,
            2: run("ddp_torchrun.py", "--epochs", 4, "--accum", 2, spy=True).notes,
            3: run("ddp_torchrun.py", *EXACT, processes=3, spy=True).notes}


def steps(notes, epoch):
    """For each global step, the images that all ranks together read in it: a dict from index to pixels."""
    share = BATCH // len(notes)
    shares = [[(index, pixels) for at, index, pixels in rank["train"] if at == epoch] for rank in notes]
    return [{index: pixels for rank in shares for index, pixels in rank[k:k + share]} for k in range(0, len(shares[0]), share)]


@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.parametrize("epoch", [1, 2])
def test_each_step_reads_the_same_images_with_the_same_pixels_at_any_world_size(worlds, world, epoch):
    assert steps(worlds[world], epoch) == steps(worlds[1], epoch)


@pytest.mark.parametrize("world", [1, 2, 3])
def test_an_epoch_reads_each_image_once_but_for_the_tail(worlds, world):
    for epoch in (1, 2):
        read = [index for step in steps(worlds[world], epoch) for index in step]
        assert len(read) == len(set(read)) == TRAIN // BATCH * BATCH
        assert set(read) < set(range(TRAIN))


def test_the_single_process_scripts_read_the_order_that_distributedsampler_reads(run, worlds, tiny, tmp_path, monkeypatch):
    for script in ("single_gpu.py", "dataparallel.py"):
        module, read = __import__(script[:-3]), []
        get = common.Folder.__getitem__
        with monkeypatch.context() as patch:
            patch.setattr(common.Folder, "__getitem__", lambda self, index: read.append((int(self.epoch), index)) or get(self, index))
            module.main([*map(str, tiny), "--checkpoint", str(tmp_path / "c.pt")])
        for epoch in (1, 2):
            order = [index for at, index in read if at == epoch]
            assert [set(order[k:k + BATCH]) for k in range(0, len(order), BATCH)] == [set(s) for s in steps(worlds[1], epoch)]


def test_order_and_pixels_change_from_epoch_to_epoch(worlds):
    first, second = steps(worlds[1], 1), steps(worlds[1], 2)
    assert [set(step) for step in first] != [set(step) for step in second]
    first, second = ({index: pixels for step in part for index, pixels in step.items()} for part in (first, second))
    changed = [first[index] != second[index] for index in first.keys() & second.keys()]
    assert sum(changed) > 0.9 * len(changed)


def folder(images, seed=0):
    return common.Folder(argparse.Namespace(data=str(images), image_size=16, seed=seed), "train")


def in_memory(images, seed=0):
    args = argparse.Namespace(data="synthetic", image_size=16, seed=seed)
    return common.ImagesInMemory(*common.synthetic_images(args, True), args, torch.device("cpu"), train=True)


@pytest.mark.parametrize("workers, persistent", [(2, False), (2, True), (1, True)])
def test_pixels_do_not_depend_on_loader_workers(images, workers, persistent):
    here, elsewhere = folder(images), folder(images)
    loader = DataLoader(elsewhere, 5, num_workers=workers, persistent_workers=persistent)
    for epoch in (0, 1):
        here.set_epoch(epoch)
        elsewhere.set_epoch(epoch)
        loaded = torch.cat([pixels for pixels, _ in loader])
        assert torch.equal(loaded, torch.stack([here[index][0] for index in range(len(here))]))


@pytest.mark.parametrize("build", [folder, in_memory])
def test_pixels_depend_on_seed_epoch_and_index_alone(images, build):
    def pixels(dataset, epoch, indices):
        dataset.set_epoch(epoch)
        return torch.stack([dataset[index][0] for index in indices])

    reference = pixels(build(images), 1, range(20))
    torch.manual_seed(123)  # what else was drawn before does not matter
    assert torch.equal(pixels(build(images), 1, reversed(range(20))).flip(0), reference)
    assert not torch.equal(pixels(build(images), 2, range(20)), reference)
    assert not torch.equal(pixels(build(images, seed=1), 1, range(20)), reference)
    state = torch.get_rng_state()
    build(images)[0]
    assert torch.equal(torch.get_rng_state(), state)  # and the caller's random numbers stay as they were


def test_a_batch_from_memory_is_padded_cropped_and_flipped(images):
    """The gather against torchvision's own pad, crop and flip: each image is one of the 5 x 5 x 2 possible ones."""
    dataset = in_memory(images)
    originals = common.synthetic_images(argparse.Namespace(image_size=16), True)[0].permute(0, 3, 1, 2)
    dataset.set_epoch(3)
    batch, labels = dataset.__getitems__(list(range(30)))
    found = set()
    for index in range(30):
        padded = pad(originals[index], 2)
        ways = {(top, left, flip): (hflip if flip else lambda image: image)(crop(padded, top, left, 16, 16))
                for top in range(5) for left in range(5) for flip in (False, True)}
        match = [way for way, image in ways.items() if torch.equal(image, batch[index])]
        assert match, index
        found.add(match[0])
    assert len(found) > 10
    assert labels.tolist() == [index % 10 for index in range(30)]
    assert batch.is_contiguous(memory_format=torch.channels_last)


@pytest.mark.parametrize("height, width", [(16, 24), (24, 16), (24, 24)])
def test_images_in_memory_of_another_shape_are_resized(height, width):
    images = torch.randint(256, (3, height, width, 3), dtype=torch.uint8)
    dataset = common.ImagesInMemory(images, torch.arange(3), "abc", argparse.Namespace(image_size=16, seed=0),
                                    torch.device("cpu"), train=False)
    assert torch.equal(dataset[[0, 1, 2]][0], resize(images.permute(0, 3, 1, 2), [16, 16]))


def test_validation_images_are_not_augmented(worlds, images):
    for world in worlds.values():
        seen = {(index, pixels) for rank in world for _, index, pixels in rank["val"]}
        assert len(seen) == 11  # in all epochs the same pixels
