"""Shapes of models for planning: from their files, or by hub name from a table where the hub cannot be read."""

from __future__ import annotations

import difflib
import functools
import importlib.resources
import json
import os

from absl import logging

from jaxrl_llm.models import default_model, families
from jaxrl_llm.models.load import HubError, Scratch, read_config
from jaxrl_llm.types import JsonObject, ModelConfig, UserError

# Entries are dict(names=[hub names], config={the fields of their config.json that decide shapes}). RoPE settings and
# epsilons are left out: they change no shape. Fields were written down without the hub: parameter counts confirm the
# sizes of matrices; nothing confirms max_position_embeddings and sliding_window. The table describes no model well
# enough to load its weights.
TABLE = 'known_shapes.json'


def read_shape(name: str, *, scratch: Scratch = None) -> ModelConfig:
  """`read_config`, or for a hub name that cannot be fetched the shape of the table, with a warning.

  Raises UserError as `read_config` does, with the nearest name of the table.
  """
  if os.path.exists(name) or name in ('scratch', default_model.NAME):
    return read_config(name, scratch=scratch)
  return _hub_shape(name)


@functools.cache
def known_configs() -> dict[str, JsonObject]:
  """The table: hub name → fields of config.json."""
  text = (importlib.resources.files(__package__) / TABLE).read_text('utf-8')
  return {name: entry['config'] for entry in json.loads(text) for name in entry['names']}


@functools.cache  # a sweep of meshes reads it for each: one attempt and one warning are enough
def _hub_shape(name: str) -> ModelConfig:
  try:
    return read_config(name)
  except HubError as error:
    known = known_configs()
    if name not in known:
      (nearest,) = difflib.get_close_matches(name, known, n=1, cutoff=0.0)
      raise UserError(
        f'{error} --mode=compile and --mode=layout know the shapes of {len(known)} models without the hub, such as '
        f'{nearest}.'
      ) from error
    logging.warning(
      'config.model=%r cannot be fetched from the hub; its shape is that of the table %s.',
      name,
      TABLE,
    )
    return families.read(known[name], f'config.model={name!r}')
