"""The models that the benchmarks compare: a composed one and its plain twins."""

import argparse
import json
from dataclasses import replace

import dclm


def add_language_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the choice of a language model."""
    parser.add_argument("--model", default="dcformer_pp_405m", help="a composed configuration of dclm")
    parser.add_argument("--overrides", type=json.loads, default={}, help="JSON of fields to replace")


def language_configs(name: str, overrides: dict) -> dict[str, dclm.DecoderConfig]:
    """Return the composed model, plain attention with the same windows, and plain attention without windows."""
    composed = dclm.decoder_config(name, **overrides)
    if not composed.is_composed:
        raise SystemExit(f"--model={name} is not composed; choose a dcformer or dcpythia configuration.")
    same_windows = replace(composed, pre_compose=False, post_compose=False)
    return {"composed": composed, "plain": same_windows, "plain, all global": replace(same_windows, windows=(None,))}
