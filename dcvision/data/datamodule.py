"""ImageDataModule: batches of uint8 images for training and evaluation, exact over ranks, workers and restarts."""

import math
from functools import partial
from itertools import zip_longest

from lightning.pytorch.trainer.states import TrainerFn
from torch.utils.data import DataLoader

from dctrain.cli.argument_types import check_types
from dctrain.distributed.strategy import FSDP2Strategy
from dctrain.errors import UserError, as_user_error

from .decode import MAX_PIXELS, PIXEL_LIMIT, eval_transform, train_transform
from .fields import Fields
from .image_data import ImageData
from .samples import Collate, ImageSamples
from .sources import Source, open_source
from .stream import StreamedSample, classified

MIN_CROP, MAX_OPS, MAX_IMAGE_SIZE = 0.05, 64, 8192  # bounds before anything is allocated


class ImageDataModule(ImageData):
    """Images for classification.

    Splitting: this module gives every rank its slice of one global order, so the trainer must not add a distributed
    sampler (`use_distributed_sampler: false`, which the command line sets). Workers share a rank's batches.

    Epoch: a pass over the data in an order that depends on (seed, epoch) alone. Every rank takes equally many training
    batches; what is less than one global batch at the end is left out. Evaluation sees every sample once: padding that
    evens out the ranks carries the label -100.

    Resume: training goes on at the very next sample, also in the middle of an epoch. On another number of ranks or
    another batch size the samples of the epoch that are left are each seen once.

    Remote streams promise less (see `dcvision.data.stream`).

    Args:
        train: Training set, in the notation of `dcvision.data.sources`: "digits", "shards:PATTERN", "folder:DIR" or
            "torchvision:NAME:DIR".
        val: Validation set, likewise; also used by `test` and `predict`.
        num_classes: Labels must lie in [0, num_classes).
        image_size: Side of the square images, in pixels.
        batch_size: Images of one rank in a step.
        num_workers: Loader processes of a rank; 0 loads in the main process.
        seed: Seed of order and augmentation.
        min_crop_area: Smallest part of the image a training crop may cover; 1.0 resizes without cropping.
        horizontal_flip: Flip half of the training images.
        randaugment_ops: RandAugment operations per training image; 0 for none.
        randaugment_magnitude: Strength of these operations, 0 to 30 (torchvision's scale).
        crop_fraction: Part of the resized image's side that the central crop of evaluation keeps.
        stream_samples: Samples that count as an epoch when `train` is a remote stream.
        max_bad_images: Unreadable images are skipped and reported; more than these of a set, seen by one rank, stop the
            run: a number of them, or a fraction of the set (below 1.0), which always allows 10. More than half of a set
            is never allowed.
        max_pixels: Images of more count as unreadable, before they are decoded.
        fields: Names of the fields of WebDataset samples, {image: "jpg;png", label: cls} if they differ from the usual.

    Raises:
        UserError: If a data set cannot be opened or does not fit the other arguments.
    """

    def __init__(
        self,
        train: str = "digits",
        val: str = "digits",
        num_classes: int = 10,
        image_size: int = 8,
        batch_size: int = 64,
        num_workers: int = 0,
        seed: int = 0,
        min_crop_area: float = 0.05,
        horizontal_flip: bool = True,
        randaugment_ops: int = 0,
        randaugment_magnitude: int = 10,
        crop_fraction: float = 0.875,
        stream_samples: int | None = None,
        max_bad_images: int | float = 0.001,
        max_pixels: int = MAX_PIXELS,
        fields: dict[str, str] | None = None,
    ) -> None:
        loading = {"batch_size": batch_size, "num_workers": num_workers, "seed": seed}
        super().__init__(train, val, stream_samples, max_bad_images, **loading)
        self.save_hyperparameters(logger=False)
        check_types(type(self).__init__, self.hparams)
        if not 0 < min_crop_area <= 1 or not MIN_CROP <= crop_fraction <= 1:
            raise UserError(f"{min_crop_area=} must be in (0, 1], {crop_fraction=} in [{MIN_CROP}, 1].")
        if not 0 <= randaugment_ops <= MAX_OPS or not 0 <= randaugment_magnitude <= 30:
            raise UserError(f"{randaugment_ops=} must be in [0, {MAX_OPS}] and {randaugment_magnitude=} in [0, 30].")
        if num_classes < 2 or not 1 <= image_size <= MAX_IMAGE_SIZE:
            raise UserError(f"{num_classes=} must be at least 2, {image_size=} in [1, {MAX_IMAGE_SIZE}].")
        if not 1 <= max_pixels <= PIXEL_LIMIT:
            raise UserError(f"{max_pixels=} must be in [1, {PIXEL_LIMIT}]; Pillow opens no larger image.")
        if not 0 <= max_bad_images < (math.inf if isinstance(max_bad_images, int) else 1):
            raise UserError(f"{max_bad_images=} must be a number of images, or a fraction in [0, 1).")
        with as_user_error("data.fields"):
            self.fields = Fields(**fields or {})
        self.num_classes, self.image_size, self.max_pixels = num_classes, image_size, max_pixels
        self.train_transform = train_transform(
            image_size, min_crop_area, horizontal_flip, randaugment_ops, randaugment_magnitude
        )
        self.eval_transform = eval_transform(image_size, crop_fraction)
        self.classes: list[str] | None = None

    def index(self, spec: str, is_train: bool) -> None:
        """Download, write and index a local set; its labels are checked when it is used."""
        open_source(spec, is_train, self.fields)

    def setup(self, stage: str) -> None:
        """Open the data sets of a stage and check their labels."""
        super().setup(stage)
        self._compare_classes(None)

    def _compare_classes(self, trained: list[str] | None) -> None:
        """Take the names of the classes from the data, or from a checkpoint; refuse two numberings of them."""
        known = {
            "data.train": getattr(self.train_source, "classes", None),
            "data.val": getattr(self.val_source, "classes", None),
            "the checkpoint": trained,
        }
        if self.trainer is not None and self.trainer.state.fn == TrainerFn.PREDICTING:
            self.classes = trained or self.classes  # the data need not have labels
            return
        known = {what: names for what, names in known.items() if names is not None}
        if not known:
            return
        (first, self.classes), *others = known.items()
        for other, names in others:
            if names != self.classes:
                pairs = enumerate(zip_longest(self.classes, names))
                number, (here, there) = next(pair for pair in pairs if pair[1][0] != pair[1][1])
                raise UserError(
                    f"{first} and {other} number their classes differently ({len(self.classes)} and {len(names)} "
                    f"names): class {number} is {here!r} and {there!r}."
                )

    def open(self, spec: str, is_train: bool) -> Source:
        """Open a local set, and check its labels."""
        source = open_source(spec, is_train, self.fields)
        labels = source.labels()
        wrong = ((labels < 0) | (labels >= self.num_classes)).nonzero()[0]
        if len(wrong):
            first = int(wrong[0])
            raise UserError(
                f"label {labels[first]} of {source.name(first)} is out of range; expected 0 to {self.num_classes - 1} "
                f"(data.num_classes={self.num_classes}). {len(wrong)} of {len(labels)} labels are."
            )
        return source

    def train_dataloader(self) -> DataLoader:
        """Make the training loader, from the position that training has reached."""
        if self.train_source is None:
            return self._stream(self.train_spec, self.train_transform, self.steps_per_epoch)
        batches = self.train_batches(self.train_source.shard_sizes)
        samples = ImageSamples(self.train_source, self.train_transform, self.seed, self.max_pixels)
        return self.make_loader(samples, batches, Collate(self.image_size))

    def val_dataloader(self) -> DataLoader:
        """Make the evaluation loader."""
        if self.val_source is None:
            if isinstance(self.trainer.strategy, FSDP2Strategy):
                raise UserError("data.val cannot be a stream under FSDP, whose ranks must take equally many batches.")
            return self._stream(self.val_spec, self.eval_transform, None)
        samples = ImageSamples(self.val_source, self.eval_transform, self.seed, self.max_pixels)
        return self.make_loader(samples, self.eval_batches(len(self.val_source)), Collate(self.image_size))

    test_dataloader = predict_dataloader = val_dataloader

    def _stream(self, spec: str, transform, num_steps: int | None) -> DataLoader:
        sample = StreamedSample(
            transform, self.seed + self.rank, self.fields, self.max_pixels, partial(classified, self.num_classes)
        )
        return self.stream(spec, sample, Collate(self.image_size), num_steps)

    def state_dict(self) -> dict:
        """Save the position in the training data, and the names of the classes."""
        return super().state_dict() | {"classes": self.classes}

    def load_state_dict(self, state_dict: dict) -> None:
        """Take over the position of a checkpoint, and compare the names of its classes with those of the data."""
        super().load_state_dict(state_dict if "epoch" in state_dict else {})
        self._compare_classes(state_dict.get("classes"))
