"""Generation with a decoding cache: one forward pass over the prompts, then one per token."""

# B batch, T tokens of the longest prompt

from collections.abc import Callable, Iterator, Sequence
from numbers import Integral

import torch
import torch.nn.functional as F
from torch import Tensor

from dcmha.checks import check_integers, check_module, is_integer

from .blocks import CrossContext
from .data.tokenizers import Tokenizer
from .decoder import Decoder
from .sampling import Sampling
from .stop_strings import StopStringBuffer

Prompts = Tensor | Sequence[Tensor | Sequence[int]]
Watch = Callable[[list[int]], list[bool]]


MAX_GENERATED_TOKENS = 2**31


def generate(
    decoder: Decoder,
    input_ids: Prompts,
    max_new_tokens: int,
    temperature: float = 0.0,
    *,
    top_k: int | None = None,
    top_p: float | None = None,
    stop_tokens: Sequence[int] = (),
    stop_strings: Sequence[str] = (),
    tokenizer: Tokenizer | None = None,
    context: CrossContext | None = None,
    seed: int | None = None,
    compile: bool = False,
) -> Tensor | list[Tensor]:
    """Generate continuations of prompts.

    Args:
        decoder: The model.
        input_ids: Prompts of the same length [B, T], or a sequence of prompts of any lengths.
        max_new_tokens: Maximum number of new tokens per prompt.
        temperature: Sampling temperature; 0 for greedy decoding.
        top_k: Sample among the top k tokens.
        top_p: Nucleus sampling: smallest set of top tokens whose probabilities sum to p.
        stop_tokens: A row ends with the first of these tokens. None by default.
        stop_strings: A row ends with the token that completes one of these strings. None by default.
        tokenizer: Tokenizer of the model; required for `stop_strings`.
        context: Context of the cross-attention layers, one row per prompt; for models with `cross_layers` only.
        seed: Seed of sampling; None for torch's global generator.
        compile: Compile the decode step: once, and a second time with dynamic sizes if the sizes of prompts change.

    Returns:
        Prompts with their continuations: [B, T + new] for a tensor, where rows that ended early repeat their last
        token; else a list of tensors of different lengths.

    Raises:
        TypeError: If `decoder` is not a `Decoder`.
        ValueError: If the model is bidirectional, a prompt is empty, a token is outside of the vocabulary, the position
            table is too short, the context does not match, an option is out of range, or logits are NaN (on CUDA
            checked for the first token only).
        MemoryError: If the cache cannot be allocated.
    """
    check_module(Decoder, decoder=decoder)
    prompts = check_prompts(decoder, input_ids, max_new_tokens, stop_tokens)
    steps = stream(
        decoder,
        prompts,
        max_new_tokens,
        Sampling(temperature, top_k, top_p),
        stop_tokens=stop_tokens,
        watch=_watch(stop_strings, tokenizer, len(prompts)),
        context=context,
        seed=seed,
        compile=compile,
    )
    new, lengths = _stack(steps, len(prompts))
    if isinstance(input_ids, Tensor):
        return torch.cat([input_ids, new.to(input_ids.device)], 1)
    return [
        torch.cat([prompt, row[:length].to(prompt.device)])
        for prompt, row, length in zip(prompts, new, lengths.tolist(), strict=True)
    ]


def _watch(stop_strings: Sequence[str], tokenizer: Tokenizer | None, num_rows: int) -> Watch | None:
    """Create the function that detects stop strings."""
    if not stop_strings:
        return None
    if tokenizer is None:
        raise ValueError("tokenizer=None: stop_strings require the model's tokenizer.")
    texts = [StopStringBuffer(tokenizer, stop_strings=stop_strings) for _ in range(num_rows)]

    def watch(tokens: list[int]) -> list[bool]:
        for text, token in zip(texts, tokens, strict=True):
            text.add(token)
        return [text.is_ended for text in texts]

    return watch


def _stack(steps: Iterator[tuple[Tensor, Tensor]], num_rows: int) -> tuple[Tensor, Tensor]:
    """Stack steps [B, new]; count the tokens of each row up to its end [B]."""
    tokens, ended = [], []
    for chosen, has_ended in steps:
        tokens.append(chosen)
        ended.append(has_ended)
    if not tokens:
        return torch.empty(num_rows, 0, dtype=torch.long), torch.zeros(num_rows, dtype=torch.long)
    return torch.stack(tokens, 1), 1 + (~torch.stack(ended, 1)[:, :-1]).sum(1)


def check_prompts(
    decoder: Decoder, input_ids: Prompts, max_new_tokens: int, stop_tokens: Sequence[int] = ()
) -> list[Tensor]:
    """Convert prompts to a list of tensors of ids; raise ValueError if they are invalid."""
    if not isinstance(input_ids, Tensor | Sequence) or isinstance(input_ids, str):
        raise ValueError(f"input_ids: expected a tensor [B, T] or a list of prompts, not {type(input_ids).__name__}.")
    if isinstance(input_ids, Tensor) and input_ids.dim() != 2:
        raise ValueError(f"input_ids has shape {list(input_ids.shape)}; expected [B, T], or a list of prompts.")
    if len(input_ids) == 0:
        raise ValueError("input_ids has no prompts.")
    check_integers(least=0, max_new_tokens=max_new_tokens)
    if max_new_tokens > MAX_GENERATED_TOKENS:
        raise ValueError(f"{max_new_tokens=} must be at most {MAX_GENERATED_TOKENS}.")
    if decoder.device.type == "meta":
        raise ValueError("the decoder has no weights: it is on the meta device.")
    if not isinstance(stop_tokens, Sequence):
        raise ValueError(f"{stop_tokens=} must be a sequence of token ids.")
    config = decoder.config
    wrong = [t for t in stop_tokens if not isinstance(t, Integral) or not 0 <= t < config.vocab_size]
    if wrong:
        raise ValueError(f"stop_tokens has {wrong[0]!r}; expected integers from 0 to {config.vocab_size - 1}.")
    prompts = [_as_ids(number, prompt) for number, prompt in enumerate(input_ids)]
    for number, prompt in enumerate(prompts):
        if prompt.dim() != 1 or prompt.numel() == 0:
            raise ValueError(f"prompt {number} has shape {list(prompt.shape)}; expected at least one token id.")
        low, high = int(prompt.min()), int(prompt.max())
        if low < 0 or high >= config.vocab_size:
            wrong = low if low < 0 else high
            raise ValueError(f"prompt {number} has token {wrong}; expected 0 to {config.vocab_size - 1}.")
        if config.position == "learned" and len(prompt) + max_new_tokens > config.context_length:
            raise ValueError(
                f"prompt {number} of {len(prompt)} tokens and max_new_tokens={max_new_tokens} exceed the position "
                f"table of {config.context_length} (context_length)."
            )
    return prompts


def _as_ids(number: int, prompt: Tensor | Sequence[int]) -> Tensor:
    try:
        ids = torch.as_tensor(prompt) if len(prompt) else torch.empty(0, dtype=torch.long)
    except (TypeError, ValueError, RuntimeError) as error:
        raise ValueError(f"prompt {number} is not a sequence of token ids: {error}") from error
    if ids.dtype == torch.bool or ids.is_floating_point() or ids.is_complex():
        raise ValueError(f"prompt {number} has dtype {ids.dtype}; expected integer token ids.")
    return ids.long()


@torch.no_grad()
def stream(
    decoder: Decoder,
    prompts: list[Tensor],
    max_new_tokens: int,
    sampling: Sampling,
    *,
    stop_tokens: Sequence[int] = (),
    watch: Watch | None = None,
    context: CrossContext | None = None,
    seed: int | None = None,
    compile: bool = False,
) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield the new tokens [B] and the finished rows [B] of each step, until all rows are finished or `max_new_tokens`.

    Arguments as in `generate`, with `prompts` from `check_prompts`; `watch` receives the new tokens of each step and
    returns which rows end. A finished row repeats its last token.
    """
    device = decoder.device
    ids, padding = _pad_left(prompts, device)
    cache = decoder.make_cache(ids.shape[1] + max_new_tokens, padding, context)
    if seed is not None and not (is_integer(seed) and -(2**63) <= seed < 2**64):
        raise ValueError(f"{seed=} must be an integer of 64 bits, or None.")
    generator = None if seed is None else torch.Generator(device).manual_seed(int(seed))
    stops = torch.tensor(list(stop_tokens), dtype=torch.long, device=device)
    ended = torch.zeros(len(prompts), dtype=torch.bool, device=device)
    step = torch.compile(decoder.step, fullgraph=True) if compile else decoder.step
    tokens = None
    for number in range(max_new_tokens):
        if number == 0:
            logits = decoder.decode(ids, cache, last_only=True)
        else:
            logits = step(tokens[:, None], cache.advance(len(prompts), 1, device), cache)
        if (number == 0 or device.type == "cpu") and logits.isnan().any():
            raise ValueError(f"the logits of new token {number} have NaN: the weights are damaged or too large.")
        chosen = sampling.choose(logits[:, -1], generator)
        tokens = chosen if tokens is None else torch.where(ended, tokens, chosen)
        if len(stops):
            ended = ended | torch.isin(tokens, stops)
        if watch is not None:
            ended = ended | torch.tensor(watch(tokens.tolist()), device=device)
        yield tokens, ended
        if (len(stops) or watch is not None) and ended.all():
            return


def _pad_left(prompts: list[Tensor], device: torch.device) -> tuple[Tensor, Tensor | None]:
    """Stack prompts with left padding [B, T]; return each row's padding [B], None if there is none."""
    longest = max(len(prompt) for prompt in prompts)
    padding = [longest - len(prompt) for prompt in prompts]
    rows = [F.pad(prompt.to(device), (count, 0)) for prompt, count in zip(prompts, padding, strict=True)]
    return torch.stack(rows), torch.tensor(padding, device=device) if any(padding) else None
