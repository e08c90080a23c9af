"""Scorers of reasoning-gym's tasks that never evaluate text."""
