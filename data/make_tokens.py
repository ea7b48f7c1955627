"""Turn texts into token files: `python data/make_tokens.py --help`.

Inputs are text files, JSONL and JSONL.zst (the Pile's format), or folders of them. Running it again does nothing;
running it after an interruption goes on where it stopped. `manifest.json` lists every file with its tokens, bytes and
SHA-256.
"""

import argparse
import os
import sys
from pathlib import Path

from dclm.data.prepare import Options, prepare
from dclm.data.texts import SUFFIXES, find_inputs
from dctrain.errors import UserError


def parse_arguments(args: list[str] | None) -> argparse.Namespace:
    """Define and parse the command line."""
    parser = argparse.ArgumentParser(description="Turn texts into token files for dclm.")
    parser.add_argument("inputs", type=Path, nargs="+", help=f"files, or folders of {' '.join(SUFFIXES)}")
    parser.add_argument("--out", type=Path, required=True, help="folder of the corpus")
    parser.add_argument(
        "--tokenizer",
        default="bytes",
        help="bytes (default), bpe:SIZE to train one on the inputs, a tokenizer.json, or a hub name",
    )
    parser.add_argument("--eos", help="the token that ends a document (default: the tokenizer's usual one)")
    parser.add_argument("--suffix", action="append", help="take only such files from folders; may be repeated")
    parser.add_argument("--text-key", default="text", help="key of the text in JSONL (default: text)")
    parser.add_argument(
        "--val-fraction", type=float, default=0.005, help="part of the documents for validation (default: 0.005)"
    )
    parser.add_argument(
        "--segment-tokens", type=int, default=10**8, help="training tokens of a file, about (default: 10^8)"
    )
    parser.add_argument("--num-workers", type=int, default=os.cpu_count(), help="processes (default: all cores)")
    return parser.parse_args(args)


def run(options: argparse.Namespace) -> None:
    """Prepare, and say what came out."""
    if options.num_workers < 1:
        raise UserError(f"--num-workers={options.num_workers} must be at least 1.")
    what = Options(options.tokenizer, options.eos, options.text_key, options.val_fraction, options.segment_tokens)
    files = find_inputs(options.inputs, tuple(options.suffix or SUFFIXES))
    manifest = prepare(files, options.out, what, options.num_workers)
    counts = ", ".join(f"{count:,} {split} tokens" for split, count in manifest["tokens"].items())
    print(f"{counts}; vocabulary {manifest['vocab_size']}; manifest {options.out / 'manifest.json'}")
    if manifest["skipped"]:
        print(f"left out, for not being UTF-8 (the manifest lists them): {len(manifest['skipped'])} files")


def main(args: list[str] | None = None) -> None:
    """Run the command line; mistakes end in one message and exit status 2."""
    try:
        run(parse_arguments(args))
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
    except OSError as error:
        print(f"error: {error.strerror}: {error.filename}", file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:
        print("interrupted; the same command goes on from here", file=sys.stderr)
        sys.exit(130)


if __name__ == "__main__":
    main()
