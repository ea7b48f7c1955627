"""`dclm explain`: analysis of heads and their composition in language models."""

KINDS = ("ablate", "attribute", "breakdown", "circuits", "diversity", "mixing", "report")
EXPLANATIONS = {kind: f"dclm.explain.{kind}:{kind}" for kind in KINDS}

__all__ = ["EXPLANATIONS"]
