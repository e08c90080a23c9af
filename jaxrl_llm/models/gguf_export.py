"""Writes a model as one GGUF file, which llama.cpp and what is built on it load."""

from __future__ import annotations

from collections.abc import Iterator

import gguf
import jax
import numpy as np

from jaxrl_llm.checkpointing import safe_files
from jaxrl_llm.models import gguf_file, tokenizer
from jaxrl_llm.types import JsonObject, JsonValue, Model, ModelConfig, UserError

# Of matrices, in the file. Norms and biases stay in float32, as in every file of llama.cpp's own converter.
_TYPES = {
  'bfloat16': gguf.GGMLQuantizationType.BF16,
  'float16': gguf.GGMLQuantizationType.F16,
  'float32': gguf.GGMLQuantizationType.F32,
  'q8_0': gguf.GGMLQuantizationType.Q8_0,
}
DTYPES = tuple(_TYPES)
_FILE_TYPES = dict(
  bfloat16=gguf.LlamaFileType.MOSTLY_BF16,
  float16=gguf.LlamaFileType.MOSTLY_F16,
  float32=gguf.LlamaFileType.ALL_F32,
  q8_0=gguf.LlamaFileType.MOSTLY_Q8_0,
)


def save(path: str, model: Model, *, dtype: str = 'bfloat16', name: str = '') -> str:
  """Write `model` with its tokenizer and chat template to the file `path`, replacing it; returns `path`.

  Raises UserError for an unknown dtype, a model that differs from its family's decoder in GGUF, and a tokenizer that is
  not byte-level BPE with a split that GGUF has a name for.
  """
  if dtype not in DTYPES:
    raise UserError(
      f'--dtype={dtype!r} is unknown for a GGUF file; choose one of: {", ".join(DTYPES)}.'
    )
  fields = _model_fields(model.config) | tokenizer.to_gguf(model.tokenizer, model.config.vocab)
  tensors = dict(_tensors(model))
  _check_same_model(model, fields, tensors)
  with safe_files.replacing(path) as part:
    writer = gguf.GGUFWriter(part, _architecture(model.config))
    writer.add_name(name or model.name)
    writer.add_file_type(_FILE_TYPES[dtype])
    for key, value in fields.items():
      _add_field(writer, key, value)
    for tensor_name, value in tensors.items():
      # As in llama.cpp's files, routers are float32.
      is_matrix = value.ndim > 1 and not tensor_name.endswith('ffn_gate_inp.weight')
      kind = _TYPES[dtype] if is_matrix else gguf.GGMLQuantizationType.F32
      writer.add_tensor(tensor_name, gguf.quants.quantize(value, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
  return path


def _model_fields(config: ModelConfig) -> JsonObject:
  c, kind = config, _architecture(config)
  sizes = {
    'context_length': c.max_tokens,
    'embedding_length': c.width,
    'block_count': c.layers,
    'feed_forward_length': c.mlp,
    'attention.head_count': c.heads,
    'attention.head_count_kv': c.kv_heads,
    'attention.key_length': c.head_dim,
    'attention.value_length': c.head_dim,
    'rope.dimension_count': c.head_dim,
    'vocab_size': c.vocab,
    'attention.layer_norm_rms_epsilon': float(c.norm_eps),
    'rope.freq_base': float(c.rope_theta),
  }
  if c.experts:
    sizes |= {
      'feed_forward_length': c.shared_mlp or c.mlp,
      'expert_count': c.experts,
      'expert_used_count': c.experts_per_token,
      'expert_feed_forward_length': c.mlp,
    }
  if c.shared_mlp:
    sizes['expert_shared_feed_forward_length'] = c.shared_mlp
  return {f'{kind}.{name}': value for name, value in sizes.items()}


def _architecture(config: ModelConfig) -> str:
  """The family's name in files. Raises UserError for a family without one."""
  for name, family in gguf_file.ARCHITECTURES.items():
    if family == config.family:
      return name
  raise UserError(
    f'a model of family {config.family!r} cannot be written as a GGUF file; supported: '
    f'{", ".join(gguf_file.ARCHITECTURES.values())}; write a Hugging Face folder instead: --to=FOLDER.'
  )


def _check_same_model(model: Model, fields: JsonObject, tensors: dict[str, np.ndarray]) -> None:
  """Raises UserError where the file would describe another model: a window, scaled rotary embeddings, a cap."""
  read = gguf_file.config_of(fields, _architecture(model.config), tensors.keys(), 'export')
  changed = [
    name for name in vars(model.config) if getattr(read, name) != getattr(model.config, name)
  ]
  if changed:
    value = getattr(model.config, changed[0])
    raise UserError(
      f'GGUF has no {changed[0]}={value!r} for the family {model.config.family!r}; write a Hugging Face folder '
      'instead: --to=FOLDER.'
    )


def _tensors(model: Model) -> Iterator[tuple[str, np.ndarray]]:
  """(name, float32 array) of every tensor, matrices as [out, in], rotary pairs of llama interleaved."""
  for tree_path, leaf in jax.tree_util.tree_leaves_with_path(model.params):
    path = [str(k.key) for k in tree_path]
    name, value = gguf_file.tensor_name(path), np.asarray(leaf, np.float32)
    value = gguf_file.file_order(value) if path[-1] == 'kernel' else value
    yield name, np.ascontiguousarray(gguf_file.rotary_order(value, name, model.config, read=False))


def _add_field(writer: gguf.GGUFWriter, key: str, value: JsonValue) -> None:
  if isinstance(value, list):
    writer.add_array(key, value)
  elif isinstance(value, bool):
    writer.add_bool(key, value)
  elif isinstance(value, int):
    writer.add_uint32(key, value)
  elif isinstance(value, float):
    writer.add_float32(key, value)
  else:
    writer.add_string(key, value)
