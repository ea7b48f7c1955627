"""Retrieval at 1: how often the nearest text is one of an image's own, and the nearest image one of a text's own."""

# N images, M texts, E embedding width, T tokens

import torch
from torch import Tensor
from torchmetrics import Metric

CHUNK = 1024  # rows whose cosines with all others are held at once


class RetrievalAt1(Metric):
    """Takes in embedded images with their texts; images that have a text in common are each other's, too."""

    full_state_update = False

    def __init__(self) -> None:
        super().__init__()
        for name in ("images", "texts", "keys", "owners", "counts"):
            self.add_state(name, default=[], dist_reduce_fx="cat")

    def update(self, images: Tensor, texts: Tensor, input_ids: Tensor, owners: Tensor) -> None:
        """Take in a batch.

        Args:
            images: [B, E], of length 1.
            texts: [M, E], likewise.
            input_ids: Their tokens [M, T]; texts of the same tokens are the same.
            owners: Which image of the batch each is of [M].
        """
        self.images.append(images.float())
        self.texts.append(texts.float())
        self.keys.append(input_ids)
        self.owners.append(owners)
        self.counts.append(torch.tensor([[len(images), len(texts)]], device=images.device))

    def compute(self) -> dict[str, Tensor]:
        """Return the share of images whose nearest text is theirs, and of texts whose nearest image is.

        NaN if there are none, or an embedding is NaN.
        """
        if len(self.counts) == 0:
            return dict.fromkeys(("image_to_text", "text_to_image"), torch.tensor(torch.nan, device=self.device))
        images, texts, keys, owners, counts = (
            torch.cat(list(part)) if isinstance(part, list) else part
            for part in (self.images, self.texts, self.keys, self.owners, self.counts)
        )
        starts = counts[:, 0].cumsum(0) - counts[:, 0]
        owners = owners + starts.repeat_interleave(counts[:, 1])
        if len(images) == 0 or len(texts) == 0 or images.isnan().any() or texts.isnan().any():
            return dict.fromkeys(("image_to_text", "text_to_image"), torch.tensor(torch.nan, device=images.device))
        kinds = keys.unique(dim=0, return_inverse=True)[1]
        own = owners * len(kinds) + kinds  # a number for each pair of an image and a text of its own
        best_text = torch.arange(len(images), device=images.device) * len(kinds) + kinds[_nearest(images, texts)]
        best_image = _nearest(texts, images) * len(kinds) + kinds
        return {
            "image_to_text": torch.isin(best_text, own).float().mean(),
            "text_to_image": torch.isin(best_image, own).float().mean(),
        }


def _nearest(queries: Tensor, keys: Tensor) -> Tensor:
    """Tell which row of `keys` each row of `queries` is nearest to."""
    return torch.cat([(part @ keys.mT).argmax(1) for part in queries.split(CHUNK)])
