"""Checkpoints, the run directory, and files written whole."""
