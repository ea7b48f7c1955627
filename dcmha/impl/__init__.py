"""Implementations of composed attention. They share the modules of this folder and do not import each other."""
