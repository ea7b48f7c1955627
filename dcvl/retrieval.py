"""Recall at 1 of image-to-text and text-to-image retrieval."""

# N images, M texts, E embedding width, T tokens

import torch
from torch import Tensor
from torchmetrics import Metric

CHUNK = 1024  # rows per block of cosine similarities


class RetrievalAt1(Metric):
    """Recall at 1; images with a common text count as matches for each other."""

    full_state_update = False

    def __init__(self) -> None:
        super().__init__()
        for name in ("images", "texts", "keys", "owners", "counts"):
            self.add_state(name, default=[], dist_reduce_fx="cat")

    def update(self, images: Tensor, texts: Tensor, input_ids: Tensor, owners: Tensor) -> None:
        """Add a batch.

        Args:
            images: Normalized image embeddings [B, E].
            texts: Normalized text embeddings [M, E].
            input_ids: Tokens of the texts [M, T]; texts with the same tokens are equal.
            owners: Index of each text's image in the batch [M].
        """
        self.images.append(images.float())
        self.texts.append(texts.float())
        self.keys.append(input_ids)
        self.owners.append(owners)
        self.counts.append(torch.tensor([[len(images), len(texts)]], device=images.device))

    def compute(self) -> dict[str, Tensor]:
        """Return the fraction of images whose nearest text matches, and of texts whose nearest image matches.

        NaN without data, or if an embedding is NaN.
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
        own = owners * len(kinds) + kinds  # index of each pair of an image and its text
        best_text = torch.arange(len(images), device=images.device) * len(kinds) + kinds[_nearest(images, texts)]
        best_image = _nearest(texts, images) * len(kinds) + kinds
        return {
            "image_to_text": torch.isin(best_text, own).float().mean(),
            "text_to_image": torch.isin(best_image, own).float().mean(),
        }


def _nearest(queries: Tensor, keys: Tensor) -> Tensor:
    """Return the nearest row of `keys` for each row of `queries`."""
    return torch.cat([(part @ keys.mT).argmax(1) for part in queries.split(CHUNK)])
