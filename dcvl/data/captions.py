"""Sources of images with captions: the notation of data sets, and map-style access.

- `scenes`, `scenes:unseen`: digit scenes (`dcvl.data.scenes`)
- `shards:PATTERN`: WebDataset tar shards of images with captions, as written by img2dataset, local or remote
- `classes:SPEC`: any labeled set of `dcvision`, such as `classes:torchvision:CIFAR10:DIR`, captioned by templates
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from tarfile import TarFile, TarInfo
from typing import BinaryIO, ClassVar, Protocol

from torch import Tensor

from dctrain.errors import UserError, as_user_error
from dcvision.data.fields import SampleFields
from dcvision.data.shards import ShardSource, expand_urls
from dcvision.data.sources import open_source

from . import scenes

KINDS = (scenes.NAME, f"{scenes.NAME}:SPLIT", "shards:PATTERN", "classes:SPEC")
CLASSES = "classes:"
TEMPLATE = "a photo of a {}"
JSON_KEYS = ("captions", "caption")  # list of texts, or a text
IS_JSON, IS_TEXT = 1, 0


class CaptionSource(Protocol):
    """Random access to images with captions.

    Attributes:
        shard_sizes: Samples of each shard, for shuffling.
    """

    shard_sizes: list[int]

    def __len__(self) -> int: ...

    def name(self, index: int) -> str:
        """Name of a sample for messages."""

    def read(self, index: int) -> tuple[bytes | Tensor, list[str]]:
        """Return the encoded image, or the decoded one (uint8 [3, H, W]), and its captions, at least one."""


@dataclass(frozen=True)
class CaptionFields(SampleFields):
    """Names of the image field and of the caption field.

    Attributes:
        image: Field of the encoded image.
        text: Field of the captions: text with one caption per line, or JSON with a text in "caption", or a list of
            texts in "captions" (or "caption").
    """

    text: str = "txt;json"
    other: ClassVar[str] = "text"

    def pick(self, sample: dict[str, object], name: str):
        """Select the fields of a sample; the first of several alternatives for the captions."""
        wanted = self.text.split(";")
        first = next((field for field in wanted if field in sample), None)
        rest = {field: value for field, value in sample.items() if field not in wanted or field == first}
        return super().pick(rest, name)

    def index(self, tar: TarFile, member: TarInfo, name: str) -> tuple[int, int, int]:
        """Return the location of the captions and whether they are JSON, after checking that there are captions."""
        self.parse(tar.extractfile(member).read(), member.name, name)
        return member.offset_data, member.size, IS_JSON if _is_json(member.name) else IS_TEXT

    def read(self, file: BinaryIO, kept: list[int], name: str) -> list[str]:
        """Read the captions."""
        offset, size, kind = kept
        file.seek(offset)
        return self.parse(file.read(size), "json" if kind == IS_JSON else "txt", name)

    def parse(self, content: bytes, field: str, name: str) -> list[str]:
        """Parse captions from text or JSON.

        Raises:
            UserError: If there are none, or the content is not UTF-8.
        """
        with as_user_error(f"the captions of {name}"):
            text = content.decode()
            found = _of_json(json.loads(text)) if _is_json(field) else text.split("\n")
        captions = [caption.strip() for caption in found if caption.strip()]
        if not captions:
            raise UserError(f"{name} has no captions.")
        return captions


def _is_json(field: str) -> bool:
    return field.rpartition(".")[2].lower() == "json"


def _of_json(content: object) -> list[str]:
    """Return the captions of a JSON object.

    Raises:
        ValueError: If there are none.
    """
    found = next((content[key] for key in JSON_KEYS if content.get(key)), None) if isinstance(content, dict) else None
    captions = [found] if isinstance(found, str) else found
    if not isinstance(captions, list) or not all(isinstance(caption, str) for caption in captions):
        raise ValueError("no text in 'caption', and no list of texts in 'captions'")
    return captions


class TemplateSource:
    """A labeled set with captions made from class names and templates.

    Args:
        spec: Data set in the notation of `dcvision.data.sources`.
        is_train: Whether to use the training split.
        templates: Sentences with {} for the class name.

    Raises:
        UserError: If it cannot be opened or has no class names.
    """

    def __init__(self, spec: str, is_train: bool, templates: Sequence[str]) -> None:
        self.source = open_source(spec, is_train)
        if not self.source.classes:
            raise UserError(f"{CLASSES}{spec} has no class names, which captions require.")
        self.templates, self.shard_sizes = list(templates), self.source.shard_sizes
        self.names = [name.replace("_", " ") for name in self.source.classes]

    def __len__(self) -> int:
        return len(self.source)

    def name(self, index: int) -> str:
        """Name of a sample for messages."""
        return self.source.name(index)

    def read(self, index: int) -> tuple[bytes | Tensor, list[str]]:
        """Return an image, and one caption per template."""
        image, label = self.source.read(index)
        return image, [in_template(template, self.names[label]) for template in self.templates]


def in_template(template: str, name: str) -> str:
    """Insert a name into a template with {}."""
    return template.replace("{}", name)


def check_templates(templates: Sequence[str]) -> None:
    """Check templates with {}.

    Raises:
        UserError: If there are none, or one does not have {} once.
    """
    if not templates or any(template.count("{}") != 1 for template in templates):
        raise UserError(f"templates={list(templates)}; expected sentences, each with {{}} once for the class name.")


def open_captions(
    spec: str, is_train: bool, fields: CaptionFields = CaptionFields(), templates: Sequence[str] = (TEMPLATE,)
) -> CaptionSource:
    """Open a local data set given in the notation above.

    Raises:
        UserError: If the notation is unknown or the data cannot be opened.
    """
    kind, _, rest = spec.partition(":")
    if kind == scenes.NAME:
        if not rest and spec != scenes.NAME:
            raise UserError(f"{spec!r} is not a split; expected {', '.join(KINDS)}.")
        return scenes.SceneSource(rest or ("train" if is_train else "val"))
    if kind == "shards" and rest:
        return ShardSource(expand_urls(rest), fields)
    if spec.startswith(CLASSES) and rest:
        return TemplateSource(rest, is_train, templates)
    raise UserError(f"data set {spec!r} is unknown; expected {', '.join(KINDS)}.")
