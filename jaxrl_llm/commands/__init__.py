"""What the flags of the command line run: one module a mode."""
