"""Turn an image set into WebDataset shards: `python data/make_shards.py --help`.

The images are those of class folders, or of the official validation tar with its ground truth. Running it again does
nothing; running it after an interruption writes the shards that are missing. `PREFIX-manifest.json` lists every shard
with its number of samples and SHA-256.
"""

import argparse
import hashlib
import json
import os
import sys
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from layouts import Image, LayoutError, class_folders, validation_tar
from tqdm import tqdm
from webdataset import TarWriter


@dataclass(frozen=True)
class Shard:
    """One shard to write: its file and its images in order."""

    path: Path
    images: tuple[Image, ...]


def plan(images: list[Image], out: Path, prefix: str, num_shards: int, seed: int) -> list[Shard]:
    """Shuffle the images once, by `seed`, and deal them into shards of nearly equal size."""
    if not 0 < num_shards <= len(images):
        raise LayoutError(f"--num-shards={num_shards} must be between 1 and the number of images, {len(images)}.")
    keys: set[str] = set()
    for image in images:
        if image.key in keys:
            raise LayoutError(
                f"two images would be sample {image.key}: names must differ in more than dots and extension."
            )
        keys.add(image.key)
    order = np.random.default_rng(seed).permutation(len(images))
    width = max(4, len(str(num_shards - 1)))
    return [
        Shard(out / f"{prefix}-{number:0{width}d}.tar", tuple(images[i] for i in part))
        for number, part in enumerate(np.array_split(order, num_shards))
    ]


def write_shard(shard: Shard) -> dict:
    """Write one shard beside its place, move it there when whole, and return its entry of the manifest."""
    partial = shard.path.with_suffix(".partial")
    with TarWriter(str(partial), mtime=0) as writer:
        for image in shard.images:
            writer.write({"__key__": image.key, image.extension: image.read(), "cls": str(image.label)})
    entry = describe(partial, shard)
    os.replace(partial, shard.path)
    return entry


def describe(path: Path, shard: Shard) -> dict:
    """Make a shard's entry of the manifest."""
    with open(path, "rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    return {"file": shard.path.name, "samples": len(shard.images), "sha256": digest}


def write_shards(shards: list[Shard], num_workers: int) -> list[dict]:
    """Write the shards that are missing, in parallel; return the entries of all, in order."""
    missing = [shard for shard in shards if not shard.path.exists()]
    entries = {shard.path.name: describe(shard.path, shard) for shard in shards if shard.path.exists()}
    with ProcessPoolExecutor(num_workers) as pool, tqdm(total=len(shards), unit="shard", initial=len(entries)) as bar:
        for entry in pool.map(write_shard, missing):
            entries[entry["file"]] = entry
            bar.update()
    return [entries[shard.path.name] for shard in shards]


def parse_arguments(args: list[str] | None) -> argparse.Namespace:
    """Define and parse the command line."""
    parser = argparse.ArgumentParser(description="Turn an image set into WebDataset shards.")
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--folder", type=Path, help="class folders: FOLDER/CLASS/image.jpg")
    source.add_argument("--validation-tar", type=Path, help="ILSVRC2012_img_val.tar, with --labels")
    parser.add_argument("--labels", type=Path, help="ground truth of the validation images (see data/README.md)")
    parser.add_argument("--classes", type=Path, help="class names in order, one a line; written for class folders")
    parser.add_argument("--devkit-meta", type=Path, help="meta.mat, where --labels holds the devkit's class numbers")
    parser.add_argument("--out", type=Path, required=True, help="folder of the shards")
    parser.add_argument("--prefix", default="train", help="shards are named PREFIX-0000.tar (default: train)")
    parser.add_argument("--num-shards", type=int, required=True, help="number of shards")
    parser.add_argument("--num-workers", type=int, default=os.cpu_count(), help="processes (default: all cores)")
    parser.add_argument("--seed", type=int, default=0, help="seed of the one shuffle (default: 0)")
    return parser.parse_args(args)


def run(options: argparse.Namespace) -> None:
    """Read the layout, write the shards, their manifest and the class names."""
    if options.folder is not None:
        images, classes = class_folders(options.folder)
    else:
        images, classes = validation_tar(options.validation_tar, options.labels, options.classes, options.devkit_meta)
    if options.num_workers < 1 or (options.out.exists() and not options.out.is_dir()):
        raise LayoutError(f"--num-workers={options.num_workers} must be at least 1, and --out={options.out} a folder.")
    shards = plan(images, options.out, options.prefix, options.num_shards, options.seed)
    options.out.mkdir(parents=True, exist_ok=True)
    manifest = options.out / f"{options.prefix}-manifest.json"
    listing = "\n".join(f"{image.key} {image.label} {image.size}" for image in images)
    identity = {
        "images": hashlib.sha256(listing.encode(errors="surrogateescape")).hexdigest(),
        "num_shards": options.num_shards,
        "seed": options.seed,
    }
    identity_file = options.out / f".{options.prefix}-plan.json"
    if identity_file.exists() and json.loads(identity_file.read_text()) != identity:
        raise LayoutError(
            f"{options.out} holds {options.prefix} shards of other images, --num-shards or --seed; "
            "nothing was overwritten."
        )
    identity_file.write_text(json.dumps(identity))
    entries = write_shards(shards, options.num_workers)
    manifest.write_text(json.dumps({"samples": len(images), "classes": len(classes), "shards": entries}, indent=1))
    (options.out / f"{options.prefix}-classes.txt").write_text("\n".join(classes) + "\n")
    print(f"{len(images)} images of {len(classes)} classes in {len(shards)} shards; manifest {manifest}")


def main(args: list[str] | None = None) -> None:
    """Run the command line; mistakes end in one message and exit status 2."""
    try:
        run(parse_arguments(args))
    except LayoutError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)


if __name__ == "__main__":
    main()
