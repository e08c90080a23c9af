"""Answers read from completions."""
