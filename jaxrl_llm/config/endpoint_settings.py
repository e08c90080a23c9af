"""Settings that do not go with config.environment.fn='endpoint', or any environment: rows of `compatibility.ROWS`."""

from __future__ import annotations

from jaxrl_llm.config.conditions import Condition, Row

_ENDPOINT = Condition('environment', 'in', ('endpoint',))
_WHOLE = 'all requests of an episode are made in one step'
_OTHER_SAMPLER = 'completions come from the programs of the endpoint, not from the sampling program'


def _row(other: Condition, reason: str, remedy: str) -> Row:
  return Row(_ENDPOINT, other, reason, remedy)


ROWS = (
  _row(
    Condition('evaluation.prompts', 'above', 0),
    'held-out prompts are completed without the harness',
    'set --config.evaluation.prompts=0',
  ),
  _row(Condition('environment.rounds', 'above', 0), _WHOLE, 'set --config.environment.rounds=0'),
  _row(
    Condition('environment.horizon', 'not in', ('constant',)),
    'the harness decides how many requests it makes',
    'set --config.environment.horizon.fn=constant',
  ),
  _row(Condition('rollout.early_exit'), _OTHER_SAMPLER, 'set --config.rollout.early_exit.fn=none'),
  _row(
    Condition('rollout.length_schedule', 'not in', ('constant',)),
    _OTHER_SAMPLER,
    'set --config.rollout.length_schedule.fn=constant',
  ),
  _row(
    Condition('rollout.weights_dtype', 'not in', ('auto',)),
    _OTHER_SAMPLER,
    'set --config.rollout.weights_dtype=auto',
  ),
  _row(
    Condition('rollout.cache_dtype', 'in', ('int8',)),
    _OTHER_SAMPLER,
    'set --config.rollout.cache_dtype=auto',
  ),
  _row(Condition('rollout.carry_cache'), _WHOLE, 'set --config.rollout.carry_cache=False'),
  _row(
    Condition('learner.replay_experts'),
    'the endpoint records no experts',
    'set --config.learner.replay_experts=False',
  ),
  _row(
    Condition('objective.score_centering'),
    'the endpoint records no likeliest tokens',
    'set --config.objective.score_centering.fn=none',
  ),
  _row(
    Condition('lora.rank'),
    'sampling from a frozen base with an adapter is untried at the endpoint',
    'set --config.lora.rank=0',
  ),
  _row(
    Condition(
      'objective.advantage',
      'needs',
      'greedy',
      "that needs a greedy rollout (such as 'greedy_baseline')",
    ),
    'all rollouts of the harness are sampled',
    'choose another advantage',
  ),
  _row(
    Condition('model.recurrent', label='a model with recurrent layers'),
    'the endpoint has no slots for states',
    "choose another model, or an environment of the rollout's own",
  ),
  Row(
    Condition('environment'),
    Condition('curriculum.prior_pooling', 'in', ('hidden_state',)),
    'its hidden states are of the prompts of the data set, and the environment writes its own',
    'set --config.curriculum.prior_pooling.fn=kind, or --config.environment.fn=none',
  ),
)
