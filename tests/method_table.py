"""The tables of configs/README.md: every method with what it changes, what tests it and where its formula is from.

python tests/method_table.py          writes them
"""

from __future__ import annotations

import functools
import pathlib
import re
import sys

ROOT = pathlib.Path(__file__).parents[1]
if __name__ == '__main__':
  sys.path[:0] = [str(ROOT), str(ROOT / 'tests')]

import provenance  # noqa: E402
from objective_table import METHODS, settings  # noqa: E402

from jaxrl_llm.config import loading, paths  # noqa: E402

README = ROOT / 'configs' / 'README.md'
FILES = {name: pathlib.Path(path) for name, path in paths.names().items()}
# Configs that are no method: tasks, models and rewards to start from.
JOBS = (
  *('sums', 'tiny', 'mixture', 'code', 'guess', 'batched_turns', 'harness', 'calculator', 'r3'),
  *('gsm8k', 'unique_letters', 'sft', 'sft_then_rl', 'distill', 'reward_model', 'countdown'),
  *('rubric', 'keychain', 'long_copy', 'products'),
)
PAPERS = [name for name in FILES if name not in JOBS]
# Stages of the policy gradient: a row of tests/objective_table.py has the functions of every config.
STAGES = (
  *('advantage', 'credit_assignment', 'auxiliary_model', 'importance_correction', 'old_policy'),
  *('ratio', 'advantage_modulation', 'trust_region', 'token_weighting', 'kl', 'aggregation'),
  *('lr_scale', 'reward_kl', 'kl_scale'),
)
# Section and stage, or stage=function → the test file of its functions; other stages of the curriculum: SELECTION.
TESTS = {
  'objective.sft_loss': 'tests/objective/test_sft_loss.py',
  'objective.distillation': 'tests/objective/test_distillation.py',
  'objective.distillation=on_policy_spans': 'tests/learner/test_teacher_spans.py',
  'objective.distillation=solved_by_group': 'tests/learner/test_solutions.py',
  'objective.distillation=solved_by_data': 'tests/learner/test_solutions.py',
  'objective.divergence': 'tests/learner/test_teacher_divergence.py',
  'objective.score_centering': 'tests/learner/test_centered_scores.py',
  'objective.entropy_bonus': 'tests/learner/test_entropy_bonus.py',
  'objective.reference': 'tests/learner/test_update_methods.py',
  'rollout.pruning': 'tests/rollout/test_pruning.py',
  'rollout.draft_head': 'tests/rollout/test_draft_head.py',
  'rollout.length_head': 'tests/rollout/test_length_head.py',
  'rollout.slots': 'tests/learner/test_group_memory.py',
  'rollout.stop': 'tests/rollout/test_slot_loop.py',
  'rollout.draft': 'tests/rollout/test_draft_verification.py',
  'rollout.length_schedule': 'tests/rollout/test_length_schedule.py',
  'rollout.tree': 'tests/rollout/test_tree_decode.py',
  'rollout.tree=branch_grpo': 'tests/rollout/test_branch_grpo.py',
  'rewards.vote': 'tests/rewards/test_majority_vote.py',
  'rewards.truncate': 'tests/rewards/test_length_truncation.py',
  'replay.reuse': 'tests/replay/test_successes.py',
  'replay.reuse=cached': 'tests/replay/test_trajectory_cache.py',
  'replay.reuse=contrast_pairs': 'tests/replay/test_contrast_pairs.py',
  'replay.reuse=extremes': 'tests/replay/test_extremes.py',
  'replay.reuse=mixed_groups': 'tests/replay/test_rollout_buffer.py',
  'replay.reuse=recomposed': 'tests/replay/test_recomposition.py',
  'replay.reuse=self_imitation': 'tests/replay/test_self_imitation.py',
  'replay.reuse=shared': 'tests/replay/test_shared_rollouts.py',
  'replay.collect': 'tests/replay/test_dynamic_sampling.py',
  'curriculum.hint': 'tests/curriculum/test_hint_rules.py',
  'curriculum.hint=corrected': 'tests/runner/test_corrected_prompts.py',
  'curriculum.hint=rewritten': 'tests/runner/test_rewritten_prompts.py',
  'curriculum.hint=reflected': 'tests/runner/test_reflected_retries.py',
  'curriculum.hint=written': 'tests/runner/test_written_hints.py',
  'curriculum.labels': 'tests/curriculum/test_labels.py',
  'curriculum.allocation': 'tests/curriculum/test_allocation.py',
  'data.keep': 'tests/data/test_row_filters.py',
  'sft.keep': 'tests/data/test_row_filters.py',
  'lora.rank': 'tests/learner/test_lora.py',
  'lora.base_dtype': 'tests/learner/test_quantized_base.py',
}
SELECTION = 'tests/curriculum/test_rules.py'
JUDGED = ('steps', 'pairwise')  # rewards beside the right answer
JUDGE_TESTS = 'tests/rewards/model_judge/test_rubric.py'
# Methods of turns play a game, and rows of tests/objective_table.py have a single turn.
TURNS = dict(
  at_grpo='tests/objective/test_credit_assignment.py',
  comas='tests/runner/test_discussion.py',
  gigpo='tests/objective/test_credit_assignment.py',
  seeupo='tests/learner/test_turn_by_turn.py',
)
MARKS = {
  name: (f'<!-- {name}: python tests/method_table.py -->\n', f'<!-- end of {name} -->\n')
  for name in ('methods', 'jobs')
}


@functools.cache
def config(name: str):
  """The configuration of a file, to be read only."""
  return loading.load(name)


DEFAULT = loading.default()


def functions(objective) -> dict[str, str]:
  """Stage of the policy gradient → function."""
  return {stage: objective[stage]['fn'] for stage in STAGES}


def changes(name: str, base) -> dict[str, str]:
  """Section and stage → function, where a config's differs from that of `base`; rewards' parts, slots and LoRA, too."""
  own, found = config(name), {}
  sections = 'objective optimizer rollout rewards replay curriculum data sft'.split()
  for section in sections:
    for stage in own[section]:
      fn = getattr(own[section][stage], 'fn', None)
      if fn is not None and fn != base[section][stage].fn:
        found[f'{section}.{stage}'] = fn
  if parts := [part['fn'] for part in own.rewards.parts]:
    found['rewards.parts'] = '+'.join(parts)
  if own.rollout.slots:
    found['rollout.slots'] = str(own.rollout.slots)
  if own.lora.rank:
    found['lora.rank'] = str(own.lora.rank)
  if own.lora.base_dtype != 'auto':
    found['lora.base_dtype'] = own.lora.base_dtype
  return found


def selection(name: str) -> dict[str, str]:
  """The changes of the stages that choose prompts."""
  elsewhere = ('curriculum.hint', 'curriculum.labels')
  found = changes(name, DEFAULT).items()
  return {k: fn for k, fn in found if k.startswith('curriculum.') and k not in elsewhere}


@functools.cache
def proven() -> dict[str, dict[str, str]]:
  """Row of tests/objective_table.py → its functions."""
  return {row: functions(settings(**method.settings)) for row, method in METHODS.items()}


def proof(name: str) -> str:
  """The row of tests/objective_table.py with the functions of a config, or the file that tests it."""
  if name in TURNS:
    return TURNS[name]
  own, default = functions(config(name).objective), functions(DEFAULT.objective)
  rows = [row for row, chosen in proven().items() if chosen == own]
  assert rows, (
    f'{FILES[name]}: no row of tests/objective_table.py has its functions, '
    f'{ {k: v for k, v in own.items() if v != default[k]} }; add one, best named {name!r}.'
  )
  return name if name in rows else rows[0]


def title(name: str) -> str:
  """The first line of a config's header."""
  return FILES[name].read_text().split('"""')[1].strip().split('\n')[0]


def paper(name: str) -> tuple[str, str]:
  """(name and arXiv id, or 'no paper'; what the method does), from the first line of a config."""
  found = re.match(r'(.*?)(?:, (arXiv:\d{4}\.\d{4,5}.*?)| \(no paper.*?\)): (.*)', title(name))
  assert found, (
    f"{FILES[name]} must begin with 'Name, arXiv:2503.14476: what it does' or 'Name (no paper: why): what it "
    f"does', not {title(name)!r}; one that is no method is named in JOBS of tests/method_table.py."
  )
  return f'{found[1]}, {found[2] or "no paper"}', found[3]


def tests(name: str, changed: dict[str, str]) -> list[str]:
  """A row of tests/objective_table.py, and the test files of what else a method changes."""
  found = (TESTS.get(f'{stage}={fn}', TESTS.get(stage)) for stage, fn in changed.items())
  files = [file for file in found if file]
  if any(part in JUDGED for part in changed.get('rewards.parts', '').split('+')):
    files.append(JUDGE_TESTS)
  if [*selection(name)] not in ([], ['curriculum.allocation']):
    files.append(SELECTION)
  same_as_dapo = config(name).objective == config('dapo').objective and files
  return list(dict.fromkeys(files if same_as_dapo else [proof(name), *files]))


def trained() -> dict[str, str]:
  """Config → the file of tests/bench/results with a run of it."""
  found: dict[str, str] = {}
  for path in sorted((ROOT / 'tests' / 'bench' / 'results').glob('*.md')):
    for name in re.findall(r'configs/(?:\w+/)?(\w+)\.py', path.read_text()):
      found.setdefault(name, path.name)
  return found


def status(name: str) -> str:
  """Whether the formula was compared with official code, and whether the config was trained here."""
  checked = 'formula checked against official code' if provenance.proven(name) else 'formula tested'
  run = trained().get(name)
  return checked + (f'; [trained here](../tests/bench/results/{run})' if run else '')


def link(name: str) -> str:
  """The config's name as a link."""
  return f'[`{name}`]({FILES[name].relative_to(ROOT / "configs")})'


def methods_table() -> str:
  """Every method of a paper."""
  lines = [
    '| method | config | stage | what changes, against GRPO | tested by | formula from | status |',
    '|---|---|---|---|---|---|---|',
  ]
  for name in sorted(PAPERS, key=lambda n: (n != 'grpo', n != 'dapo', n)):
    changed = changes(name, DEFAULT)
    files = tests(name, changed)
    on_dapo = name != 'dapo' and config(name).objective == config('dapo').objective
    shown = changes(name, config('dapo')) if on_dapo else changed
    stage = ', '.join(sorted({key.partition('.')[0] for key in shown})) or 'objective'
    text = ' '.join(f'{key.removeprefix("objective.")}={fn}' for key, fn in shown.items())
    code = f'{"DAPO, and " if on_dapo else ""}`{text}`' if text else '–'
    tested = ', '.join(f'`{file}`' for file in files)
    lines.append(
      f'| {paper(name)[0]} | {link(name)} | {stage} | {code} | {tested} | {provenance.level(name)} | '
      f'{status(name)} |'
    )
  return '\n'.join(lines) + '\n'


def jobs_table() -> str:
  """Every other config."""
  lines = ['| job | what it is |', '|---|---|']
  lines += [f'| {link(name)} | {title(name)} |' for name in sorted(JOBS)]
  return '\n'.join(lines) + '\n'


def tables() -> dict[str, str]:
  """Mark → table."""
  return dict(methods=methods_table(), jobs=jobs_table())


def written(text: str, mark: str) -> str:
  """The table between the marks of a README."""
  begin, end = MARKS[mark]
  return text.split(begin)[1].split(end)[0]


def updated(text: str) -> str:
  """A README with the tables of today."""
  for mark, table in tables().items():
    begin, end = MARKS[mark]
    before, rest = text.split(begin)
    text = before + begin + table + end + rest.split(end)[1]
  return text


if __name__ == '__main__':
  README.write_text(updated(README.read_text()))
