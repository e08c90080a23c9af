"""Drafts from the group's text against plain decoding: decode iterations and time per token, SmolLM2 float32 on sums.

python -m tests.bench.ngram [--turns 3] [--tokens 48] [--match 3] [--smoke]
4 prompts × 8 rollouts at temperature 1, end tokens on; every row in a slot of its own, or 8 slots with rollout 0
of each prompt first. All cases sample the same tokens and alternate in one process; the best turn of each
counts. Times are wall-clock and CPU time; on a busy machine only the latter is meaningful.
"""

from __future__ import annotations

import argparse
import os
import time

os.environ.setdefault('JAX_PLATFORMS', 'cpu')

import jax
import numpy as np

from jaxrl_llm import models
from jaxrl_llm.config import loading as configs
from jaxrl_llm.models import default_model
from jaxrl_llm.rollout import ngram_drafts, queue_order, ring_decode
from jaxrl_llm.rollout.decode_records import DecodeInputs
from jaxrl_llm.types import Prompts
from tests.bench.lib import smoke

G, L = 8, 64
QUESTIONS = ('47 + 35', '6 + 8 + 9', '512 + 304', '73 + 18 + 25')
TEMPLATE = 'State the final answer to the following arithmetic problem: Calculate {}.'


def prompts(tokenizer, width: int) -> Prompts:
  """Prompts like those of the default job."""
  encoded = [
    tokenizer.encode_chat([dict(role='user', content=TEMPLATE.format(q))]) for q in QUESTIONS
  ]
  tokens_PxL = np.zeros((len(encoded), width), np.int32)
  for row, tokens in zip(tokens_PxL, encoded, strict=True):
    row[: len(tokens)] = tokens
  length_P = np.array([len(tokens) for tokens in encoded], np.int32)
  index_P = np.arange(len(encoded), dtype=np.int32)
  return Prompts(tokens_PxL, length_P, index_P, index_P * 0, np.zeros(len(encoded), np.float32))


def case(model, inputs_P: Prompts, tokens: int, slots: int, match: int, draft: int):
  """A function of no arguments that samples: rollout, decode iterations, and counts of drafts."""
  end_ids = tuple(model.tokenizer.end_ids)
  spec = ring_decode.DecodeSettings(
    G, tokens, 1.0, end_ids, 'float32', slots=slots, queue_order=queue_order.probe_then_longest
  )
  start = model.config, jax.random.key(0), np.int32(0)

  def sampled(params, inputs_P):
    config, key, version = start
    inputs = DecodeInputs(params, inputs_P, key, version)
    if not draft:
      return *ring_decode.generate(config, spec, inputs), None
    return ngram_drafts.generate(config, spec, inputs, ngram_drafts.NgramSettings(match, draft))

  fn = jax.jit(sampled)
  return lambda: jax.tree.map(np.asarray, jax.block_until_ready(fn(model.params, inputs_P)))


def main(turns: int, tokens: int, match: int, tiny: bool) -> None:
  if tiny:  # a token is a character
    scratch = configs.default().scratch.to_dict() | dict(max_tokens=256)
    model, width = models.load('scratch', scratch=scratch), 2 * L
  else:
    model, width = models.load(default_model.NAME), L
  model = model._replace(params=jax.device_put(model.params))
  inputs_P = prompts(model.tokenizer, width)
  names = [(slots, draft) for slots in (0, 8) for draft in (0, 2, 4, 8)]
  runs = {name: case(model, inputs_P, tokens, name[0], match, name[1]) for name in names}
  best, results, first = {}, {}, None
  for turn in range(turns + 1):  # the first one compiles
    for name, run in runs.items():
      began, cpu = time.perf_counter(), time.process_time()
      results[name] = run()
      took = time.perf_counter() - began, time.process_time() - cpu
      if turn:
        best[name] = tuple(map(min, best.get(name, took), took))
      first = first or results[name][0]
      same = (results[name][0].tokens_BxT == first.tokens_BxT).all(1).sum()
      assert same >= len(first.length_B) - 1, 'but for rounding, drafts change no token'
  print(
    'slots draft  tokens  rounds  per token  of plain  offered/turn  kept/turn    ms/token  CPU-ms/token'
  )
  for (slots, draft), (rollout, rounds, counts) in results.items():
    wall, cpu = (1000 * x / rollout.length_B.sum() for x in best[slots, draft])
    # The first token of a row takes no decode iteration.
    after = int((rollout.length_B - 1).sum())
    ratio = rounds / results[slots, 0][1]
    offered, kept = (0, 0) if counts is None else np.array(counts[1:]) / counts.turns
    print(
      f'{slots or len(rollout.length_B):5} {draft:5} {rollout.length_B.sum():7} {rounds:7} {rounds / after:10.4f} '
      f'{ratio:9.2f} {offered:13.2f} {kept:10.2f} {wall:11.2f} {cpu:13.2f}'
    )


if __name__ == '__main__':
  parser = argparse.ArgumentParser(description=__doc__)
  parser.add_argument('--turns', type=int, default=3)
  parser.add_argument('--tokens', type=int, default=48)
  parser.add_argument('--match', type=int, default=3)
  arguments = smoke.parse(parser, turns=1, tokens=8)
  main(arguments.turns, arguments.tokens, arguments.match, arguments.smoke)
