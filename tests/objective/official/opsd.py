"""OPSD for sampled tokens: whose log-probs the teacher's are, behind which prompt, and the gradient toward them.

The official trainer runs with a model whose logits give the drawn log-probs: those of `logp` behind the plain prompt,
those of `reference` behind the prompt with a solution and without the adapter, and zeros otherwise.
"""

from __future__ import annotations

import contextlib
import types

import numpy as np

from jaxrl_llm import objective
from jaxrl_llm.objective import aggregation, distillation
from jaxrl_llm.types import Solutions
from tests.objective.official import lib

TRAINER = 'opsd_trainer.py'
OFFICIAL = lib.Official(
  'siyan-zhao/OPSD', '590ec26c59e689a29840a501f65335578251b68c', (TRAINER,), 'none stated'
)
SETTINGS = dict(
  advantage=dict(fn='raw', baseline=0.0),
  ratio='one',
  trust_region='none',
  aggregation='token_mean',
  distillation=dict(fn='solved_by_data', prompt_tokens=8),
)
SEEDS = (0, 1)
WITHOUT = {'ratios far above and below 1 for both signs': 'the student is the policy that sampled'}
MUTANTS = {
  'sign': (
    distillation,
    'present(tokens.teacher_BxT) - tokens.old_BxT',
    'tokens.old_BxT - present(tokens.teacher_BxT)',
  ),
  'the teacher alone': (
    distillation,
    'present(tokens.teacher_BxT) - tokens.old_BxT',
    'present(tokens.teacher_BxT)',
  ),
  'rows count alike': (
    aggregation,
    'mask_BxT.sum()',
    '(mask_BxT.sum() + 1)',
  ),
}
PLAIN, SOLVED, TEMPERATURE = 2, 5, 1.1  # tokens of the two prompts


def draw(seed):
  """As everywhere, sampled by the student; the teacher's probabilities are below 1."""
  data = lib.draw(seed)
  data['reference'] = np.minimum(data['reference'], -0.05)
  data['old'] = data['behavior'] = data['logp'].copy()
  return data


class Model:
  """Logits over two tokens, of which token 0 has the drawn log-probs."""

  def __init__(self, torch, x):
    self.torch, self.x, self.adapter = torch, x, True

  @contextlib.contextmanager
  def disable_adapter(self):
    self.adapter = False
    yield
    self.adapter = True

  def __call__(self, input_ids, attention_mask):
    prompt = input_ids.shape[1] - lib.T
    logp_BxT = {(PLAIN, True): self.x.logp, (SOLVED, False): self.x.reference}[prompt, self.adapter]
    both = self.torch.stack([logp_BxT, self.torch.log(-self.torch.expm1(logp_BxT))], -1)
    pad = self.torch.nn.functional.pad
    return types.SimpleNamespace(logits=pad(TEMPERATURE * both, (0, 0, prompt - 1, 1)))


def official(torch, read, data):
  x = lib.tensors(torch, data)
  rows, none = len(x.logp), torch.zeros(0)
  compute_loss = lib.method(
    read(TRAINER),
    'OPSDTrainer',
    'compute_loss',
    torch=torch,
    F=torch.nn.functional,
    nullcontext=contextlib.nullcontext,
    empty_cache=lambda: None,
    is_peft_model=lambda model: True,
  )
  own = types.SimpleNamespace(
    use_thinking_machines_loss=True,
    temperature=TEMPERATURE,
    use_ema_teacher=False,
    fixed_teacher=True,
    accelerator=types.SimpleNamespace(unwrap_model=lambda model: model),
  )
  ids = lambda prompt: torch.zeros(rows, prompt + lib.T, dtype=torch.long)  # noqa: E731
  labels = ids(PLAIN)
  labels[:, PLAIN:][x.mask == 0] = -100
  inputs = dict(
    student_prompt_length=PLAIN,
    teacher_prompt_length=SOLVED,
    student_input_ids=ids(PLAIN),
    teacher_input_ids=ids(SOLVED),
    student_attention_mask=none,
    teacher_attention_mask=none,
    labels=labels,
  )
  return lib.outputs(x, compute_loss(own, Model(torch, x), inputs))


def ours(data):
  method = objective.method(lib.settings(SETTINGS))
  known = Solutions(np.zeros((lib.B, 8), np.int32), np.full(lib.B, 8))
  rows = lib.batch(data, method.needs_old)._replace(solutions=known)
  target = objective.targets(method, rows, lib.G).with_arrays(teacher_BxT=data['reference'])
  target = objective.distill(method, target)
  c_BxT, _ = objective.coefficients(method, target, data['logp'], data['entropy'])
  return dict(gradient=-np.asarray(c_BxT))


lib.main(__name__)
