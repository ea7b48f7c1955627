"""Conversion of images to WebDataset shards, `python -m dcvision shards`; an interrupted conversion continues.

Images come from class folders, or from the official validation tar with its ground truth. `PREFIX-manifest.json` lists
every shard with its number of samples and SHA-256, and the unreadable images, which are omitted.
"""

import json
import os
import tarfile
from concurrent.futures import ProcessPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from tqdm import tqdm
from webdataset import TarWriter

from dctrain.data.dataset_cache import digest_lines, file_digest, preparing, verify_files
from dctrain.errors import UserError, as_user_error
from dctrain.utils.files import atomic_write

from .decode import BadImage, decode
from .imagenet import Image, class_folders, validation_images


def make_shards(
    out: str,
    num_shards: int,
    folder: str | None = None,
    validation_tar: str | None = None,
    labels: str | None = None,
    classes: str | None = None,
    devkit_meta: str | None = None,
    prefix: str = "train",
    num_workers: int | None = None,
    seed: int = 0,
) -> None:
    """Convert an image set to WebDataset shards.

    Args:
        out: Output folder.
        num_shards: Number of shards.
        folder: Folder of class folders, FOLDER/CLASS/image.jpg.
        validation_tar: ILSVRC2012_img_val.tar in place of a folder; requires labels and classes.
        labels: Ground truth of the validation images (see docs/data.md).
        classes: Class names in order, one per line, as written by this command for class folders.
        devkit_meta: The devkit's meta.mat, if labels has its class numbers.
        prefix: Shards are named PREFIX-0000.tar.
        num_workers: Number of processes; default: one per core.
        seed: Seed of the shuffle.
    """
    if (folder is None) == (validation_tar is None):
        raise UserError("--folder and --validation_tar: expected one of them.")
    if folder is not None and (labels or classes or devkit_meta):
        raise UserError("--labels, --classes and --devkit_meta require --validation_tar; folders define the classes.")
    if not prefix or prefix != Path(prefix).name:
        raise UserError(f"{prefix=} must be the start of a file's name.")
    if not 0 <= seed < 2**32:
        raise UserError(f"{seed=} must be in [0, 2^32).")
    workers = os.cpu_count() if num_workers is None else num_workers
    if workers < 1:
        raise UserError(f"--num_workers={num_workers} must be at least 1.")
    if folder is not None:
        images, names = class_folders(Path(folder))
    else:
        paths = (None if path is None else Path(path) for path in (validation_tar, labels, classes, devkit_meta))
        images, names = validation_images(*paths)
    manifest_path = write_shards(images, names, Path(out), prefix, num_shards, seed, workers)
    manifest = json.loads(manifest_path.read_text())
    unreadable = [key for shard in manifest["shards"] for key in shard.get("unreadable", ())]
    if unreadable:
        count = len(unreadable)
        print(f"omitted unreadable images (listed in the manifest): {count}, the first is {unreadable[0]}")
    print(f"{manifest['samples']} images of {len(names)} classes in {num_shards} shards; manifest {manifest_path}")


def verify(folder: str) -> None:
    """Verify the checksums of shards; takes two to three seconds per GB.

    Args:
        folder: Folder written by `dcvision shards`.
    """
    manifests = sorted(Path(folder).glob("*-manifest.json"))
    if not manifests:
        raise UserError(f"--folder: {folder} has no *-manifest.json written by `dcvision shards`.")
    for path in manifests:
        with as_user_error(f"{path} is damaged"):
            shards = list(json.loads(path.read_text())["shards"])
        verify_files(path.parent, shards)


@dataclass(frozen=True)
class Shard:
    """A shard to write: its file and its images in order."""

    path: Path
    images: tuple[Image, ...]


def plan(images: list[Image], out: Path, prefix: str, num_shards: int, seed: int) -> list[Shard]:
    """Shuffle the images by `seed`, and distribute them over shards of nearly equal size."""
    if not 0 < num_shards <= len(images):
        raise UserError(f"--num_shards={num_shards} must be between 1 and the number of images, {len(images)}.")
    keys: set[str] = set()
    for image in images:
        if image.key in keys:
            raise UserError(f"two images have the key {image.key}: names must differ in more than dots and extension.")
        keys.add(image.key)
    order = np.random.default_rng(seed).permutation(len(images))
    width = max(4, len(str(num_shards - 1)))
    return [
        Shard(out / f"{prefix}-{number:0{width}d}.tar", tuple(images[i] for i in part))
        for number, part in enumerate(np.array_split(order, num_shards))
    ]


def write_shard(shard: Shard) -> dict:
    """Write a shard atomically, without unreadable images, and return its entry for the manifest."""
    with atomic_write(shard.path) as file, TarWriter(file, mtime=0) as writer:
        for image in shard.images:
            content = image.read()
            with suppress(BadImage):
                decode(content)
                writer.write({"__key__": image.key, image.extension: content, "cls": str(image.label)})
    return describe(shard)


def describe(shard: Shard) -> dict:
    """Return the manifest entry of a written shard."""
    with tarfile.open(shard.path) as tar:
        written = {member.name.removesuffix(".cls") for member in tar if member.name.endswith(".cls")}
    unreadable = [image.key for image in shard.images if image.key not in written]
    entry = {"file": shard.path.name, "samples": len(written), "sha256": file_digest(shard.path)}
    return entry | ({"unreadable": unreadable} if unreadable else {})


def write_shards(
    images: list[Image], classes: list[str], out: Path, prefix: str, num_shards: int, seed: int, num_workers: int
) -> Path:
    """Write missing shards, the manifest and the class names; return the manifest's path.

    Raises:
        UserError: If there are fewer images than shards, names are not unique, `out` has shards of different images, or
            no image of a shard can be read.
    """
    shards = plan(images, out, prefix, num_shards, seed)
    listing = digest_lines(f"{image.key} {image.label} {image.size}" for image in images)
    made_from = {"images": listing, "num_shards": num_shards, "seed": seed}
    names = {"plan_name": f".{prefix}-plan.json", "manifest_name": f"{prefix}-manifest.json"}
    with preparing(out, made_from, (f"{prefix}-*.tar",), **names) as preparation:
        (out / f"{prefix}-classes.txt").write_text("\n".join(classes) + "\n")
        if preparation.manifest() is None or not all(shard.path.exists() for shard in shards):
            preparation.begin()
            entries = _write_missing(shards, num_workers)
            for entry in entries:
                if not entry["samples"]:
                    raise UserError(f"{out / entry['file']} would be empty: none of its images can be read.")
            samples = sum(entry["samples"] for entry in entries)
            preparation.finish({"samples": samples, "classes": len(classes), "shards": entries})
    return preparation.manifest_path


def _write_missing(shards: list[Shard], num_workers: int) -> list[dict]:
    """Write missing shards in parallel; return the entries of all shards in order."""
    missing = [shard for shard in shards if not shard.path.exists()]
    entries = {shard.path.name: describe(shard) for shard in shards if shard.path.exists()}
    with ProcessPoolExecutor(num_workers) as pool, tqdm(total=len(shards), unit="shard", initial=len(entries)) as bar:
        for entry in pool.map(write_shard, missing):
            entries[entry["file"]] = entry
            bar.update()
    return [entries[shard.path.name] for shard in shards]
