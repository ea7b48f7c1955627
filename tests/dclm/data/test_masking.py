"""Masking: fraction, replacement tokens, whole spans, and dependence on the key."""

import numpy as np
import pytest

from dclm.data import TokenDataModule
from dclm.data.masking import Masking
from dclm.loss import IGNORED
from dctrain.data.sampler import SampleRef
from dctrain.errors import UserError

from .corpora import numbered_corpus

EOS, VOCAB = 0, 1000


def masked(span: float = 1, fraction: float = 0.15, length: int = 200, rows: int = 400):
    random = np.random.default_rng(1)
    ids = random.integers(1, VOCAB, (rows, length))
    ids[:, ::20] = EOS
    found = [Masking(fraction, span, VOCAB, (EOS,))(row, (3, 0, i)) for i, row in enumerate(ids)]
    return ids, np.stack([row.input_ids for row in found]), np.stack([row.targets for row in found])


@pytest.mark.parametrize("span", [1, 2.5, 5])
@pytest.mark.parametrize("fraction", [0.01, 0.15, 0.9])
def test_given_fraction_is_masked_and_other_tokens_are_unchanged(span, fraction):
    ids, inputs, targets = masked(span, fraction)
    asked = targets != IGNORED
    share = fraction * 190  # 200 tokens, of which ten are end tokens
    assert (np.abs(asked.sum(1) - share) < 1).all() and asked.sum(1).mean() == pytest.approx(share, abs=0.1)
    assert np.array_equal(targets[asked], ids[asked]) and np.array_equal(inputs[~asked], ids[~asked])
    assert not asked[ids == EOS].any()


@pytest.mark.parametrize("span", [1, 3.8])
def test_targets_are_80_percent_masked_10_percent_random_10_percent_kept(span):
    ids, inputs, targets = masked(span)
    asked = targets != IGNORED
    hidden, kept = (inputs == VOCAB)[asked], (inputs == ids)[asked]
    assert hidden.mean() == pytest.approx(0.8, abs=0.02) and kept.mean() == pytest.approx(0.1, abs=0.015)
    replaced = inputs[asked][~hidden & ~kept]
    assert replaced.min() < 50 and 950 < replaced.max() < VOCAB and len(set(replaced)) > 300


def test_every_position_is_masked_equally_often():
    asked = masked(1, length=20, rows=4000)[2] != IGNORED
    rates = asked[:, 1:].mean(0)
    assert np.allclose(rates, 3 / 19, atol=0.025) and not asked[:, 0].any()


def test_span_lengths_have_given_mean_and_are_geometric_up_to_ten():
    masking = Masking(0.15, 3.8, VOCAB, (EOS,))
    drawn = np.concatenate([masking._lengths(np.random.default_rng(i), 1000)[:-1] for i in range(40)])
    assert drawn.mean() == pytest.approx(3.8, abs=0.08) and drawn.max() == 10
    rates = np.bincount(drawn, minlength=11)[1:] / len(drawn)
    assert np.allclose(rates, 0.8 ** np.arange(10) * 0.2 / (1 - 0.8**10), atol=0.012)  # distribution of SpanBERT
    assert (Masking(0.15, 1, VOCAB, (EOS,))._lengths(np.random.default_rng(0), 50) == 1).all()


def test_spans_end_at_document_boundaries():
    """Every other token is an end token, so spans have one token each and are replaced independently."""
    ids = np.where(np.arange(4000) % 2, EOS, 5)
    inputs, targets = Masking(0.5, 5, VOCAB, (EOS,))(ids, (0,))
    asked = np.flatnonzero(targets != IGNORED)
    hidden = inputs[asked] == VOCAB
    neighbors = np.diff(asked) == 2
    agree = (hidden[1:] == hidden[:-1])[neighbors].mean()
    assert agree == pytest.approx(0.8**2 + 0.2**2, abs=0.05)


def test_whole_span_is_masked_replaced_or_kept(monkeypatch):
    monkeypatch.setattr(Masking, "_lengths", lambda self, random, count: np.array([4]))
    fates = set()
    for number in range(60):
        ids = np.arange(1, 41)
        inputs, targets = Masking(0.1, 4, VOCAB, (EOS,))(ids, (number,))
        asked = np.flatnonzero(targets != IGNORED)
        assert np.array_equal(asked, np.arange(asked[0], asked[0] + 4))
        fate = {
            ("hidden" if a == VOCAB else "kept" if a == b else "replaced") for a, b in zip(inputs, ids, strict=True)
        }
        fates.add(frozenset(fate - {"kept"} or {"kept"}))
    assert fates == {frozenset({"hidden"}), frozenset({"kept"}), frozenset({"replaced"})}


def test_short_sequences_match_fraction_on_average_and_end_tokens_are_skipped():
    for length in range(1, 5):
        masking = Masking(0.15, 1, VOCAB, (EOS, 9))
        counts = [(masking(np.arange(1, length + 1), (i,)).targets != IGNORED).sum() for i in range(1000)]
        assert np.mean(counts) == pytest.approx(0.15 * length, abs=0.05) and max(counts) == 1
    inputs, targets = Masking(0.9, 1, VOCAB, (EOS, 9))(np.array([EOS, 9, 9, EOS]), (0,))
    assert (targets == IGNORED).all() and inputs.tolist() == [EOS, 9, 9, EOS]


def test_masks_change_with_seed_and_epoch_but_not_in_evaluation(tmp_path):
    folder = numbered_corpus(tmp_path / "c")
    rows = {}
    for seed in (0, 1):
        data = TokenDataModule(str(folder), context_length=32, batch_size=3, seed=seed, mask_fraction=0.15)
        data.setup("fit")
        assert data.vocab_size == data.corpus.vocab_size + 1 and data.bytes_per_token is None
        for epoch in (0, 1):
            rows[seed, epoch] = data.train_samples[SampleRef(4, epoch)].targets.tobytes()
        rows[seed, "again"] = data.train_samples[SampleRef(4, 1)].targets.tobytes()
        rows[seed, "val"] = data.val_samples[SampleRef(0, 0)].targets.tobytes()
    assert len({rows[seed, epoch] for seed in (0, 1) for epoch in (0, 1)}) == 4
    assert rows[0, "again"] == rows[0, 1] and rows[0, "val"] == rows[1, "val"]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"mask_fraction": 0.0}, r"mask_fraction=0.0 must be in \(0, 1\)"),
        ({"mask_fraction": 1}, "mask_fraction=1 must be in"),
        ({"mask_fraction": 0.15, "mask_span": 6}, r"mask_span=6 must be in \[1, 5\]"),
        ({"mask_span": 3}, "mask_span=3 requires mask_fraction"),
        ({"tokens": "tasks", "mask_fraction": 0.15}, "no validation, tokenizer, separate_documents, mask_fraction"),
    ],
)
def test_invalid_masking_options_raise_user_error(options, said):
    with pytest.raises(UserError, match=said):
        TokenDataModule(**options)


def test_vocabulary_too_small_for_mask_token_is_rejected(tmp_path):
    data = TokenDataModule(str(numbered_corpus(tmp_path / "c")), vocab_size=257, mask_fraction=0.15)
    with pytest.raises(
        UserError, match="has a vocabulary of 258 including a mask token; data.vocab_size=257 must be at least"
    ):
        data.setup("fit")
