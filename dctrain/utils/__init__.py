"""Helpers without knowledge of training: files, JSON fields, Markdown tables, devices, signals, lazy imports."""
