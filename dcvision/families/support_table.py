"""Table of the timm model families that `swap_attention` supports, as in README.md.

Command: `python -m dcvision.families.support_table`.
"""

from importlib.util import find_spec

import timm
import torch
from torch import nn

from ..swap import attention_names

TAKEN, UNSUPPORTED, NONE = "supported", "not supported", "no self-attention"


def survey() -> list[tuple[str, str, str, str]]:
    """Try one model of each timm module: return module, model, verdict, and the attention classes or the reason."""
    modules = [module for module in timm.list_modules() if find_spec(f"timm.models.{module}") is not None]
    return [(module, *_ask(sorted(timm.list_models(module=module), key=_by_size))) for module in modules]


def _by_size(name: str) -> tuple:
    """Sort key that prefers small models."""
    small = ("atto", "femto", "pico", "nano", "xxs", "xxt", "xs", "tiny", "_t", "_s", "small", "_b0", "18")
    return next((i for i, word in enumerate(small) if word in name), len(small)), len(name), name


def _ask(names: list[str]) -> tuple[str, str, str]:
    for name in names:
        try:
            with torch.device("meta"):
                model = timm.create_model(name)
        except Exception:  # noqa: S112  some deprecated names, and models that cannot be built on the meta device
            continue
        return name, *_verdict(model)
    return "-", UNSUPPORTED, "no model could be built"


def _verdict(model: nn.Module) -> tuple[str, str]:
    try:
        names = attention_names(model)
    except ValueError as error:
        message = str(error).partition(";")[0] if "expected a supported family" in str(error) else str(error)
        return (NONE, "") if "no self-attention" in message and "none found" in message else (UNSUPPORTED, message)
    kinds = {type(model.get_submodule(name)).__name__ for name in names}
    return TAKEN, f"{len(names)} layers: {', '.join(sorted(kinds))}"


def table(rows: list[tuple[str, str, str, str]]) -> str:
    """Format the families with attention as a Markdown table, and list the others."""
    lines = ["| family (timm module) | example | verdict | attention, or the reason |", "|---|---|---|---|"]
    lines += [f"| {' | '.join(row)} |" for row in rows if row[2] != NONE]
    others = ", ".join(row[0] for row in rows if row[2] == NONE)
    return "\n".join([*lines, "", f"Without self-attention: {others}.", ""])


if __name__ == "__main__":
    print(table(survey()), end="")
