"""The configuration: fields, files, overrides, and what goes with what."""
