"""Valid and broken images, shards compared with webdataset, class names, and limits of unreadable images."""

import csv
import gzip
import io
import json
import multiprocessing
import os
import tarfile
from pathlib import Path

import lightning as L
import numpy as np
import pytest
import timm
import torch
import webdataset as wds
from PIL import Image

from dctrain.errors import UserError
from dcvision import ImageDataModule
from dcvision.data.decode import BadImage, decode
from dcvision.data.fields import Fields
from dcvision.data.shards import ShardSource, index_shard
from tests.conftest import encode, numbered_samples, write_shard
from tests.dcvision.commands import run, small

from .fault_injection import mistake

PLAIN = {"image_size": 8, "min_crop_area": 1.0, "horizontal_flip": False, "crop_fraction": 1.0}


def picture() -> Image.Image:
    """Photo-like image of 40 x 30 pixels."""
    rows, columns = np.mgrid[0:30, 0:40]
    return Image.fromarray(np.stack([rows * 8, columns * 6, (rows + columns) * 3], -1).astype(np.uint8))


def saved(image: Image.Image, kind: str, **options) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, kind, **options)
    return buffer.getvalue()


def rotated() -> bytes:
    exif = Image.Exif()
    exif[274] = 6  # orientation: rotated by 90 degrees when displayed
    return saved(picture(), "JPEG", exif=exif)


def wide() -> bytes:
    """PNG with 16 bits per channel."""
    return saved(Image.fromarray((np.mgrid[0:30, 0:40][0] * 2000).astype(np.uint16)), "PNG")


GOOD = {
    "JPEG": lambda: saved(picture(), "JPEG"),
    "progressive": lambda: saved(picture(), "JPEG", progressive=True),
    "CMYK": lambda: saved(picture().convert("CMYK"), "JPEG"),
    "gray": lambda: saved(picture().convert("L"), "JPEG"),
    "palette": lambda: saved(picture().convert("P"), "PNG"),
    "transparent": lambda: saved(picture().convert("RGBA"), "PNG"),
    "16 bits": wide,
    "animated": lambda: saved(picture(), "GIF", save_all=True, append_images=[picture().rotate(90)]),
    "animated WebP": lambda: saved(picture(), "WEBP", save_all=True, append_images=[picture().rotate(90)]),
    "turned by EXIF": rotated,
    "BMP": lambda: saved(picture(), "BMP"),
    "TIFF": lambda: saved(picture(), "TIFF"),
    "PPM": lambda: saved(picture(), "PPM"),
}


@pytest.mark.parametrize("name", GOOD)
def test_decode_of_all_image_formats_matches_pillow(name):
    encoded = GOOD[name]()
    got = decode(encoded)
    assert got.dtype == torch.uint8 and got.shape == (3, 30, 40)  # EXIF is ignored, as in torchvision and timm
    expected = torch.from_numpy(np.array(Image.open(io.BytesIO(encoded)).convert("RGB"))).permute(2, 0, 1).int()
    if name == "16 bits":
        expected = (torch.from_numpy(np.mgrid[0:30, 0:40][0].copy()) * 2000 // 257).expand(3, -1, -1)
    assert (got.int() - expected).abs().max() <= (12 if name == "CMYK" else 3)


BAD = {
    "zero bytes": b"",
    "text": b"no picture at all",
    "a header alone": lambda: GOOD["JPEG"]()[:20],
    "half a PNG": lambda: GOOD["palette"]()[:60],
    "32-bit floats": lambda: saved(Image.fromarray(np.ones((4, 4), np.float32)), "TIFF"),
}


@pytest.mark.parametrize("name", BAD)
def test_invalid_image_raises_error(name):
    with pytest.raises(BadImage):
        decode(BAD[name] if isinstance(BAD[name], bytes) else BAD[name]())


def test_image_above_max_pixels_raises_error_before_decoding(monkeypatch):
    encoded = saved(Image.new("1", (20_000, 20_000)), "PNG")
    monkeypatch.setattr("dcvision.data.decode.decode_image", lambda *args: pytest.fail("the image was decoded"))
    with pytest.raises(BadImage, match="more than max_pixels=134,217,728 pixels"):
        decode(encoded)
    with pytest.raises(BadImage, match=r"40 x 30 is more than max_pixels=1,000 pixels"):
        decode(GOOD["JPEG"](), max_pixels=1000)


def test_image_above_max_pixels_is_skipped_and_reported(tmp_path, capsys):
    samples = numbered_samples(8)
    samples[3]["png"] = encode(np.zeros((40, 40, 3), np.uint8))
    write_shard(tmp_path / "a.tar", samples)
    spec = f"shards:{tmp_path}/a.tar"
    data = ImageDataModule(spec, spec, **PLAIN, batch_size=8, max_pixels=1000)
    data.setup("fit")
    (batch,) = data.val_dataloader()
    assert len(data.on_before_batch_transfer(batch, 0).labels) == 7
    assert "0003: 40 x 40 is more than max_pixels=1,000" in capsys.readouterr().out


def tar_of(path: Path, members: list[tuple[str, bytes]], mode: str = "w") -> Path:
    with tarfile.open(path, mode) as tar:
        for name, content in members:
            info = tarfile.TarInfo(name)
            info.size = len(content)
            tar.addfile(info, io.BytesIO(content))
    return path


PNG = encode(np.zeros((4, 4, 3), np.uint8))
READABLE = {
    "plain": ([("a.png", PNG), ("a.cls", b"1"), ("b.png", PNG), ("b.cls", b"2")], {}),
    "capitals": ([("a.PNG", PNG), ("a.CLS", b"1"), ("b.JPG", PNG), ("b.cls", b"2")], {}),
    "folders with dots": ([("v1.0/a.png", PNG), ("v1.0/a.cls", b"1"), ("v1.1/a.png", PNG), ("v1.1/a.cls", b"2")], {}),
    "of tar itself": ([("./a.png", PNG), ("./a.cls", b"1"), ("./b.png", PNG), ("./b.cls", b"2")], {}),
    "metadata": ([("__meta__/x.json", b"{}"), ("a.png", PNG), ("a.cls", b"1"), ("a.json", b"{}"), ("README", b"")], {}),
    "renamed": (
        [("a.input.jpg", PNG), ("a.target.cls", b"1"), ("b.input.jpg", PNG), ("b.target.cls", b"2")],
        {"image": "input.jpg", "label": "target.cls"},
    ),
    "one of two": ([("a.png", PNG), ("a.seg.png", PNG), ("a.jpg", PNG), ("a.cls", b"7")], {"image": "png"}),
}


@pytest.mark.parametrize("name", READABLE)
def test_local_shards_match_webdataset(tmp_path, name):
    members, fields = READABLE[name]
    path = tar_of(tmp_path / "a.tar", members)
    source = ShardSource([str(path)], Fields(**fields))
    image, label = Fields(**fields).image, Fields(**fields).label
    streamed = wds.WebDataset(str(path), shardshuffle=False).to_tuple("__key__", image, label)
    expected = [(key, encoded, int(number)) for key, encoded, number in streamed]
    got = [(source.name(i).removeprefix(f"{path}/"), *source.read(i)) for i in range(len(source))]
    assert got == expected and got


A = [("a.png", PNG), ("a.cls", b"1")]
B = [("b.png", PNG), ("b.cls", b"2")]
UNREADABLE = {
    "keys with dots": ([("a.1.png", PNG), ("a.1.cls", b"1"), ("a.2.png", PNG)], "sample .* has 0 of the fields jpg;"),
    "a name twice": ([*A, ("a.png", PNG)], "has a.png twice"),
    "a key twice": ([*A, *B, ("a.jpg", PNG), ("a.cls", b"1")], "has sample a twice"),
    "two images": ([*A, ("a.jpg", PNG)], "has 2 of the fields .*It has png, cls, jpg"),
    "no label": ([("a.png", PNG)], "has 0 of the fields cls"),
    "a label of words": ([("a.png", PNG), ("a.cls", b"cat")], "a.* has b'cat'; expected a class number as text"),
}


@pytest.mark.parametrize("name", UNREADABLE)
@pytest.mark.parametrize("way", ["local", "stream"])
def test_malformed_shard_raises_error(tmp_path, name, way):
    members, message = UNREADABLE[name]
    path = tar_of(tmp_path / "a.tar", members)
    if way == "local":
        with pytest.raises(UserError, match=message):
            index_shard(str(path))
        return
    spec = f"shards:pipe:cat {path}"
    data = ImageDataModule("digits", spec, **PLAIN, batch_size=1)
    data.setup("validate")
    data.trainer = L.Trainer(logger=False, accelerator="cpu")
    if name == "a key twice":
        assert sum(len(batch.labels) for batch in data.val_dataloader()) == 3  # a stream cannot detect duplicate keys
        return
    with pytest.raises(UserError, match="duplicate file name" if name == "a name twice" else message):
        list(data.val_dataloader())


def test_compressed_shard_raises_error(tmp_path):
    path = tar_of(tmp_path / "a.tar.gz", READABLE["plain"][0], "w:gz")
    with pytest.raises(UserError, match="a.tar.gz is compressed; decompress it first"):
        index_shard(str(path))


def test_relabeled_shard_of_equal_size_and_time_is_indexed_again(tmp_path):
    path = tar_of(tmp_path / "a.tar", READABLE["plain"][0])
    assert ShardSource([str(path)]).labels().tolist() == [1, 2]
    times = path.stat()
    tar_of(path, [("a.png", PNG), ("a.cls", b"5"), ("b.png", PNG), ("b.cls", b"6")])
    os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))
    assert path.stat().st_size == times.st_size and path.stat().st_mtime_ns == times.st_mtime_ns
    assert ShardSource([str(path)]).labels().tolist() == [5, 6]


@pytest.mark.parametrize("content", [b"", b"text", b"PK\x03\x04" + b"x" * 50])
def test_damaged_index_is_rebuilt(tmp_path, monkeypatch, content):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    path = tar_of(tmp_path / "a.tar", READABLE["plain"][0])
    ShardSource([str(path)])
    (index,) = (tmp_path / "cache/dcmha/shard-index").iterdir()
    index.write_bytes(content)
    assert ShardSource([str(path)]).labels().tolist() == [1, 2]
    assert np.load(index)["others"].tolist() == [[1], [2]]


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("way", ["removed", "replaced"])
def test_shard_removed_or_replaced_during_run_ends_run_with_error(shards, tmp_path, capsys, way, workers):
    """Images of a removed shard count toward the limit; a changed shard, with unknown samples, ends the run."""
    Vandal.path, Vandal.way = shards.replace("{0..4}", "3"), way
    spoiling = ["--trainer.callbacks+=tests.faults.test_images.Vandal", f"--data.num_workers={workers}"]
    error = mistake(capsys, run, "fit", *small(shards, tmp_path), *spoiling, "--data.max_bad_images=2")
    if way == "removed":
        assert "images could not be read" in error and "No such file or directory: " in error
    else:
        assert f"shard {Vandal.path} has changed since the run began" in error


def test_killed_loader_worker_ends_run_with_error(shards, tmp_path, capsys):
    Vandal.path, Vandal.way = "", "kill"
    spoiling = ["--trainer.callbacks+=tests.faults.test_images.Vandal", "--data.num_workers=1"]
    error = mistake(capsys, run, "fit", *small(shards, tmp_path), *spoiling)
    assert "DataLoader worker (pid" in error or "a loader worker has died" in error


class Vandal(L.Callback):
    """Remove or replace a shard, or kill the loader's processes, after the first step."""

    path, way = "", ""

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx) -> None:
        if trainer.global_step == 1 and self.way == "kill":
            for process in multiprocessing.active_children():
                process.kill()
        elif trainer.global_step == 1:
            Path(self.path).unlink()
            if self.way == "replaced":
                write_shard(Path(self.path), numbered_samples(10))


def folders(root: Path, names: list[str]) -> Path:
    for label, name in enumerate(names):
        (root / name).mkdir(parents=True)
        for i in range(4):
            (root / name / f"{i}.png").write_bytes(encode(np.full((8, 8, 3), 60 * label + i, np.uint8)))
    return root


def test_train_and_val_with_different_class_numbers_are_rejected(tmp_path, capsys):
    train, val = folders(tmp_path / "train", ["ant", "bee", "cat"]), folders(tmp_path / "val", ["bee", "cat"])
    arguments = [*small("unused", tmp_path / "root"), f"--data.train=folder:{train}", "--data.num_classes=3"]
    error = mistake(capsys, run, "fit", *arguments, f"--data.val=folder:{val}")
    assert (
        "data.train and data.val number their classes differently (3 and 2 names): class 0 is 'ant' and 'bee'" in error
    )
    assert not list((tmp_path / "root").rglob("*"))


def test_class_names_are_kept_in_checkpoints_predictions_and_exports(tmp_path, capsys):
    names = ["ant", "bee", "cat"]
    train = folders(tmp_path / "train", names)
    run("shards", f"--folder={train}", f"--out={tmp_path}/shards", "--prefix=val", "--num_shards=2")
    data = ["--data.num_classes=3", f"--data.val=shards:{tmp_path}/shards"]
    arguments = [*small("unused", tmp_path), f"--data.train=folder:{train}", *data, "--trainer.max_steps=3"]
    run("fit", *arguments)
    folder = tmp_path / "t/version_0"
    assert json.loads((folder / "classes.json").read_text()) == names
    config = ["--config", str(folder / "config.yaml"), f"--checkpoint={folder}"]
    run("predict", *config)
    with open(tmp_path / "t/version_0/predict/predictions.csv") as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 12 and all(row["class_name"] == names[int(row["class"])] for row in rows)
    run("export", f"--checkpoint={folder}", f"--out={tmp_path}/exported")
    assert timm.create_model(f"local-dir:{tmp_path}/exported", pretrained=True).pretrained_cfg["label_names"] == names
    other = folders(tmp_path / "other", ["ant", "bee", "dog"])
    error = mistake(capsys, run, "validate", *config, f"--data.val=folder:{other}")
    assert (
        "data.val and the checkpoint number their classes differently (3 and 3 names): class 2 is 'dog' and 'cat'"
        in error
    )


@pytest.mark.parametrize(
    ("limit", "bad", "is_allowed"),
    [(0.001, 10, True), (0.001, 11, False), (0.5, 20, True), (100, 21, False), (3, 3, True), (3, 4, False)],
)
def test_max_bad_images_limits_unreadable_images(tmp_path, limit, bad, is_allowed):
    """Of 40 images, any fraction allows at least 10, and no limit allows more than half."""
    samples = numbered_samples(40)
    for sample in samples[:bad]:
        sample["png"] = b"broken"
    write_shard(tmp_path / "a.tar", samples)
    spec = f"shards:{tmp_path}/a.tar"
    data = ImageDataModule(spec, spec, **PLAIN, batch_size=8, max_bad_images=limit)
    data.setup("validate")

    def read() -> int:
        return sum(len(data.on_before_batch_transfer(batch, 0).names) for batch in data.val_dataloader())

    if is_allowed:
        assert read() == 40 - bad
    else:
        with pytest.raises(UserError, match="images could not be read; at most .* of this set are allowed"):
            read()


def test_set_without_readable_images_is_rejected(tmp_path, capsys):
    write_shard(tmp_path / "a.tar", [sample | {"png": b"broken"} for sample in numbered_samples(8)])
    error = mistake(capsys, run, "fit", *small(str(tmp_path / "a.tar"), tmp_path), "--data.max_bad_images=100")
    assert "images could not be read; at most 4 of this set are allowed" in error


STREAMS = {
    "a command that fails": "pipe:false",
    "no such file": "pipe:cat /nowhere.tar",
    "cut short": "pipe:head -c 3000 {path}",
    "no tar": "pipe:echo text",
}


@pytest.mark.parametrize("name", STREAMS)
def test_failing_stream_exits_without_traceback(tmp_path, capfd, name):
    path = write_shard(tmp_path / "a.tar", numbered_samples(12))
    url = STREAMS[name].format(path=path)
    arguments = [*small("unused", tmp_path), f"--data.train=shards:{url}", "--data.val=digits"]
    with pytest.raises(SystemExit) as exit_info:
        run("fit", *arguments, "--data.stream_samples=40", "--trainer.limit_val_batches=1")
    assert exit_info.value.code == 2 and "Traceback" not in capfd.readouterr().err


def test_gzip_stream_is_decompressed(tmp_path):
    path = tmp_path / "a.tar.gz"
    path.write_bytes(gzip.compress(write_shard(tmp_path / "a.tar", numbered_samples(12)).read_bytes()))
    spec = f"shards:pipe:cat {path}"
    data = ImageDataModule("digits", spec, **PLAIN, batch_size=5)
    data.setup("validate")
    data.trainer = L.Trainer(logger=False, accelerator="cpu")
    assert sum(len(batch.labels) for batch in data.val_dataloader()) == 12
