"""Limit for unreadable images, which are skipped and reported once each."""

from dctrain.errors import UserError

from .samples import ImageBatch

ALWAYS_ALLOWED = 10  # minimum limit if it is a fraction, but never more than half of a set


class BadImages:
    """Unreadable images of one set on one rank.

    Args:
        limit: Maximum number, or fraction of the set.
        size: Number of images in the set; None for a stream, for which the images seen so far count.
        share: Number of images that this rank processes.

    Attributes:
        names: Names of the unreadable images.
    """

    def __init__(self, limit: int | float, size: int | None, share: int | None) -> None:
        self.limit, self.size, self.share = limit, size, share
        self.names: set[str] = set()
        self._num_seen = 0

    @property
    def allowed(self) -> int:
        """Maximum number of unreadable images."""
        size, share = (self._num_seen, self._num_seen) if self.size is None else (self.size, self.share)
        by_limit = self.limit if isinstance(self.limit, int) else max(ALWAYS_ALLOWED, int(self.limit * size))
        is_early = self.size is None and share < 2 * ALWAYS_ALLOWED
        return by_limit if is_early else min(by_limit, share // 2)

    def note(self, batch: ImageBatch) -> None:
        """Count and report the unreadable images of a batch.

        Raises:
            UserError: If there are too many.
        """
        self._num_seen += len(batch.names) + len(batch.skipped)
        for name, why in batch.skipped:
            if name not in self.names:
                self.names.add(name)
                print(f"skipped an unreadable image ({len(self.names)} so far): {name}: {why}", flush=True)
        if len(self.names) > self.allowed:
            last = f"; one of them: {', '.join(batch.skipped[-1])}" if batch.skipped else ""
            raise UserError(
                f"{len(self.names)} images could not be read; at most {self.allowed} of this set are allowed "
                f"(data.max_bad_images={self.limit}){last}"
            )
