"""Aurora's draft head: the loss of one update, its gradient, and the step of the optimizer.

Equal are: each draft token's hidden state comes from the one before it and the rollout's token, the policy's
distribution of the rollout is its target, the mean is over all tokens of a batch, and place k weighs 0.8^(k − 1). The
official loss is a cross-entropy, ours a KL divergence; both are taken less that of a head that changes nothing. Ours
divides logits by the sampling temperature, which is 1 here.

The official trainer runs with our head in the place of its transformer layer, which this project leaves out. It
divides the head's output by its root mean square, ours begins behind the policy's last norm; a further feature keeps
that root constant here. The official mask counts a draft token by the token two places before it, so that drafts that
begin in the prompt or end behind the row count, too. Decoding has neither, and ours leaves them out: so do the official
rows here, which begin with the prompt's last token and are masked from their last but one on. The official rate warms
up and falls; ours is constant.
"""

from __future__ import annotations

import types
import typing

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl_llm.rollout import draft_head
from jaxrl_llm.types import ModelConfig
from tests.objective.official import lib

MODEL, LOSS, TENSOR = (
  'aurora/models/eagle3.py',
  'aurora/models/ops/loss.py',
  'aurora/utils/tensor.py',
)
TRAINER, OPTIMIZER = 'aurora/training/eagle3_trainer.py', 'aurora/training/optimizer.py'
CONFIG = 'aurora/config/train_config.py'
OFFICIAL = lib.Official(
  'togethercomputer/aurora',
  '8358be4cd632013f5078fcfb319be5d454f5c2e4',
  (MODEL, LOSS, TENSOR, TRAINER, OPTIMIZER, CONFIG),
  'MIT',
)
V, D, W, K = 7, 5, 6, 3
SHARDS = (8, 2, 3), (1, 5)  # lengths of completions in each shard
SEEDS = (0, 1)
WITHOUT = {'*': 'hidden states and tokens'}
MUTANTS = {
  'another decay': (draft_head, '_STEP_DECAY = 0.8', '_STEP_DECAY = 0.9'),
  'decay from the first on': (draft_head, '** jnp.arange(self.tokens)', '** jnp.arange(1, self.tokens + 1)'),
  'reverse KL': (draft_head, '(jnp.exp(policy_logp) * (policy_logp - draft_logp))', '(jnp.exp(draft_logp) * (draft_logp - policy_logp))'),
  'one count for all places': (draft_head, '/ jnp.maximum(count_K, 1)', '/ jnp.maximum(count_K[0], 1)'),
  'the next token': (draft_head, '_shifted(decoder.embed(policy, inputs.token_ZxU, dtype))', 'decoder.embed(policy, inputs.token_ZxU, dtype)'),
  'the hidden state behind the token': (draft_head, '_next_hidden(params, _shifted(hidden_ZxUxD)', '_next_hidden(params, hidden_ZxUxD'),
  "the policy's states between": (draft_head, '_next_hidden(params, _shifted(hidden_ZxUxD)', '_next_hidden(params, _shifted(inputs.hidden_ZxUxD)'),
  'no place of its own': (draft_head, 'inputs.place_ZxU[:, None] >= place_1xKx1', 'inputs.place_ZxU[:, None] >= 1'),
  'drafts from the second token on': (draft_head, 'inputs.place_ZxU[:, None] >= place_1xKx1', 'inputs.place_ZxU[:, None] > place_1xKx1'),
  'padding counts': (draft_head, 'in_use_ZxU[:, None] & ', ''),
  'no bound of the gradient': (draft_head, 'optax.clip_by_global_norm(self.clip_norm), ', ''),
  'another bound': (draft_head, 'clip_norm: float = 0.5', 'clip_norm: float = 1.0'),
  'another rate': (draft_head, 'learning_rate: float = 1e-4', 'learning_rate: float = 2e-4'),
}  # fmt: skip


def draw(seed):
  """Rows of hidden states [row, place, D] and their tokens, the head's weights, and the policy's two matrices."""
  r = np.random.default_rng(seed)
  some = lambda *shape: np.round(r.normal(size=shape), 3)  # noqa: E731
  length_B = np.concatenate(SHARDS)
  rows = len(length_B), max(length_B) + 1  # with the prompt's last token
  return dict(
    length=length_B, token=r.integers(0, V, rows), hidden=some(*rows, D), embedding=some(V, D),
    output=some(D, V), w1=some(2 * D, W), b1=some(W), w2=some(W, D),
  )  # fmt: skip


def official(torch, read, data):
  head = {k: torch.nn.Parameter(torch.tensor(data[k])) for k in ('w1', 'b1', 'w2')}
  trainer = _trainer(torch, read, data, head)
  length_B, place_S = torch.tensor(data['length'])[:, None], torch.arange(data['token'].shape[1])
  batch = dict(
    input_ids=torch.tensor(data['token']),
    last_hidden_states=torch.tensor(data['hidden']),
    hidden_states=torch.tensor(data['hidden']),
    loss_mask=(place_S < length_B - 1).long(),
    attention_mask=None,
  )
  loss = trainer._backward(trainer._forward(batch)[0]).detach()
  gradient = {k: x.grad.clone().numpy() for k, x in head.items()}
  before = {k: x.detach().clone() for k, x in head.items()}
  _optimizer(torch, read, head).step()
  moved = {f'moved_{k}': 1e3 * (x.detach() - before[k]).numpy() for k, x in head.items()}
  with torch.no_grad():
    head['w2'].zero_()
  idle = trainer._backward(trainer._forward(batch)[0]).detach()
  return gradient | moved | dict(loss=float(loss - idle))


def _trainer(torch, read, data, head):
  """The official trainer and its model in float64, with our head as the draft model."""
  F, common = torch.nn.functional, dict(torch=torch, F=torch.nn.functional)
  loss_names = 'compiled_forward_kl_loss', 'compiled_forward_kl_loss_from_hs'
  losses = lib.functions(read(LOSS).replace('.float()', '.double()'), loss_names, **common)
  padding = lib.functions(read(TENSOR), ('padding',), **common).padding
  names = 'Eagle3Model', 'compute_lazy_target_padded'
  model = lib.functions(
    read(MODEL), names, **common, nn=torch.nn, padding=padding, torch_checkpoint=None,
    LazyTarget=types.SimpleNamespace, PrecomputedTarget=type('Pruned', (), {}), **vars(losses),
  )  # fmt: skip
  text = read(TRAINER).replace('.cuda()', '')
  code = lib.functions(
    text, ('Eagle3Trainer',), torch=torch, Trainer=object, padding=padding,
    compute_lazy_target_padded=model.compute_lazy_target_padded,
  )  # fmt: skip
  square = 1e4

  def steady(hidden):
    """With a feature more, such that the square of the norm is always the same."""
    return torch.cat([hidden, (square - hidden.pow(2).sum(-1, keepdim=True)).sqrt()], -1)

  def next_hidden(input_embeds, hidden_states, **_):
    unit = lambda x: x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)  # noqa: E731
    hidden = hidden_states[..., :D]
    both = torch.cat([unit(hidden), unit(input_embeds)], -1)
    return steady(hidden + F.silu(both @ head['w1'] + head['b1']) @ head['w2']), None, None

  output, embedding = torch.tensor(data['output'].T), torch.tensor(data['embedding'])
  norm = torch.full((D + 1,), (square / (D + 1)) ** 0.5)
  draft = types.SimpleNamespace(
    vocab_size=V,
    target_vocab_size=V,
    get_lm_head_params=lambda: (norm, F.pad(output, (0, 1)), 0.0),
    project_hidden_states=steady,
    embed_input_ids=lambda ids: embedding[ids],
    backbone=next_hidden,
  )
  trainer = object.__new__(code.Eagle3Trainer)
  trainer.model = trainer.eagle3 = model.Eagle3Model(draft, K, attention_backend='none')
  trainer.t2d, trainer.target_lm_head_weight = None, output
  return trainer


def _optimizer(torch, read, head):
  """The official optimizer at its full rate, with the settings of the official config."""
  names = dict.fromkeys(('Optional',), typing.Optional)
  settings = lib.functions(read(CONFIG), ('TrainingConfig',), **names).TrainingConfig
  text = read(OPTIMIZER).replace('torch.float32', 'torch.float64')
  schedule = types.SimpleNamespace(step=lambda: None)
  code = lib.functions(
    text, ('BF16Optimizer',), torch=torch, LRSchedulerWithWarmup=lambda *_, **__: schedule
  )
  parameters = types.SimpleNamespace(parameters=lambda: head.values())
  return code.BF16Optimizer(
    parameters, settings.learning_rate, max_grad_norm=settings.max_grad_norm
  )


def ours(data):
  head = draft_head.eagle(tokens=K)
  config = ModelConfig(
    vocab=V, width=D, layers=1, heads=1, kv_heads=1, head_dim=2, mlp=2, max_tokens=16, tied=False
  )
  policy = dict(
    embed=dict(embedding=jnp.asarray(data['embedding'])),
    head=dict(kernel=jnp.asarray(data['output'])),
  )
  params = {k: jnp.asarray(data[k]) for k in ('w1', 'b1', 'w2')}
  count_K, inputs = head.counts(data['length']), _packed(data)

  def loss(params):
    return head.loss(
      config, params, policy, inputs, count_K, temperature=1.0, chunk_tokens=1024, dtype='float64'
    )

  (value, sums), grads = jax.value_and_grad(loss, has_aux=True)(params)
  idle, _ = loss(params | dict(w2=0 * params['w2']))
  state = draft_head.DraftHeadState(params, head._optimizer().init(params), jnp.float32(0))
  after, _ = head.learn(state, grads, sums, count_K)
  moved = {f'moved_{k}': 1e3 * (after.params[k] - x) for k, x in params.items()}
  return grads | moved | dict(loss=value - idle)


def _packed(data):
  """The completions of each shard one after another, each token with the hidden state before it; then padding."""
  used_Z = np.array([sum(lengths) for lengths in SHARDS])
  U = max(used_Z) + 2
  hidden_ZxUxD, token_ZxU = np.ones((len(used_Z), U, D)), np.ones((len(used_Z), U), np.int32)
  place_ZxU, b = np.full((len(used_Z), U), 5), 0
  for z, lengths in enumerate(SHARDS):
    start = 0
    for n in lengths:
      at = slice(start, start + n)
      hidden_ZxUxD[z, at], token_ZxU[z, at] = data['hidden'][b, :n], data['token'][b, 1 : n + 1]
      place_ZxU[z, at], start, b = np.arange(n), start + n, b + 1
  arrays = hidden_ZxUxD, token_ZxU, place_ZxU, used_Z
  return draft_head.PredictedTokens(*map(jnp.asarray, arrays))


lib.main(__name__)
