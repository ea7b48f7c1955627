"""Beam search: agreement with exhaustive search, and comparison with greedy decoding."""

from itertools import product

import pytest
import torch

import dclm
from dclm.blocks import CrossContext

V, LONGEST = 5, 4


def made(**overrides) -> dclm.Decoder:
    torch.manual_seed(0)
    shape = {"dim": 32, "num_layers": 2, "num_heads": 4, "mlp_dim": 48, "vocab_size": V, "context_length": 16}
    config = dclm.decoder_config("dcformer_pp_debug", **shape | {"windows": (3, None), "init_std": 0.3} | overrides)
    return dclm.Decoder(config, dtype=torch.float64).eval()


def prompts(rows: int) -> torch.Tensor:
    return torch.randint(V, (rows, 3), generator=torch.Generator().manual_seed(1))


def every_continuation(stops: tuple[int, ...]) -> list[tuple[int, ...]]:
    """Return all continuations that end with their first stop token or have the maximum length."""
    found = dict.fromkeys(product(range(V), repeat=LONGEST))
    cut = (
        next((tokens[: number + 1] for number, token in enumerate(tokens) if token in stops), tokens)
        for tokens in found
    )
    return list(dict.fromkeys(cut))


def log_probabilities(decoder: dclm.Decoder, prompt: torch.Tensor, rows: list[tuple[int, ...]], context) -> list[float]:
    """Return the log-probability of each row of tokens after the prompt, computed in one padded batch."""
    lengths = torch.tensor([len(tokens) for tokens in rows])
    ids = torch.tensor([[*prompt.tolist(), *tokens, *[0] * (LONGEST - len(tokens))] for tokens in rows])
    if context is not None:
        context = CrossContext(context.tokens.expand(len(rows), -1, -1))
    logs = decoder(ids, context=context).log_softmax(-1)[:, len(prompt) - 1 : -1]
    found = logs.gather(2, ids[:, len(prompt) :, None])[..., 0]
    return found.masked_fill(torch.arange(LONGEST) >= lengths[:, None], 0.0).sum(1).tolist()


@torch.no_grad()
@pytest.mark.parametrize(("penalty", "stops"), [(0.0, (2,)), (1.0, (2,)), (0.7, (1, 3)), (1.0, ())])
def test_wide_beam_matches_exhaustive_search(penalty, stops):
    decoder = made(context_dim=12, cross_layers=1)
    ids, context = prompts(3), CrossContext(torch.randn(3, 7, 12, dtype=torch.float64))
    found = dclm.beam_search(decoder, ids, LONGEST, V**3, length_penalty=penalty, stop_tokens=stops, context=context)
    for row, (prompt, got) in enumerate(zip(ids, found, strict=True)):
        own = CrossContext(context.tokens[row : row + 1])
        every = every_continuation(stops)
        logs = log_probabilities(decoder, prompt, every, own)
        scores = {tokens: value / len(tokens) ** penalty for tokens, value in zip(every, logs, strict=True)}
        assert tuple(got[len(prompt) :].tolist()) == max(scores, key=scores.get)


@torch.no_grad()
def test_beam_search_is_never_worse_than_greedy_decoding():
    decoder, ids = made(), prompts(6)

    def scores(found):
        new = [tuple(row[ids.shape[1] :].tolist()) for row in found]
        return torch.tensor([log_probabilities(decoder, p, [row], None)[0] for p, row in zip(ids, new, strict=True)])

    greedy = scores(dclm.generate(decoder, list(ids), LONGEST, stop_tokens=(4,)))
    one, four = (
        scores(dclm.beam_search(decoder, ids, LONGEST, beams, stop_tokens=(4,), length_penalty=0.0)) for beams in (1, 4)
    )
    assert (one >= greedy).all() and (four >= greedy).all() and four.sum() > one.sum()


@pytest.mark.parametrize(
    ("arguments", "options", "message"),
    [
        ((LONGEST, 0), {}, "num_beams=0"),
        ((0, 2), {}, "max_new_tokens=0"),
        ((LONGEST, 2), {"length_penalty": -1.0}, "length_penalty=-1.0"),
        ((LONGEST, 2), {"stop_tokens": (V,)}, "stop_tokens has 5"),
    ],
)
def test_invalid_arguments_raise_value_error(arguments, options, message):
    with pytest.raises(ValueError, match=message):
        dclm.beam_search(made(), prompts(1), *arguments, **options)
    with pytest.raises(ValueError, match="the cache is empty"):
        made().make_cache(4).repeat(2)
