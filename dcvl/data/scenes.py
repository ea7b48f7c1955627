"""Digit scenes: two handwritten digits, one above or left of the other, with captions that require binding.

A caption states the positions and sizes of the digits. Some combinations of relation and digits do not occur in
training, although each digit occurs in each place of each relation: they test the composition of known parts. Scene i
of a split is a function of the split and i; digits of training and evaluation are written by different people.
"""

from functools import cache
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from dclm.data.tokenizers import END_TOKENS, SubwordTokenizer
from dctrain.errors import UserError
from dcvision.data.decode import decode
from dcvision.data.sources import open_source

UNKNOWN = "a word that no scene is told by"  # without a token: encoding an unknown word is an error
NAME = "scenes"  # value of `data.train`
SPLITS = ("train", "val", "unseen")  # val: combinations of training, other digits; unseen: other combinations
ENDLESS = 2**31  # scenes per split
SIZE, CELL = 32, 16  # side of an image, and of a cell of its middle column or row, in pixels
LARGE, SMALL = (13, CELL), (8, 10)  # minimum and maximum side of a digit
ASIDE = 2  # maximum offset from the middle of the cell
ABOVE, LEFT = "above", "left of"
RELATIONS = (ABOVE, LEFT)
NUMERALS = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")
PLURALS = {"six": "sixes"}
SIZES = {True: "large", False: "small"}


class Thing(NamedTuple):
    """A digit, and whether it is large."""

    digit: int
    is_large: bool

    def __str__(self) -> str:
        return f"{SIZES[self.is_large]} {NUMERALS[self.digit]}"


class Scene(NamedTuple):
    """Two digits and their relation."""

    relation: str
    first: Thing
    second: Thing

    @property
    def is_unseen(self) -> bool:
        """Whether this combination does not occur in training: a tenth of all, with each digit about once in each
        place.
        """
        first, second = self.first, self.second
        if first.digit == second.digit:
            return (first.digit + 3 * (first.is_large + second.is_large)) % 10 == 0
        return (first.digit + 3 * second.digit + 5 * RELATIONS.index(self.relation)) % 10 == 0

    @property
    def caption(self) -> str:
        """Caption of the scene, which is unique."""
        first, second = self.first, self.second
        if first.digit == second.digit:
            return _two_alike(NUMERALS[first.digit], first.is_large, second.is_large)
        if self.relation == ABOVE:
            return f"a {first} above a {second}"
        return f"the digit left of the {second} is a {first}"


def _two_alike(numeral: str, *are_large: bool) -> str:
    plural = PLURALS.get(numeral, f"{numeral}s")
    if len(set(are_large)) == 1:
        return f"two {SIZES[are_large[0]]} {plural}"
    return f"two {plural}, a large and a small one"


def draw_scene(rng: np.random.Generator, is_unseen: bool) -> Scene:
    """Sample a scene that occurs in training, or one that does not."""
    while True:
        relation, *digits = rng.integers((2, 10, 10)).tolist()
        first, second = (Thing(digit, bool(rng.integers(2))) for digit in digits)
        scene = Scene(RELATIONS[relation], first, second)
        if scene.is_unseen == is_unseen:
            return scene


def draw_picture(scene: Scene, rng: np.random.Generator, digits: "Digits") -> Tensor:
    """Render a scene: uint8 [3, SIZE, SIZE]."""
    canvas = np.zeros((SIZE, SIZE), np.uint8)
    for number, thing in enumerate((scene.first, scene.second)):
        side = int(rng.integers(*(LARGE if thing.is_large else SMALL), endpoint=True))
        along, across = (begin + _within_cell(side, rng) for begin in (CELL * number, (SIZE - CELL) // 2))
        top, left = (along, across) if scene.relation == ABOVE else (across, along)
        canvas[top : top + side, left : left + side] = digits.draw(thing.digit, side, rng)
    return torch.from_numpy(canvas).expand(3, -1, -1)


def _within_cell(side: int, rng: np.random.Generator) -> int:
    """Sample the start of a digit within its cell."""
    begin = (CELL - side) // 2 + int(rng.integers(-ASIDE, ASIDE, endpoint=True))
    return min(max(begin, 0), CELL - side)


class Digits:
    """Handwritten digits by class, in all sizes.

    Args:
        is_train: Whether to use the training split.
    """

    def __init__(self, is_train: bool) -> None:
        source = open_source("digits", is_train)
        images = torch.stack([decode(source.read(index)[0])[:1].float() for index in range(len(source))])
        self.places = [np.flatnonzero(source.labels() == digit) for digit in range(10)]
        self.by_side = {
            side: F.interpolate(images, (side, side), mode="bilinear")[:, 0].round().to(torch.uint8).numpy()
            for low, high in (SMALL, LARGE)
            for side in range(low, high + 1)
        }

    def draw(self, digit: int, side: int, rng: np.random.Generator) -> np.ndarray:
        """Sample a digit of a class, uint8 [side, side]."""
        return self.by_side[side][rng.choice(self.places[digit])]


class SceneSource:
    """Generated scenes, with the interface of `CaptionSource`.

    Args:
        split: One of `SPLITS`.

    Raises:
        UserError: If the split is unknown.
    """

    def __init__(self, split: str) -> None:
        if split not in SPLITS:
            raise UserError(f"{NAME}:{split} is unknown; expected {', '.join(f'{NAME}:{s}' for s in SPLITS)}.")
        self.split, self.shard_sizes = split, [ENDLESS]
        self.digits = Digits(is_train=split == "train")

    def __len__(self) -> int:
        return ENDLESS

    def name(self, index: int) -> str:
        """Name of a scene for messages."""
        return f"{NAME}:{self.split}/{index}"

    def read(self, index: int) -> tuple[Tensor, list[str]]:
        """Return an image, uint8 [3, SIZE, SIZE], and its caption."""
        rng = np.random.default_rng((SPLITS.index(self.split), index))
        scene = draw_scene(rng, self.split == "unseen")
        return draw_picture(scene, rng, self.digits), [scene.caption]


@cache
def scene_tokenizer() -> SubwordTokenizer:
    """Create a tokenizer in which every word of a caption is one token."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers

    things = [Thing(digit, is_large) for digit in range(10) for is_large in (False, True)]
    scenes = [Scene(relation, first, second) for relation in RELATIONS for first in things for second in things]
    known = {word for scene in scenes for word in scene.caption.replace(",", " ,").split()}
    vocabulary = {word: number for number, word in enumerate([END_TOKENS[0], *sorted(known)])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token=UNKNOWN))
    split = pre_tokenizers.Split(Regex(r"\w+|[^\w\s]"), "isolated")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.WhitespaceSplit(), split])
    tokenizer.decoder = decoders.WordPiece(cleanup=True)
    return SubwordTokenizer(tokenizer.to_str())
