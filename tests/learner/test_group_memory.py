"""Large groups: 512 rollouts of a prompt need the memory of the rows that decode at once."""

from __future__ import annotations

import jax
import test_configs

from jaxrl_llm import step as steps
from jaxrl_llm.commands import compile_report
from jaxrl_llm.distributed import sharding
from jaxrl_llm.runner import setup

SLOTS, PROMPT, COMPLETION = 32, 12, 16
LAYERS, HEADS, WIDTH = 2, 4, 64
CACHE_BYTES = 2 * LAYERS * WIDTH * (PROMPT + COMPLETION) * 4  # of a row, float32


def temporary_bytes(folder, rollouts: int, slots: int = SLOTS) -> int:
  """What the compiled step of configs/rollout/bro_rl.py needs beside its arguments."""
  config = test_configs.small('bro_rl', folder)
  config.prompts, config.rollouts, config.rollout.slots = 1, rollouts, slots
  config.prompt_tokens, config.completion_tokens = PROMPT, COMPLETION
  config.scratch.update(width=WIDTH, layers=LAYERS, heads=HEADS, kv_heads=HEADS, mlp=2 * WIDTH)
  config.learner.microbatch_tokens = 256
  mesh = sharding.make_mesh(config.mesh, jax.devices()[:1])
  spec = setup.build_context(config, mesh).spec
  lowered = steps.compile_step(spec).lower(*compile_report.arguments(spec))
  return lowered.compile().memory_analysis().temp_size_in_bytes


def test_a_further_rollout_needs_its_tokens_and_no_cache(tmp_path):
  few, many = (temporary_bytes(tmp_path, rollouts) for rollouts in (64, 512))
  a_row = (many - few) / (512 - 64)
  assert 0 < a_row < CACHE_BYTES / 10
  # All rows at once do need theirs.
  at_once = temporary_bytes(tmp_path, 512, slots=0)
  assert at_once - many > (512 - SLOTS) * CACHE_BYTES / 2
