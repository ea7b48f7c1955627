"""Sources, shards, decoding, streams and the data module: contents, exactness and errors."""

import io
import tarfile

import lightning as L
import numpy as np
import pytest
import torch
from PIL import Image

from dctrain.errors import UserError
from dcvision import ImageDataModule
from dcvision.data.decode import decode, eval_transform, sample_rng, train_transform
from dcvision.data.fields import Fields
from dcvision.data.samples import IGNORED
from dcvision.data.shards import ShardSource, expand_urls, index_shard
from dcvision.data.sources import open_source
from dcvision.data.stream import StreamedSample, stream_loader
from tests.conftest import encode, numbered_samples, write_shard

PLAIN = {"image_size": 8, "min_crop_area": 1.0, "horizontal_flip": False, "crop_fraction": 1.0}


def module(train: str, val: str | None = None, **kwargs) -> ImageDataModule:
    data = ImageDataModule(train, val or train, **{**PLAIN, **kwargs})
    data.prepare_data()
    data.setup("fit")
    return data


def numbers(batches) -> list[int]:
    return [int(image[0, 0, 0]) for batch in batches for image in batch.images]


def test_shards_are_read_by_offset(shards):
    source = open_source(f"shards:{shards}", is_train=True)
    assert len(source) == 40 and source.shard_sizes == [7, 9, 8, 10, 6]
    for index in (0, 6, 7, 39):
        image, label = source.read(index)
        assert decode(image)[0, 0, 0] == index and label == index % 10
    assert source.name(7).endswith("s-1.tar/0007")
    assert source.labels().tolist() == [i % 10 for i in range(40)]


def test_index_is_cached_and_rebuilt_when_shard_changes(tmp_path, monkeypatch):
    path = write_shard(tmp_path / "a.tar", numbered_samples(3))
    assert len(ShardSource([str(path)])) == 3
    monkeypatch.setattr("dcvision.data.shards.index_shard", lambda url, fields: pytest.fail("indexed twice"))
    assert len(ShardSource([str(path)])) == 3
    monkeypatch.undo()
    write_shard(path, numbered_samples(5))
    assert len(ShardSource([str(path)])) == 5


def test_many_shards_indexed_in_parallel_keep_their_order(tmp_path):
    for i in range(12):
        write_shard(tmp_path / f"{i:02d}.tar", numbered_samples(2, 2 * i))
    source = ShardSource(expand_urls(str(tmp_path)))
    assert [int(decode(source.read(i)[0])[0, 0, 0]) for i in range(24)] == list(range(24))


def test_folder_source_reads_classes_and_unknown_torchvision_name_raises_error(tmp_path):
    for label, name in enumerate(("ant", "bee")):
        (tmp_path / name).mkdir()
        for i in range(3):
            (tmp_path / name / f"{i}.png").write_bytes(encode(np.full((9, 9, 3), 10 * label + i, np.uint8)))
    source = open_source(f"folder:{tmp_path}", is_train=True)
    assert source.labels().tolist() == [0, 0, 0, 1, 1, 1]
    assert decode(source.read(4)[0])[0, 0, 0] == 11
    with pytest.raises(UserError, match="torchvision has no data set 'CIFAR11'"):
        open_source(f"torchvision:CIFAR11:{tmp_path}", is_train=True)


def test_torchvision_cifar_is_read_from_disk(tmp_path):
    """A small data set in the format of CIFAR10 is read through torchvision without the checksum test."""
    import pickle

    from torchvision.datasets import CIFAR10

    folder = tmp_path / CIFAR10.base_folder
    folder.mkdir()
    pixels = np.arange(4, dtype=np.uint8)[:, None] * np.ones((1, 3072), np.uint8)
    for name in [*(n for n, _ in CIFAR10.train_list), *(n for n, _ in CIFAR10.test_list)]:
        (folder / name).write_bytes(pickle.dumps({"data": pixels, "labels": [3, 1, 2, 0]}))
    (folder / CIFAR10.meta["filename"]).write_bytes(pickle.dumps({"label_names": list("abcdefghij")}))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(CIFAR10, "_check_integrity", lambda self: True)
        patch.setattr("torchvision.datasets.cifar.check_integrity", lambda *args: True)
        train, val = (open_source(f"torchvision:CIFAR10:{tmp_path}", is_train=t) for t in (True, False))
    assert (len(train), len(val)) == (20, 4)
    image, label = val.read(2)
    assert image.shape == (3, 32, 32) and image[0, 0, 0] == 2 and label == 2
    assert train.labels().tolist() == [3, 1, 2, 0] * 5


def test_digits_are_the_default_data_set():
    data = ImageDataModule()
    data.prepare_data()
    data.setup("fit")
    assert (len(data.train_source), len(data.val_source)) == (1437, 360)
    batch = next(iter(data.train_dataloader()))
    assert batch.images.shape == (64, 3, 8, 8) and batch.images.dtype == torch.uint8
    assert batch.images.max() > 200
    assert len(set(data.train_source.labels().tolist())) == 10


@pytest.mark.parametrize("workers", [0, 2])
def test_train_loader_drops_last_batch_and_validation_loader_reads_all(shards, workers):
    data = module(f"shards:{shards}", batch_size=6, num_workers=workers)
    train = list(data.train_dataloader())
    assert [len(b.labels) for b in train] == [6] * 6
    assert len(set(numbers(train))) == 36
    val = list(data.val_dataloader())
    assert numbers(val) == list(range(40))
    assert [int(x) for b in val for x in b.labels] == [i % 10 for i in range(40)]


def test_augmentation_depends_on_seed_but_not_on_number_of_workers(shards):
    options = {"min_crop_area": 0.3, "horizontal_flip": True, "randaugment_ops": 2, "batch_size": 8}
    runs = [
        torch.cat([b.images for b in module(f"shards:{shards}", num_workers=w, seed=s, **options).train_dataloader()])
        for w, s in ((0, 0), (2, 0), (0, 1))
    ]
    assert torch.equal(runs[0], runs[1])
    assert not torch.equal(runs[0], runs[2])


def test_loading_preserves_global_random_state(shards):
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    list(module(f"shards:{shards}", batch_size=8, horizontal_flip=True).train_dataloader())
    assert torch.equal(torch.rand(3), expected)


def test_padding_sample_has_ignored_label():
    from dctrain.data.sampler import SampleRef
    from dcvision.data.samples import ImageSamples

    data = ImageDataModule()
    data.prepare_data()
    data.setup("fit")
    samples = ImageSamples(data.val_source, data.eval_transform, 0, 2**20)
    assert samples[SampleRef(3, 0, is_padding=True)][1] == IGNORED
    assert samples[SampleRef(3, 0)][1] == data.val_source.labels()[3]


@pytest.mark.parametrize("kind", ["JPEG", "PNG", "WEBP", "BMP"])
def test_decode_preserves_pixels_in_every_format(kind):
    pixels = np.tile(np.arange(0, 256, 8, dtype=np.uint8)[None, :, None], (32, 1, 3))
    got = decode(encode(pixels, kind)).permute(1, 2, 0).numpy().astype(int)
    assert got.shape == (32, 32, 3) and abs(got - pixels).mean() < 3


@pytest.mark.parametrize("mode", ["L", "CMYK", "P", "RGBA"])
def test_decode_converts_every_color_mode_to_rgb(mode):
    buffer = io.BytesIO()
    Image.new("RGB", (5, 4), (200, 200, 200)).convert(mode).save(buffer, "JPEG" if mode == "CMYK" else "PNG")
    got = decode(buffer.getvalue())
    assert got.shape == (3, 4, 5) and got.dtype == torch.uint8
    assert (got.int() - 200).abs().max() < 8


def test_transforms_resize_and_train_transform_is_reproducible():
    image = torch.arange(3 * 40 * 60, dtype=torch.uint8).view(3, 40, 60)
    assert eval_transform(16, 0.875)(image).shape == (3, 16, 16)
    square = torch.randint(0, 255, (3, 16, 16), dtype=torch.uint8)
    assert torch.equal(eval_transform(16, 1.0)(square), square)
    transform = train_transform(16, 0.2, True, 2, 10)
    made = []
    for key in ((0, 1), (0, 1), (0, 2)):
        with sample_rng(*key):
            made.append(transform(image))
    assert made[0].shape == (3, 16, 16) and made[0].dtype == torch.uint8
    assert torch.equal(made[0], made[1]) and not torch.equal(made[0], made[2])


def corrupt(samples: list[dict], *indices: int) -> list[dict]:
    for i in indices:
        samples[i]["png"] = samples[i]["png"][:40]
    return samples


def test_unreadable_images_are_skipped_counted_and_limited(tmp_path, capsys):
    write_shard(tmp_path / "a.tar", corrupt(numbered_samples(20), 3, 11))
    data = module(f"shards:{tmp_path}/a.tar", batch_size=5, max_bad_images=2)
    got = [data.on_before_batch_transfer(b, 0) for b in data.val_dataloader()]
    assert numbers(got) == [i for i in range(20) if i not in (3, 11)]
    assert len(data.bad_images[False].names) == 2
    [data.on_before_batch_transfer(b, 0) for b in data.val_dataloader()]
    assert len(data.bad_images[False].names) == 2  # the same two images are counted once
    printed = capsys.readouterr().out
    assert printed.count("skipped an unreadable image") == 2 and "a.tar/0011" in printed
    data = module(f"shards:{tmp_path}/a.tar", batch_size=5, max_bad_images=1)
    with pytest.raises(UserError, match=r"2 images could not be read; at most 1 .* one of them: .*a.tar/0011"):
        [data.on_before_batch_transfer(b, 0) for b in data.val_dataloader()]


def truncate(path, keep: float):
    content = path.read_bytes()
    path.write_bytes(content[: int(len(content) * keep)])


def test_invalid_shards_raise_error(tmp_path):
    good = write_shard(tmp_path / "good.tar", numbered_samples(12))
    with pytest.raises(UserError, match=r"2 of 3 shards are missing, the first is .*x-0.tar"):
        open_source(f"shards:{good}::{tmp_path}/x-{{0..1}}.tar", True)
    (tmp_path / "empty").mkdir()
    with pytest.raises(UserError, match=r"no shards: the folder .*empty has no \*.tar files"):
        open_source(f"shards:{tmp_path}/empty", True)
    cut = write_shard(tmp_path / "cut.tar", numbered_samples(12))
    truncate(cut, 0.52)
    with pytest.raises(UserError, match="cut.tar"):
        index_shard(str(cut))
    (tmp_path / "text.tar").write_text("no tar at all, but long enough to be read as one" * 30)
    with pytest.raises(UserError, match="text.tar is truncated or not an uncompressed tar file"):
        index_shard(str(tmp_path / "text.tar"))
    samples = numbered_samples(3)
    del samples[1]["cls"]
    with pytest.raises(UserError, match=r"sample 0001 of shard .* has 0 of the fields cls; expected one. It has png"):
        index_shard(str(write_shard(tmp_path / "unpaired.tar", samples)))
    samples = numbered_samples(3)
    samples[2]["cls"] = "cat"
    with pytest.raises(UserError, match=r"0002.cls has b'cat'; expected a class number as text"):
        index_shard(str(write_shard(tmp_path / "named.tar", samples)))


def test_batch_without_readable_images_has_ignored_label(tmp_path):
    write_shard(tmp_path / "a.tar", corrupt(numbered_samples(9), 8))
    batch = list(module(f"shards:{tmp_path}/a.tar", batch_size=4).val_dataloader())[-1]
    assert batch.names == [] and batch.labels.tolist() == [IGNORED] and batch.images.shape == (1, 3, 8, 8)


def test_shard_truncated_between_samples_raises_error(tmp_path):
    path = write_shard(tmp_path / "a.tar", numbered_samples(12))
    with tarfile.open(path) as tar:
        boundary = tar.getmembers()[6].offset
    path.write_bytes(path.read_bytes()[:boundary])
    with pytest.raises(UserError, match="a.tar is truncated: its end-of-archive mark is missing"):
        index_shard(str(path))


@pytest.mark.parametrize("keep", [0.2, 0.35, 0.5, 0.7, 0.81])
def test_truncated_shard_raises_error(tmp_path, keep):
    path = write_shard(tmp_path / "a.tar", numbered_samples(12))
    truncate(path, keep)
    with pytest.raises(UserError, match="a.tar"):
        index_shard(str(path))


def test_invalid_configuration_raises_error(tmp_path, shards):
    with pytest.raises(UserError, match=r"label 9 of .*s-1.tar/0009 is out of range; expected 0 to 8"):
        module(f"shards:{shards}", num_classes=9)
    with pytest.raises(UserError, match=r"data set 'imagenet' is unknown; expected digits, shards:PATTERN"):
        module("imagenet")
    with pytest.raises(UserError, match="the image folder .*nowhere does not exist"):
        module(f"folder:{tmp_path}/nowhere")
    (tmp_path / "flat").mkdir()
    with pytest.raises(UserError, match="does not have one folder per class"):
        module(f"folder:{tmp_path}/flat")
    with pytest.raises(UserError, match="smaller than one global batch of 64 x 1 ranks"):
        module(f"shards:{shards}", batch_size=64)
    with pytest.raises(UserError, match="batch_size=0: expected a whole number from 1"):
        ImageDataModule(batch_size=0)
    with pytest.raises(UserError, match="min_crop_area=0"):
        ImageDataModule(min_crop_area=0)


def test_stream_has_fixed_epoch_length_and_validation_reads_all_samples(shards):
    """`cat` reads local shards through the pipeline of remote shards."""
    url = f"shards:pipe:cat {shards}"
    data = ImageDataModule(url, url, stream_samples=40, batch_size=6, num_workers=2, **PLAIN)
    data.prepare_data()
    data.setup("fit")
    data.trainer = L.Trainer(logger=False, accelerator="cpu")
    loader = data.train_dataloader()
    first, second = list(loader), list(loader)
    assert len(first) == len(loader) == 6
    assert all(len(b.labels) == 6 for b in first)
    assert numbers(first) != numbers(second)
    assert sorted(numbers(data.val_dataloader())) == list(range(40))


def test_stream_samples_have_unique_numbers_across_workers(shards):
    """The number of a sample seeds its random augmentation."""

    def finish(image, label, name, number):
        return number

    sample = StreamedSample(train_transform(8, 1.0, False, 0, 0), 0, Fields(), 1000, finish)
    options = {"rank": 0, "world_size": 1, "seed": 0, "batch_size": 4, "num_steps": 10}
    loader = stream_loader(expand_urls(f"pipe:cat {shards}"), sample, collate=list, num_workers=2, **options)
    numbers = [number for batch in loader for number in batch]
    assert len(numbers) == len(set(numbers)) == 40


def test_invalid_streams_raise_error(shards, tmp_path):
    url = f"shards:pipe:cat {shards}"
    data = ImageDataModule(url, url, stream_samples=40, batch_size=6, num_workers=6, **PLAIN)
    data.setup("fit")
    message = r"a stream of 5 shards cannot be split over 1 ranks x 6 workers; use at least 6 shards"
    with pytest.raises(UserError, match=message):
        data.train_dataloader()
    with pytest.raises(UserError, match="data.stream_samples=None: expected the samples per epoch"):
        ImageDataModule(url, url, **PLAIN).setup("fit")
    data = ImageDataModule(url, url, stream_samples=40, batch_size=6, num_classes=5, **PLAIN)
    data.setup("fit")
    with pytest.raises(UserError, match="label [5-9] of .* is out of range; expected 0 to 4"):
        list(data.train_dataloader())


def test_keys_of_tar_members_include_folder(tmp_path):
    with tarfile.open(tmp_path / "f.tar", "w") as tar:
        for name, content in (("a/x.png", encode(np.zeros((4, 4, 3), np.uint8))), ("a/x.cls", b"3\n")):
            info = tarfile.TarInfo(name)
            info.size = len(content)
            tar.addfile(info, io.BytesIO(content))
    index = index_shard(str(tmp_path / "f.tar"))
    assert index.keys.tolist() == ["a/x"] and index.others.tolist() == [[3]]
