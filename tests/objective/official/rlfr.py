"""RLFR: the flow's network with its loss, the rewards of deviations, and the clipped loss, by the paper's repository.

The official last token of a row has a latent; the project's has none, and leaves the normalization here.
"""

from __future__ import annotations

import types
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl_llm.models import flow_head
from jaxrl_llm.objective import auxiliary_loss, credit_assignment
from tests.objective.official import lib

FLOW = 'openrlhf/openrlhf/models/lmm_kits/flow_simple.py'
UTILS = 'openrlhf/openrlhf/models/utils.py'
LOSS = 'openrlhf/openrlhf/models/loss.py'
MAKER = 'openrlhf/openrlhf/trainer/ppo_utils/experience_maker.py'
OFFICIAL = lib.Official(
  'Jinghaoleven/RLFR',
  '1589879eedd2a61917e387e6119f3e3519729989',
  (FLOW, UTILS, LOSS, MAKER),
  'Apache-2.0',
)
SETTINGS = dict(
  advantage=dict(fn='group_normalized', eps=1e-9),
  credit_assignment=dict(fn='flow', coef=0.2, threshold=0.3, top=2),
  auxiliary_model='flow',
  trust_region=dict(fn='dual_clip', low=0.2, high=0.2, most=3.0),
  aggregation='sequence_mean',
)
NETWORK = ('expand_t', 'modulate', 'RMSNorm', 'TimestepEmbedder', 'ResBlock', 'FinalLayer')
WIDTH, DEPTH, TIME, LAYER = 6, 2, 0.8, 0.25
MUTANTS = {
  'rewards of what was': (
    credit_assignment,
    'coef * _ahead(share_BxT, inputs.mask_BxT)',
    'coef * jnp.cumsum(share_BxT, axis=1)',
  ),
  'a reward for leaving': (
    credit_assignment,
    'inputs.advantage_Bx1 - penalty_BxT',
    'inputs.advantage_Bx1 + penalty_BxT',
  ),
  'from zero': (credit_assignment, '(d_BxT - low_Bx1) / span_Bx1', 'd_BxT / span_Bx1'),
  'the smallest': (credit_assignment, 'share_BxT >= smallest_Bx1', 'share_BxT <= smallest_Bx1'),
  'wrong rows learn': (auxiliary_loss, 'targets.correct_B > 0.5, targets.weight_B', 'True, targets.weight_B'),
  'time upside down': (
    flow_head,
    'time * target + (1 - time) * noise',
    '(1 - time) * target + time * noise',
  ),
  'toward noise': (flow_head, 'wanted = target - noise', 'wanted = noise - target'),
  'no gate': (flow_head, 'x = x + gate * _dense', 'x = x + _dense'),
  'sines first': (
    flow_head,
    '[jnp.cos(angle), jnp.sin(angle)]',
    '[jnp.sin(angle), jnp.cos(angle)]',
  ),
  'the place is no input': (flow_head, " + _embed(params['layer'], layer)", ''),
}  # fmt: skip


def weights(seed: int) -> Any:
  """Weights of the network, of which none is 0."""
  r = np.random.default_rng((seed, 5))
  like = jax.eval_shape(lambda: flow_head.init(WIDTH, DEPTH, 0))
  return jax.tree.map(lambda x: r.normal(size=x.shape) / np.sqrt(x.shape[0]), like)


def draw(seed):
  """As everywhere, with latents of rows of T + 1 tokens and the noise of their targets; weights come from the seed."""
  data, r = lib.draw(seed), np.random.default_rng((seed, 4))
  shape = *data['logp'].shape, WIDTH
  data['process'] = np.round(r.uniform(0, 2, shape[:2]), 4)
  hidden = np.round(r.normal(size=(shape[0], shape[1] + 1, WIDTH)), 3)
  return data | dict(hidden=hidden, noise=np.round(r.normal(size=shape), 3), seed=np.array(seed))


class _Drawn:
  """torch with noise that was drawn before."""

  def __init__(self, torch, noise):
    self._torch, self._noise = torch, noise

  def __getattr__(self, name):
    return getattr(self._torch, name)

  def randn_like(self, _):
    return self._noise


def _network(torch, read, noise, own):
  """The official network with the weights `own`."""
  import math

  namespace = dict(torch=_Drawn(torch, noise), nn=torch.nn, math=math, checkpoint=None)
  names = ('FlowReward', 'SimpleMLPAdaLNTimePos', *NETWORK)
  # The official code rounds times and deviations to float32.
  text = read(FLOW).replace('.float()', '.double()').replace('torch.float32', 'torch.float64')
  code = lib.functions(text, names, **namespace)
  flow = code.FlowReward(WIDTH, WIDTH, DEPTH, WIDTH, str(TIME))

  def fill(linear, params):
    linear.weight.data = torch.tensor(params['kernel'].T)
    linear.bias.data = torch.tensor(params['bias'])

  model = flow.model
  pairs = [(model.input_proj, own['target']), (model.cond_embed, own['context'])]
  for embedder, name in ((model.time_embed, 'time'), (model.layer_embed, 'layer')):
    pairs += [(embedder.mlp[0], own[name]['first']), (embedder.mlp[2], own[name]['second'])]
  for block, params in zip(model.res_blocks, own['blocks'], strict=True):
    pairs += [(block.mlp[0], params['first']), (block.mlp[2], params['second'])]
    pairs += [(block.adaLN_modulation[1], params['modulation'])]
    block.in_ln.weight.data = torch.tensor(params['norm'])
  last = model.final_layer
  pairs += [(last.adaLN_modulation[1], own['modulation']), (last.linear, own['last'])]
  last.norm_final.weight.data = torch.tensor(own['norm'])
  for linear, params in pairs:
    fill(linear, params)
  return flow


def _flow_outputs(torch, read, data):
  """Deviations of all tokens but the last one, and the gradient of the loss of one row after the other."""
  exists = data['length'] > 0
  mask = torch.tensor(lib.mask(data)[exists])
  read_mask = mask * torch.nn.functional.pad(mask[:, 1:], (0, 1))
  hidden, noise = (torch.tensor(data[name][exists]) for name in ('hidden', 'noise'))
  flat = lambda x: x.reshape(-1, WIDTH)  # noqa: E731
  flow = _network(torch, read, flat(noise), weights(int(data['seed'])))
  loss, _ = flow(target=flat(hidden[:, 1:]), cond=flat(hidden[:, :-1]), layer=LAYER)
  loss = loss.reshape(mask.shape)
  mean = lib.functions(read(UTILS), ('masked_mean',), torch=torch).masked_mean
  right = torch.where(torch.tensor(data['reward'][exists]) >= 1.0, 1, 0)
  rows = [  # micro-batches of one row, whose gradients are averaged
    mean(mean(loss[b : b + 1], read_mask[b : b + 1], dim=-1), right[b : b + 1], dim=0)
    for b in range(len(mask))
  ]
  torch.stack(rows).mean().backward()
  deviation = np.zeros(data['logp'].shape)
  deviation[exists] = (loss * read_mask).detach().numpy()
  return dict(
    deviation=deviation,
    of_target=flow.model.input_proj.weight.grad.T.numpy(),
    of_layer=flow.model.layer_embed.mlp[2].weight.grad.T.numpy(),
  )


def official(torch, read, data):
  x = lib.tensors(torch, {k: v for k, v in data.items() if k not in ('hidden', 'noise')})
  names = ('normalize_flow_score', 'get_row_min', 'postprocess_flow_score', 'compute_reward')
  code = lib.functions(read(UTILS), (*names, 'masked_mean'), torch=torch)
  own = SETTINGS['credit_assignment']
  args = types.SimpleNamespace(
    flow_reward_norm='minmax',
    flow_score_bil=False,
    flow_gamma=1,
    flow_score_threshold=own['threshold'],
    flow_score_topk=own['top'],
  )
  read_mask = x.mask * torch.nn.functional.pad(x.mask[:, 1:], (0, 1))
  several = (
    read_mask.sum(1) > 1
  )  # the official range of one latent is 0, and its score not a number
  score = code.normalize_flow_score(x.process, read_mask.bool(), args)
  score = torch.where(several[:, None] & (read_mask > 0), score, 0.0)
  score = code.postprocess_flow_score(score, args)
  reward = torch.empty_like(x.reward)
  for uid in set(x.uid.tolist()):
    rows = torch.tensor(x.uid == uid)
    reward[rows] = (x.reward[rows] - x.reward[rows].mean()) / (x.reward[rows].std() + 1e-9)
  reward = code.compute_reward(
    reward, 0.0, torch.zeros_like(x.mask), own['coef'], score, action_mask=x.mask
  )
  returns = lib.method(read(MAKER), 'NaiveExperienceMaker', 'get_cumulative_returns', torch=torch)
  advantages = returns(types.SimpleNamespace(), reward, x.mask, 1.0)
  text, space = read(LOSS), dict(torch=torch, masked_mean=code.masked_mean)
  policy = types.SimpleNamespace(clip_eps=0.2, clip_high=0.2, use_dapo=False)
  loss = lib.method(text, 'PolicyLoss', 'forward', **space)(
    policy, x.logp, x.old, advantages, x.mask
  )
  return lib.outputs(x, loss) | _flow_outputs(torch, read, data)


def ours(data):
  hidden, noise = data['hidden'], data['noise']
  mask, exists = lib.mask(data), (data['length'] > 0).astype(float)
  targets = auxiliary_loss.AuxiliaryTargets(
    mask_BxT=jnp.asarray(mask),
    weight_BxT=jnp.asarray(mask / mask.sum()),
    weight_B=jnp.asarray(exists / exists.sum()),
    correct_B=jnp.asarray(data['reward']),
  )
  model = auxiliary_loss.flow(time=TIME)

  def loss(params):
    found = flow_head.deviation(
      params, hidden[:, 1:], hidden[:, :-1], noise, jnp.asarray(TIME), jnp.asarray(LAYER)
    )
    return model.loss(found, targets, lib.G)[0], found

  own = jax.tree.map(jnp.asarray, weights(int(data['seed'])))
  slope, found = jax.grad(loss, has_aux=True)(own)
  read = mask * np.pad(mask[:, 1:], ((0, 0), (0, 1)))
  return lib.gradient(SETTINGS, data) | dict(
    deviation=np.asarray(found) * read,
    of_target=slope['target']['kernel'],
    of_layer=slope['layer']['second']['kernel'],
  )


lib.main(__name__)
