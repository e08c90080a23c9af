"""Configuration: typed fields, files and overrides, stages, validation and compatibility."""
