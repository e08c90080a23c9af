"""Meshes, sharding, and the processes of one run: discovery, watchdog, consistency check, preemption."""
