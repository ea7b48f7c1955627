"""Scoring of continuations: the scorer of dclm and lm-evaluation-harness with the Hugging Face model class.

Both process the same requests alternately, with the same random GPT-NeoX weights and the same batch size. There are
three kinds of requests: four answers to a question ("choices"), four one-letter answers to a prompt ("letters"), and a
last word ("last").

python benchmarks/evaluate.py --json benchmarks/results/evaluate_cpu.json
"""

import argparse
import statistics
import tempfile
import time
from importlib.metadata import version
from pathlib import Path

import torch
from lm_eval.models.huggingface import HFLM
from measure import save
from tqdm import tqdm
from transformers import GPTNeoXConfig, GPTNeoXForCausalLM, PreTrainedTokenizerFast

from dclm import load_model
from dclm.data.tokenizers import train_bpe
from dclm.evaluation.scorer import Scorer
from dctrain.evaluation.answer_cache import AnswerCache
from dctrain.evaluation.ranks import EvaluationRanks
from dctrain.utils.environment import environment

KINDS = {  # answers per question, range of tokens per context, range of tokens per answer
    "choices": (4, (40, 160), (4, 24)),
    "letters": (4, (80, 240), (1, 1)),
    "last": (1, (40, 120), (1, 3)),
}


def write_model(folder: Path, options: argparse.Namespace) -> None:
    """Save a GPT-NeoX model with random weights and a tokenizer in the format of transformers."""
    torch.manual_seed(0)
    model = GPTNeoXForCausalLM(
        GPTNeoXConfig(
            vocab_size=options.vocabulary,
            hidden_size=options.width,
            num_hidden_layers=options.layers,
            num_attention_heads=options.heads,
            intermediate_size=4 * options.width,
            bos_token_id=0,
            eos_token_id=0,
        )
    )
    model.save_pretrained(folder)
    (folder / "tokenizer.json").write_text(train_bpe(["a word"] * 9, 300).spec)
    end = "<|endoftext|>"
    ends = {"bos_token": end, "eos_token": end, "pad_token": end}
    PreTrainedTokenizerFast(tokenizer_file=str(folder / "tokenizer.json"), **ends).save_pretrained(folder)


def make_pairs(kind: str, questions: int, vocabulary: int) -> list[tuple[list[int], list[int]]]:
    """Generate random requests: pairs of context and continuation."""
    answers, context, continuation = KINDS[kind]
    generator = torch.Generator().manual_seed(1)

    def draw(lengths: tuple[int, int]) -> list[int]:
        length = int(torch.randint(lengths[0], lengths[1] + 1, (), generator=generator))
        return torch.randint(vocabulary, (length,), generator=generator).tolist()

    contexts = [draw(context) for _ in range(questions)]
    return [(context, draw(continuation)) for context in contexts for _ in range(answers)]


def main() -> None:
    """Run the benchmark and print the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--vocabulary", type=int, default=50304)
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--heads", type=int, default=8)
    parser.add_argument("--questions", type=int, default=24)
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", help="file for the raw results")
    options = parser.parse_args()
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        path, alone = Path(folder), EvaluationRanks(0, 1, 0)
        write_model(path, options)
        theirs = HFLM(pretrained=folder, device="cpu", dtype="float32", batch_size=options.batch_size)
        model = load_model(path)
        for kind in KINDS:
            pairs = make_pairs(kind, options.questions, options.vocabulary)
            tokens = sum(len(context) + len(answer) for context, answer in pairs)
            seconds = {"harness": [], "dclm": []}
            for number in tqdm(range(options.rounds + 1), kind):
                start = time.perf_counter()
                asked = [((str(number), str(i)), *pair) for i, pair in enumerate(pairs)]
                expected = theirs._loglikelihood_tokens(asked, disable_tqdm=True)
                middle = time.perf_counter()
                journal = AnswerCache(path, f"{kind}{number}", {}, alone)
                found = Scorer(model, alone, journal, options.batch_size, 2048).score(pairs)
                end = time.perf_counter()
                if number:  # the first round is a warm-up
                    seconds["harness"].append(middle - start)
                    seconds["dclm"].append(end - middle)
            error = max(abs(a[0] - b[0]) for a, b in zip(expected, found, strict=True))
            ratio = statistics.median(a / b for a, b in zip(*seconds.values(), strict=True))
            rates = {name: tokens / statistics.median(times) for name, times in seconds.items()}
            rows.append({"kind": kind, "tokens": tokens, "ratio": ratio, "error": error} | {"tokens_per_second": rates})
            print(f"{kind:8} {ratio:5.2f} times the harness's tokens/s ({rates['dclm']:.0f}/s); differ by {error:.1e}")
    versions = {name: version(name) for name in ("transformers", "lm_eval")}
    where = environment(torch.device("cpu")) | versions
    save(options.json, {"environment": where, "options": vars(options), "rows": rows})


if __name__ == "__main__":
    main()
