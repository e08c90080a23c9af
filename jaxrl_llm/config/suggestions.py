"""Names that a mistyped flag or field may mean, for error messages."""

from __future__ import annotations

import difflib
import functools
from collections.abc import Iterable, Sequence

import ml_collections

from jaxrl_llm.config import paths
from jaxrl_llm.config.schema import default

# Flag → names of the same in TRL, verl, OpenRLHF and transformers.
_ELSEWHERE = {
  'config.checkpoint.every': ('save_freq', 'save_steps'),
  'config.completion_tokens': (
    *('max_completion_length', 'max_new_tokens', 'max_response_length', 'max_tokens'),
  ),
  'config.data.path': ('dataset', 'dataset_name', 'dataset_path', 'train_files'),
  'config.dtype': ('bf16', 'fp16', 'torch_dtype'),
  'config.evaluation.every': ('eval_steps', 'test_freq'),
  'config.learner.microbatch_tokens': ('gradient_accumulation_steps',),
  'config.learner.minibatches': ('mini_batch_size', 'ppo_mini_batch_size'),
  'config.learner.passes': ('num_iterations', 'ppo_epochs'),
  'config.learner.remat': ('gradient_checkpointing',),
  'config.lora.alpha': ('lora_alpha',),
  'config.lora.rank': ('lora_r', 'lora_rank'),
  'config.model': ('model_name', 'model_name_or_path', 'model_path'),
  'config.monitoring.trackers': ('report_to',),
  'config.objective.kl.coef': ('beta', 'kl_coef', 'kl_loss_coef'),
  'config.objective.trust_region.high': ('clip_ratio', 'epsilon', 'epsilon_high'),
  'config.optimizer.clip_norm': ('max_grad_norm',),
  'config.optimizer.decay': ('lr_scheduler_type',),
  'config.optimizer.learning_rate': ('lr',),
  'config.prompt_tokens': ('max_prompt_length',),
  'config.prompts': ('batch_size', 'per_device_train_batch_size', 'train_batch_size'),
  'config.rewards.fn': ('reward', 'reward_funcs', 'reward_function'),
  'config.rollouts': ('group_size', 'n', 'num_generations'),
  'config.steps': (
    *('epochs', 'max_steps', 'num_epochs', 'num_train_epochs'),
    *('total_epochs', 'total_training_steps'),
  ),
  'workdir': ('logging_dir', 'output_dir', 'resume', 'resume_from_checkpoint'),
}
_MOST = 4  # suggestions of one message
_FOREIGN = {name: flag for flag, names in _ELSEWHERE.items() for name in names}


def near(name: str, valid: Iterable[str], prefix: str = '') -> str:
  """The nearest valid name with `prefix`, or all of them, for an error message."""
  close = difflib.get_close_matches(name, list(valid), n=1)
  return f'did you mean {prefix}{close[0]}' if close else f'valid: {", ".join(sorted(valid))}'


def field(config: ml_collections.ConfigDict, flag: str, known: int, value: str = '') -> str:
  """For an unknown field, the flags that it may mean, or the valid names of its section.

  `flag` is all that was typed, such as 'rollout.learning_rate', of which the first `known` names are sections.
  """
  *_, leaf = names = flag.split('.')
  name, section = names[known], ''.join(f'{name}.' for name in names[:known])
  part = functools.reduce(getattr, names[:known], config)
  close = difflib.get_close_matches(name, list(part), n=1)
  last = known == len(names) - 1
  if leaf in ('fn', 'algorithm', 'method') and value in paths.names():
    return f'did you mean --config={value}'
  if not known and leaf in _FOREIGN:
    return f'did you mean --{_FOREIGN[leaf]}'
  below = [f'{section}{field}' for field in _ending(fields(part), leaf)] if last else []
  everywhere = _ending(fields(config), leaf) if last or not close else []
  if (found := below or everywhere) and len(found) <= _MOST:
    return f'did you mean {" or ".join(f"--config.{field}" for field in found)}'
  if leaf in _FOREIGN and not close:
    return f'did you mean --{_FOREIGN[leaf]}'
  if close:
    return f'did you mean --config.{".".join((*names[:known], close[0], *names[known + 1 :]))}'
  return near(name, part)


def flag(argument: str, others: Sequence[str] = ()) -> str:
  """For an unknown flag such as '--steps=10', the flag that is meant, '--config.steps=10'; '' if none is near.

  `others` are the names of the flags that set no field.
  """
  name, equals, value = argument.lstrip('-').partition('=')
  known, leaf = fields(default()), name.rpartition('.')[2]
  if name not in known and leaf in _FOREIGN:
    return f'--{_FOREIGN[leaf]}'  # without the value, which may be of another kind
  found = [name] if name in known else _ending(known, leaf)
  if not found and (close := difflib.get_close_matches(name, others, n=1, cutoff=0.75)):
    return f'--{close[0]}{equals}{value}'
  found = found or difflib.get_close_matches(name, known, n=1)
  return ' or '.join(f'--config.{field}{equals}{value}' for field in found)


def fields(part: ml_collections.ConfigDict, prefix: str = '') -> list[str]:
  """The dotted names of all fields, without those of sections."""
  names = []
  for key, value in part.items():
    inner = isinstance(value, ml_collections.ConfigDict)
    names += fields(value, f'{prefix}{key}.') if inner else [f'{prefix}{key}']
  return names


def _ending(names: list[str], leaf: str) -> list[str]:
  """The fields of that last name; of several, those in the fewest sections."""
  found = [name for name in names if name.rpartition('.')[2] == leaf]
  depth = min((name.count('.') for name in found), default=0)
  return [name for name in found if name.count('.') == depth]
