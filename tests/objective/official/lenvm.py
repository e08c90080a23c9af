"""LenVM: labels, value head, returns, loss, its gradient and the lengths that its values stand for.

Every position from the prompt's last token on is a sample, here as in the official code; the project's head reads the
first of them. The official code computes returns by a recursion over tokens (GAE with λ = 1).
"""

from __future__ import annotations

import types

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl_llm.rollout import length_head
from tests.objective.official import lib

TRAINER = 'LlamaFactory-LenVM/src/llamafactory/train/lenvm/trainer.py'
WORKFLOW = 'LlamaFactory-LenVM/src/llamafactory/train/lenvm/workflow.py'
LABELS = 'LlamaFactory-LenVM/src/llamafactory/data/processor/value_regression.py'
CUTOFF = 'LlamaFactory-LenVM/src/llamafactory/data/processor/processor_utils.py'
OFFICIAL = lib.Official(
  'eric-ai-lab/Length-Value-Model',
  '9ebb78838cf0e469e23af61e6e9f81ee3ffaea28',
  (TRAINER, WORKFLOW, LABELS, CUTOFF),
  'none stated; Apache-2.0 of the LLaMA-Factory that it contains',
)
B, D, L = 6, 5, 4
LENGTHS = (1, 2, 5, 9, 20, 60)  # in tokens, the end token included
T = L + max(LENGTHS)
SEEDS = (0, 1)
GAMMAS = (0.997, 0.9)
WITHOUT = {'*': 'hidden states and lengths'}
MUTANTS = {
  'another activation': (length_head, 'jax.nn.silu(', 'jax.nn.gelu('),
  'no bias': (length_head, " + params['b1'][None])", ')'),
  'no half': (length_head, '0.5 * (value_N', '(value_N'),
  'positive values': (length_head, '-jax.nn.sigmoid(_logit', 'jax.nn.sigmoid(_logit'),
  'one token more': (length_head, 'jnp.expm1(length_N *', 'jnp.expm1((length_N + 1) *'),
  'undiscounted': (length_head, 'jnp.expm1(length_N * math.log(gamma))', '-length_N / 1000.0'),
  'another inverse': (length_head, 'jax.nn.softplus(logit_N) /', 'jax.nn.softplus(-logit_N) /'),
  'mean over all positions': (length_head, 'jnp.maximum(weight_N.sum(), 1)', 'len(weight_N)'),
}


def draw(seed):
  """Hidden states of all positions, weights of a head, a discount, and lengths from 1 token to many."""
  r = np.random.default_rng(seed)
  some = lambda *shape: np.round(r.normal(size=shape), 3)  # noqa: E731
  return dict(
    hidden=some(B, T, D), w1=some(D, D), b1=some(D), w2=some(D), b2=some(), gamma=GAMMAS[seed],
    length=np.array(LENGTHS),
  )  # fmt: skip


def official(torch, read, data):
  labels_BxT, mask_BxT = _labels(read, data['length'])
  head = lib.functions(read(WORKFLOW), ('MLP2SiLUValueHead',), nn=torch.nn).MLP2SiLUValueHead(
    types.SimpleNamespace(hidden_size=D)
  )
  with torch.no_grad():
    head.fc.weight.copy_(torch.tensor(data['w1'].T))
    head.fc.bias.copy_(torch.tensor(data['b1']))
    head.summary.weight.copy_(torch.tensor(data['w2'])[None])
    head.summary.bias.fill_(float(data['b2']))
  trainer, logit_BxT = _trainer(torch, read, data['gamma']), []
  trainer._forward_value = lambda model, inputs: logit_BxT[0]
  logit_BxT.append(head(torch.tensor(data['hidden']))[..., 0])
  inputs = dict(value_labels=torch.tensor(labels_BxT), value_mask=torch.tensor(mask_BxT))
  loss = trainer.compute_loss(types.SimpleNamespace(training=False), inputs)
  loss.backward()
  value_BxT = trainer._raw_to_target_prediction(logit_BxT[0].detach())
  tokens_BxT = trainer._value_to_length(value_BxT, data['gamma'])
  return dict(
    labels=labels_BxT * mask_BxT, mask=mask_BxT, loss=float(loss.detach()), w1=head.fc.weight.grad.numpy().T,
    b1=head.fc.bias.grad.numpy(), w2=head.summary.weight.grad.numpy()[0],
    b2=head.summary.bias.grad.numpy()[0], tokens=tokens_BxT.numpy(),
  )  # fmt: skip


def _labels(read, length_B):
  """Tokens to go at each position and which positions are samples, [B, T], from prompts of L tokens."""
  code = lib.functions(
    read(LABELS) + '\n' + read(CUTOFF), ('LengthValueDatasetProcessor', 'infer_seqlen'),
    DatasetProcessor=object,
  )  # fmt: skip
  processor = code.LengthValueDatasetProcessor()
  plugin = types.SimpleNamespace(
    process_messages=lambda messages, *rest: messages,
    process_token_ids=lambda ids, *rest: (ids, None),
  )
  processor.tokenizer = types.SimpleNamespace(encode=lambda text: [0])
  processor.processor = None
  processor.data_args = types.SimpleNamespace(cutoff_len=2 * T, max_finite_length=2 * T)
  labels_BxT, mask_BxT = np.zeros((len(length_B), T)), np.zeros((len(length_B), T))
  for b, length in enumerate(length_B):
    processor.template = types.SimpleNamespace(
      mm_plugin=plugin, efficient_eos=False,
      encode_oneturn=lambda *rest, n=int(length): ([1] * L, [1] * n),
    )  # fmt: skip
    _, labels, mask = processor._encode_example([], [], None, None, [], [], [])
    labels_BxT[b, : len(labels)], mask_BxT[b, : len(mask)] = labels, mask
  return labels_BxT, mask_BxT


def _trainer(torch, read, gamma):
  """The official trainer with its published settings, without a model."""
  code = lib.functions(
    read(TRAINER), ('LengthValueTrainer',), torch=torch, F=torch.nn.functional, Trainer=object,
    override=lambda fn: fn, EPS=1e-12,
  )  # fmt: skip
  trainer = object.__new__(code.LengthValueTrainer)
  trainer.finetuning_args = types.SimpleNamespace(
    lenvm_gamma=gamma, lenvm_lam=1.0, lenvm_target_type='discounted_return', lenvm_loss_type='huber',
    lenvm_huber_loss_delta=1.0, lenvm_relative_loss=False, lenvm_agg_method='token-mean',
  )  # fmt: skip
  return trainer


def ours(data):
  hidden_NxD = jnp.asarray(data['hidden']).reshape(-1, D)
  gamma, position_T = float(data['gamma']), np.arange(T)
  labels_BxT = data['length'][:, None] - (position_T - (L - 1))[None]
  mask_BxT = (position_T >= L - 1)[None] & (labels_BxT >= 0)
  params = {name: jnp.asarray(data[name]) for name in ('w1', 'b1', 'w2', 'b2')}
  loss, grads = jax.value_and_grad(length_head._loss)(
    params, hidden_NxD, labels_BxT.reshape(-1), mask_BxT.reshape(-1).astype(float), gamma
  )
  head = length_head.discounted_return(gamma=gamma)
  tokens_N = head.remaining_tokens(length_head.LengthHeadState(params, ()), hidden_NxD)
  return grads | dict(
    labels=labels_BxT * mask_BxT, mask=mask_BxT, loss=loss, tokens=tokens_N.reshape(B, T)
  )


lib.main(__name__)
