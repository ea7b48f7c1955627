"""Digit scenes: two handwritten digits, one above or left of the other, and a caption that takes binding to tell.

A scene says which digit stands where and how large each is. Some combinations of relation and digits are never shown in
training, though each digit is in each place of each relation: what is tested there is composition of known parts. Scene
number i of a split is a function of the split and of i; digits of training and of tests are by other hands.
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

UNKNOWN = "a word that no scene is told by"  # and that has no token: encoding one is an error
NAME = "scenes"  # what `data.train` calls it
SPLITS = ("train", "val", "unseen")  # of combinations that training shows, by other hands, and of those it does not
ENDLESS = 2**31  # scenes of a split
SIZE, CELL = 32, 16  # sides of a picture, and of a cell of the column or row in its middle, in pixels
LARGE, SMALL = (13, CELL), (8, 10)  # smallest and largest side of a digit
ASIDE = 2  # by how much it may miss the middle of its cell
ABOVE, LEFT = "above", "left of"
RELATIONS = (ABOVE, LEFT)
NUMERALS = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")
PLURALS = {"six": "sixes"}
SIZES = {True: "large", False: "small"}


class Thing(NamedTuple):
    """A digit, and whether it is a large one."""

    digit: int
    is_large: bool

    def __str__(self) -> str:
        return f"{SIZES[self.is_large]} {NUMERALS[self.digit]}"


class Scene(NamedTuple):
    """Which digit is above, or left of, which."""

    relation: str
    first: Thing
    second: Thing

    @property
    def is_unseen(self) -> bool:
        """Whether training never shows these digits in this relation, or this digit twice in these sizes: a tenth, each
        digit about once in each place.
        """
        first, second = self.first, self.second
        if first.digit == second.digit:
            return (first.digit + 3 * (first.is_large + second.is_large)) % 10 == 0
        return (first.digit + 3 * second.digit + 5 * RELATIONS.index(self.relation)) % 10 == 0

    @property
    def caption(self) -> str:
        """Tell the scene; there is one way to tell each."""
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
    """Draw a scene among those that training shows, or does not."""
    while True:
        relation, *digits = rng.integers((2, 10, 10)).tolist()
        first, second = (Thing(digit, bool(rng.integers(2))) for digit in digits)
        scene = Scene(RELATIONS[relation], first, second)
        if scene.is_unseen == is_unseen:
            return scene


def draw_picture(scene: Scene, rng: np.random.Generator, digits: "Digits") -> Tensor:
    """Draw a scene by some hand: uint8 [3, SIZE, SIZE]."""
    canvas = np.zeros((SIZE, SIZE), np.uint8)
    for number, thing in enumerate((scene.first, scene.second)):
        side = int(rng.integers(*(LARGE if thing.is_large else SMALL), endpoint=True))
        along, across = (begin + _within_cell(side, rng) for begin in (CELL * number, (SIZE - CELL) // 2))
        top, left = (along, across) if scene.relation == ABOVE else (across, along)
        canvas[top : top + side, left : left + side] = digits.draw(thing.digit, side, rng)
    return torch.from_numpy(canvas).expand(3, -1, -1)


def _within_cell(side: int, rng: np.random.Generator) -> int:
    """Draw where in its cell a digit begins."""
    begin = (CELL - side) // 2 + int(rng.integers(-ASIDE, ASIDE, endpoint=True))
    return min(max(begin, 0), CELL - side)


class Digits:
    """Handwritten digits of all sides that occur, by class.

    Args:
        is_train: Whether those of the training split.
    """

    def __init__(self, is_train: bool) -> None:
        source = open_source("digits", is_train)
        pictures = torch.stack([decode(source.read(index)[0])[:1].float() for index in range(len(source))])
        self.places = [np.flatnonzero(source.labels() == digit) for digit in range(10)]
        self.by_side = {
            side: F.interpolate(pictures, (side, side), mode="bilinear")[:, 0].round().to(torch.uint8).numpy()
            for low, high in (SMALL, LARGE)
            for side in range(low, high + 1)
        }

    def draw(self, digit: int, side: int, rng: np.random.Generator) -> np.ndarray:
        """Draw one of a class, uint8 [side, side]."""
        return self.by_side[side][rng.choice(self.places[digit])]


class SceneSource:
    """Scenes drawn one by one; a source as `dcvl.data.captions` has them.

    Args:
        split: One of `SPLITS`.

    Raises:
        UserError: If there is no such split.
    """

    def __init__(self, split: str) -> None:
        if split not in SPLITS:
            raise UserError(f"{NAME}:{split} is unknown; expected {', '.join(f'{NAME}:{s}' for s in SPLITS)}.")
        self.split, self.shard_sizes = split, [ENDLESS]
        self.digits = Digits(is_train=split == "train")

    def __len__(self) -> int:
        return ENDLESS

    def name(self, index: int) -> str:
        """Name a scene for messages."""
        return f"{NAME}:{self.split}/{index}"

    def read(self, index: int) -> tuple[Tensor, list[str]]:
        """Return a picture, uint8 [3, SIZE, SIZE], and its caption."""
        rng = np.random.default_rng((SPLITS.index(self.split), index))
        scene = draw_scene(rng, self.split == "unseen")
        return draw_picture(scene, rng, self.digits), [scene.caption]


@cache
def scene_tokenizer() -> SubwordTokenizer:
    """Make a tokenizer of which every word of a caption is one token."""
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
