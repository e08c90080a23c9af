"""Runs the command line up to compilation, for tests of bad input: `outcome(...)` is its exit status and message."""

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

from jaxrl_llm import main, train
from jaxrl_llm.checkpointing import run_dir
from jaxrl_llm.curriculum import (
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
from jaxrl_llm.data import row_filters
from jaxrl_llm.learner import inner_steps
from jaxrl_llm.models import decoder
from jaxrl_llm.objective import activation_noise, divergence, method_spec, score_centering
from jaxrl_llm.replay import dynamic_sampling, reuse
from jaxrl_llm.rewards import length_truncation, majority_vote, verifiers
from jaxrl_llm.rollout import (
  draft_head,
  draft_verification,
  early_exit,
  length_head,
  length_schedule,
  pruning,
  queue_order,
  stopping,
  tree_rules,
)

# Deterministic: a failure is caused by the change that is tested.
SETTINGS = dict(
  derandomize=True, deadline=None, database=None, print_blob=False,
  suppress_health_check=list(hypothesis.HealthCheck),
)  # fmt: skip

# Field of a stage → the module of its functions.
STAGES = {
  **{f'objective.{stage}': module for stage, module in method_spec.STAGES.items()},
  'objective.activation_noise': activation_noise,
  'objective.divergence': divergence,
  'objective.score_centering': score_centering,
  **{
    f'curriculum.{module.__name__.rpartition(".")[2]}': module
    for module in (
      *(allocation, candidates, domain_mix, evidence_decay, eligibility, labels, prior_pooling),
      *(rate_estimate, selection, utility),
    )
  },
  'curriculum.hint': hint_rules,
  'rollout.draft_head': draft_head,
  'rollout.length_head': length_head,
  'rollout.length_schedule': length_schedule,
  'rollout.queue_order': queue_order,
  'rollout.pruning': pruning,
  'rollout.stop': stopping,
  'rollout.draft': draft_verification,
  'rollout.early_exit': early_exit,
  'rollout.tree': tree_rules,
  'optimizer.outer': inner_steps,
  'rewards': verifiers,
  'rewards.vote': majority_vote,
  'rewards.truncate': length_truncation,
  'replay.collect': dynamic_sampling,
  'replay.reuse': reuse,
  'data.keep': row_filters,
  'sft.keep': row_filters,
}


def job(**changes) -> dict:
  """The smallest job; no warm start."""
  data = dict(tiny_job.CONFIG['data'], size=16)
  small = tiny_job.CONFIG | dict(sft=dict(steps=0), data=data, prompts=4)
  return small | changes


def with_value(tree: dict, field: str, value) -> dict:
  """A copy of a tree with `value` at 'a.b.c'; an Ellipsis removes the field."""
  first, _, rest = field.partition('.')
  below = tree.get(first)
  new = with_value(below if isinstance(below, dict) else {}, rest, value) if rest else value
  out = {k: v for k, v in tree.items() if k != first}
  return out if new is ... else out | {first: new}


def settings_of(fn) -> list[inspect.Parameter]:
  return [p for p in inspect.signature(fn).parameters.values() if p.kind == p.KEYWORD_ONLY]


def source(value) -> str:
  """Python source of a value; nan and inf have no literal."""
  if isinstance(value, dict):
    return '{' + ', '.join(f'{k!r}: {source(v)}' for k, v in value.items()) + '}'
  if isinstance(value, list | tuple):
    left, right = '[]' if isinstance(value, list) else ('(', ',)' if value else ')')
    return left + ', '.join(map(source, value)) + right
  if isinstance(value, float) and not math.isfinite(value):
    return f"float('{value}')"
  return repr(value)


@contextlib.contextmanager
def up_to_compiling() -> Iterator[None]:
  """Replaces what initializes a model, compiles and trains; everything before is real."""

  def abstract(config, seed):
    return decoder.abstract_params(config)

  with contextlib.ExitStack() as stack:
    for where, name, stub in (
      (train, '_train', lambda *a: {}),
      (decoder, 'init', abstract),
      (run_dir, '_git_revision', lambda folder: None),
    ):
      stack.enter_context(mock.patch.object(where, name, stub))
    yield


def outcome(config: dict, *overrides: str) -> tuple[int, str]:
  """The exit status and the standard error of `main` for a config file that returns `config`."""
  err = io.StringIO()
  with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stderr(err):
    path = pathlib.Path(folder, 'c.py')
    path.write_text(
      f'def get_config():\n  return {source(config)}\n',
      encoding='utf-8',
      errors='backslashreplace',
    )
    try:
      code = main.main([f'--config={path}', f'--workdir={folder}/run', *overrides])
    except SystemExit as stop:  # argparse
      code = stop.code
    return code, err.getvalue().replace(os.fspath(folder), '')


def sentence(code: int, text: str) -> str:
  """The message of a refusal, '' for success; fails for a traceback and for more than one sentence."""
  lines = [line for line in text.splitlines() if line.startswith('error:')]
  assert 'Traceback' not in text, text
  assert code in (0, 2), (code, text)
  if code == 0:
    assert not lines, text
    return ''
  assert len(lines) == 1 and text.rstrip().endswith(lines[0].rstrip()), text
  assert lines[0].endswith('.'), text
  return lines[0].removeprefix('error: ')
