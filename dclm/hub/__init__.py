"""Model folders: published DCFormer and DCPythia (read and written), GPT-NeoX and Llama (read)."""

from .checkpoint import is_known, load_pretrained, read_config, save_pretrained
from .published_config import why_not_published

__all__ = ["is_known", "load_pretrained", "read_config", "save_pretrained", "why_not_published"]
