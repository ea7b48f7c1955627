"""Unreadable images: skipped, reported once each, and limited."""

from dctrain.errors import UserError

from .samples import ImageBatch

ALWAYS_ALLOWED = 10  # of a limit that is a fraction; but never more than half of a set


class BadImages:
    """The unreadable images of one set, as one rank sees it.

    Args:
        limit: Most of them: a number, or a fraction of the set.
        size: Images of the set; None for a stream, of which those seen so far are taken.
        share: Those of them that this rank can see.

    Attributes:
        names: What they are called.
    """

    def __init__(self, limit: int | float, size: int | None, share: int | None) -> None:
        self.limit, self.size, self.share = limit, size, share
        self.names: set[str] = set()
        self._num_seen = 0

    @property
    def allowed(self) -> int:
        """Most images that may be unreadable."""
        size, share = (self._num_seen, self._num_seen) if self.size is None else (self.size, self.share)
        by_limit = self.limit if isinstance(self.limit, int) else max(ALWAYS_ALLOWED, int(self.limit * size))
        is_early = self.size is None and share < 2 * ALWAYS_ALLOWED
        return by_limit if is_early else min(by_limit, share // 2)

    def note(self, batch: ImageBatch) -> None:
        """Count and report the unreadable images of a batch.

        Raises:
            UserError: If they have become too many.
        """
        self._num_seen += len(batch.names) + len(batch.skipped)
        for name, why in batch.skipped:
            if name not in self.names:
                self.names.add(name)
                print(f"skipped an unreadable image ({len(self.names)} so far): {name}: {why}", flush=True)
        if len(self.names) > self.allowed:
            last = f"; one of them: {', '.join(batch.skipped[-1])}" if batch.skipped else ""
            raise UserError(
                f"{len(self.names)} images could not be read; of this set at most {self.allowed} may be so "
                f"(data.max_bad_images={self.limit}){last}"
            )
