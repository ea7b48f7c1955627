"""Decoders on a GPU: training steps with the fused kernels, and a decode step in a CUDA graph."""

import pytest
import torch

from dclm import Decoder, decoder_config

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


def test_405m_training_loss_matches_compiled_implementation():
    """The loss of two layers at full width and length matches `impl="compiled"`, with and without recomputation."""
    losses = {}
    for impl, recompute in (("compiled", False), ("triton", False), ("triton", True)):
        torch.manual_seed(0)
        config = decoder_config("dcformer_pp_405m", num_layers=2, impl=impl)
        decoder = Decoder(config, device="cuda")
        decoder.set_grad_checkpointing(recompute)
        decoder.compile()
        optimizer = torch.optim.AdamW(decoder.parameters(), lr=1e-3)
        tokens = torch.randint(config.vocab_size, (4, 2049), device="cuda")
        for _ in range(3):
            with torch.autocast("cuda", torch.bfloat16):
                loss = decoder(tokens[:, :-1], targets=tokens[:, 1:])
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        losses[impl, recompute] = loss.item()
    expected = losses.pop(("compiled", False))
    assert all(loss == pytest.approx(expected, rel=2e-3) for loss in losses.values()), (expected, losses)


def test_decode_step_in_cuda_graph_matches_eager_step():
    """A captured step that is replayed on new tokens and positions returns the logits of the eager step."""
    config = decoder_config("dcformer_pp_debug", vocab_size=257)
    torch.manual_seed(0)
    decoder = Decoder(config, device="cuda", dtype=torch.bfloat16)
    ids = torch.randint(config.vocab_size, (2, 40), device="cuda")
    expected = decode_all(decoder, ids, None)
    graph = torch.cuda.CUDAGraph()
    torch.testing.assert_close(decode_all(decoder, ids, graph), expected)


@torch.no_grad()
def decode_all(decoder, ids, graph):
    """Return the logits of every token after the first eight, from eager steps or from a captured graph."""
    cache = decoder.make_cache(ids.shape[1])
    decoder.decode(ids[:, :8], cache)
    token, position, logits = ids[:, 8:9].clone(), torch.zeros(1, dtype=torch.long, device="cuda"), []
    for number in range(8, ids.shape[1]):
        token.copy_(ids[:, number : number + 1])
        position.copy_(cache.advance(2, 1, token.device))
        if graph is None or number < 11:  # warm up
            out = decoder.step(token, position, cache)
        elif number == 11:
            with torch.cuda.graph(graph):
                out = decoder.step(token, position, cache)
            graph.replay()
        else:
            graph.replay()
        logits.append(out.clone())
    return torch.stack(logits)
