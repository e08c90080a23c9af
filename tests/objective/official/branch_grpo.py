"""BranchGRPO: rewards of a tree's nodes from its leaves, advantages among the nodes of a depth, each edge once.

The official trees are of denoising steps of images, and a step that does not split has one child. Here a node is a
token after all tokens before it. The clipped loss of an edge, in the middle of a long function there, is written here,
with the mean over the tokens of all rows; the advantages are clipped at 5 there, which none of the draw reaches.
"""

from __future__ import annotations

import math
import typing

import numpy as np

from jaxrl_llm.objective import credit_assignment
from tests.objective.official import lib

TRAINER = 'fastvideo/train_branchgrpo_flux.py'
OFFICIAL = lib.Official(
  'Fredreic1849/BranchGRPO', 'ffc3c902c900284db60dc61bb02f8b475966322f', (TRAINER,), 'Apache-2.0'
)
SETTINGS = dict(
  advantage='raw',
  credit_assignment=dict(fn='by_depth'),
  trust_region=dict(fn='clip', low=0.2, high=0.28),
  aggregation='token_mean',
)
IDLE = (
  'advantage.baseline',
  'credit_assignment.least',
)  # one for all rewards; for those that differ by rounding
WITHOUT = {'empty rows': 'every path of an official tree has a leaf'}
MUTANTS = {
  'every row counts': (credit_assignment, 'node_B, R_n_B = mask_B / n_B', 'node_B, R_n_B = mask_B'),
  'a depth of all groups': (
    credit_assignment, 'nodes_B = total(node_B, group_BxB)', 'nodes_B = node_B.sum() + 0 * node_B',
  ),
  'equal tokens are a node': (
    credit_assignment,
    'same_BxB &= token_B[:, None] == token_B[None]',
    'same_BxB = group_BxB & (token_B[:, None] == token_B[None])',
  ),
  'biased': (
    credit_assignment,
    'node_B * off_B**2, group_BxB) / jnp.maximum(nodes_B - 1, 1)',
    'node_B * off_B**2, group_BxB) / jnp.maximum(nodes_B, 1)',
  ),
  'a row of a node has its whole gradient': (
    credit_assignment, 'off_B / (std_B + eps) * node_B, 0.0)', 'off_B / (std_B + eps) * mask_B, 0.0)',
  ),
  'without std': (credit_assignment, 'off_B / (std_B + eps) * node_B', 'off_B * node_B'),
}  # fmt: skip


def draw(seed):
  """Groups whose rows fork before tokens 0, 2 and 4, into tokens that are drawn; each ends with one of its own."""
  data, r = lib.draw(seed), np.random.default_rng(seed + 1)
  data['length'] = np.maximum(data['length'], 1)
  tokens_PxGxT = np.zeros((lib.P, lib.G, lib.T), int)
  for t, shared in enumerate((2, 2, 1, 1, 1, 1)):
    drawn = r.integers(0, 3, (lib.P, lib.G // shared))
    tokens_PxGxT[..., t] = np.repeat(drawn, shared, axis=1)
  data['tokens'] = tokens_PxGxT.reshape(lib.B, lib.T)
  data['tokens'][np.arange(lib.B), data['length'] - 1] = 10 + np.arange(lib.B) % lib.G
  data['reward'] = np.round(data['reward'] + r.normal(size=lib.B) * (data['reward'] > 0), 4)
  return data


def official(torch, read, data):
  """The loss of all edges, with the advantages of their nodes."""
  names = (
    'TreeNode',
    'compute_node_rewards_from_leaves',
    'compute_hierarchical_advantages_by_depth',
  )
  code = lib.functions(
    read(TRAINER), names, torch=torch, np=np, math=math, main_print=lambda *_: None, **vars(typing)
  )
  advantage_BxT, share_BxT = np.zeros((2, *data['logp'].shape))
  for p in range(lib.P):
    rows = range(p * lib.G, (p + 1) * lib.G)
    root = code.TreeNode('root', None)
    paths = [_path(code, root, data['tokens'][b, : data['length'][b]]) for b in rows]
    rewards = torch.tensor(data['reward'][rows.start : rows.stop])
    _, by_depth = code.compute_node_rewards_from_leaves(root, rewards, [path[-1] for path in paths])
    advantage = code.compute_hierarchical_advantages_by_depth(by_depth)
    for b, path in zip(rows, paths, strict=True):
      for t, node in enumerate(path):
        advantage_BxT[b, t] = advantage[node.node_id]
        share_BxT[b, t] = 1 / sum(node in other for other in paths)
  assert np.abs(advantage_BxT).max() < 5
  x = lib.tensors(torch, data)
  ratio_BxT, a_BxT = torch.exp(x.logp - x.old), torch.tensor(advantage_BxT)
  of_edge = torch.maximum(-a_BxT * ratio_BxT, -a_BxT * torch.clamp(ratio_BxT, 0.8, 1.28))
  return lib.outputs(x, (of_edge * torch.tensor(share_BxT) * x.mask).sum() / x.mask.sum())


def _path(code, root, tokens):
  """The nodes of a row's tokens, new ones where it is the first to have them."""
  node, path = root, []
  for t, token in enumerate(tokens):
    name = f'{node.node_id} {token}'
    found = [child for child in node.children if child.node_id == name]
    if not found:
      found = [code.TreeNode(name, None, parent=node, step=t + 1)]
      node.add_child(found[0])
    path.append(node := found[0])
  return path


lib.main(__name__)
