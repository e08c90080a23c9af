"""The parts of the host loop: building a run, and the host's work between two compiled steps."""
