"""Compiled programs as text, rooflines, and device traces."""
