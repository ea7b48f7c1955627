"""Folders of checkpoints: the published DCFormer and DCPythia, read and written; GPT-NeoX and Llama, read."""

from .checkpoint import load_pretrained, save_pretrained

__all__ = ["load_pretrained", "save_pretrained"]
