"""Checkpoints: writing, finding, checking and reading them; single files and sharded folders; weights to start from."""
