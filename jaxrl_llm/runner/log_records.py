"""A landed batch as the log tells it: numbers, and rows in words."""

from __future__ import annotations

import sys
from typing import Any

import jax
import numpy as np

from jaxrl_llm import rewards
from jaxrl_llm.types import REASONS, TRUNCATED, Batch


def metrics(batch: Batch) -> dict[str, float]:
  """Numbers of the rows that are learned from. Source: none."""
  real_B = batch.rollout.length_B > 0
  if not real_B.any():
    return {'perf/rollouts': 0, 'response_length/sum': 0}
  length_B, reward_B = batch.rollout.length_B[real_B], batch.reward_B[real_B]
  if batch.rollout.turns is not None:  # of what the policy said
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
  """The mean, over slots with rollouts, of their rewards' standard deviation (over n)."""
  by_slot = lambda x: np.asarray(x, float).reshape(len(batch.prompts.index_P), -1)  # noqa: E731
  exists_PxG, reward_PxG = by_slot(batch.rollout.length_B) > 0, by_slot(batch.reward_B)
  n_P = exists_PxG.sum(1)
  mean_P = (reward_PxG * exists_PxG).sum(1) / np.maximum(n_P, 1)
  off_PxG = (reward_PxG - mean_P[:, None]) * exists_PxG
  return float(np.sqrt((off_PxG**2).sum(1) / np.maximum(n_P, 1))[n_P > 0].mean())


def facts(config: Any, devices: np.ndarray, root: str) -> dict[str, str]:
  """What is about to run, a name and a few words each. Source: none."""
  return dict(
    model=config.model,
    devices=f'{devices.size} ({devices.flat[0].device_kind})',
    steps=f'{config.steps} of {config.prompts} prompts with {config.rollouts} rollouts each, '
    f'of at most {config.completion_tokens} tokens',
    run_folder=root,
  )


def memory() -> dict[str, float]:
  """Most memory used so far, in GiB: of the fullest device, where devices tell, and of this process. Source: none."""
  stats = [device.memory_stats() or {} for device in jax.local_devices()]
  device = max((s.get('peak_bytes_in_use', 0) for s in stats), default=0)
  import resource  # not on Windows, where the parts can be imported all the same

  # Linux tells kilobytes, macOS bytes.
  unit = 2**30 if sys.platform == 'darwin' else 2**20
  host = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / unit
  told = {'perf/host_memory_gib': host}
  return told | ({'perf/device_memory_gib': device / 2**30} if device else {})


def choice(proposal: Any, visits, asked, busy) -> dict[str, Any]:
  """Which prompts a step asks, why, and what the posterior said of them before; see control.Proposal.

  `asked` are the prompts that lack rollouts, `busy` all that run on or lack some. Source: none.
  """
  short = lambda x: [round(v, 4) if np.isfinite(v) else None for v in np.asarray(x).tolist()]  # noqa: E731
  mean = round(proposal.mean_worth, 4) if np.isfinite(proposal.mean_worth) else None
  return dict(
    prompt=proposal.index.tolist(),
    why=list(proposal.why),
    worth=short(proposal.worth),
    mean_worth=mean,
    success=short(proposal.p_mean),
    mixed=short(proposal.p_mixed),
    visits=np.asarray(visits).tolist(),
    continued=sorted(set(np.asarray(busy).tolist()) - set(np.asarray(asked).tolist())),
    asked=sorted(set(np.asarray(asked).tolist())),
  )


def rows_of(
  rows, marks: Any, batch: Batch, index: int, numbers: dict[int, dict] | None = None
) -> list[dict]:
  """What was learned from, and what could not be graded, with how that ended; `numbers` by row are told with it.

  Source: none.
  """
  G, hint_P = len(rows) // len(batch.prompts.index_P), batch.prompts.hint_P
  shown = lambda p: {} if hint_P is None else dict(hint=float(hint_P[p]))  # noqa: E731
  said = batch.rollout.turns
  turns = lambda b: {} if said is None else dict(turns=int(said.number_BxT[b].max()) + 1)  # noqa: E731
  failed_B, success_B = marks.outcome_B > rewards.OK, batch.success
  graded_B = success_B != batch.correct_B
  part = lambda b: dict(success=round(float(success_B[b]), 4)) if graded_B[b] else {}  # noqa: E731
  why = lambda b: dict(graded=rewards.OUTCOMES[marks.outcome_B[b]]) if failed_B[b] else {}  # noqa: E731
  return [
    dict(
      input=row.question or row.messages,
      output=text,
      gts=row.answer,
      score=float(batch.reward_B[b]),
      step=index,
      prompt=int(batch.prompts.index_P[b // G]),
      length=int(batch.rollout.length_B[b] or marks.length_B[b]),
      reason=REASONS[int(batch.rollout.reason_B[b])],
      right=int(batch.correct_B[b]),
      **part(b),
      **shown(b // G),
      **turns(b),
      **why(b),
      **(numbers or {}).get(b, {}),
    )
    for b, (row, text) in enumerate(zip(rows, marks.shown, strict=True))
    if batch.rollout.length_B[b] or failed_B[b]
  ]


def exhibit(parts: Any, batch: Batch) -> tuple[dict[str, np.ndarray], list[dict]]:
  """A batch to look at: all its arrays by name, and its rows in words. Source: none."""
  arrays = {}
  for name, part in dict(batch._asdict()).items():
    fields = part._asdict() if hasattr(part, '_asdict') else {'': part}
    if fields.get('turns') is not None:
      fields |= {f'turns.{k}': v for k, v in fields['turns']._asdict().items()} | dict(turns=None)
    arrays |= {f'{name}.{k}'.strip('.'): np.asarray(v) for k, v in fields.items() if v is not None}
  G = len(batch.reward_B) // len(batch.prompts.index_P)
  rows = []
  for b in np.flatnonzero(arrays['rollout.length_B']):
    row = parts.tables.train.rows[int(arrays['prompts.index_P'][b // G])]
    said = arrays['rollout.tokens_BxT'][b, : arrays['rollout.length_B'][b]]
    output = parts.model.tokenizer.decode(said.tolist())
    told = dict(input=row.question or row.messages, output=output, gts=row.answer, row=int(b))
    rows.append(told | dict(score=float(arrays['reward_B'][b]), tokens=said.tolist()))
  return arrays, rows
