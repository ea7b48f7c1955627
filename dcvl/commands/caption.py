"""`dcvl caption`: generates captions of images."""

from collections.abc import Sequence

from dclm.sampling import Sampling
from dctrain.errors import UserError, as_user_error
from dctrain.evaluation.run import check_at_least_one

from ..captioning import generate_captions
from ..load import load_pair
from .images import batches, check_captioner, find_images


def caption(
    checkpoint: str,
    images: Sequence[str],
    max_new_tokens: int | None = None,
    temperature: float = 0.0,
    top_p: float | None = None,
    seed: int | None = None,
    num_beams: int = 1,
    batch_size: int = 16,
    device: str = "cpu",
) -> None:
    """Generate a caption of each image; prints one line per image: file, tab, caption.

    Args:
        checkpoint: A .ckpt file or run of `dcvl fit`, or a folder written by `export`.
        images: Image files, or folders of images.
        max_new_tokens: Maximum tokens per caption; default: the context length.
        temperature: Sampling temperature; 0 for greedy decoding.
        top_p: Nucleus sampling: smallest set of top tokens whose probabilities sum to p.
        seed: Seed of sampling; samples also depend on `batch_size`.
        num_beams: Number of beams; above 1 for beam search by log-probability per token.
        batch_size: Images per batch.
        device: Device, such as cuda.
    """
    check_at_least_one(max_new_tokens=max_new_tokens, batch_size=batch_size, num_beams=num_beams)
    with as_user_error():
        Sampling(temperature, None, top_p)  # checks both options before loading
    files, pair = find_images(images), load_pair(checkpoint, device)
    most = pair.encode.context_length - 1
    if max_new_tokens is not None and max_new_tokens > most:
        raise UserError(f"{max_new_tokens=}: expected at most {most}, the limit of the model's context.")
    longest = most if max_new_tokens is None else max_new_tokens
    check_captioner(pair)
    for number, (part, batch) in enumerate(batches(pair, files, batch_size)):
        options = {"top_p": top_p, "seed": None if seed is None else seed + number, "num_beams": num_beams}
        with as_user_error(of=ValueError):
            told = generate_captions(pair.model, batch, pair.tokenizer, longest, temperature, **options)
        for file, text in zip(part, told, strict=True):
            print(f"{file}\t{text}", flush=True)
