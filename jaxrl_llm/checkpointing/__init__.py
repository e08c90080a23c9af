"""Checkpoints, the run directory, and atomic file writes."""
