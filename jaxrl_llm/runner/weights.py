"""The weights of a run, for modes that do not train: neither data nor reward functions are loaded for them."""

from __future__ import annotations

from typing import NamedTuple

import jax

from jaxrl_llm import models
from jaxrl_llm.checkpointing import checkpoint, run_dir
from jaxrl_llm.config.schema import Config
from jaxrl_llm.distributed import sharding
from jaxrl_llm.learner import empty_records
from jaxrl_llm.learner import state as train_state
from jaxrl_llm.learner.spec_from_config import check_objective, make_spec
from jaxrl_llm.learner.step_spec import StepSpec
from jaxrl_llm.runner import setup, validate
from jaxrl_llm.types import JsonObject, Model, Params, TrainState


class RunWeights(NamedTuple):
  """A checkpoint, or the model as loaded."""

  spec: StepSpec
  model: Model  # as loaded, with the weights before training
  state: TrainState
  done: int  # steps taken
  host: JsonObject | None  # host state of the checkpoint; None: the model as loaded

  def merged(self) -> Params:
    """The weights in float32, with an adapter merged into them."""
    return train_state.merged_weights(self.spec, self.state)


def load(config: Config, directory: run_dir.RunDirectory, *, base: bool = False) -> RunWeights:
  """Load config.model and the newest checkpoint, or with `base` none.

  `config` is that of the run. Raises UserError for bad input, and for a checkpoint that does not fit it.
  """
  validate.validate(config)
  check_objective(config)
  model = models.load(config.model, scratch=config.scratch, seed=config.seed)
  return fresh(config, model) if base else restore(config, model, directory)


def restore(
  config: Config, model: Model, directory: run_dir.RunDirectory, step: int | None = None
) -> RunWeights:
  """Restore the newest intact checkpoint or that of `step`; without any, as `fresh`."""
  newest = checkpoint.latest(directory.checkpoints, step)
  if newest is None:
    return fresh(config, model)
  spec = _spec(config, model)
  batch = empty_records.empty_batch(spec)
  abstract = (
    train_state.without_frozen(train_state.abstract_state(spec)),
    jax.eval_shape(lambda: batch),
  )
  (state, _), host = checkpoint.restore(directory.checkpoints, newest, abstract)
  state = train_state.with_frozen(spec, state, model.params)
  return RunWeights(spec, model, state, newest, host)


def fresh(config: Config, model: Model) -> RunWeights:
  """The weights before the first step."""
  spec = _spec(config, model)
  state = train_state.init_state(spec, model.params, None, setup.load_adapter(config, spec))
  return RunWeights(spec, model, state, 0, None)


def _spec(config: Config, model: Model) -> StepSpec:
  """The specification of the run's step: it decides the shapes of a checkpoint. No teacher is loaded."""
  mesh, teacher = sharding.make_mesh(config.mesh.to_dict()), config.objective.teacher
  teacher_config = models.read_config(teacher, scratch=config.scratch) if teacher else None
  end_ids, token_texts = model.tokenizer.end_ids, model.tokenizer.token_texts
  return make_spec(config, model.config, end_ids, mesh, token_texts, teacher_config)
