"""What the host loop of train.py calls between two steps."""
