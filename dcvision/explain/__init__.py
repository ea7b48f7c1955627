"""`dcvision explain`: analysis of heads and their composition in image models."""

KINDS = ("ablate", "attribute", "breakdown", "circuits", "diversity", "mixing", "report")
EXPLANATIONS = {kind: f"dcvision.explain.{kind}:{kind}" for kind in KINDS}

__all__ = ["EXPLANATIONS"]
