"""SPEC-RL's verification: which tokens of a draft are accepted, what is kept of it, and how much may be sampled behind.

Its statements that assemble a batch are run with padding for the tokens behind the accepted ones, as in a step that
samples none. Its uniforms are drawn from the same seed in every step; here both sides read those of the draw. Not
covered: the sampling behind the accepted tokens, how drafts are found by their prompts, and the objective, which is
that of dapo.py here and GRPO's in its only script of SPEC-RL. A draft of length 0, which the official batch lacks,
counts as accepted there and is sampled here.
"""

from __future__ import annotations

import ast
import math
from typing import Any

import jax.numpy as jnp
import numpy as np

from jaxrl_llm.config import loading as configs
from jaxrl_llm.config import stages
from jaxrl_llm.learner import verify_drafts
from jaxrl_llm.rollout import draft_verification
from jaxrl_llm.types import UNFINISHED, Rollout
from tests.objective.official import clpo_core, lib

CUT, TRAINER = 'verl/utils/speculative_decoding.py', 'verl/trainer/ppo/ray_trainer.py'
OFFICIAL = lib.Official(
  'ShopeeLLM/Spec-RL', '97da99ed54d663b238c417c728bc824c79cfab6f', (CUT, TRAINER), 'Apache-2.0'
)
B, T, V = 48, 7, 5
PAD, END = 0, 1
BIAS = 0.15  # trainer.spec_bias: the logarithm of the lenience in configs/rollout/spec_rl.py
TEMPERATURE = 0.8
WITHOUT = {'*': 'its inputs are drafts and logits'}
SEEDS = (0, 1)
MUTANTS = {
  'upside down': (draft_verification, 'new_BxT - logp_BxT + jnp.log', 'logp_BxT - new_BxT + jnp.log'),
  'strict': (draft_verification, '+ jnp.log(jnp.float32(lenience))', '- jnp.log(jnp.float32(lenience))'),
  'no lenience': (draft_verification, ' + jnp.log(jnp.float32(lenience))', ''),
  'no temperature': (
    draft_verification,
    'logits_BxTxV = logits_BxTxV / temperature\n',
    'logits_BxTxV = logits_BxTxV\n',
  ),
  'log-probs of the draft': (draft_verification, 'token_BxT, -1), new_BxT', 'token_BxT, -1), logp_BxT'),
  'all accepted tokens': (
    verify_drafts,
    'jnp.cumprod(same_BxT, axis=1).sum(1)',
    'same_BxT.sum(1)',
  ),
  'padding is accepted': (verify_drafts, ' & (column_BxT < most_B[:, None])\n  accepted_B', '\n  accepted_B'),
  'no draft is complete': (
    verify_drafts,
    'jnp.where(stopped_B, STOPPED, reason_B)',
    'jnp.where(stopped_B, UNFINISHED, UNFINISHED)',
  ),
}  # fmt: skip


def draw(seed: int) -> dict[str, np.ndarray]:
  """Drafts that end with the end token or at T, with uniforms 0.1% from the bound of acceptance for half of the tokens.

  The first quarter of the rows is accepted completely, a few rows are rejected at their first token.
  """
  r = np.random.default_rng(seed)
  length = r.integers(1, T + 1, B)
  length[::5] = T
  real = np.arange(T)[None] < length[:, None]
  tokens = r.integers(2, V, (B, T))
  stopped = (length < T) | (r.random(B) < 0.5)
  tokens[np.flatnonzero(stopped), length[stopped] - 1] = END
  logits = np.round(r.normal(size=(B, T, V)), 3)
  scaled = logits / TEMPERATURE
  logp = scaled - np.log(np.exp(scaled).sum(-1, keepdims=True))
  new = np.take_along_axis(logp, tokens[..., None], -1)[..., 0]
  old = np.round(np.minimum(new + r.normal(size=(B, T)) + 0.3, -0.01), 4)
  bound = np.exp(new - old + BIAS)
  near = bound * r.choice([0.999, 1.001], (B, T), p=[0.9, 0.1])
  uniform = np.where(r.random((B, T)) < 0.5, near, r.random((B, T)))
  uniform[: B // 4] = bound[: B // 4] * 0.999
  uniform[B // 4 : B // 4 + 3, 0] = bound[B // 4 : B // 4 + 3, 0] * 1.001
  uniform = np.round(np.clip(uniform, 1e-6, 1 - 1e-6), 6)
  tokens, old = np.where(real, tokens, PAD), np.where(real, old, 0)
  return dict(length=length, tokens=tokens, logits=logits, old=old, uniform=uniform)


def official(torch, read, data):
  """`spec_cut_with_knobs` with the sign of the bias that its trainer uses, then the trainer's assembly of rows."""
  tokens, length = torch.tensor(data['tokens']), torch.tensor(data['length'])
  mask = (torch.arange(T)[None] < length[:, None]).long()
  logp = torch.log_softmax(torch.tensor(data['logits']) / TEMPERATURE, -1)
  new = torch.gather(logp, 2, tokens[..., None])[..., 0]
  cut = lib.functions(
    read(CUT),
    ('spec_cut_with_knobs',),
    torch=torch,
    math=math,
    _rand_like_compat=lambda *_, **__: torch.tensor(data['uniform']),
  ).spec_cut_with_knobs
  call = clpo_core.statement(read(TRAINER), ast.Assign, 'out = spec_cut_with_knobs(')
  out = clpo_core.run(
    call,
    spec_cut_with_knobs=cut,
    spec_bias=BIAS,
    old_logp=torch.tensor(data['old']),
    new_logp=new,
    response_mask=mask,
  )['out']
  kept = out['cut_idx']
  rows = assembled(torch, read(TRAINER), tokens, mask, out)
  return dict(
    kept=kept,
    complete=torch.isin(torch.arange(B), out['idx_reuse']).long(),
    left=out['per_request_max_new_tokens'],
    tokens=rows,
    logp=new * (torch.arange(T)[None] < kept[:, None]),
  )


def assembled(torch, trainer: str, tokens, mask, out: dict):
  """Responses [B, T]: complete drafts, and the accepted tokens of others."""
  names = dict(
    idx_reuse=out['idx_reuse'],
    idx_need=out['idx_need'],
    cut_idx=out['cut_idx'],
    aligned_old_responses=tokens,
    aligned_old_response_mask=mask,
    final_resp=torch.full((B, T), PAD),
    **dict(R=T, P=1, pad_id=PAD, trunc_nonpad=0, trunc_nonpad_tokens=0),
    final_attn=torch.zeros((B, T + 1), dtype=torch.long),
    final_pos=torch.zeros((B, T + 1), dtype=torch.long),
    prompt_pos_ids=torch.zeros((B, 1), dtype=torch.long),
    delta=torch.arange(1, T + 1),
  )
  new_rows = torch.full((len(out['idx_need']), T), PAD)
  reuse = clpo_core.statement(trainer, ast.If, 'final_resp[idx_reuse] = ')
  names = clpo_core.run(reuse, **names)
  loop = clpo_core.statement(trainer, ast.For, 'final_resp[i, :keep_pref] = ')
  return clpo_core.run(loop, **names, new_resp=new_rows)['final_resp']


def ours(data):
  """`lenient` with the settings of the config, and the rows that decoding begins with."""
  config: Any = configs.load('spec_rl')
  verify = stages.pick(draft_verification, config.rollout.draft, 'rollout.draft')
  token_BxT, logp_BxT = verify(
    jnp.asarray(data['logits']),
    data['tokens'],
    data['old'],
    data['uniform'],
    jnp.zeros((B, T)),
    TEMPERATURE,
  )
  version_BxT, ones_B = np.zeros((B, T), np.int32), np.ones(B)
  draft = Rollout(
    data['tokens'], data['old'], data['length'], ones_B, version_BxT, ones_B, np.zeros((B, 0))
  )
  rows, accepted_B = verify_drafts._accepted_rows(
    draft, token_BxT, logp_BxT, jnp.int32(1), (END,), jnp.int32(T)
  )
  return dict(
    kept=accepted_B,
    complete=np.asarray(rows.reason_B != UNFINISHED, int),
    left=T - rows.length_B,
    tokens=rows.tokens_BxT,
    logp=rows.logp_BxT,
  )


lib.main(__name__)
