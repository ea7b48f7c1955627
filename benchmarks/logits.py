"""Error of the loss and its gradients due to rounding the logits to 16 bits, relative to float64.

Hidden states are normalized sums of noise and the output row of their target times a gain; the gains range from an
untrained to a confident model. The benchmark compares products of bfloat16 matrices with bfloat16 results (as in
autocast) and with float32 results.

python benchmarks/logits.py --json benchmarks/results/logits.json
"""

import argparse

import torch
import torch.nn.functional as F
from measure import save
from torch import Tensor

from dctrain.utils.environment import environment


def losses(hidden: Tensor, output: Tensor, targets: Tensor, kind: str) -> tuple[Tensor, Tensor]:
    """Compute the losses of tokens [N] and the gradient of their sum for `hidden` [N, C]."""
    dtype = torch.float64 if kind == "float64" else torch.float32
    hidden, output = hidden.to(dtype).requires_grad_(), output.to(dtype)
    if kind == "float64":
        logits = hidden @ output.T
    elif kind == "bfloat16":
        logits = (hidden.bfloat16() @ output.bfloat16().T).float()
    else:
        logits = hidden.bfloat16().float() @ output.bfloat16().float().T
    loss = F.cross_entropy(logits, targets, reduction="none")
    return loss.detach(), torch.autograd.grad(loss.sum(), hidden)[0]


def main() -> None:
    """Run the benchmark and print the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--vocabulary", type=int, default=50257)
    parser.add_argument("--tokens", type=int, default=512)
    parser.add_argument("--json", help="file for the raw results")
    options = parser.parse_args()
    torch.manual_seed(0)
    output = 0.02 * torch.randn(options.vocabulary, options.width)
    targets = torch.randint(options.vocabulary, (options.tokens,))
    noise = torch.randn(options.tokens, options.width)
    rows = []
    for gain in (0.0, 0.15, 0.2, 0.25, 0.3):
        hidden = 2 * F.rms_norm(noise + gain * output[targets] / 0.02, (options.width,))
        expected, expected_gradient = losses(hidden, output, targets, "float64")
        for kind in ("bfloat16", "float32"):
            got, gradient = losses(hidden, output, targets, kind)
            error = got.double() - expected
            rows.append(
                {
                    "gain": gain,
                    "loss": expected.mean().item(),
                    "logits": kind,
                    "mean_error": error.mean().item(),
                    "token_error": error.square().mean().sqrt().item(),
                    "gradient_error": ((gradient - expected_gradient).norm() / expected_gradient.norm()).item(),
                }
            )
            print(", ".join(f"{k} {v:.2e}" if isinstance(v, float) else f"{k} {v}" for k, v in rows[-1].items()))
    save(options.json, {"environment": environment(torch.device("cpu")), "options": vars(options), "rows": rows})


if __name__ == "__main__":
    main()
