"""Log records of a graded batch: metrics, and rows of the files of a run directory."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import jax
import numpy as np

from jaxrl_llm import curriculum, rewards
from jaxrl_llm.config.schema import Config
from jaxrl_llm.runner import token_stats
from jaxrl_llm.types import REASONS, TRUNCATED, Batch, JsonObject, Row

if TYPE_CHECKING:
  from jaxrl_llm.runner.context import RunContext
  from jaxrl_llm.runner.grading import ScoreTable


def metrics(batch: Batch) -> dict[str, float]:
  """Metrics of the completions that are learned from."""
  real_B = batch.rollout.length_B > 0
  if not real_B.any():
    return {'perf/rollouts': 0, 'response_length/sum': 0}
  length_B, reward_B = batch.rollout.length_B[real_B], batch.reward_B[real_B]
  if batch.rollout.turns is not None:  # sampled tokens alone
    length_B = (batch.rollout.turns.number_BxT[real_B] >= 0).sum(1)
  return {
    'critic/score/mean': float(reward_B.mean()),
    'critic/score/max': float(reward_B.max()),
    'critic/score/min': float(reward_B.min()),
    'critic/score/group_std': _group_std(batch),
    'response_length/sum': int(length_B.sum()),
    'response_length/mean': float(length_B.mean()),
    'response_length/max': float(length_B.max()),
    'response_length/min': float(length_B.min()),
    'response_length/clip_ratio': float((batch.rollout.reason_B == TRUNCATED)[real_B].mean()),
    'prompt_length/mean': float(batch.prompts.length_P.mean()),
    'perf/rollouts': int(real_B.sum()),
  }


def _group_std(batch: Batch) -> float:
  """The mean over groups of the standard deviation (over n) of their rewards."""
  by_slot = lambda x: np.asarray(x, float).reshape(len(batch.prompts.index_P), -1)  # noqa: E731
  real_PxG, reward_PxG = by_slot(batch.rollout.length_B) > 0, by_slot(batch.reward_B)
  n_P = real_PxG.sum(1)
  mean_P = (reward_PxG * real_PxG).sum(1) / np.maximum(n_P, 1)
  off_PxG = (reward_PxG - mean_P[:, None]) * real_PxG
  return float(np.sqrt((off_PxG**2).sum(1) / np.maximum(n_P, 1))[n_P > 0].mean())


def facts(config: Config, devices: np.ndarray, root: str) -> dict[str, str]:
  """The banner of a run: a name and a few words each."""
  return dict(
    model=config.model,
    devices=f'{devices.size} ({devices.flat[0].device_kind})',
    steps=f'{config.steps} of {config.prompts} prompts with {config.rollouts} rollouts each, '
    f'of at most {config.completion_tokens} tokens',
    run_folder=root,
  )


def memory() -> dict[str, float]:
  """Peak memory so far, in GiB: of the fullest local device, where devices report it, and of this process."""
  stats = [device.memory_stats() or {} for device in jax.local_devices()]
  device = max((s.get('peak_bytes_in_use', 0) for s in stats), default=0)
  import resource  # not on Windows, where this module is imported all the same

  # ru_maxrss is in kilobytes on Linux and in bytes on macOS.
  unit = 2**30 if sys.platform == 'darwin' else 2**20
  host = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / unit
  peak = {'perf/host_memory_gib': host}
  return peak | ({'perf/device_memory_gib': device / 2**30} if device else {})


def choice(
  proposal: curriculum.Proposal,
  visits: Sequence[int] | np.ndarray,
  waiting: Sequence[int] | np.ndarray,
  busy: Sequence[int] | np.ndarray,
) -> JsonObject:
  """A row of choices.jsonl: the prompts of a step, the reason for each, and its posterior before the step.

  `waiting` are prompts that lack rollouts or follow their last visit, `busy` all of these and the unfinished ones.
  """
  rounded = lambda x: [round(v, 4) if np.isfinite(v) else None for v in np.asarray(x).tolist()]  # noqa: E731
  mean = round(proposal.mean_worth, 4) if np.isfinite(proposal.mean_worth) else None
  return dict(
    prompt=proposal.index.tolist(),
    why=list(proposal.why),
    worth=rounded(proposal.worth),
    mean_worth=mean,
    success=rounded(proposal.p_mean),
    mixed=rounded(proposal.p_mixed),
    visits=np.asarray(visits).tolist(),
    continued=sorted(set(np.asarray(busy).tolist()) - set(np.asarray(waiting).tolist())),
    asked=sorted(set(np.asarray(waiting).tolist())),
  )


def rollout_records(
  rows: Sequence[Row],
  scores: ScoreTable,
  batch: Batch,
  index: int,
  token_values: Mapping[int, JsonObject],
) -> list[JsonObject]:
  """Rows of a rollout file: completions that are learned from, and those that could not be graded.

  `rows` [B] are the data rows, `token_values` by row the per-token values of `TokenStats`. `prompt_text` is the prompt
  as the model reads it, special tokens included. `rewards` are those of each function before their weights, where there
  are several, and `shaped` is the reward after config.objective.reward_shaping, where there is one.
  """
  G, failed_B = len(rows) // len(batch.prompts.index_P), scores.outcome_B > rewards.OK
  context, shaped_B = scores.context, None
  if context.spec.objective.method.batch_stages.reward_shaping is not None:
    shaped_B = token_stats.shaped_rewards(context.spec, batch)
  prompt_texts = _prompt_texts(context, batch)
  return [
    dict(
      input=row.question or row.messages,
      output=text,
      gts=row.answer,
      score=float(batch.reward_B[b]),
      step=index,
      prompt=int(batch.prompts.index_P[b // G]),
      length=int(batch.rollout.length_B[b] or scores.length_B[b]),
      reason=REASONS[int(batch.rollout.reason_B[b])],
      right=int(batch.correct_B[b]),
      prompt_text=prompt_texts[b // G],
      **_optional_fields(batch, scores, b, b // G),
      **({} if shaped_B is None else dict(shaped=_short(shaped_B[b]))),
      **token_values.get(b, {}),
    )
    for b, (row, text) in enumerate(zip(rows, scores.logged_texts, strict=True))
    if batch.rollout.length_B[b] or failed_B[b]
  ]


def _prompt_texts(context: RunContext, batch: Batch) -> list[str]:
  tokenizer, (tokens_PxL, length_P) = context.models.policy.tokenizer, batch.prompts[:2]
  pairs = zip(np.asarray(tokens_PxL), np.asarray(length_P), strict=True)
  return [
    tokenizer.decode(tokens[:length].tolist(), skip_special=False) for tokens, length in pairs
  ]


def _short(value: float | np.floating) -> float:
  return float(f'{value:.5g}')


def _optional_fields(batch: Batch, scores: ScoreTable, b: int, p: int) -> JsonObject:
  """Fields of a rollout record that only some runs have."""
  fields: JsonObject = {}
  if batch.success[b] != batch.correct_B[b]:
    fields['success'] = round(float(batch.success[b]), 4)
  if batch.prompts.hint_P is not None:
    fields['hint'] = float(batch.prompts.hint_P[p])
  if batch.rollout.turns is not None:
    fields['turns'] = int(batch.rollout.turns.number_BxT[b].max()) + 1
  names = [part.name for part in scores.context.grading.rewards]
  if len(names) > 1:
    fields['rewards'] = dict(zip(names, map(_short, scores.part_BxK[b]), strict=True))
  if scores.outcome_B[b] > rewards.OK:
    fields['graded'] = rewards.OUTCOMES[scores.outcome_B[b]]
  return fields


def batch_dump(context: RunContext, batch: Batch) -> tuple[dict[str, np.ndarray], list[dict]]:
  """A batch for debugging: all arrays by name, and its completions as text."""
  arrays = {}
  for name, part in dict(batch._asdict()).items():
    fields = part._asdict() if hasattr(part, '_asdict') else {'': part}
    if fields.get('turns') is not None:
      fields |= {f'turns.{k}': v for k, v in fields['turns']._asdict().items()} | dict(turns=None)
    arrays |= {f'{name}.{k}'.strip('.'): np.asarray(v) for k, v in fields.items() if v is not None}
  G = len(batch.reward_B) // len(batch.prompts.index_P)
  records = []
  for b in np.flatnonzero(arrays['rollout.length_B']):
    row = context.tables.train.rows[int(arrays['prompts.index_P'][b // G])]
    token_ids = arrays['rollout.tokens_BxT'][b, : arrays['rollout.length_B'][b]].tolist()
    output = context.models.policy.tokenizer.decode(token_ids)
    record = dict(input=row.question or row.messages, output=output, gts=row.answer, row=int(b))
    records.append(record | dict(score=float(arrays['reward_B'][b]), tokens=token_ids))
  return arrays, records
