"""How well priors of difficulty predict success on prompts that were never sampled, before training.

python -m tests.bench.difficulty --job=tiny [--prompts 1200] [--samples 8] [--out runs/difficulty] [--smoke] [--write]

Jobs are those of tests/bench/choices.py, with their supervised starts. The model answers each prompt --samples times;
then a curriculum visits all prompts once, 16 at a time, in random order, and its prior predicts success rate and mixed
group of each before the visit. Of the visits after the first quarter: log loss of a sample in nats (least where each
prompt's own rate is predicted, which no prior knows), calibration error (mean gap between predicted and observed rates
in ten bins of equal size), and the share of mixed groups. In the rows "blind" all prompts are of one kind. Samples are
kept in --out, so that rules can be compared again.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import os

import jax
import numpy as np

from jaxrl_llm import data, rewards
from jaxrl_llm.config import loading, validation
from jaxrl_llm.curriculum import Curriculum, answer_wording, prompt_features
from jaxrl_llm.evaluation import evaluate, held_out
from jaxrl_llm.learner import compile as programs
from jaxrl_llm.learner import state as train_state
from jaxrl_llm.runner import prompt_encoding, setup
from tests.bench import choices
from tests.bench.lib import results, smoke

VISITS = 16  # of a step
BINS = 10
ANSWER = 16  # tokens of an answer whose odds are a feature
# name → (curriculum.prior_pooling, whether it is told the kinds)
RULES = {
  'none': (dict(fn='none'), False),
  'kind': (dict(fn='kind', strength=2.0), True),
  'fitted_kind': (dict(fn='fitted_kind'), True),
  'fitted_kind, blind': (dict(fn='fitted_kind'), False),
  'hidden_state': (dict(fn='hidden_state'), True),
  'hidden_state, blind': (dict(fn='hidden_state'), False),
  'answer_odds': (dict(fn='hidden_state', dimensions=0, answer_tokens=ANSWER), True),
  'answer_odds, blind': (dict(fn='hidden_state', dimensions=0, answer_tokens=ANSWER), False),
  'odds and states': (dict(fn='hidden_state', answer_tokens=ANSWER), True),
  'odds and states, blind': (dict(fn='hidden_state', answer_tokens=ANSWER), False),
}


def measured(config, prompts: int, samples: int) -> dict[str, np.ndarray]:
  """Right samples, kind, hidden state and the odds of the answer, for `prompts` random training prompts."""
  config = validation.sized(config, jax.devices())
  context = setup.build_context(config)
  table, spec = context.tables.train, context.spec
  kind_N = data.kinds(table.rows, table.file_tokens_N)
  index_M = np.random.default_rng(0).permutation(len(table))[:prompts]
  part = dataclasses.replace(
    table, rows=[table.rows[i] for i in index_M], tokens=[table.tokens[i] for i in index_M]
  )
  state = train_state.init_state(spec, context.models.policy.params)
  with rewards.Pool(context.config.rewards) as workers:
    grading = held_out.scoring(context.config.rewards, workers, None)
    sampling = context.config.evaluation.sampling
    decode = context.models.policy.tokenizer.decode
    sample = evaluate.make_evaluator(spec, part, decode, grading, samples, sampling)
    _, records, _ = sample(train_state.sampling_weights(spec, state))
  records = [record for record in records if record['kind'] == 'sampled']
  score_MxN = np.array([record['score'] for record in records])
  right_MxN = score_MxN >= config.rewards.right
  wording = words(part.rows, records, right_MxN) or answer_wording.Wording(
    answer_wording.Lead(''), ''
  )
  length = min(ANSWER, config.completion_tokens)
  answers = data.known_answers(part.rows, context.models.policy.tokenizer, length, wording.phrase)
  # Whole blocks; some prompts are encoded twice.
  at, block = np.arange(len(part)), spec.layout.prompts
  at = np.resize(at, -(-len(at) // block) * block)
  encode = functools.partial(programs.compile_encode(spec), state._replace(carried=()))
  answers = tuple(x[at] for x in answers)
  encoded = prompt_encoding.encoded(encode, part, at, answers, block)
  states_MxF = np.concatenate(encoded.hidden)
  states_MxF[encoded.index_M] = states_MxF.copy()
  return dict(right=right_MxN.sum(1), kind=kind_N[index_M], states=states_MxF[: len(part)])


def words(rows, records, right_MxN: np.ndarray) -> answer_wording.Wording | None:
  """How the right samples of the first quarter, of which nothing is predicted, word their answers."""
  groups = [
    answer_wording.Group(
      row.question,
      row.answer,
      [text for text, right in zip(record['output'], right_N, strict=True) if right],
    )
    for row, record, right_N in zip(rows, records, right_MxN, strict=True)
  ]
  record = answer_wording.updated(answer_wording.none(), groups[: len(groups) // 4])
  return answer_wording.commonest(record)


def predictions(found: dict[str, np.ndarray], samples: int, rule: str) -> np.ndarray:
  """[2, M]: the success rate and the chance of a mixed group, predicted for each prompt before its visit."""
  pooling, told = RULES[rule]
  size = len(found['right'])
  settings = loading.default().curriculum.to_dict() | dict(prior_pooling=pooling)
  kind = found['kind'] if told else np.zeros(size, int)
  curriculum = Curriculum(settings, size, group=samples, kind=kind)
  if curriculum.features:
    states = found['states'] if curriculum.features.answer_tokens else found['states'][:, :-1]
    if not curriculum.features.ready:
      curriculum.features.fit(states[: prompt_features.STATES])
    curriculum.features.put(np.arange(size), states)
  predicted_2xM = np.zeros((2, size))
  for index in np.array_split(np.arange(size), -(-size // VISITS)):
    predicted_2xM[:, index] = curriculum.predict(index)[::2]
    curriculum.observe(index, found['right'][index], np.full(len(index), samples))
  return predicted_2xM


def log_loss(rate_M: np.ndarray, share_M: np.ndarray) -> float:
  """Mean −log-likelihood of a sample in nats, where `share_M` of a prompt's samples are right."""
  rate_M = np.clip(rate_M, 1e-6, 1 - 1e-6)
  return float(-(share_M * np.log(rate_M) + (1 - share_M) * np.log1p(-rate_M)).mean())


def calibration_error(rate_M: np.ndarray, share_M: np.ndarray) -> float:
  """Mean gap between predicted and observed rates over bins of equally many predictions."""
  bins = np.array_split(np.argsort(rate_M, kind='stable'), BINS)
  return float(np.mean([abs(rate_M[b].mean() - share_M[b].mean()) for b in bins]))


def table(found: dict[str, np.ndarray], samples: int) -> str:
  """A row for each rule."""
  share_M = found['right'] / samples
  late = np.arange(len(share_M)) >= len(share_M) // 4
  mixed = ((share_M > 0) & (share_M < 1))[late].mean()
  rows = [["each prompt's own rate", f'{log_loss(share_M[late], share_M[late]):.4f}', '–', '–']]
  for rule in RULES:
    rate_M, mixed_M = predictions(found, samples, rule)
    loss = log_loss(rate_M[late], share_M[late])
    error = calibration_error(rate_M[late], share_M[late])
    rows.append([rule, f'{loss:.4f}', f'{error:.3f}', f'{mixed_M[late].mean():.3f}'])
  header = ['prior', 'log loss', 'calibration error', f'mixed groups ({mixed:.3f} came)']
  return results.table(header, rows)


def add_options(parser: argparse.ArgumentParser) -> None:
  """The options that name a recording."""
  parser.add_argument('--job', choices=list(choices.JOBS), default='tiny')
  parser.add_argument('--prompts', type=int, default=1200)
  parser.add_argument('--samples', type=int, default=8)
  parser.add_argument('--out', default='runs/difficulty')


def recording(options: argparse.Namespace) -> dict[str, np.ndarray]:
  """What `measured` returns, from --out if it is there."""
  out = os.path.abspath(options.out)
  os.makedirs(out, exist_ok=True)
  jax.config.update('jax_compilation_cache_dir', os.path.join(out, 'compiled'))
  path = os.path.join(out, f'{options.job}_{options.prompts}_{options.samples}.npz')
  if not os.path.exists(path):
    more = choices.SMOKE[options.job] if options.smoke else ()
    if options.job == 'mixture':
      more += choices.write_mixture(os.path.join(out, 'mixture_rows'), options.smoke)
    more += choices.supervised_start(options.job, os.path.join(out, f'{options.job}_start'), more)
    config = choices.job(options.job, 'default', 0, (*more, 'evaluation.prompts=0'))
    np.savez(path, **measured(config, options.prompts, options.samples))
  with np.load(path) as found:
    return dict(found)


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  add_options(parser)
  options = smoke.parse(parser, prompts=48, samples=2)
  found = recording(options)
  kinds, right = len(np.unique(found['kind'])), found['right'].mean() / options.samples
  print(
    f'{options.job}: {options.prompts} prompts of {kinds} kinds, {options.samples} samples each, '
    f'of which {100 * right:.1f} % are right\n'
  )
  print(table(found, options.samples))


if __name__ == '__main__':
  main()
