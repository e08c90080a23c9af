"""The two halves of the step, update and sampling: their spec, state, compilation, optimizer and adapters."""
