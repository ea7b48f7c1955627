"""ImageData: base of the data modules of images, with sources, streams and unreadable images."""

from collections.abc import Callable, Sized

from lightning.pytorch.trainer.states import TrainerFn
from torch.utils.data import DataLoader

from dctrain.data.datamodule import ResumableDataModule
from dctrain.errors import UserError

from .bad_images import BadImages
from .sources import stream_urls
from .stream import StreamedSample, stream_loader


class ImageData(ResumableDataModule):
    """Base of the data modules of images. Subclasses open sources and create samples from them.

    Args:
        train: Training set, in the notation of the subclass.
        val: Validation set, likewise.
        stream_samples: Samples per epoch if `train` is a remote stream.
        max_bad_images: Maximum unreadable images: a number, or a fraction of the set.
        **kwargs: Arguments of `ResumableDataModule`.
    """

    def __init__(
        self, train: str, val: str, stream_samples: int | None, max_bad_images: int | float, **kwargs: int
    ) -> None:
        super().__init__(sample_noun="images", **kwargs)
        self.train_spec, self.val_spec = train, val
        if stream_samples is not None and stream_samples < 1:
            raise UserError(f"{stream_samples=} must be at least 1.")
        self.stream_samples, self.max_bad_images = stream_samples, max_bad_images
        self.train_source: Sized | None = None
        self.val_source: Sized | None = None
        self.bad_images: dict[bool, BadImages] = {}  # for training, and for evaluation

    def open(self, spec: str, is_train: bool) -> Sized:
        """Open a local set, and check it."""
        raise NotImplementedError

    def prepare_data(self) -> None:
        """Download, write and index the required local sets, once per machine."""
        is_fit = self.trainer is None or self.trainer.state.fn == TrainerFn.FITTING
        for spec, is_train in ((self.train_spec, True), (self.val_spec, False)):
            if stream_urls(spec) is None and (is_fit or not is_train):
                self.index(spec, is_train)

    def index(self, spec: str, is_train: bool) -> None:
        """Download, write and index a local set."""
        self.open(spec, is_train)

    def setup(self, stage: str) -> None:
        """Open the data sets of a stage."""
        self.check_trainer()
        if stage == "fit":
            self._open_train()
            self.check_steps()
        if self.val_source is None and stream_urls(self.val_spec) is None:
            self.val_source = self.open(self.val_spec, is_train=False)

    def _open_train(self) -> None:
        if self.train_source is None and stream_urls(self.train_spec) is None:
            self.train_source = self.open(self.train_spec, is_train=True)

    def count_samples(self) -> int:
        """Count the samples of the training set; a local set is opened."""
        self._open_train()
        return self.num_samples

    @property
    def num_samples(self) -> int:
        """Number of samples in the training set, or per epoch of a stream."""
        if self.train_source is not None:
            return len(self.train_source)
        if self.stream_samples is None:
            raise UserError("data.stream_samples=None: expected the samples per epoch, because data.train is a stream.")
        return self.stream_samples

    def stream(self, spec: str, sample: StreamedSample, collate: Callable, num_steps: int | None) -> DataLoader:
        """Create a loader of a remote set; arguments as in `stream_loader`."""
        return stream_loader(
            stream_urls(spec),
            sample,
            collate=collate,
            batch_size=self.batch_size,
            num_workers=self.num_workers,
            rank=self.rank,
            world_size=self.world_size,
            num_steps=num_steps,
            seed=self.seed,
        )

    def on_before_batch_transfer(self, batch, dataloader_idx: int):
        """Report unreadable images; stop the run above the limit."""
        is_train = self.trainer is not None and self.trainer.training
        if is_train not in self.bad_images:
            source = self.train_source if is_train else self.val_source
            size = None if source is None else len(source)
            # in training a rank gets different images in every epoch, in validation always the same
            share = size if is_train or size is None else -(-size // self.world_size)
            self.bad_images[is_train] = BadImages(self.max_bad_images, size, share)
        self.bad_images[is_train].note(batch)
        return batch
