"""Answers parsed from completions."""
