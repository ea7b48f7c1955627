"""Contrastive losses, compared with the definitions in the papers."""

import math

import pytest
import torch
import torch.nn.functional as F

from dcvl.contrastive import ContrastiveBatch, contrastive_loss

SCALE, BIAS = torch.tensor(3.0, dtype=torch.float64), torch.tensor(-1.5, dtype=torch.float64)


def made(count: int = 5) -> ContrastiveBatch:
    torch.manual_seed(0)
    images, texts = (F.normalize(torch.randn(count, 7, dtype=torch.float64), dim=1) for _ in range(2))
    return ContrastiveBatch(
        images, texts, torch.arange(count)[:, None].repeat(1, 3), torch.ones(count, dtype=torch.bool)
    )


def test_sigmoid_loss_matches_definition():
    pairs = made()
    expected = 0.0
    for i, image in enumerate(pairs.images):
        for j, text in enumerate(pairs.texts):
            logit = float(image @ text * SCALE + BIAS)
            expected += math.log1p(math.exp(-logit if i == j else logit))
    assert float(contrastive_loss("sigmoid", pairs, SCALE, BIAS)) == pytest.approx(expected / 5, rel=1e-12)


def test_softmax_loss_matches_definition():
    pairs = made()
    logits, labels = pairs.images @ pairs.texts.mT * SCALE, torch.arange(5)
    expected = (F.cross_entropy(logits, labels) + F.cross_entropy(logits.mT, labels)) / 2
    torch.testing.assert_close(contrastive_loss("softmax", pairs, SCALE, None), expected)


@pytest.mark.parametrize("kind", ["sigmoid", "softmax"])
def test_excluded_pairs_do_not_affect_loss(kind):
    pairs = made()
    counts = torch.tensor([True, False, True, True, False])
    fewer = ContrastiveBatch(*(part[counts] for part in pairs))
    found = contrastive_loss(kind, pairs._replace(counts=counts), SCALE, BIAS)
    torch.testing.assert_close(found, contrastive_loss(kind, fewer, SCALE, BIAS))
    none = contrastive_loss(kind, pairs._replace(counts=torch.zeros_like(counts)), SCALE, BIAS)
    assert float(none) == 0.0


def test_repeated_text_is_not_a_negative_example():
    """If two pairs have the same text, the text of one is not a negative example for the image of the other."""
    pairs = made(3)
    pairs.input_ids[2] = pairs.input_ids[0]
    logits = pairs.images @ pairs.texts.mT * SCALE + BIAS
    kept = torch.ones(3, 3, dtype=torch.bool)
    kept[0, 2] = kept[2, 0] = False
    expected = -F.logsigmoid(torch.where(torch.eye(3, dtype=torch.bool), logits, -logits))[kept].sum() / 3
    torch.testing.assert_close(contrastive_loss("sigmoid", pairs, SCALE, BIAS), expected)
    hidden = logits.masked_fill(~kept, -torch.inf)
    expected = (F.cross_entropy(hidden, torch.arange(3)) + F.cross_entropy(hidden.mT, torch.arange(3))) / 2
    torch.testing.assert_close(contrastive_loss("softmax", pairs, SCALE, BIAS), expected)


@pytest.mark.parametrize("kind", ["sigmoid", "softmax"])
def test_gradients_pass_gradcheck(kind):
    pairs = made(4)
    pairs.input_ids[3] = pairs.input_ids[0]
    pairs.counts[1] = False

    def compute(images, texts, scale, bias):
        return contrastive_loss(kind, pairs._replace(images=images, texts=texts), scale, bias)

    inputs = (pairs.images, pairs.texts, SCALE.clone(), BIAS.clone())
    assert torch.autograd.gradcheck(compute, [x.requires_grad_() for x in inputs])
