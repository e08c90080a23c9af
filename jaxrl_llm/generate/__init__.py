"""Sampling inside the compiled program. A method whose result is tokens lives here."""
