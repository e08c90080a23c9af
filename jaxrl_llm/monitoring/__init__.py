"""Console, trackers, alarms and device traces of a run."""
