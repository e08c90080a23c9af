"""One step of plain GRPO (choose, update, generate, land) executes a bounded number of files and lines."""

from __future__ import annotations

import pathlib
import sys

import jax
import numpy as np

from jaxrl_llm import rewards
from jaxrl_llm import step as steps
from jaxrl_llm.config import loading
from jaxrl_llm.distributed import sharding
from jaxrl_llm.learner import empty_records
from jaxrl_llm.learner import state as train_state
from jaxrl_llm.runner import host_step, setup
from jaxrl_llm.runner.context import PendingStep

PACKAGE = str(pathlib.Path(__file__).parents[1] / 'jaxrl_llm')
# Stages that are off are not called. Each stage that is on is a module of its own, the registry of its functions.
FILES, LINES = 41, 1748
# Plain GRPO: the settings are stated here, so that defaults can change without changing what is counted.
PLAIN = dict(
  model='scratch',
  scratch=dict(width=16, layers=1, heads=2, kv_heads=1, mlp=32, max_tokens=64),
  prompts=4,
  rollouts=4,
  prompt_tokens=12,
  completion_tokens=8,
  objective=dict(
    advantage=dict(fn='group_normalized', eps=1e-6),
    trust_region=dict(fn='clip', low=0.2, high=0.2),
    kl=dict(fn='none'),
    aggregation=dict(fn='sequence_mean'),
  ),
  curriculum=dict(
    candidates=dict(fn='everything'),
    utility=dict(fn='uniform'),
    selection=dict(fn='top'),  # of equal utilities: at random
    evidence_decay=dict(fn='none'),
    prior_pooling=dict(fn='none'),
    eligibility=dict(fn='none'),
  ),
  rewards=dict(fn='exact'),
  data=dict(source='digits', size=16, chat=False, tasks=(dict(name='copy', min_length=1, max_length=3),)),
  mesh=dict(fsdp=1),
  monitoring=dict(rollouts_tokens=0),
)  # fmt: skip


def traced(call) -> set[tuple[str, int]]:
  """(file, line) of the package that `call` executes."""
  seen: set[tuple[str, int]] = set()

  def trace(frame, event, _):
    path = frame.f_code.co_filename
    if not path.startswith(PACKAGE):
      return None
    if event == 'line':
      seen.add((path, frame.f_lineno))
    return trace

  sys.settrace(trace)
  try:
    call()
  finally:
    sys.settrace(None)
  return seen


def test_a_step_of_plain_grpo_runs_few_files_and_lines(tmp_path):
  (tmp_path / 'plain.py').write_text(f'def get_config():\n  return {PLAIN!r}\n')
  config = loading.load(str(tmp_path / 'plain.py'))
  context = setup.build_context(config, sharding.make_mesh(config.mesh, jax.devices()[:1]))
  spec, params = context.spec, context.models.policy.params
  state, batch = train_state.init_state(spec, params), empty_records.empty_batch(spec)
  landed = []
  program = steps.compile_step(spec)  # once a run; it is traced where it is called

  def one_step():
    # Step 1: after step 0 the reward function is checked, too.
    inputs = host_step.build_inputs(context, 1, host_step.choose(context, 1))
    _, rollout, metrics = program(state, batch, *inputs)
    landed.append(host_step.land(context, pool, PendingStep(1, inputs[0], rollout, metrics)))

  with rewards.Pool(config.rewards) as pool:
    found = traced(one_step)
  assert np.asarray(landed[0].batch.reward_B).shape == (16,)
  files = {path for path, _ in found}
  assert len(files) <= FILES and len(found) <= LINES, (len(files), len(found), sorted(files))
