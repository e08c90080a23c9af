"""What a machine has used, as the log tells it."""

from __future__ import annotations

import resource
import types

import numpy as np
import pytest

from jaxrl_llm import objective, rewards
from jaxrl_llm.config import loading as configs
from jaxrl_llm.runner import log_records
from jaxrl_llm.types import Batch, Prompts, Rollout, Row


@pytest.mark.parametrize(
  'stats, want',
  [
    ([{'peak_bytes_in_use': 2**30}, None, {'peak_bytes_in_use': 3 * 2**30}], 3.0),
    ([None, {}], None),
  ],
)
def test_memory_is_that_of_the_fullest_device_where_devices_tell(stats, want, monkeypatch):
  devices = [types.SimpleNamespace(memory_stats=lambda s=s: s) for s in stats]
  monkeypatch.setattr(log_records.jax, 'local_devices', lambda: devices)
  monkeypatch.setattr(log_records.sys, 'platform', 'linux')
  used = types.SimpleNamespace(ru_maxrss=512 * 1024)  # in kilobytes
  monkeypatch.setattr(resource, 'getrusage', lambda _: used)
  told = log_records.memory()
  assert told.pop('perf/host_memory_gib') == 0.5
  assert told == ({} if want is None else {'perf/device_memory_gib': want})


class Numbers:
  """A tokenizer whose tokens are numbers, and 0 a special one."""

  def decode(self, token_ids, skip_special=True):
    return ' '.join(str(t) for t in token_ids if t or not skip_special)


def records(parts: int, shaping: dict) -> list[dict]:
  """Records of two prompts with two completions of three tokens at most."""
  P, G, T = 2, 2, 3
  config = configs.default()
  config.objective.reward_shaping = shaping
  part_BxK = np.array([[1, 0.25], [0, 0.5], [1, 0], [0, 0]], np.float32)[:, :parts]
  context = types.SimpleNamespace(
    config=config,
    models=types.SimpleNamespace(policy=types.SimpleNamespace(tokenizer=Numbers())),
    grading=types.SimpleNamespace(rewards=[rewards.Part(n, 1.0, None) for n in 'ab'[:parts]]),
    spec=types.SimpleNamespace(
      objective=types.SimpleNamespace(method=objective.method(config.objective)),
      update=types.SimpleNamespace(minibatches=1),
      rollout=types.SimpleNamespace(decode=types.SimpleNamespace(rollouts=G)),
      layout=types.SimpleNamespace(slots_per_prompt=1),
    ),
  )
  zeros = np.zeros((P * G, T), np.int32)
  prompts = Prompts(
    np.array([[0, 5, 6], [0, 7, 9]], np.int32), np.array([3, 2], np.int32),
    *[np.arange(P, dtype=np.int32)] * 2, np.zeros(P, np.float32),
  )  # fmt: skip
  length_B = np.array([3, 1, 1, 1], np.int32)
  rollout = Rollout(
    zeros, zeros.astype(np.float32), length_B, np.ones(P * G, np.int8), zeros,
    np.ones(P * G, np.float32), np.zeros((P * G, 0), np.float32),
  )  # fmt: skip
  correct_B = part_BxK[:, 0]
  batch = Batch(prompts, rollout, part_BxK.sum(1), correct_B, success_B=correct_B)
  scores = types.SimpleNamespace(
    context=context, outcome_B=np.zeros(P * G, np.int8), part_BxK=part_BxK, length_B=length_B,
    logged_texts=list('wxyz'),
  )  # fmt: skip
  rows = [Row(str(b), 'q', (), 'a', 's', {}) for b in range(P * G)]
  return log_records.rollout_records(rows, scores, batch, 7, {})


def test_a_record_has_the_prompt_as_read_every_reward_and_the_shaped_one():
  rows = records(2, dict(fn='overlong', buffer_tokens=2, factor=0.5))
  assert [row['prompt_text'] for row in rows] == ['0 5 6'] * 2 + ['0 7'] * 2
  assert [row['rewards'] for row in rows][:2] == [dict(a=1.0, b=0.25), dict(a=0.0, b=0.5)]
  assert [row['score'] for row in rows] == [1.25, 0.5, 1.0, 0.0]
  # Of three tokens two are within the buffer: −0.5 at the cap.
  assert [row['shaped'] for row in rows] == [0.75, 0.5, 1.0, 0.0]


def test_a_single_unshaped_reward_is_the_score_alone():
  rows = records(1, dict(fn='none'))
  assert not any({'rewards', 'shaped'} & row.keys() for row in rows) and rows[0]['score'] == 1.0
