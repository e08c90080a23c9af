"""Settings that do not go with an environment, or that need one: rows of `compatibility.ROWS`."""

from __future__ import annotations

from jaxrl_llm.config.conditions import Condition, Row

_ENVIRONMENT = Condition('environment')
_REWARDS_OF_TURNS = Condition('environment.judge', 'in', ('environment',))

ROWS = (
  *(
    Row(
      by_turns,
      Condition('environment', 'in', ('none',)),
      'it is defined by turns, and without an environment a row has one',
      'choose an environment, or another function',
    )
    for by_turns in (
      Condition(
        'objective.credit_assignment',
        'in',
        ('gigpo', 'turn_grouped', 'turn_whitened', 'turn_reward_whitened'),
      ),
      Condition('optimizer.outer', 'in', ('last_turn_first',)),
    )
  ),
  Row(
    Condition('environment', 'in', ('discussion',)),
    Condition('environment.turns', 'below', 3),
    'the third turn holds the score, and without it no turn is paid',
    'set --config.environment.turns=3',
  ),
  Row(
    _ENVIRONMENT,
    Condition('mode', 'not in', ('split',)),
    'the environment runs on the host between two calls of the sampling program',
    'set --config.mode=split',
  ),
  Row(
    _ENVIRONMENT,
    Condition('rollout.early_exit', 'not in', ('none', 'text')),
    'a row that exits counts as a turn that ended, and this rule ends rows for other reasons',
    'set --config.rollout.early_exit.fn to text or none',
  ),
  *(
    Row(
      _ENVIRONMENT,
      of_one_completion,
      'a row holds several turns, and this assumes a single completion',
      'leave one of them at its default',
    )
    for of_one_completion in (
      Condition('replay.reuse'),
      Condition('replay.collect'),
      Condition('rewards.vote'),
      Condition('rewards.truncate'),
      Condition('curriculum.labels'),
      Condition('curriculum.hint'),
      Condition('rollout.stop'),
      Condition('rollout.draft'),
      Condition('rollout.pruning'),
      Condition('rollout.length_head'),
      Condition('rollout.tree'),
      Condition('rollout.ngram.draft'),
      Condition('rollout.windows', 'above', 1),
      Condition(
        'objective.advantage', 'needs', 'parts', "that needs each reward (such as 'decoupled')"
      ),
    )
  ),
  Row(
    _REWARDS_OF_TURNS,
    Condition('rewards.parts'),
    'the rewards of the environment replace those of config.rewards',
    'set --config.environment.judge=rewards, or leave the parts empty',
    also=(_ENVIRONMENT,),
  ),
  Row(
    _REWARDS_OF_TURNS,
    Condition('evaluation.benchmark'),
    'the rewards of the environment say nothing of the answers of a benchmark',
    'set --config.environment.judge=rewards, or --config.environment.fn=none',
    also=(_ENVIRONMENT,),
  ),
)
