"""Trainer callbacks: the newest and the best checkpoint, a graceful stop on signals, speed in TensorBoard."""
