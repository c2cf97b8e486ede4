"""Folders of images: every usual kind loads as the eye sees it, what cannot be used is named, and the smallest sets work."""
import argparse

import common
import pytest
import single_gpu
import torch
from PIL import Image
from torchvision.transforms.functional import pil_to_tensor

COLOURS = [(255, 0, 0), (0, 0, 255)]  # left and right half


def picture(mode):
    """Red and blue halves, or white and black ones where there is no colour, in a mode of Pillow's."""
    image = Image.new("RGB", (16, 16), COLOURS[0])
    image.paste(COLOURS[1], (8, 0, 16, 16))
    if mode in ("1", "L"):
        image = Image.new("L", (16, 16), 255)
        image.paste(0, (8, 0, 16, 16))
    return image.convert(mode)


@pytest.mark.parametrize("mode, suffix", [("1", "png"), ("L", "jpg"), ("P", "png"), ("P", "gif"), ("RGBA", "png"), ("CMYK", "jpg"),
                                          ("RGB", "webp"), ("RGB", "bmp")])
def test_a_picture_loads_as_the_eye_sees_it(tmp_path, mode, suffix):
    picture(mode).save(tmp_path / f"picture.{suffix}")
    pixels = pil_to_tensor(common.load_image(tmp_path / f"picture.{suffix}")).float()
    colours = [(255, 255, 255), (0, 0, 0)] if mode in ("1", "L") else COLOURS
    for half, colour in zip((pixels[:, :, :6], pixels[:, :, 10:]), colours):
        assert (half - torch.tensor(colour).view(3, 1, 1)).abs().max() < 30  # JPEG and WebP are not exact


def save_16_bits(path):
    Image.fromarray(torch.full((16, 16), 40_000).numpy().astype("uint16")).save(path)


@pytest.mark.parametrize("kind", ["16 bits", "truncated", "empty", "no image"])
def test_a_file_that_is_no_picture_to_train_on_is_named(tmp_path, kind):
    path = tmp_path / "picture.png"
    picture("RGB").resize((64, 64)).save(path)
    whole = path.read_bytes()
    if kind == "16 bits":
        save_16_bits(path)
    else:
        path.write_bytes({"truncated": whole[:len(whole) // 2], "empty": b"", "no image": b"a text"}[kind])
    with pytest.raises(RuntimeError, match=f"{path}.*{'16|8 bits' if kind == '16 bits' else ''}"):
        common.load_image(path)


def folder_of(tmp_path, *names):
    for name in names:
        (tmp_path / "data" / name).parent.mkdir(parents=True, exist_ok=True)
        picture("RGB").save(tmp_path / "data" / name)
    return str(tmp_path / "data")


@pytest.mark.parametrize("fault, named", [
    ("too few images", "--batch-size 3"), ("no class folders", "train"), ("empty class", "train/b"), ("unknown class", "val/c"),
    ("empty validation", "val")])
def test_what_only_the_data_tell_gets_one_line(tmp_path, capsys, fault, named):
    data = tmp_path / "data"
    folder_of(tmp_path, "train/a/1.png", "train/a/2.png", "val/a/1.png")
    if fault == "no class folders":
        (data / "train").rename(data / "old")
        (data / "train/.hidden").mkdir(parents=True)
    if fault == "empty class":
        (data / "train/b").mkdir()
    if fault == "unknown class":
        folder_of(tmp_path, "val/c/1.png")
    if fault == "empty validation":
        (data / "val/a/1.png").unlink()
    with pytest.raises(SystemExit, match="2"):
        single_gpu.main(["--data", str(data), "--batch-size", "3", "--image-size", "16"])
    err = capsys.readouterr().err
    assert named in err and err.count("\n") == 1


def test_a_class_that_val_lacks_keeps_trains_numbers_and_hidden_folders_are_none(tmp_path):
    data = folder_of(tmp_path, "train/a/1.png", "train/b/1.png", "train/c/1.png", "train/.cache/1.png", "val/c/1.png", "val/.x/1.png")
    args = argparse.Namespace(data=data, image_size=16, seed=0, batch_size=1)
    train_set, val_set = common.build_datasets(args, torch.device("cpu"))
    assert train_set.classes == val_set.classes == ["a", "b", "c"]
    assert len(train_set) == 3 and len(val_set) == 1
    assert val_set[0][1] == 2


def test_one_image_is_enough(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    data = folder_of(tmp_path, "train/a/1.png", "val/a/1.png")
    single_gpu.main(["--data", data, "--image-size", "16", "--batch-size", "1", "--epochs", "1", "--workers", "0"])
    assert torch.load("checkpoint.pt", weights_only=True)["epoch"] == 1
