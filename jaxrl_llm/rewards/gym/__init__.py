"""Scorers of reasoning-gym's tasks, without evaluating text."""
