"""The record that describes a model family, and readers of fields that several families share."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from jaxrl_llm.types import JsonObject, UserError

Raw = JsonObject
_KINDS = {'sliding_attention': True, 'full_attention': False}


class Family(NamedTuple):
  """Fields of ModelConfig that are fixed in a family, those read from its config.json, and the file's defaults."""

  architecture: str  # class of transformers
  settings: Raw = {}
  read: Callable[[Raw, int], Raw] = (
    lambda raw, layers: {}
  )  # from config.json and the number of layers
  defaults: Raw = {}  # values of fields that config.json omits
  biases: tuple[str, ...] = ('qkv_bias', 'out_bias')  # fields of ModelConfig set by attention_bias
  # Path within a layer → name in files, where it is not Llama's. Paths of one name are stored in one tensor, one
  # after the other along the output dimension.
  names: dict[str, str] = {}
  # Names in files of tensors [experts, out, in]. Without them, tensors of all experts are [experts, in, out].
  transposed: tuple[str, ...] = ()
  # Whether files may hold layers after the last that predict several tokens, which are not read.
  has_prediction_layer: bool = False
  # Name in files → the field of ModelConfig with the number of blocks into which the columns of a tensor are divided.
  # Each block holds a part of every parameter of the tensor; otherwise one parameter stands after the other.
  blocks: dict[str, str] = {}


def windowed(raw: Raw, sliding: tuple[bool, ...]) -> Raw:
  """Fields of layers with a sliding window; none where the file states no window or does not use it."""
  window = raw.get('sliding_window')
  if not window or not raw.get('use_sliding_window', True) or not any(sliding):
    return {}
  return dict(window=window, sliding=sliding)


def sliding_layers(raw: Raw) -> tuple[bool, ...]:
  """Whether each layer slides, by layer_types; () where the file has none. Raises UserError for other types."""
  try:
    return tuple(_KINDS[kind] for kind in raw.get('layer_types') or ())
  except KeyError as error:
    raise UserError(
      f'layer_types holds {error}; supported: {", ".join(_KINDS)}; choose another model.'
    ) from error


def all_sliding(raw: Raw, layers: int) -> Raw:
  """All layers have a sliding window, or none."""
  return windowed(raw, (True,) * layers)


def sliding_rope_theta(raw: Raw, default: float) -> float:
  """The rotary base of sliding layers. Raises UserError where their frequencies are scaled, too."""
  rope = (raw.get('rope_parameters') or {}).get('sliding_attention') or {}
  if (kind := rope.get('rope_type', 'default')) != 'default':
    raise UserError(
      f'rope_parameters scales sliding layers ({kind!r}); supported: scaling of full layers; choose another model.'
    )
  return rope.get('rope_theta') or default


def refuse(raw: Raw, **plain: object) -> None:
  """Raises UserError for a field of config.json that is neither missing nor the value given here."""
  for name, value in plain.items():
    if (stated := raw.get(name, value)) != value:
      raise UserError(
        f'{name}={stated!r} is not supported; supported: {value!r}; choose another model.'
      )
