"""Implementations of composed attention. They share `masking` and never import each other."""
