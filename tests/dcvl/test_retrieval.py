"""Retrieval at 1, compared with a search over all images and texts one by one."""

import pytest
import torch
import torch.nn.functional as F

from dcvl.retrieval import RetrievalAt1


def test_retrieval_with_several_captions_and_shared_texts_matches_search():
    """The metric accumulates five batches; a text shared by several images belongs to each of them."""
    torch.manual_seed(0)
    metric, kinds = RetrievalAt1(), F.normalize(torch.randn(6, 3), dim=1)
    images, owned, texts = [], [], []
    for number in range(5):
        owners = torch.cat([torch.arange(4), torch.randint(4, (3,))]).sort().values
        keys = torch.randint(6, (7,))
        embedded = F.normalize(torch.randn(4, 3), dim=1)
        metric.update(embedded, kinds[keys], keys[:, None].repeat(1, 2), owners)
        images += embedded
        texts += keys.tolist()
        owned += zip((owners + 4 * number).tolist(), keys.tolist(), strict=True)
    found = {"image_to_text": 0, "text_to_image": 0}
    for i, image in enumerate(images):
        best = max(texts, key=lambda kind: float(image @ kinds[kind]))
        found["image_to_text"] += (i, best) in owned
    for kind in texts:
        best = max(range(20), key=lambda i: float(images[i] @ kinds[kind]))
        found["text_to_image"] += (best, kind) in owned
    shares = {"image_to_text": found["image_to_text"] / 20, "text_to_image": found["text_to_image"] / 35}
    assert metric.compute() == pytest.approx(shares) and 0 < min(shares.values()) < max(shares.values()) < 1


def test_retrieval_directions_are_counted_separately():
    images, texts = torch.eye(3), torch.tensor([[1.0, 0, 0], [0.9, 0.1, 0], [0, 0, 1]])
    metric = RetrievalAt1()
    metric.update(images, texts, torch.arange(3)[:, None], torch.arange(3))
    assert metric.compute() == pytest.approx({"image_to_text": 1.0, "text_to_image": 2 / 3})


def test_retrieval_without_samples_is_nan():
    metric = RetrievalAt1()
    metric.update(torch.empty(0, 3), torch.empty(0, 3), torch.empty(0, 2, dtype=torch.long), torch.empty(0).long())
    assert all(value.isnan() for value in metric.compute().values())
