"""`dclm explain report`: all explanations of a model for a prompt, as one HTML page."""

import torch

from dcmha.analysis import attention_layers, measure_mixing, record_attention
from dctrain.evaluation.run import check_steps, find_dtype, name_models
from dctrain.explain.attribution import AttributionSettings
from dctrain.explain.diversity import explain_diversity
from dctrain.explain.explanation import Explanation, origin_of
from dctrain.explain.html_report import PageSubject, check_size, model_facts, page_path, small_maps, write_page
from dctrain.explain.mixing_report import explain_mixing
from dctrain.utils.files import relative

from ..load import LoadedModel, load_model
from .attribute import KINDS, attribution_of
from .breakdown import breakdown_of
from .prompts import Question, ask


def report(
    checkpoint: str,
    prompt: str,
    target: str | None = None,
    out: str = "report.html",
    steps: int = 32,
    tokenizer: str | None = None,
    device: str = "cpu",
    dtype: str | None = None,
) -> None:
    """Write an HTML page: attention of each head before and after composition, attribution, breakdown, statistics.

    The page is self-contained. The maps of one layer at a time are in memory; in the page they take two bytes per pair
    of tokens and head.

    Args:
        checkpoint: A model, as in `generate`; parts about composition are omitted for plain models.
        prompt: The text.
        target: The token after it, for the attribution; default: the predicted token.
        out: Output file that ends in .html, or a folder for index.html.
        steps: Integration points of the attribution.
        tokenizer: "bytes", a tokenizer.json or a hub name; default: the tokenizer of the checkpoint or folder.
        device: Device, such as cuda.
        dtype: "float32", "bfloat16" or "float16"; default: the dtype of the weights.

    Raises:
        UserError: If a file cannot be read or written, the target is not a single token, or the prompt is too long.
    """
    check_steps(steps)
    model = load_model(checkpoint, tokenizer, dtype=find_dtype(dtype), device=device)
    question = ask(model, prompt, target)
    decoder, (name,) = model.decoder, name_models([checkpoint])
    check_size(sum(layer.num_heads for layer in attention_layers(decoder).values()), question.input_ids.shape[1])
    with torch.inference_mode(), record_attention(decoder, keep=small_maps) as maps:
        decoder.hidden_states(question.input_ids)
    found = [*_of_prompt(model, question, steps), explain_diversity([(name, decoder)])]
    composed = "" if _is_composed(model) else " Plain attention: the model has no composition."
    facts = f"{model_facts(origin_of(checkpoint, decoder), decoder)}{composed}"
    path = page_path(out)
    write_page(path, f"{name}: {prompt[-80:]!r}", facts, PageSubject(question.words[:-1]), maps, found)
    print(relative(path))


def _is_composed(model: LoadedModel) -> bool:
    return any(block.attn.options.is_composed for block in model.decoder.blocks)


def _of_prompt(model: LoadedModel, question: Question, steps: int) -> list[Explanation]:
    """Explain the model for a prompt; without compositions for plain attention."""
    if not _is_composed(model):
        return [
            attribution_of(model, question, AttributionSettings([kind for kind in KINDS if kind != "branches"], steps))
        ]
    with torch.inference_mode(), measure_mixing(model.decoder) as meters:
        model.decoder.hidden_states(question.input_ids)
    composition = "post" if model.decoder.blocks[0].attn.options.post_compose else "pre"
    return [
        attribution_of(model, question, AttributionSettings(KINDS, steps)),
        breakdown_of(model, question.input_ids, question.words[:-1], composition=composition),
        explain_mixing(meters, f"compositions over the prompt's {question.input_ids.shape[1]} tokens"),
    ]
