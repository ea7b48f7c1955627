"""`dclm explain attribute`: which branches, heads and tokens a prediction is owed to, by integrated gradients."""

# T tokens

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from dctrain.checkpoint import make_folder
from dctrain.errors import told_as
from dctrain.evaluation.run import check_at_least_one, find_dtype
from dctrain.explain.attribution import Attribution, Objective, attribute_branches, attribute_heads, integrate
from dctrain.explain.attribution_report import explain_attribution
from dctrain.explain.explanation import Explanation, origin_of, write_explanation
from dctrain.explain.places import check_kinds

from ..decoder import Decoder
from ..load import LoadedModel, load_model
from .prompts import Question, ask

KINDS = ("branches", "heads", "tokens")


def attribute(
    checkpoint: str,
    prompt: str,
    target: str | None = None,
    over: Sequence[str] = KINDS,
    steps: int = 64,
    out: str = "attribution",
    tokenizer: str | None = None,
    device: str = "cpu",
    dtype: str | None = None,
) -> None:
    """Credit the log-probability of the next token to branches of the compositions, to heads, and to tokens.

    Integrated gradients (Sundararajan et al., 2017; paper, section 4.3): parts are faded in together, from none to all;
    tokens from the embedding of the token that ends a text to their own. Each kind takes two forward passes and
    `steps` forward and backward ones over the prompt.

    Args:
        checkpoint: A model, as `generate` takes it.
        prompt: The text before the token.
        target: The token; the likeliest one if left out.
        over: What is credited, each by itself: "branches", "heads", "tokens".
        steps: Points of the integral; the table tells by how much the credits miss their sum.
        out: Folder for attribution.csv, attribution-sums.csv, attribution.json and attribution.png.
        tokenizer: "bytes", a tokenizer.json or a hub name; by default the one in the checkpoint or folder.
        device: Where to run, such as cuda.
        dtype: "float32", "bfloat16" or "float16"; by default that of the weights.

    Raises:
        UserError: If the model cannot be read or has no such parts, or the target is not one token.
    """
    asked = locals().copy()
    check_kinds("over", over, KINDS)
    check_at_least_one(steps=steps)
    model = load_model(checkpoint, tokenizer, dtype=find_dtype(dtype), device=device)
    found = attribution_of(model, ask(model, prompt, target), over, steps)
    write_explanation(found, make_folder(out), [origin_of(checkpoint, model.decoder)], asked)


def attribution_of(model: LoadedModel, question: Question, over: Sequence[str], steps: int) -> Explanation:
    """Credit the log-probability of a token; arguments as of `attribute`.

    Raises:
        UserError: If the model has no such parts.
    """
    decoder = model.decoder.requires_grad_(False)

    def objective() -> Tensor:
        return decoder(question.input_ids)[0, -1].float().log_softmax(-1)[question.target]

    measures: dict[str, Callable[[], Attribution]] = {
        "branches": lambda: attribute_branches(decoder, objective, steps),
        "heads": lambda: attribute_heads(decoder, objective, steps),
        "tokens": lambda: _attribute_tokens(model, question, objective, steps),
    }
    found = []
    for kind in over:
        with told_as(f"over={kind}", ValueError):
            found.append(measures[kind]())
    what = f"log-probability of {question.words[-1]!r} after {question.prompt[-60:]!r}"
    return explain_attribution(found, what)


def _attribute_tokens(model: LoadedModel, question: Question, objective: Objective, steps: int) -> Attribution:
    """Credit the tokens of the prompt, against the embedding of the token that ends a text."""
    decoder: Decoder = model.decoder
    baseline = decoder.embed.weight[model.tokenizer.eos_id]

    def compute(factors: Tensor) -> Tensor:
        def fade(_module, _args, embedded: Tensor) -> Tensor:
            return torch.lerp(baseline.expand_as(embedded), embedded, factors[:, None].to(embedded.dtype))

        hook = decoder.embed.register_forward_hook(fade)
        try:
            return objective()
        finally:
            hook.remove()

    names = tuple(question.words[:-1])
    return integrate("tokens", ("",) * len(names), names, compute, decoder.device, steps)
