"""Programs of the model, run in sandboxes."""
