"""The learning half of the step: update, microbatches, state, optimizer, adapters."""
