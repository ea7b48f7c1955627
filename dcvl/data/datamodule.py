"""CaptionDataModule: batches of images with captions, exact over ranks, workers and restarts."""

from collections.abc import Sequence
from functools import cached_property, partial

from torch import Tensor
from torch.utils.data import DataLoader

from dclm.data.tokenizers import Tokenizer, open_tokenizer
from dctrain.cli.argument_types import check_types
from dctrain.data.sampler import Permutation
from dctrain.errors import UserError, as_user_error
from dcvision.data.decode import MAX_PIXELS, eval_transform, train_transform
from dcvision.data.image_data import ImageData
from dcvision.data.samples import SkippedSample, make_image
from dcvision.data.sources import stream_urls
from dcvision.data.stream import StreamedSample

from .captions import TEMPLATE, CaptionFields, CaptionSource, check_templates, open_captions
from .samples import (
    CaptionBatch,
    CaptionCollate,
    CaptionedImage,
    CaptionedSamples,
    CaptionEncoder,
    black,
    choose_caption,
)
from .scenes import ENDLESS, NAME, scene_tokenizer


def find_tokenizer(train: str, tokenizer: str | None) -> Tokenizer:
    """Open the tokenizer of a run: that of the scenes, or the given one.

    Raises:
        UserError: If it cannot be opened.
    """
    if tokenizer is not None:
        return open_tokenizer(tokenizer)
    if train.partition(":")[0] != NAME:
        raise UserError(f"data.tokenizer is required for captions of {train!r}.")
    return scene_tokenizer()


def vocabulary_rows(train: str, tokenizer: str | None) -> int:
    """Return the number of embedding rows of the text tower."""
    return find_tokenizer(train, tokenizer).vocab_size


class CaptionDataModule(ImageData):
    """Images with captions.

    Ranks, epochs, resume, streams and unreadable images are handled as in `dcvision.ImageDataModule`. In training one
    random caption per image and epoch is used, in evaluation all captions.

    Args:
        train: Training set in the notation of `dcvl.data.captions`: "scenes", "shards:PATTERN" or "classes:SPEC".
        val: Validation set, likewise; also used by `test`.
        tokenizer: Tokenizer of the captions: "bytes", a `tokenizer.json`, or a hub name; None for that of the scenes.
        context_length: Tokens per text, including begin and end tokens; longer captions are truncated and counted.
        image_size: Side of the square images, in pixels.
        batch_size: Images per rank and step.
        num_workers: Loader workers per rank; 0 loads in the main process.
        seed: Seed of order, augmentation and the choice of captions.
        min_crop_area: Minimum area fraction of a training crop; 1.0 resizes the whole image to a square without
            cropping (in evaluation the smaller side is resized and the center cropped). Must be 1.0 for scenes.
        horizontal_flip: Flip half of the training images; not for scenes, whose captions depend on left and right.
        crop_fraction: Fraction of the resized image's side kept by the central crop of evaluation; 1.0 for scenes.
        val_samples: Number of validation images, sampled deterministically from the set; None for all.
        stream_samples: Samples per epoch if `train` is a remote stream.
        max_bad_images: As in `dcvision.ImageDataModule`.
        max_pixels: Larger images count as unreadable.
        fields: Field names of WebDataset samples, such as {image: "jpg;png", text: caption}.
        templates: Sentences with {} for the class name, the captions of "classes:SPEC".
        hide_images: Replace all images by black, as a baseline without image information.

    Raises:
        UserError: If an argument is out of range, or a data set cannot be opened.
    """

    def __init__(
        self,
        train: str = NAME,
        val: str = NAME,
        tokenizer: str | None = None,
        context_length: int = 16,
        image_size: int = 32,
        batch_size: int = 64,
        num_workers: int = 0,
        seed: int = 0,
        min_crop_area: float = 1.0,
        horizontal_flip: bool = False,
        crop_fraction: float = 1.0,
        val_samples: int | None = None,
        stream_samples: int | None = None,
        max_bad_images: int | float = 0.001,
        max_pixels: int = MAX_PIXELS,
        fields: dict[str, str] | None = None,
        templates: Sequence[str] = (TEMPLATE,),
        hide_images: bool = False,
    ) -> None:
        loading = {"batch_size": batch_size, "num_workers": num_workers, "seed": seed}
        super().__init__(train, val, stream_samples, max_bad_images, **loading)
        self.save_hyperparameters(logger=False)
        check_types(type(self).__init__, self.hparams)
        if not 0 < min_crop_area <= 1 or not 0 < crop_fraction <= 1:
            raise UserError(f"min_crop_area={min_crop_area} and crop_fraction={crop_fraction} must be in (0, 1].")
        if context_length < 3 or image_size < 1 or (val_samples is not None and val_samples < 1):
            raise UserError(
                f"{context_length=} must be at least 3 (begin token, a token, end token), {image_size=} and "
                f"{val_samples=} at least 1."
            )
        check_templates(templates)
        with as_user_error("data.fields"):
            self.fields = CaptionFields(**fields or {})
        self.tokenizer, self.templates = tokenizer, templates
        self.context_length, self.image_size = context_length, image_size
        self.val_samples, self.max_pixels = val_samples, max_pixels
        self.train_transform = train_transform(image_size, min_crop_area, horizontal_flip, 0, 0)
        self.eval_transform = eval_transform(image_size, crop_fraction)
        if train.partition(":")[0] == NAME and (horizontal_flip or min_crop_area < 1):
            raise UserError(
                f"{horizontal_flip=}, {min_crop_area=}: not supported for scenes, whose captions would be wrong."
            )
        if val.partition(":")[0] == NAME and crop_fraction < 1:
            raise UserError(f"{crop_fraction=}: not supported for scenes, whose captions would be wrong.")
        if hide_images:
            self.train_transform = self.eval_transform = partial(black, image_size)
        self._has_reported_cuts = False
        if self.num_val_samples is None and val.partition(":")[0] == NAME:
            raise UserError(f"data.val={val} is endless; data.val_samples is required.")

    @cached_property
    def words(self) -> Tokenizer:
        """The tokenizer."""
        return find_tokenizer(self.train_spec, self.tokenizer)

    @cached_property
    def encode(self) -> CaptionEncoder:
        """The encoder of captions."""
        return CaptionEncoder(self.words, self.context_length)

    def open(self, spec: str, is_train: bool) -> CaptionSource:
        """Open a data set.

        Raises:
            UserError: If it cannot be opened, or is empty.
        """
        source = open_captions(spec, is_train, self.fields, self.templates)
        if len(source) == 0:
            raise UserError(f"{spec} has no images.")
        return source

    def read(self, source: CaptionSource, index: int) -> tuple[Tensor, list[str]]:
        """Read an image with the transform of evaluation, uint8 [3, size, size], and all its captions.

        Raises:
            UserError: If it cannot be read.
        """
        encoded, captions = source.read(index)
        image = make_image(encoded, source.name(index), self.eval_transform, self.max_pixels, index)
        if isinstance(image, SkippedSample):
            raise UserError(f"{image.name} cannot be read: {image.reason}")
        return image, captions

    def setup(self, stage: str) -> None:
        """Open the data sets of a stage; the validation set must be local."""
        if stream_urls(self.val_spec) is not None:
            raise UserError(f"data.val={self.val_spec} is a stream; expected a local set.")
        super().setup(stage)

    @property
    def num_val_samples(self) -> int | None:
        """Number of images in an evaluation; None for all, before they are counted."""
        if self.val_source is None or len(self.val_source) == ENDLESS:
            return self.val_samples
        return min(len(self.val_source), self.val_samples or len(self.val_source))

    def train_dataloader(self) -> DataLoader:
        """Create the training loader, starting at the current position."""
        if self.train_source is None:
            return self._stream()
        batches = self.train_batches(self.train_source.shard_sizes)
        return self.make_loader(
            self._samples(self.train_source, is_train=True), batches, CaptionCollate(self.image_size)
        )

    def val_dataloader(self) -> DataLoader:
        """Create the evaluation loader, in a fixed shuffled order: many sets are sorted by class, and a batch of one
        class would have few distinct pairs.
        """
        size = len(self.val_source)
        batches = self.eval_batches(self.num_val_samples, None if size == ENDLESS else Permutation(size, [0]))
        return self.make_loader(
            self._samples(self.val_source, is_train=False), batches, CaptionCollate(self.image_size)
        )

    test_dataloader = val_dataloader

    def _samples(self, source: CaptionSource, is_train: bool) -> CaptionedSamples:
        transform = self.train_transform if is_train else self.eval_transform
        return CaptionedSamples(source, transform, self.encode, self.seed, self.max_pixels, has_all=not is_train)

    def _stream(self) -> DataLoader:
        seed = self.seed + self.rank
        finish = partial(_captioned, self.encode, seed)
        sample = StreamedSample(self.train_transform, seed, self.fields, self.max_pixels, finish)
        return self.stream(self.train_spec, sample, CaptionCollate(self.image_size), self.steps_per_epoch)

    def on_before_batch_transfer(self, batch: CaptionBatch, dataloader_idx: int) -> CaptionBatch:
        """Report unreadable images and truncated captions; stop the run above the limit of unreadable images."""
        batch = super().on_before_batch_transfer(batch, dataloader_idx)
        if batch.num_cut and not self._has_reported_cuts:
            self._has_reported_cuts = True
            print(f"captions are longer than data.context_length={self.context_length} and are truncated", flush=True)
        return batch

    def fixed(self) -> dict[str, object]:
        """Settings that cannot change when a run is resumed in the middle of an epoch."""
        return super().fixed() | {"context_length": self.context_length}

    def state_dict(self) -> dict:
        """Save the position in the training data, and the tokenizer, so that checkpoints are self-contained."""
        return super().state_dict() | {"tokenizer": self.words.spec}

    def load_state_dict(self, state_dict: dict) -> None:
        """Restore the position of a checkpoint, and check the tokenizer."""
        if state_dict.get("tokenizer", self.words.spec) != self.words.spec:
            raise UserError("the checkpoint was trained with a different data.tokenizer.")
        super().load_state_dict(state_dict if "epoch" in state_dict else {})


def _captioned(
    encode: CaptionEncoder, seed: int, image: Tensor | SkippedSample, captions: list[str], name: str, count: int
) -> CaptionedImage:
    """Create the sample of a streamed image and one of its captions."""
    return CaptionedImage(image, [encode(choose_caption(captions, (seed, count)))], name, is_padding=False)
