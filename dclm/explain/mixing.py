"""`dclm explain mixing`: composition statistics of a language model over texts."""

# T tokens

from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor
from tqdm import tqdm

from dcmha.analysis import measure_mixing
from dctrain.checkpointing.checkpoint import make_folder
from dctrain.errors import UserError, as_user_error
from dctrain.evaluation.run import check_at_least_one, find_dtype
from dctrain.explain.explanation import origin_of, write_explanation
from dctrain.explain.mixing_report import explain_mixing

from ..data.texts import find_inputs, read_documents
from ..evaluation.measures import PILE_KEY
from ..load import LoadedModel, load_model


def mixing(
    checkpoint: str,
    texts: str,
    tokens: int = 65536,
    context_length: int | None = None,
    out: str = "mixing",
    text_key: str = "text",
    tokenizer: str | None = None,
    batch_size: int = 1,
    device: str = "cpu",
    dtype: str | None = None,
) -> None:
    """Report the size of the branches of each composition, its effective rank, and its dependence on the tokens.

    Texts are concatenated and split into rows of the context length. In addition to the model, one layer at a time
    needs nine H x H matrices per token of a batch: 75 MB for 32 heads and 2048 tokens.

    Args:
        checkpoint: A model of this project, as in `evaluate`.
        texts: A file or folder of texts.
        tokens: Maximum number of tokens.
        context_length: Tokens per row. Default: the model's.
        out: Folder for mixing.csv and mixing.png.
        text_key: Key of the text in records.
        tokenizer: "bytes", a tokenizer.json or a hub name; default: the tokenizer of the checkpoint or folder.
        batch_size: Rows per batch.
        device: Device, such as cuda.
        dtype: "float32", "bfloat16" or "float16"; default: the dtype of the weights.

    Raises:
        UserError: If an input cannot be read, or the model composes nothing.
    """
    asked = locals().copy()
    folder = make_folder(out)
    check_at_least_one(tokens=tokens, context_length=context_length, batch_size=batch_size)
    model = load_model(checkpoint, tokenizer, dtype=find_dtype(dtype), device=device)
    length = min(context_length or model.decoder.config.context_length, tokens)
    rows = _rows(model, Path(texts), text_key, length, tokens)
    with as_user_error(checkpoint, ValueError), torch.inference_mode(), measure_mixing(model.decoder) as meters:
        for start in tqdm(range(0, len(rows), batch_size), "rows", unit="batch", leave=False):
            model.decoder.hidden_states(rows[start : start + batch_size].to(model.decoder.device))
    write_explanation(
        explain_mixing(meters, f"compositions over {rows.numel()} tokens of {Path(texts).name}"),
        folder,
        [origin_of(checkpoint, model.decoder)],
        asked,
    )


def _rows(model: LoadedModel, path: Path, text_key: str, length: int, count: int) -> Tensor:
    """Encode texts with end tokens, and split them into rows [N, T]; an incomplete row is dropped.

    Raises:
        UserError: If there are too few tokens for a row.
    """
    tokenizer = model.tokenizer
    ids: list[int] = []
    for text in _texts(path, text_key):
        ids += [*tokenizer.begin_ids, *tokenizer.encode([text])[0].tolist(), tokenizer.eos_id]
        if len(ids) >= count:
            break
    rows = min(len(ids), count) // length
    if not rows:
        raise UserError(f"{path} has {len(ids)} tokens, too few for a row of context_length={length}.")
    return torch.tensor(ids[: rows * length]).view(rows, length)


def _texts(path: Path, text_key: str) -> Iterator[str]:
    for file in find_inputs([path]):
        for document in read_documents(file, text_key, PILE_KEY):
            if document.text:
                yield document.text
