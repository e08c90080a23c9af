"""Console output, health alarms, metric trackers and profiler traces of a run."""
