"""One config a paper: each trains the default job, is tested, and stands in the table of configs/README.md with its source.

That each runs, tests/test_configs.py says.

python tests/test_papers.py          writes the table into configs/README.md
"""

from __future__ import annotations

import functools
import importlib
import pathlib
import re
import sys

import pytest

ROOT = pathlib.Path(__file__).parents[1]
if __name__ == '__main__':
  sys.path[:0] = [str(ROOT), str(ROOT / 'tests')]

import provenance  # noqa: E402
from curricula import RULES  # noqa: E402
from objective_table import METHODS, settings  # noqa: E402

from jaxrl_llm.config import loading as configs  # noqa: E402

FILES = {path.stem: path for path in sorted((ROOT / 'configs').rglob('*.py'))}
JOBS = (
  *('sums', 'tiny', 'code', 'guess', 'calculator', 'r3', 'gsm8k', 'unique_letters'),
  *('sft', 'sft_then_rl', 'distill', 'reward_model', 'countdown', 'keychain', 'rubric'),
)
PAPERS = [name for name in FILES if name not in JOBS]
STAGES = (
  'advantage',
  'credit_assignment',
  'auxiliary_model',
  'importance_correction',
  'old_policy',
  'ratio',
  'advantage_modulation',
  'trust_region',
  'token_weighting',
  'kl',
  'aggregation',
  'lr_scale',
)
BEGIN, END = '<!-- methods: python tests/test_papers.py -->\n', '<!-- end of methods -->\n'


# What proves a part of generation.
GENERATION = dict(
  prune='tests/rollout/test_pruning.py',
  stop='tests/rollout/test_slot_loop.py',
  draft='tests/rollout/test_draft_verification.py',
  cap='tests/rollout/test_length_schedule.py',
  tree='tests/rollout/test_tree_decode.py',
)


# What proves a stage that stands beside the policy gradient, or in the place of rewards.
BESIDE = dict(
  sft_loss='tests/objective/test_sft_loss.py', distillation='tests/objective/test_distillation.py'
)
# And of what happens between sampling and learning.
BETWEEN = dict(
  rewards=dict(
    vote='tests/rewards/test_majority_vote.py', truncate='tests/rewards/test_length_truncation.py'
  ),
  replay=dict(
    reuse='tests/replay/test_successes.py', collect='tests/replay/test_dynamic_sampling.py'
  ),
  curriculum=dict(
    hint='tests/curriculum/test_hint_rules.py', labels='tests/curriculum/test_labels.py'
  ),
)


# And of rewards beside the right answer.
GRADED = dict(
  steps='tests/rewards/model_judge/test_rubric.py',
  pairwise='tests/rewards/model_judge/test_rubric.py',
)


# And of methods of many turns, whose job is a game: rows of tests/objective_table.py are of one.
TURNS = dict(
  gigpo='tests/objective/test_credit_assignment.py', seeupo='tests/learner/test_turn_by_turn.py'
)


# And of the choice of prompts.
SELECTION = 'tests/curriculum/test_rules.py'
ALLOTTED = 'tests/curriculum/test_allocation.py'


@functools.cache
def held(name: str):
  """The config, to be read alone."""
  return configs.load(str(FILES[name]))


DEFAULT = configs.default()


def selection(name: str) -> dict[str, str]:
  own, default = held(name).curriculum, DEFAULT.curriculum
  stages = [s for s in default if hasattr(default[s], 'fn') and own[s].fn != default[s].fn]
  return {f'curriculum.{s}': own[s].fn for s in stages}


def functions(objective) -> dict[str, str]:
  return {stage: objective[stage]['fn'] for stage in STAGES}


def proof(name: str) -> str:
  """The row of tests/objective_table.py with the functions of a config, or the file that proves it."""
  if name in TURNS:
    return TURNS[name]
  own, default = functions(held(name).objective), functions(DEFAULT.objective)
  rows = [row for row, told in proven().items() if told == own]
  assert rows, (
    f'configs/{name}.py: no row of tests/objective_table.py has its functions, '
    f'{ {k: v for k, v in own.items() if v != default[k]} }; add one, best named {name!r}.'
  )
  return name if name in rows else rows[0]


@functools.cache
def proven() -> dict[str, dict[str, str]]:
  """The functions of every row of tests/objective_table.py."""
  return {row: functions(settings(**m.settings)) for row, m in METHODS.items()}


def generation(name: str) -> dict[str, str]:
  own, default = held(name).generate, DEFAULT.generate
  return {part: own[part].fn for part in GENERATION if own[part].fn != default[part].fn}


def between(name: str) -> dict[str, str]:
  own = held(name)
  return {part: own[part].fn for part in BETWEEN if own[part].fn != 'none'}


def paper(name: str) -> str:
  """'Name, arXiv:2503.14476', or 'Name, no paper', from the first line of a config."""
  title = FILES[name].read_text().split('"""')[1].strip().split('\n')[0]
  found = re.match(r'(.*?)(?:, (arXiv:\d{4}\.\d{4,5}.*?)| \(no paper.*?\)): ', title)
  assert found, (
    f"configs/{name}.py must begin with 'Name, arXiv:2503.14476: what it does' or 'Name (no paper: why): what it "
    f"does', not {title!r}; one that is no method is named in JOBS of tests/test_papers.py."
  )
  return f'{found[1]}, {found[2] or "no paper"}'


def table() -> str:
  """The README's table: paper → config → functions → what tests them → where the formula is from."""
  lines = [
    '| paper | config | functions that differ from GRPO | tested by | formula from |',
    '|---|---|---|---|---|',
  ]
  default = functions(DEFAULT.objective)
  for name in sorted(PAPERS, key=lambda n: (n != 'grpo', n != 'dapo', n)):
    objective = held(name).objective
    chosen = [f'{s}={fn}' for s, fn in functions(objective).items() if fn != default[s]]
    outer = held(name).optimizer.outer.fn
    if outer != 'none':
      chosen.append(f'optimizer.outer={outer}')
    extra = [
      stage
      for stage in ('reward_shaping', 'zero_variance', 'activation_noise', *BESIDE)
      if objective[stage].fn != DEFAULT.objective[stage].fn
    ]
    chosen += [f'{stage}={objective[stage].fn}' for stage in extra]
    code = f'`{" ".join(chosen)}`' if chosen else '–'
    proofs, more = [proof(name), *(BESIDE[s] for s in extra if s in BESIDE)], []
    for part, fn in generation(name).items():
      more.append(f'generate.{part}={fn}')
      proofs.append(GENERATION[part])
    for part in held(name).grade.parts:
      more.append(f'rewards.parts={part["fn"]}')
      proofs += [GRADED[part['fn']]] if part['fn'] in GRADED else []
    if rank := held(name).lora.rank:
      more.append(f'lora.rank={rank}')
      proofs.append('tests/learner/test_lora.py')
    for part, fn in between(name).items():
      more.append(f'{part}={fn}')
      proofs.append(BETWEEN[part])
    if told_by := selection(name):
      more += [f'{stage}={fn}' for stage, fn in told_by.items()]
      proofs.append(ALLOTTED if [*told_by] == ['curriculum.allocation'] else SELECTION)
    if more and objective == held('dapo').objective:
      code, proofs = f'those of DAPO, and `{" ".join(more)}`', proofs[1:]
    elif more:
      code = f'`{" ".join(chosen + more)}`'
    tested = ', '.join(f'`{p}`' for p in proofs)
    lines.append(
      f'| {paper(name)} | `configs/{name}.py` | {code} | {tested} | {provenance.level(name)} |'
    )
  return '\n'.join(lines) + '\n'


def readme() -> tuple[str, str, str]:
  text = (ROOT / 'configs' / 'README.md').read_text()
  before, rest = text.split(BEGIN)
  old, after = rest.split(END)
  return before, old, after


def test_the_table_of_methods_is_up_to_date():
  assert readme()[1] == table(), 'run: python tests/test_papers.py'


@pytest.mark.parametrize('name', PAPERS)
def test_every_method_says_where_its_formula_is_from(name):
  """Once: by a golden of official code, or by name."""
  assert provenance.level(name)
  named = [level for level, configs in provenance.LEVELS.items() if name in configs]
  assert len(named) == (0 if provenance.proven(name) else 1)


def test_provenance_names_nothing_but_methods():
  named = [name for configs in provenance.LEVELS.values() for name in configs]
  assert set(named) | set(provenance.ALIASES) <= set(PAPERS)
  assert sum(provenance.proven(name) for name in PAPERS) >= 12


@pytest.mark.parametrize('name', [name for name in PAPERS if provenance.proven(name)])
def test_a_golden_runs_the_very_functions_of_the_config(name):
  golden = provenance.ALIASES.get(name, name)
  script = importlib.import_module(f'tests.objective.official.{golden}')
  if hasattr(script, 'SETTINGS'):
    own = functions(held(name).objective)
    assert functions(settings(**script.SETTINGS)) == own


def test_a_method_without_a_source_is_refused():
  with pytest.raises(LookupError, match='no level'):
    provenance.level('nonesuch')


@pytest.mark.parametrize('name', TURNS)
def test_methods_of_turns_play_a_game(name):
  """A method of turns is that of guess.py but for its objective, and where it wants another game for that."""
  own, guess = (configs.load(str(FILES[n])) for n in (name, 'guess'))
  assert name in (ROOT / proof(name)).read_text() and own.environment.judge == 'environment'
  own.optimizer.outer = guess.optimizer.outer
  games = {'data', 'environment', 'prompt_tokens', 'completion_tokens'}
  assert {field for field in own if own[field] != guess[field]} <= {'objective', *games}
  assert f'--config={name}' in FILES[name].read_text()


@pytest.mark.parametrize('name', [name for name in PAPERS if name not in TURNS])
def test_every_config_is_proven_and_trains_the_default_job(name):
  """The very functions of the config are a row of the table of methods; the job is that of dapo.py."""
  own, dapo = (configs.load(str(FILES[n])) for n in (name, 'dapo'))
  row = settings(**METHODS[proof(name)].settings)
  assert functions(own.objective) == functions(row)
  assert own.objective.reward_shaping.fn in ('none', 'overlong', row.reward_shaping.fn)
  own.optimizer.outer, own.rewards.parts = dapo.optimizer.outer, dapo.grade.parts
  for how in ('workers', 'deadline_s'):  # it is graded, not what is right
    own.rewards[how] = dapo.grade[how]
  if own.lora.rank:  # an adapter begins at nothing
    own.optimizer.learning_rate = dapo.optimizer.learning_rate
  for field in own:
    free = (
      'objective',
      'updates_per_rollout',
      'rollouts',
      'prompts',
      'generate',
      'curriculum',
      'prompt_tokens',
      'lora',
      *BETWEEN,
    )
    if field not in free:
      assert own[field] == dapo[field], f'config.{field} is not that of dapo.py'
  text = FILES[name].read_text()
  for said in (f'--config={name}', 'Numbers:'):
    assert said in text, f'the header of configs/{name}.py has no {said!r}'
  assert paper(name)
  if (chosen := selection(name)) and [*chosen] != ['curriculum.allocation']:
    assert name in RULES, (
      f'{name} changes the curriculum: it belongs into RULES of tests/curricula.py'
    )


if __name__ == '__main__':
  before, _, after = readme()
  (ROOT / 'configs' / 'README.md').write_text(before + BEGIN + table() + END + after)
