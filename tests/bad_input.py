"""The command up to where it would compile, for tests of bad input: `outcome(...)` is its status and its sentence."""

from __future__ import annotations

import contextlib
import inspect
import io
import math
import os
import pathlib
import tempfile
from collections.abc import Iterator
from unittest import mock

import hypothesis
import tiny_job

from jaxrl_llm import main, rewards, train
from jaxrl_llm.checkpointing import run_dir
from jaxrl_llm.curriculum import (  # fmt: skip
  allocation,
  candidates,
  domain_mix,
  eligibility,
  evidence_decay,
  hint_rules,
  labels,
  prior_pooling,
  rate_estimate,
  selection,
  utility,
)
from jaxrl_llm.learner import inner_steps
from jaxrl_llm.models import decoder
from jaxrl_llm.objective import (  # fmt: skip
  activation_noise,
  advantage,
  advantage_modulation,
  aggregation,
  auxiliary_loss,
  credit_assignment,
  distillation,
  importance_correction,
  kl,
  lr_scale,
  old_policy,
  ratio,
  reward_shaping,
  sft_loss,
  token_weighting,
  trust_region,
)
from jaxrl_llm.replay import dynamic_sampling, successes
from jaxrl_llm.rewards import majority_vote, verifiers
from jaxrl_llm.rollout import (
  draft_verification,
  early_exit,
  length_schedule,
  pruning,
  queue_order,
  stopping,
  tree_rules,
)

# Deterministic, so that a test cannot fail for a reason that the change before it does not have.
SETTINGS = dict(
  derandomize=True, deadline=None, database=None, print_blob=False,
  suppress_health_check=list(hypothesis.HealthCheck),
)  # fmt: skip

# Which module the `fn` of a field names a function of.
STAGES = {
  **{f'objective.{m.__name__.rpartition(".")[2]}': m for m in (
    advantage, aggregation, sft_loss, auxiliary_loss,
    importance_correction, credit_assignment, distillation, token_weighting, kl,
    lr_scale, activation_noise, old_policy, ratio, reward_shaping, advantage_modulation, trust_region,
  )},
  **{f'curriculum.{m.__name__.rpartition(".")[2]}': m for m in (
    allocation, candidates, domain_mix, evidence_decay, eligibility, prior_pooling, utility, rate_estimate,
  )},
  **{f'generate.{m.__name__.rpartition(".")[2]}': m for m in (length_schedule, queue_order, pruning)},
  'curriculum.selection': selection, 'rollout.stop': stopping, 'rollout.draft': draft_verification,
  'rollout.early_exit': early_exit, 'rollout.tree': tree_rules, 'optimizer.outer': inner_steps,
  'grade': verifiers, 'vote': majority_vote, 'labels': labels, 'truncate': rewards.length_truncation,
  'hint': hint_rules,
  'collect': dynamic_sampling, 'replay': successes,
}  # fmt: skip


def job(**changes) -> dict:
  """The smallest job; no warm start."""
  data = dict(tiny_job.CONFIG['data'], size=16)
  small = tiny_job.CONFIG | dict(sft=dict(steps=0), data=data, prompts=4)
  return small | changes


def laid(tree: dict, field: str, value) -> dict:
  """A copy of a tree with `value` at 'a.b.c'; an Ellipsis takes the field away."""
  first, _, rest = field.partition('.')
  below = tree.get(first)
  new = laid(below if isinstance(below, dict) else {}, rest, value) if rest else value
  out = {k: v for k, v in tree.items() if k != first}
  return out if new is ... else out | {first: new}


def settings_of(fn) -> list[inspect.Parameter]:
  return [p for p in inspect.signature(fn).parameters.values() if p.kind == p.KEYWORD_ONLY]


def written(value) -> str:
  """Python for a value: nan and inf have no literal."""
  if isinstance(value, dict):
    return '{' + ', '.join(f'{k!r}: {written(v)}' for k, v in value.items()) + '}'
  if isinstance(value, list | tuple):
    left, right = '[]' if isinstance(value, list) else ('(', ',)' if value else ')')
    return left + ', '.join(map(written, value)) + right
  if isinstance(value, float) and not math.isfinite(value):
    return f"float('{value}')"
  return repr(value)


@contextlib.contextmanager
def up_to_compiling() -> Iterator[None]:
  """Nothing is compiled, drawn or trained; all before that is real."""
  drawn = lambda config, seed: decoder.abstract_params(config)  # noqa: E731
  with contextlib.ExitStack() as stack:
    for where, name, stub in (
      (train, '_loop', lambda *a: {}),
      (decoder, 'init', drawn),
      (run_dir, '_git_revision', lambda folder: None),
    ):
      stack.enter_context(mock.patch.object(where, name, stub))
    yield


def outcome(config: dict, *overrides: str) -> tuple[int, str]:
  """What `main` returns for a config file of that body, and what it prints to standard error."""
  err = io.StringIO()
  with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stderr(err):
    path = pathlib.Path(folder, 'c.py')
    path.write_text(
      f'def get_config():\n  return {written(config)}\n',
      encoding='utf-8',
      errors='backslashreplace',
    )
    try:
      code = main.main([f'--config={path}', f'--workdir={folder}/run', *overrides])
    except SystemExit as stop:  # argparse
      code = stop.code
    return code, err.getvalue().replace(os.fspath(folder), '')


def sentence(code: int, text: str) -> str:
  """The one sentence of a refusal; fails where it is not one, or is a traceback. '' where all was well."""
  lines = [line for line in text.splitlines() if line.startswith('error:')]
  assert 'Traceback' not in text, text
  assert code in (0, 2), (code, text)
  if code == 0:
    assert not lines, text
    return ''
  assert len(lines) == 1 and text.rstrip().endswith(lines[0].rstrip()), text
  assert lines[0].endswith('.'), text
  return lines[0].removeprefix('error: ')
