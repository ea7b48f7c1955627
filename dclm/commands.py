"""Subcommands of `dclm` for trained models."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from dctrain.checkpointing.checkpoint import check_no_run, make_folder
from dctrain.errors import UserError, as_user_error
from dctrain.utils.files import write_json

from .data.tokenizers import BYTES, SubwordTokenizer
from .hub import save_pretrained, why_not_published
from .load import load_model
from .sampling import Sampling
from .synthetic_tasks import TASKS, make_suite, write_texts
from .synthetic_tasks.stream import CAST, TRAINED, UNSEEN
from .synthetic_tasks.tasks import SUITE
from .text_generation import continue_text


def generate(
    checkpoint: str,
    prompt: Sequence[str],
    tokenizer: str | None = None,
    max_new_tokens: int = 200,
    temperature: float = 0.8,
    top_k: int | None = None,
    top_p: float | None = 0.95,
    stop_at_eos: bool = True,
    stop: Sequence[str] = (),
    seed: int | None = None,
    device: str = "cpu",
    compile: bool = False,
) -> None:
    """Generate continuations of prompts; a single one is streamed.

    Args:
        checkpoint: A .ckpt file, the folder of a run, or a folder of a DCFormer, DCPythia, Pythia or Llama model.
        prompt: Prompts, processed as one batch; a prompt that starts with a dash is given as --prompt=-text.
        tokenizer: "bytes", a tokenizer.json or a hub name; default: the tokenizer of the checkpoint or folder.
        max_new_tokens: Maximum number of new tokens per prompt.
        temperature: Sampling temperature; 0 for greedy decoding.
        top_k: Sample among the top k tokens.
        top_p: Nucleus sampling: smallest set of top tokens whose probabilities sum to p.
        stop_at_eos: Stop at the tokenizer's end-of-text token.
        stop: Stop before any of these strings.
        seed: Seed of sampling.
        device: Device, such as cuda.
        compile: Compile the decode step.
    """
    with as_user_error():
        sampling = Sampling(temperature, top_k, top_p)
    decoder, words = load_model(checkpoint, tokenizer, device=device)
    options = {"stop_at_eos": stop_at_eos, "stop_strings": stop, "seed": seed, "compile": compile}
    steps = continue_text(decoder, words, list(prompt), max_new_tokens, sampling, **options)
    if len(prompt) == 1:
        print(prompt[0], end="", flush=True)
        for (text,) in steps:
            print(text, end="", flush=True)
        print()
        return
    rows = ["".join(parts) for parts in zip(*steps, strict=True)]
    for start, text in zip(prompt, rows, strict=True):
        print(f"{start}{text}\n{'-' * 20}")


def export(checkpoint: str, out: str, native: bool = False) -> None:
    """Export a trained model to a folder, with its tokenizer unless that is bytes.

    The format is that of the published models if it supports the model, otherwise this package's own format.
    `dclm.huggingface` makes both available to `transformers`.

    Args:
        checkpoint: A .ckpt file, or the folder of a run.
        out: Output folder; must not contain a model.
        native: Always use this package's own format.
    """
    check_no_run(out)
    decoder, tokenizer = load_model(checkpoint)
    with as_user_error():
        if not native and (reason := why_not_published(decoder.config)) is not None:
            print(f"exported in the native format, because the published format does not support the model: {reason}")
            native = True
        save_pretrained(decoder, out, native=native)
    if tokenizer.spec == BYTES:
        print("the tokenizer is bytes: use --tokenizer bytes with this folder")
    else:
        _write_tokenizer(Path(out), tokenizer)
    print(f'exported to {out}; load with dclm.load_pretrained("{out}")')


def _write_tokenizer(folder: Path, tokenizer: SubwordTokenizer) -> None:
    """Write the tokenizer in Hugging Face's format, and the end-of-text token for its generation."""
    (folder / "tokenizer.json").write_text(tokenizer.spec)
    ends = dict.fromkeys(("bos_token", "eos_token", "pad_token"), tokenizer.eos_token)
    write_json(folder / "tokenizer_config.json", {"tokenizer_class": "PreTrainedTokenizerFast"} | ends)
    path = folder / "config.json"
    ids = dict.fromkeys(("bos_token_id", "eos_token_id"), tokenizer.eos_id)
    write_json(path, json.loads(path.read_text()) | ids)


def suite(out: str, seed: int = 0, combinations: Literal["all", "trained", "unseen"] = "all") -> None:
    """Write the synthetic task suite: 74 tasks, each an attention pattern with a transformation, 12 texts per task.

    Args:
        out: Output file (JSONL), for `dclm evaluate --suites`.
        seed: Seed of names and words.
        combinations: Combinations of pattern and transformation: "all", or, of the easier tasks of
            `data.tokens: tasks`, those that occur in training ("trained") or do not ("unseen").
    """
    if seed < 0:
        raise UserError(f"seed={seed}: expected at least 0.")
    path = Path(out)
    if path.exists():
        raise UserError(f"{out} already exists; nothing was overwritten.")
    make_folder(str(path.parent))
    tasks, cast = {"all": (TASKS, SUITE), "trained": (TRAINED, CAST), "unseen": (UNSEEN, CAST)}[combinations]
    write_texts(path, texts := make_suite(seed, tasks, cast=cast))
    print(f"{out}: {len(texts)} texts of {len(tasks)} tasks")
