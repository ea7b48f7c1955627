"""Trainer callbacks: newest and best checkpoint, graceful stop on signals, speed, records of the run."""
