"""--mode=export: writes a checkpoint, or the model as loaded, as a Hugging Face folder or a GGUF file."""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from typing import TYPE_CHECKING

from jaxrl_llm.checkpointing import storage
from jaxrl_llm.commands import hub_push, run_config, targets
from jaxrl_llm.commands.processes import Processes
from jaxrl_llm.config import validation
from jaxrl_llm.config.validation import ConfigLike
from jaxrl_llm.types import UserError

if TYPE_CHECKING:
  from jaxrl_llm.config.schema import Config
  from jaxrl_llm.runner.weights import RunWeights


def add_flags(parser: argparse.ArgumentParser) -> None:
  """Add --dtype, --adapter, --push and --public."""
  parser.add_argument(
    '--dtype',
    default='bfloat16',
    help='with --mode=export and reward_model: bfloat16, float16, float32; export also q8_0 with --to=FILE.gguf',
  )
  parser.add_argument(
    '--adapter',
    action='store_true',
    help="with --mode=export of a run with config.lora: the adapter alone, in PEFT's format",
  )
  parser.add_argument(
    '--push',
    default='',
    help='with --mode=export: uploads the folder to owner/name of the Hugging Face hub, private where it is new',
  )
  parser.add_argument(
    '--public', action='store_true', help='with --push: a new repository is visible to everyone'
  )


def run(arguments: argparse.Namespace, overrides: Sequence[str], processes: Processes) -> int:
  """Write the folder of --to, WORKDIR/export by default, or its file, FILE.gguf; upload the folder to --push.

  Raises UserError for bad input.
  """
  if arguments.public and not arguments.push:
    raise UserError('--public is a flag of --push; add --push=owner/name, or leave it out.')
  folder = arguments.to or os.path.join(arguments.workdir, 'export')
  if storage.is_remote(folder):
    raise UserError(
      f'--mode=export writes a local folder or file, not {folder}; name one with --to.'
    )
  if arguments.push and _is_gguf(folder):
    raise UserError(f'--push uploads a folder, and --to={folder!r} is a GGUF file; name a folder.')
  if _is_gguf(folder):
    targets.check_file('to', folder)
  else:
    targets.check_folder('to', folder)
  config = run_config.load(arguments, overrides).trained
  processes.join(arguments, config)
  pushes = arguments.push and not _process_index()
  if pushes:  # before the weights are loaded
    hub_push.prepare(arguments.push, private=not arguments.public)
  options = arguments.dtype, arguments.adapter, arguments.base, arguments.push
  export_checkpoint(config, arguments.workdir, folder, *options)
  if pushes:
    print(f'{folder} is uploaded to {hub_push.push(folder, arguments.push)}', flush=True)
  return 0


def _process_index() -> int:
  import jax

  return jax.process_index()


def export_checkpoint(
  config: ConfigLike,
  workdir: str,
  to: str,
  dtype: str,
  adapter: bool = False,
  base: bool = False,
  repository: str = '',
) -> None:
  """Write the newest checkpoint in `workdir`, or with `base` the model as loaded: a Hugging Face folder or FILE.gguf.

  With `adapter` only the LoRA adapter is written, in PEFT's format. `repository` is the hub name that the card gives
  for loading, '' for that of the folder. Raises UserError where nothing was trained, and for `adapter` without LoRA or
  with a GGUF file.
  """
  # Imported late: --help and a misspelled flag do not wait for jax.
  import jax

  from jaxrl_llm.checkpointing import run_dir
  from jaxrl_llm.commands import model_card
  from jaxrl_llm.monitoring import console
  from jaxrl_llm.runner import resume, weights

  config = validation.sized(config, jax.devices())
  if adapter and not config.lora.rank:
    raise UserError(
      '--adapter needs a run with an adapter, and config.lora.rank=0 trains the weights themselves; leave it out.'
    )
  if adapter and _is_gguf(to):
    raise UserError(f'--adapter writes a folder, and --to={to!r} is a GGUF file; name a folder.')
  with (
    storage.reading(workdir, checkpoint=not base, rollouts=False) as root,
    console.open_console(config.monitoring.console, config.steps) as screen,
  ):
    if not base:
      resume.check_trained(config, root)
    restored = weights.load(config, run_dir.view(root), base=base)
    name = repository or os.path.basename(to)
    evaluations = '' if base else _accuracy(root, restored.done)
    library = 'peft' if adapter else 'transformers'
    card = model_card.model_card(config, restored.done, name, library, evaluations)
    _write(config, restored, to, dtype, adapter, card)
    kind = 'adapter' if adapter else 'model'
    source = config.model if base else f'the {kind} after {restored.done} steps'
    screen.info(f'{source} is in {to}')


def _accuracy(workdir: str, step: int) -> str:
  """A table of the held-out measures before training and at `step`, or the last evaluation before it."""
  from jaxrl_llm.evaluation import tally
  from jaxrl_llm.report import results

  found = [entry for entry in results.evaluations(workdir) if entry['step'] <= step]
  if not found:
    return ''
  shown = [found[0]] if len(found) == 1 else [found[0], found[-1]]
  lines = ['| measure | ' + ' | '.join(f'step {entry["step"]}' for entry in shown) + ' |']
  lines.append('|---' * (1 + len(shown)) + '|')
  for measure in shown[-1]['measures']:
    cells = [entry['measures'].get(measure) for entry in shown]
    texts = [tally.percent(*cell) if cell else '' for cell in cells]
    lines.append(f'| {measure} | {" | ".join(texts)} |')
  return (
    f'Accuracy on {shown[-1]["prompts"]} held-out prompts, with intervals of 95 %:\n\n'
    + '\n'.join(lines)
  )


def _write(
  config: Config, restored: RunWeights, to: str, dtype: str, adapter: bool, card: str
) -> None:
  """Write the folder, on process 0 only; all processes fetch the weights."""
  import jax

  from jaxrl_llm.commands import model_card
  from jaxrl_llm.distributed import sharding
  from jaxrl_llm.models import export, gguf_export, peft

  params = sharding.fetch(restored.state.params if adapter else restored.merged())
  if jax.process_index():
    return
  model = restored.model._replace(params=params)
  if _is_gguf(to):
    gguf_export.save(to, model, dtype=dtype, name=os.path.basename(to))
    return
  lora = restored.spec.model.lora if adapter else None
  if lora is not None:
    model = model._replace(name=model_card.hub_name(config.model) or model.name)
    peft.save(to, model, lora, dtype=dtype, card=card)
  else:
    export.save(to, model, dtype=dtype, card=card)


def _is_gguf(path: str) -> bool:
  return path.endswith('.gguf')
