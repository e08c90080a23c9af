"""--mode=export: writes a checkpoint, or the model as loaded, as a Hugging Face folder or a GGUF file."""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from typing import TYPE_CHECKING

from jaxrl_llm.commands import run_config, targets
from jaxrl_llm.commands.processes import Processes
from jaxrl_llm.config import validation
from jaxrl_llm.config.validation import ConfigLike
from jaxrl_llm.types import UserError

if TYPE_CHECKING:
  from jaxrl_llm.config.schema import Config
  from jaxrl_llm.runner.weights import RunWeights


def add_flags(parser: argparse.ArgumentParser) -> None:
  """Add --dtype and --adapter."""
  parser.add_argument(
    '--dtype',
    default='bfloat16',
    help='with --mode=export: bfloat16, float16, float32, or q8_0 with --to=FILE.gguf',
  )
  parser.add_argument(
    '--adapter',
    action='store_true',
    help="with --mode=export of a run with config.lora: the adapter alone, in PEFT's format",
  )


def run(arguments: argparse.Namespace, overrides: Sequence[str], processes: Processes) -> int:
  """Write the folder of --to, WORKDIR/export by default, or its file, FILE.gguf."""
  folder = arguments.to or os.path.join(arguments.workdir, 'export')
  if _is_gguf(folder):
    targets.check_file('to', folder)
  else:
    targets.check_folder('to', folder)
  config = run_config.load(arguments, overrides).trained
  processes.join(arguments, config)
  options = arguments.dtype, arguments.adapter, arguments.base
  export_checkpoint(config, arguments.workdir, folder, *options)
  return 0


def export_checkpoint(
  config: ConfigLike, workdir: str, to: str, dtype: str, adapter: bool = False, base: bool = False
) -> None:
  """Write the newest checkpoint in `workdir`, or with `base` the model as loaded: a Hugging Face folder or FILE.gguf.

  With `adapter` only the LoRA adapter is written, in PEFT's format. Raises UserError where nothing was trained, and for
  `adapter` without LoRA or with a GGUF file.
  """
  # Imported late: --help and a misspelled flag do not wait for jax.
  import jax

  from jaxrl_llm.checkpointing import run_dir
  from jaxrl_llm.monitoring import console
  from jaxrl_llm.runner import resume, weights

  config = validation.sized(config, jax.devices())
  if not base:
    resume.check_trained(config, workdir)
  if adapter and not config.lora.rank:
    raise UserError(
      '--adapter needs a run with an adapter, and config.lora.rank=0 trains the weights themselves; leave it out.'
    )
  if adapter and _is_gguf(to):
    raise UserError(f'--adapter writes a folder, and --to={to!r} is a GGUF file; name a folder.')
  with console.open_console(config.monitoring.console, config.steps) as screen:
    restored = weights.load(config, run_dir.view(workdir), base=base)
    _write(config, restored, to, dtype, adapter)
    kind = 'adapter' if adapter else 'model'
    source = config.model if base else f'the {kind} after {restored.done} steps'
    screen.info(f'{source} is in {to}')


def _write(config: Config, restored: RunWeights, to: str, dtype: str, adapter: bool) -> None:
  """Write the folder, on process 0 only; all processes fetch the weights."""
  import jax

  from jaxrl_llm.distributed import sharding
  from jaxrl_llm.models import export, gguf_export, peft

  params = sharding.fetch(restored.state.params if adapter else restored.merged())
  if jax.process_index():
    return
  model = restored.model._replace(params=params)
  if _is_gguf(to):
    gguf_export.save(to, model, dtype=dtype, name=os.path.basename(to))
    return
  library = 'peft' if adapter else 'transformers'
  card = export.model_card(config, restored.done, os.path.basename(to), library)
  lora = restored.spec.model.lora if adapter else None
  if lora is not None:
    model = model._replace(name=export.hub_name(config.model) or model.name)
    peft.save(to, model, lora, dtype=dtype, card=card)
  else:
    export.save(to, model, dtype=dtype, card=card)


def _is_gguf(path: str) -> bool:
  return path.endswith('.gguf')
