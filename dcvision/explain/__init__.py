"""`dcvision explain`: what the heads of image models do, and what composition makes of it."""

KINDS = ("ablate", "attribute", "breakdown", "circuits", "diversity", "mixing", "report")
EXPLANATIONS = {kind: f"dcvision.explain.{kind}:{kind}" for kind in KINDS}

__all__ = ["EXPLANATIONS"]
