"""Layouts of ImageNet: class folders, and the official validation tar with its ground truth."""

import csv
import tarfile
from dataclasses import dataclass
from pathlib import Path

from dctrain.errors import UserError, as_user_error

EXTENSIONS = {".jpg", ".jpeg", ".png", ".webp", ".bmp"}


@dataclass(frozen=True)
class Image:
    """An image: location of its bytes (a file, or part of a tar), key in a shard, and class number."""

    key: str
    path: Path
    label: int
    extension: str
    size: int
    offset: int = 0

    def read(self) -> bytes:
        """Return the encoded image."""
        with open(self.path, "rb") as file:
            file.seek(self.offset)
            return file.read(self.size)


def class_folders(root: Path) -> tuple[list[Image], list[str]]:
    """List FOLDER/CLASS/image files; classes are numbered in sorted order.

    Raises:
        UserError: If there is no folder, no class folder, or a class without images.
    """
    if not root.is_dir():
        raise UserError(f"--folder: {root} is not a folder.")
    classes = sorted(path.name for path in root.iterdir() if path.is_dir())
    if not classes:
        raise UserError(f"--folder: {root} has no class folders; expected {root}/CLASS/image.jpg.")
    images = []
    for label, name in enumerate(classes):
        files = sorted(path for path in (root / name).iterdir() if path.is_file() and path.suffix.lower() in EXTENSIONS)
        if not files:
            raise UserError(f"--folder: the class folder {root / name} has no images.")
        images += [_image(path, f"{name}/{path.stem}", label, size=path.stat().st_size) for path in files]
    return images, classes


def _image(path: Path, key: str, label: int, size: int) -> Image:
    """Create an image with a key without dots, because a key in a shard ends at the first dot."""
    return Image(key.replace(".", "_"), path, label, path.suffix.lower().lstrip("."), size)


def validation_images(
    path: Path, labels: Path | None, classes: Path | None, devkit_meta: Path | None
) -> tuple[list[Image], list[str]]:
    """List the images of the official validation tar with their labels.

    Args:
        path: The tar, with images at its top level.
        labels: Ground truth in one of three forms: one class name (wnid) per line in the order of the file names; the
            devkit's class numbers likewise (with `devkit_meta`); or a CSV with the columns ImageId, PredictionString.
        classes: Class names in order, one per line.
        devkit_meta: The devkit's `meta.mat`.

    Raises:
        UserError: If a file is missing, or counts or names do not match.
    """
    for option, file in (("--validation_tar", path), ("--labels", labels), ("--classes", classes)):
        if file is None or not file.is_file():
            raise UserError(f"{option}={file}: expected a file.")
    with as_user_error(str(classes)):
        names = classes.read_text().split()
    number = {name: i for i, name in enumerate(names)}
    with as_user_error(f"--validation_tar: {path} is not an uncompressed tar file"), tarfile.open(path, "r:") as tar:
        members = sorted((m for m in tar if m.isfile()), key=lambda m: m.name)
    truth = _ground_truth(labels, [Path(m.name).stem for m in members], devkit_meta)
    unknown = sorted(set(truth) - set(names))
    if unknown:
        raise UserError(
            f"{len(unknown)} classes of {labels} are not among the {len(names)} of {classes}: {unknown[0]}."
        )
    images = [
        Image(
            Path(m.name).stem.replace(".", "_"),
            path,
            number[name],
            Path(m.name).suffix.lower().lstrip("."),
            m.size,
            m.offset_data,
        )
        for m, name in zip(members, truth, strict=True)
    ]
    return images, names


def _ground_truth(labels: Path, stems: list[str], devkit_meta: Path | None) -> list[str]:
    """Return the class name of each image."""
    with as_user_error(str(labels)):
        lines = labels.read_text().splitlines()
    if lines and lines[0].startswith("ImageId"):
        rows = _read_solutions(labels, lines)
        missing = [stem for stem in stems if stem not in rows]
        if missing:
            raise UserError(f"{labels} has no line for {len(missing)} images, the first is {missing[0]}.")
        return [rows[stem] for stem in stems]
    values = [line.strip() for line in lines if line.strip()]
    if len(values) != len(stems):
        raise UserError(f"{labels} has {len(values)} lines, but the tar has {len(stems)} images.")
    if not all(value.isdecimal() for value in values):
        return values
    if devkit_meta is None:
        raise UserError(f"{labels} has the devkit's class numbers; --devkit_meta=meta.mat is required.")
    from scipy.io import loadmat

    with as_user_error(f"{devkit_meta} is not a meta.mat of the devkit"):
        synsets = loadmat(devkit_meta, squeeze_me=True)["synsets"]
        wnid = {int(row["ILSVRC2012_ID"]): str(row["WNID"]) for row in synsets}
    unknown = sorted({int(value) for value in values} - wnid.keys())
    if unknown:
        raise UserError(f"{labels}: class number {unknown[0]} is not in {devkit_meta}.")
    return [wnid[int(value)] for value in values]


def _read_solutions(labels: Path, lines: list[str]) -> dict[str, str]:
    """Read Kaggle's table: the class name of each image."""
    rows = {}
    for number, row in enumerate(csv.DictReader(lines), 2):
        words = (row.get("PredictionString") or "").split()
        if not words:
            raise UserError(f"{labels}: line {number} has no PredictionString.")
        rows[row["ImageId"]] = words[0]
    return rows
