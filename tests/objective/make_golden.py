"""Makes golden.json: losses and gradients of TRL's own GRPOTrainer on one random set of 8 × 6 tensors.

python tests/objective/make_golden.py        (needs trl and torch; nothing of jaxrl_llm)
Only the model and the accelerator are stand-ins: the loss runs as TRL has it. The importance-sampling ratios, which TRL
works out in a function that also samples, are worked out here by its rule.
"""

from __future__ import annotations

import collections
import json
import pathlib
import types

import numpy as np
import torch
import trl
from trl.experimental.gmpo.gmpo_trainer import GMPOTrainer
from trl.trainer.grpo_trainer import GRPOTrainer

B, T, G = 8, 6, 4
FILE = pathlib.Path(__file__).with_name('golden.json')

# name → what differs from TRL's defaults
CASES = {
  'grpo': {},
  'dapo': dict(loss_type='dapo', epsilon_high=0.28),
  'bnpo': dict(loss_type='bnpo'),
  'dr_grpo': dict(loss_type='dr_grpo'),
  'delta': dict(delta=1.25),
  'cispo': dict(loss_type='cispo', epsilon_high=1.2),
  'sapo': dict(loss_type='sapo'),
  'vespo': dict(loss_type='vespo'),
  'gspo': dict(importance_sampling_level='sequence', epsilon_low=0.03, epsilon_high=0.04),
  'luspo': dict(loss_type='luspo', importance_sampling_level='sequence'),
  'gmpo': dict(trainer='gmpo', epsilon_low=0.3, epsilon_high=0.3),
  'k3': dict(beta=0.1),
  'k3_corrected': dict(beta=0.1, use_bias_correction_kl=True),
  'token_truncate': dict(mode='token_truncate', low=None, high=1.2),
  'token_mask': dict(mode='token_mask', low=0.8, high=1.2),
  'sequence_truncate': dict(mode='sequence_truncate', low=None, high=1.2),
  'sequence_mask': dict(mode='sequence_mask', low=None, high=1.5),
  'opsm': dict(off_policy_mask_threshold=0.01),
  'forking': dict(loss_type='dapo', top_entropy_quantile=0.4),
}


def tensors() -> dict[str, list]:
  r = np.random.default_rng(20)
  logp = np.log(r.uniform(0.05, 0.9, (B, T)))
  old = logp + 0.3 * r.normal(size=(B, T))
  return dict(
    logp=logp.tolist(),
    old=old.tolist(),
    behavior=(old + 0.2 * r.normal(size=(B, T))).tolist(),
    reference=(logp + 0.4 * r.normal(size=(B, T))).tolist(),
    entropy=r.uniform(0, 2, (B, T)).tolist(),
    length=r.integers(1, T + 1, B).tolist(),
    reward=(r.integers(0, 2, B) + 0.2 * r.random(B)).tolist(),
  )


def engine_ratio(case, old, behavior, mask):
  """TRL's rule for the ratio of trainer to engine."""
  gap = (old - behavior) * mask
  if case['mode'].startswith('sequence'):
    gap = gap.sum(-1, keepdim=True)
  ratio = gap.exp()
  if case['mode'].endswith('truncate'):
    return ratio.clamp(min=case['low'], max=case['high'])
  outside = (ratio > case['high']) | (ratio < (case['low'] or 0.0))
  return ratio.masked_fill(outside, 0.0)


def stand_in(case, logp, entropy):
  """What `_compute_loss` reads of a trainer."""
  accelerator = types.SimpleNamespace(
    num_processes=1,
    device='cpu',
    gather=lambda x: x,
    gather_for_metrics=lambda x: x,
    pad_across_processes=lambda x, **_: x,
    reduce=lambda x, **_: x,
  )
  args = types.SimpleNamespace(
    delta=case.get('delta'),
    use_bias_correction_kl=case.get('use_bias_correction_kl', False),
    sapo_temperature_pos=1.0,
    sapo_temperature_neg=1.05,
    vespo_k_pos=2.0,
    vespo_lambda_pos=3.0,
    vespo_k_neg=3.0,
    vespo_lambda_neg=2.0,
    steps_per_generation=1,
  )
  self = types.SimpleNamespace(
    accelerator=accelerator,
    args=args,
    model=types.SimpleNamespace(training=True),
    loss_type=case.get('loss_type', 'grpo'),
    importance_sampling_level=case.get('importance_sampling_level', 'token'),
    epsilon_low=case.get('epsilon_low', 0.2),
    epsilon_high=case.get('epsilon_high', 0.2),
    beta=case.get('beta', 0.0),
    top_entropy_quantile=case.get('top_entropy_quantile', 1.0),
    off_policy_mask_threshold=case.get('off_policy_mask_threshold'),
    use_vllm='mode' in case,
    vllm_importance_sampling_correction='mode' in case,
    aux_loss_enabled=False,
    use_adaptive_entropy=False,
    _entropy_bonus_enabled=False,
    current_gradient_accumulation_steps=1,
    max_completion_length=T,
    _metrics=collections.defaultdict(lambda: collections.defaultdict(list)),
    get_off_policy_mask=GRPOTrainer.get_off_policy_mask,
    get_gamma_weights=GRPOTrainer.get_gamma_weights,
    _get_per_token_logps_and_entropies=lambda *a, **k: (logp, entropy, None),
  )
  self.get_high_entropy_mask = types.MethodType(GRPOTrainer.get_high_entropy_mask, self)
  return self


def run(case, data):
  tensor = {k: torch.tensor(v, dtype=torch.float64) for k, v in data.items()}
  mask = (torch.arange(T)[None] < tensor['length'][:, None]).to(torch.float64)
  logp = tensor['logp'].requires_grad_()
  group = tensor['reward'].reshape(-1, G)
  advantage = (group - group.mean(1, keepdim=True)) / (group.std(1, keepdim=True) + 1e-4)
  tokens = torch.zeros(B, T, dtype=torch.long)
  inputs = dict(
    prompt_ids=tokens,
    prompt_mask=mask,
    completion_ids=tokens,
    completion_mask=mask,
    advantages=advantage.ravel(),
    old_per_token_logps=tensor['old'],
    ref_per_token_logps=tensor['reference'],
    num_items_in_batch=mask.sum(),
  )
  if 'mode' in case:
    inputs['importance_sampling_ratio'] = engine_ratio(
      case, tensor['old'], tensor['behavior'], mask
    )
  kind = GMPOTrainer if case.get('trainer') == 'gmpo' else GRPOTrainer
  loss = kind._compute_loss(stand_in(case, logp, tensor['entropy']), None, inputs)
  loss.backward()
  return dict(loss=loss.item(), gradient=logp.grad.tolist())


def main() -> None:
  data = tensors()
  golden = dict(
    trl=trl.__version__, data=data, cases={name: run(case, data) for name, case in CASES.items()}
  )
  rounded = json.loads(json.dumps(golden), parse_float=lambda text: round(float(text), 9))
  FILE.write_text(json.dumps(rounded) + '\n')


if __name__ == '__main__':
  main()
