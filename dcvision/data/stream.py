"""Remote shards (`pipe:` commands, cloud URLs) streamed through webdataset.

Streams guarantee less than local shards: samples are shuffled in a buffer, ranks and workers split the shards (so there
must be enough of them), an epoch is a number of steps instead of every sample once, and a resumed run starts a new
shuffle instead of continuing at the exact position. Evaluation still processes every sample once.
"""

import warnings
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from itertools import islice

import webdataset as wds
from torch import Tensor
from torch.utils.data import DataLoader, get_worker_info

from dctrain.errors import UserError, as_user_error

from .decode import Transform
from .fields import SampleFields
from .samples import Collate, SkippedSample, make_image

SHUFFLE_BUFFER = 5000


class StreamedSample:
    """Converts webdataset's raw samples to samples for `Collate`. A class, so that workers can be spawned.

    Args:
        transform: As in `ImageSamples`.
        seed: Seed of the run.
        fields: Fields of a sample.
        max_pixels: As in `decode`.
        finish: Creates the sample from the image (or the reason why it is unreadable), its other field, name and index.
    """

    def __init__(
        self,
        transform: Transform,
        seed: int,
        fields: SampleFields,
        max_pixels: int,
        finish: Callable[[Tensor | SkippedSample, object, str, int], tuple],
    ) -> None:
        self.transform, self.seed, self.fields, self.max_pixels = transform, seed, fields, max_pixels
        self.finish, self.count = finish, 0

    def __call__(self, raw: dict) -> tuple | SkippedSample:
        name = f"{raw['__url__']}/{raw['__key__']}"
        sample = {field: value for field, value in raw.items() if not field.startswith("__")}
        encoded, field, content = self.fields.pick(sample, name)
        other = self.fields.parse(content, field, name)
        worker = get_worker_info()
        self.count += 1
        number = self.count if worker is None else self.count * worker.num_workers + worker.id
        image = make_image(encoded, name, self.transform, self.max_pixels, self.seed, number)
        return self.finish(image, other, name, number)


def classified(
    num_classes: int, image: Tensor | SkippedSample, label: int, name: str, count: int
) -> tuple[Tensor, int, str] | SkippedSample:
    """Create the sample of an image and its class number.

    Raises:
        UserError: If the class number is out of range.
    """
    if not 0 <= label < num_classes:
        raise UserError(f"label {label} of {name} is out of range; expected 0 to {num_classes - 1}.")
    return image if isinstance(image, SkippedSample) else (image, label, name)


def _with_user_errors(samples: Iterator) -> Iterator:
    """Convert webdataset's errors for streams that fail, are truncated or are not tar files."""
    with as_user_error("a stream of shards"):
        yield from samples


def stream_loader(
    urls: list[str],
    sample: StreamedSample,
    *,
    collate: Collate,
    batch_size: int,
    num_workers: int,
    rank: int,
    world_size: int,
    num_steps: int | None,
    seed: int,
) -> DataLoader:
    """Create a loader of a stream.

    Args:
        urls: Shards.
        sample: Creates a sample.
        collate: Creates a batch.
        batch_size: Samples per rank and step.
        num_workers: Loader workers per rank.
        rank: Index of this rank among those that split the data.
        world_size: Number of ranks that split the data.
        num_steps: Batches per epoch, repeating shards if necessary (training); None for one pass (evaluation).
        seed: Seed of the shuffle.

    Raises:
        UserError: If there are fewer shards than ranks x workers.
    """
    splits = world_size * max(num_workers, 1)
    if len(urls) < splits:
        raise UserError(
            f"a stream of {len(urls)} shards cannot be split over {world_size} ranks x {max(num_workers, 1)} workers; "
            f"use at least {splits} shards, or fewer workers (data.num_workers)."
        )
    training = num_steps is not None
    dataset = wds.WebDataset(
        urls,
        nodesplitter=partial(_of_rank, rank=rank, world_size=world_size),
        shardshuffle=len(urls) if training else False,
        detshuffle=training,
        seed=seed,
        empty_check=True,
    )
    if training:
        dataset = dataset.shuffle(SHUFFLE_BUFFER, initial=SHUFFLE_BUFFER // 5).repeat()
    dataset = (
        dataset.map(sample).compose(_with_user_errors).batched(batch_size, collation_fn=collate, partial=not training)
    )
    loader = wds.WebLoader(dataset, batch_size=None, num_workers=num_workers, persistent_workers=num_workers > 0)
    if not training:
        return loader
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*with_length")  # the length does not limit the epoch; with_epoch does
        return loader.with_epoch(num_steps).with_length(num_steps)


def _of_rank(urls: Iterable, rank: int, world_size: int) -> Iterator:
    """Select the shards of a rank."""
    return islice(urls, rank, None, world_size)
