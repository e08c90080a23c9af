"""Hugging Face folders: config.json and safetensors to a ModelConfig and a parameter tree. Pickle is never loaded."""

from __future__ import annotations

import glob
import os
import re
from collections.abc import Callable

import jax
import numpy as np
import safetensors

from jaxrl_llm.checkpointing import safe_files
from jaxrl_llm.models import decoder, families, fp8_blocks, mxfp4, tensor_layout
from jaxrl_llm.models.model_folder import locate, read_json
from jaxrl_llm.types import JsonObject, ModelConfig, Params, UserError

# Safetensors files by path, opened once.
OpenFiles = dict[str, safetensors.safe_open]

_FP8 = ('F8_E4M3',)
_FLOATS = ('F64', 'F32', 'F16', 'BF16')
# Tensors of older files that are not needed: a head tied to the embedding, and a table derived from config.json.
_UNUSED = ('lm_head.weight', 'rotary_emb.inv_freq')
# Of the text decoder in multimodal files; transformers has used both spellings.
_PREFIX = re.compile(r'^language_model\.(?=model\.|lm_head\.)|(?<=^model\.)language_model\.')
_OTHER_PARTS = (
  'vision_tower.', 'vision_model.', 'multi_modal_projector.', 'visual.', 'embed_vision.', 'audio_tower.',
  'embed_audio.',
)  # fmt: skip


def read_config(folder: str) -> tuple[ModelConfig, JsonObject]:
  """config.json as a ModelConfig, and as parsed JSON. Raises UserError for unsupported models."""
  raw = read_json(folder, 'config.json')
  return families.read(raw, f'config.model={folder!r}'), raw


def load_params(folder: str, config: ModelConfig, ignored: tuple[str, ...] = ()) -> Params:
  """The parameter tree in float32 from the *.safetensors of `folder`; `ignored` tensors may exist and are not read.

  Raises UserError that names the tensor or file, for tensors that are missing, unexpected, of another shape or type,
  not finite, or truncated. Wrong finite numbers are not detected: the format has no checksum.
  """
  locations = _decoder_locations(_index(folder))
  opened: OpenFiles = {}
  read: set[str] = set()

  def read_one(name: str, shape: tuple[int, ...]) -> np.ndarray:
    if f'{name}_blocks' in locations:
      read.update(f'{name}_{part}' for part in ('blocks', 'scales'))
      return _read_packed(opened, locations, name, shape)
    if f'{name}_scale_inv' in locations:
      read.update((name, f'{name}_scale_inv'))
      return _read_fp8(folder, opened, locations, name, shape)
    if name not in locations:
      raise UserError(
        f'config.model={folder!r}: tensor {name!r} is missing from the weights; download them again.'
      )
    read.add(name)
    return read_tensor(opened, *locations[name], shape)

  leaves: dict[str, np.ndarray] = {}
  for tensor in tensor_layout.stored_tensors(config):
    if tensor.experts:
      value = _read_experts(read_one, locations, tensor)
    else:
      value = np.asarray(read_one(tensor.name, tensor.shape))
    leaves |= {k: np.ascontiguousarray(x, np.float32) for k, x in tensor.split(value).items()}
  offset = np.float32(families.norm_offset(config))

  def leaf(tree_path, expected):
    path = '/'.join(str(k.key) for k in tree_path)
    return leaves[path] + offset if path.endswith('scale') else leaves[path]

  params = jax.tree_util.tree_map_with_path(leaf, decoder.abstract_params(config))
  if config.tied:
    _check_tied_head(folder, opened, locations, params['embed']['embedding'])
  extra = locations.keys() - read - set(ignored)
  unread = _unread_prefixes(config)
  extra = sorted(n for n in extra if not n.startswith(unread) and not n.endswith(_UNUSED))
  if extra:
    raise UserError(
      f'config.model={folder!r}: the weights hold {extra[0]!r} ({len(extra)} such), which config.json does not '
      'describe; the files are of different models.'
    )
  return params


def _unread_prefixes(config: ModelConfig) -> tuple[str, ...]:
  """Of tensors that files may hold: layers that predict several tokens, and keys and values of layers without any."""
  readers = range(config.layers - config.kv_readers, config.layers)
  unread = tuple(f'model.layers.{i}.self_attn.{part}_' for i in readers for part in 'kv')
  if families.FAMILIES[config.family].has_prediction_layer:
    unread += f'model.layers.{config.layers}.', 'mtp.'
  return unread


def _read_experts(
  read_one: Callable[[str, tuple[int, ...]], np.ndarray],
  locations: dict[str, tuple[str, str]],
  tensor: tensor_layout.StoredTensor,
) -> np.ndarray:
  """A matrix of all experts [E, out, in], from a tensor each, or from one in which gate stands before up."""
  E, (F, D) = tensor.experts, tensor.shape
  prefix, _, name = tensor.name.partition('{}.')
  part = name.removesuffix('_proj.weight')
  stacked = prefix + ('down_proj' if part == 'down' else 'gate_up_proj')
  if stacked not in locations:
    experts = (read_one(tensor.name.format(e), tensor.shape) for e in range(E))
    return np.stack([np.asarray(x, np.float32) for x in experts])
  if part == 'down':
    return np.asarray(read_one(stacked, (E, F, D)))
  both = np.asarray(read_one(stacked, (E, 2 * F, D)))
  return both[:, :F] if part == 'gate' else both[:, F:]


def _read_packed(
  opened: OpenFiles, locations: dict[str, tuple[str, str]], name: str, shape: tuple[int, ...]
) -> np.ndarray:
  """A tensor [E, in, out] that is stored in MXFP4. Raises UserError as `read_tensor` does."""
  E, A, B = shape
  if f'{name}_scales' not in locations or A % mxfp4.BLOCK:
    raise UserError(
      f'config.model: tensor {name!r} of shape {shape} is not whole blocks of {mxfp4.BLOCK} numbers with scales; '
      'download it again.'
    )
  scale_shape = (E, B, A // mxfp4.BLOCK)
  block_shape = (*scale_shape, mxfp4.BLOCK // 2)
  blocks = read_tensor(opened, *locations[f'{name}_blocks'], block_shape, ('U8',))
  scales = read_tensor(opened, *locations[f'{name}_scales'], scale_shape, ('U8',))
  value = mxfp4.unpack(np.asarray(blocks), np.asarray(scales)).swapaxes(1, 2)
  if not np.isfinite(value).all():
    raise UserError(
      f'config.model: tensor {name!r} contains a number that is not finite; download it again.'
    )
  return value


def _read_fp8(
  folder: str,
  opened: OpenFiles,
  locations: dict[str, tuple[str, str]],
  name: str,
  shape: tuple[int, ...],
) -> np.ndarray:
  """A matrix that is stored in float8 with scales by block. Raises UserError as `read_tensor` does."""
  if name not in locations or len(shape) != 2:
    raise UserError(
      f'config.model={folder!r}: {name}_scale_inv holds scales, and {name!r} is no matrix of the weights; download '
      'them again.'
    )
  where = f'config.model={folder!r}: config.json'
  block = fp8_blocks.block_size(read_json(folder, 'config.json'), where)
  numbers = np.asarray(read_tensor(opened, *locations[name], shape, _FP8))
  scale_shape = fp8_blocks.scale_shape(shape, block)
  scales = np.asarray(read_tensor(opened, *locations[f'{name}_scale_inv'], scale_shape))
  return fp8_blocks.unpack(numbers, scales, block)


def _check_tied_head(
  folder: str, opened: OpenFiles, locations: dict[str, tuple[str, str]], embedding: np.ndarray
) -> None:
  """Raises UserError where the files hold a head that differs from the embedding."""
  if 'lm_head.weight' not in locations:
    return
  head = np.asarray(read_tensor(opened, *locations['lm_head.weight'], embedding.shape), np.float32)
  if not np.array_equal(head, embedding):
    raise UserError(
      f"config.model={folder!r}: 'lm_head.weight' differs from the embedding although config.json has "
      'tie_word_embeddings=true; set that to false, or delete the tensor.'
    )


def load_tensor(folder: str, name: str, shape: tuple[int, ...]) -> np.ndarray:
  """One tensor in float32, in the file's layout. Raises UserError if it is missing or has another shape or type."""
  files = _index(folder)
  if name not in files:
    raise UserError(f'config.model={folder!r}: tensor {name!r} is missing from the weights.')
  return np.asarray(read_tensor({}, files[name], name, shape), np.float32)


def _decoder_locations(files: dict[str, str]) -> dict[str, tuple[str, str]]:
  """Name in a text-only model → (file, name in the file). Multimodal models prefix their decoder's names."""
  locations = {name: (file, name) for name, file in files.items()}
  if not any(map(_PREFIX.search, locations)):
    return locations
  return {
    _PREFIX.sub('', name): location
    for name, location in locations.items()
    if not any(part in name for part in _OTHER_PARTS)
  }


def _index(folder: str) -> dict[str, str]:
  """Tensor name → file."""
  index = read_json(folder, 'model.safetensors.index.json')
  weight_map = index.get('weight_map', {})
  if not isinstance(weight_map, dict) or (index and not weight_map):
    raise UserError(
      f'config.model={folder!r}: model.safetensors.index.json has no weight_map; download it again.'
    )
  if weight_map:
    return _indexed_files(folder, weight_map)
  names = sorted(
    map(os.path.basename, glob.glob(os.path.join(glob.escape(folder), '*.safetensors')))
  )
  if 'model.safetensors' in names:
    names = ['model.safetensors']
  if not names:
    suffixes = ('.bin', '.pt', '.pth', '.ckpt', '.pkl')
    has_pickle = any(name.endswith(suffixes) for name in os.listdir(folder))
    content = (
      'only pickled weights, which are never loaded' if has_pickle else 'no weights (*.safetensors)'
    )
    raise UserError(f'config.model={folder!r} holds {content}; save the model as safetensors.')
  files = [locate(folder, name) for name in names]
  return {name: file for file in files for name in open_file(file).keys()}


def _indexed_files(folder: str, weight_map: JsonObject) -> dict[str, str]:
  paths = {file: locate(folder, file) for file in sorted(set(map(str, weight_map.values())))}
  for file, path in paths.items():
    if not file.endswith('.safetensors'):
      raise UserError(
        f'config.model={folder!r}: model.safetensors.index.json names {file!r}, which is no safetensors file; '
        'save the model as safetensors.'
      )
    if not os.path.exists(path):
      raise UserError(f'config.model={folder!r}: {file} is missing; download it again.')
  return {name: paths[str(file)] for name, file in weight_map.items()}


def read_tensor(
  opened: OpenFiles,
  file: str,
  name: str,
  shape: tuple[int, ...],
  dtypes: tuple[str, ...] = _FLOATS,
) -> np.ndarray:
  """The tensor `name` in the file's layout and dtype. Opens `file` unless it is in `opened`, and adds it there.

  Shape and dtype are checked before data is read. Raises UserError for others, and for unreadable or infinite values.
  """
  if file not in opened:
    opened[file] = open_file(file)
  try:
    stored = opened[file].get_slice(name)
    stored_shape, dtype = tuple(stored.get_shape()), stored.get_dtype()
    value = None
    if stored_shape == shape and dtype in dtypes:
      # The library gives float8 to torch alone.
      is_fp8 = dtype in _FP8
      value = fp8_blocks.read(file, name, shape) if is_fp8 else opened[file].get_tensor(name)
  except Exception as error:  # the library raises its own exceptions and bare ones
    raise UserError(
      f'config.model: tensor {name!r} cannot be read from {file} ({error}); download it again.'
    ) from error
  where = f'config.model={os.path.dirname(file)!r}: tensor {name!r}'
  if stored_shape != shape:
    raise UserError(
      f'{where} has shape {stored_shape} where config.json requires {shape}; the files are of different models.'
    )
  if dtype not in dtypes:
    raise UserError(f'{where} is of type {dtype}; save the weights as one of {", ".join(dtypes)}.')
  if not np.isfinite(value).all():
    raise UserError(f'{where} contains a number that is not finite; download {file} again.')
  return value


def open_file(file: str) -> safetensors.safe_open:
  """Open a safetensors file without reading tensors. Raises UserError for any other file."""
  if kind := safe_files.kind(file):
    raise UserError(f'config.model: {file} is {kind}, not a file; copy it again.')
  try:
    # 'flax' and not 'numpy': numpy has no bfloat16.
    return safe_files.retry(safetensors.safe_open, file, framework='flax')
  except Exception as error:
    raise UserError(
      f'config.model: {file} is truncated or not a safetensors file ({error}); download it again.'
    ) from error
