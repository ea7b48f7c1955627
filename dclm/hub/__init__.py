"""Folders of checkpoints: the published DCFormer and DCPythia, read and written; GPT-NeoX and Llama, read."""

from .checkpoint import is_known, load_pretrained, save_pretrained

__all__ = ["is_known", "load_pretrained", "save_pretrained"]
