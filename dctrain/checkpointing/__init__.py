"""Checkpoints: writing, finding, checking and reading them, as single files and sharded folders; initial weights."""
