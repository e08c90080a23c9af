"""Graders of programs that a model wrote, and the sandbox that runs these."""
