"""Accuracy on an image set with its own labels, and with ImageNet's ReaL labels (Beyer et al., 2020)."""

# B batch

import json
import math
import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import torch
from torch import nn
from torch.utils.data import DataLoader
from tqdm import tqdm

from dctrain.data.dataset_cache import file_digest
from dctrain.errors import UserError, as_user_error
from dctrain.evaluation.answer_cache import AnswerCache, digest
from dctrain.evaluation.ranks import EvaluationRanks
from dctrain.evaluation.results import Measure

from ..data.decode import BadImage
from ..data.sources import Source, open_source
from .networks import Classifier

VALIDATION_IMAGE = re.compile(r"ILSVRC2012_val_(\d{8})")
TOP = 5


class ImageScorer(NamedTuple):
    """A classifier with the settings of its evaluation.

    Attributes:
        network: The classifier.
        journal: Cache of answers.
        ranks: Ranks that share the work.
        batch_size: Images per batch.
        num_workers: Loader workers per rank.
        device: Device of the network.
        dtype: Dtype of the images.
        conditions: Conditions that answers depend on, such as disabled parts.
    """

    network: Classifier
    journal: AnswerCache
    ranks: EvaluationRanks
    batch_size: int
    num_workers: int
    device: torch.device
    dtype: torch.dtype
    conditions: tuple[str, ...] = ()

    @property
    def module(self) -> nn.Module:
        """The model."""
        return self.network.model

    def under(self, condition: str) -> "ImageScorer":
        """Return a scorer whose answers are cached separately for a condition."""
        return self._replace(conditions=(*self.conditions, condition))


class ImageAnswer(NamedTuple):
    """Result of an image: loss in nats (NaN if it could not be read) and the top classes in order."""

    loss: float
    classes: list[int]


class _Images(torch.utils.data.Dataset):
    """Preprocessed images of a source; None for unreadable images."""

    def __init__(self, source: Source, network: Classifier, indices: list[int]) -> None:
        self.source, self.prepare, self.indices = source, network.prepare, indices

    def __len__(self) -> int:
        return len(self.indices)

    def __getitem__(self, place: int) -> tuple[int, torch.Tensor | None]:
        index = self.indices[place]
        try:
            return index, self.prepare(self.source.read(index)[0])
        except (BadImage, OSError, ValueError, SyntaxError):
            return index, None


class ImageSet(NamedTuple):
    """An image set for evaluation.

    Attributes:
        name: Name in the table.
        spec: Data set in the notation of `dcvision.data.sources`.
        real: JSON file of ImageNet's ReaL labels: a list of lists of classes for the 50,000 validation images; None for
            none.
        limit: Maximum number of images.
    """

    name: str
    spec: str
    real: str | None
    limit: int | None

    @property
    def title(self) -> str:
        """Unique title."""
        return f"images {self.spec}"

    def settings(self, answerer: ImageScorer) -> dict:
        """Settings that the numbers depend on, other than the model."""
        source = self.open()
        content = digest([source.name(index) for index in range(len(source))], _labels(source))
        return {
            "spec": self.spec,
            "limit": self.limit,
            "images": len(source),
            "content": content,
            "real": None if self.real is None else file_digest(Path(self.real)),
            "preprocessing": answerer.network.preprocessing,
        }

    def run(self, answerer: ImageScorer) -> tuple[list[Measure], str | None]:
        """Classify all images; the note reports unreadable images.

        Raises:
            UserError: If the labels do not match the model, or the ReaL labels the images.
        """
        source = self.open()
        labels = _labels(source)[: self.limit]
        _check_classes(self.spec, source, answerer.network.classes)
        keys = [digest(self.spec, source.name(i), label, *answerer.conditions) for i, label in enumerate(labels)]
        todo = [index for index, key in enumerate(keys) if key not in answerer.journal.known]
        speed = _answer(answerer, source, todo[answerer.ranks.rank :: answerer.ranks.size], labels, keys, self.name)
        answers = [ImageAnswer(*answerer.journal.known[key]) for key in keys]
        read = [(index, answer) for index, answer in enumerate(answers) if not math.isnan(answer.loss)]
        if not read:
            raise UserError(f"{self.spec}: no image can be read.")
        measures = self._measures(read, labels)
        if self.real is not None:
            measures += self._reassessed(read, source)
        if speed is not None:
            name = f"{self.name}, batches of {answerer.batch_size}"
            measures.append(Measure(name, "images_per_second", speed, None, True, len(todo), "images"))
        lost = len(answers) - len(read)
        return measures, f"{lost} images could not be read and are not included" if lost else None

    def open(self) -> Source:
        """Open the set.

        Raises:
            UserError: If it is empty.
        """
        source = open_source(self.spec, is_train=False)
        if len(source) == 0:
            raise UserError(f"{self.spec} has no images.")
        return source

    def _measures(self, read: list[tuple[int, ImageAnswer]], labels: list[int]) -> list[Measure]:
        top1 = [answer.classes[0] == labels[index] for index, answer in read]
        top5 = [labels[index] in answer.classes for index, answer in read]
        loss, count = math.fsum(answer.loss for _, answer in read) / len(read), len(read)
        return [
            _accuracy(self.name, "top1", top1),
            _accuracy(self.name, "top5", top5),
            Measure(self.name, "loss", loss, None, False, count, "images"),
        ]

    def _reassessed(self, read: list[tuple[int, ImageAnswer]], source: Source) -> list[Measure]:
        """Score with ReaL labels: any label of an image is correct; images without labels are skipped."""
        with as_user_error(f"real={self.real} is not a list of lists of classes"):
            real = [list(map(int, labels)) for labels in json.loads(Path(self.real).read_text())]
        hits = []
        for index, answer in read:
            found = VALIDATION_IMAGE.search(source.name(index))
            if found is None or not 1 <= int(found[1]) <= len(real):
                raise UserError(
                    f"real={self.real}: {source.name(index)} is not one of its {len(real)} images; expected names that "
                    "contain ILSVRC2012_val_ and a number of eight digits."
                )
            labels = real[int(found[1]) - 1]
            if labels:
                hits.append(answer.classes[0] in labels)
        if not hits:
            raise UserError(f"real={self.real} has no label for any image of {self.spec}.")
        return [_accuracy(f"{self.name}, ReaL", "top1", hits)]


def readable_images(network: Classifier, spec: str, limit: int | None) -> Iterator[tuple[int, torch.Tensor]]:
    """Yield preprocessed images of a set [3, size, size] with their labels.

    Images are sampled deterministically from the whole set; unreadable images are skipped.

    Raises:
        UserError: If there are none, or the classes of the set and the network differ.
    """
    source = ImageSet("", spec, None, limit).open()
    labels, num_classes = _labels(source), network.model.num_classes
    _check_classes(spec, source, network.classes)
    if max(labels) >= num_classes:
        raise UserError(f"{spec} has a class {max(labels)}; the model has {num_classes}.")
    drawn = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))[:limit].tolist()
    images = _Images(source, network, drawn)
    is_any = False
    for place in range(len(images)):
        index, image = images[place]
        if image is not None:
            is_any = True
            yield labels[index], image
    if not is_any:
        raise UserError(f"{spec}: no image can be read.")


def _accuracy(name: str, metric: str, hits: list[bool]) -> Measure:
    rate = sum(hits) / len(hits)
    stderr = math.sqrt(rate * (1 - rate) / len(hits))
    return Measure(name, metric, rate, stderr, True, len(hits), "images")


def _labels(source: Source) -> list[int]:
    """Return the labels; numeric class names, as the folders of ImageNet-V2, are class numbers."""
    labels = source.labels().tolist()
    names = source.classes
    if names and all(name.isdecimal() for name in names):
        return [int(names[label]) for label in labels]
    return labels


def _check_classes(spec: str, source: Source, known: list[str] | None) -> None:
    names = source.classes
    if known and names and not all(name.isdecimal() for name in names) and list(names) != list(known):
        raise UserError(f"{spec} and the model have different classes ({names[0]!r}, ... and {known[0]!r}, ...).")


def _answer(
    answerer: ImageScorer, source: Source, indices: list[int], labels: list[int], keys: list[str], described: str
) -> float | None:
    """Classify a rank's images and exchange answers; return the images per second of the network, including copies to
    and from its device.
    """
    answers: dict = {}
    seconds, count = [], []
    for numbers, images in _batches(answerer, source, indices, described):
        found = {keys[number]: [math.nan, []] for number, image in zip(numbers, images, strict=True) if image is None}
        shown = [(number, image) for number, image in zip(numbers, images, strict=True) if image is not None]
        if shown:
            start = time.perf_counter()
            logits = _classify(answerer, torch.stack([image for _, image in shown]))
            seconds.append(time.perf_counter() - start)
            count.append(len(shown))
            found |= _judge(logits, [number for number, _ in shown], labels, keys)
        answerer.journal.add(found)
        answers |= found
    answerer.journal.share(answers)
    rest = slice(1, None) if len(count) > 1 else slice(None)  # the first batch warms up
    return sum(count[rest]) / sum(seconds[rest]) if seconds else None


def _batches(answerer: ImageScorer, source: Source, indices: list[int], described: str) -> Iterator[tuple[list, list]]:
    loader = DataLoader(
        _Images(source, answerer.network, indices),
        answerer.batch_size,
        num_workers=answerer.num_workers,
        collate_fn=_as_lists,
    )
    yield from tqdm(loader, described, unit="batch", leave=False, disable=not answerer.ranks.is_first)


def _as_lists(items: list[tuple[int, torch.Tensor | None]]) -> tuple[list, list]:
    """Separate indices and images."""
    return tuple(map(list, zip(*items, strict=True)))


@torch.inference_mode()
def _classify(answerer: ImageScorer, images: torch.Tensor) -> torch.Tensor:
    """Compute logits [B, classes], float32, on the CPU."""
    return answerer.network.model(images.to(answerer.device, answerer.dtype)).float().cpu()


def _judge(logits: torch.Tensor, numbers: list[int], labels: list[int], keys: list[str]) -> dict[str, list]:
    if logits.isnan().any():
        raise UserError("the logits are NaN: the weights are damaged or too large for their dtype.")
    targets = torch.tensor([labels[number] for number in numbers])
    if int(targets.max()) >= logits.shape[1] or int(targets.min()) < 0:
        raise UserError(f"labels reach {int(targets.max())}; the model has {logits.shape[1]} classes.")
    losses = torch.nn.functional.cross_entropy(logits, targets, reduction="none").tolist()
    best = logits.topk(min(TOP, logits.shape[1])).indices.tolist()
    return {keys[number]: [loss, classes] for number, loss, classes in zip(numbers, losses, best, strict=True)}
