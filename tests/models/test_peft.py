"""Adapters in PEFT's format, written and read again. PEFT is not installed: torch computes its function."""

from __future__ import annotations

import json
import os

import jax
import numpy as np
import pytest
import safetensors.numpy
import tiny_job

from jaxrl_llm.commands.export import export_checkpoint
from jaxrl_llm.config import loading as configs
from jaxrl_llm.learner import lora
from jaxrl_llm.models import decoder, export, huggingface, peft
from jaxrl_llm.types import Model, UserError

torch = pytest.importorskip('torch')
transformers = pytest.importorskip('transformers')

from tests.models.test_parity import CASES, padded, reference, their_logits  # noqa: E402

ON = lora.LoraSettings(3, 6.0, ('down', 'gate', 'k', 'o', 'q', 'up', 'v'))
PREFIX = 'base_model.model.'


def adapter_of(params, settings=ON, seed=0):
  r = np.random.default_rng(seed)
  fresh = lora.init(settings, params, seed)
  return jax.tree.map(lambda x: np.float32(x + 0.1 * r.normal(size=x.shape)), fresh)


@pytest.fixture(scope='module', params=['llama-biases', 'qwen2-tied', 'gemma2'])
def written(request, tmp_path_factory):
  """transformers' model, ours with the same weights, an adapter, and the folder of the exported adapter."""
  folder = tmp_path_factory.mktemp(request.param)
  theirs = reference(*CASES[request.param])
  theirs.save_pretrained(folder / 'base')
  config, _ = huggingface.read_config(str(folder / 'base'))
  base = huggingface.load_params(str(folder / 'base'), config)
  adapter = adapter_of(base)
  to = str(folder / 'adapter')
  peft.save(to, Model(config, adapter, None, str(folder / 'base')), ON, dtype='float32')
  return theirs, Model(config, base, None, str(folder / 'base')), adapter, to


def add_adapter(theirs, folder):
  """Hooks that compute y + lora_alpha / r · lora_B(lora_A(x)) on every module that the files name, in torch."""
  config = json.loads(open(os.path.join(folder, 'adapter_config.json')).read())
  tensors = safetensors.numpy.load_file(os.path.join(folder, 'adapter_model.safetensors'))
  modules, handles = dict(theirs.named_modules()), []
  for name in [n for n in tensors if n.endswith('.lora_A.weight')]:
    module = modules[name.removeprefix(PREFIX).removesuffix('.lora_A.weight')]
    assert name.split('.')[-3] in config['target_modules']
    a, b = (torch.tensor(tensors[n]) for n in (name, name.replace('lora_A', 'lora_B')))
    assert a.shape == (config['r'], module.in_features) and b.shape == (
      module.out_features,
      config['r'],
    )
    scale = config['lora_alpha'] / config['r']
    hook = lambda _, x, y, a=a, b=b, s=scale: y + s * (x[0] @ a.T) @ b.T  # noqa: E731
    handles.append(module.register_forward_hook(hook))
  return handles


def test_the_files_are_pefts_and_give_our_logits(written):
  theirs, base, adapter, folder = written
  tensors = safetensors.numpy.load_file(os.path.join(folder, 'adapter_model.safetensors'))
  assert len(tensors) == 2 * 7 * base.config.layers
  q = 'base_model.model.model.layers.1.self_attn.q_proj.lora_{}.weight'
  np.testing.assert_array_equal(tensors[q.format('A')], adapter['layers'][1]['q']['a'].T)
  np.testing.assert_array_equal(tensors[q.format('B')], adapter['layers'][1]['q']['b'].T)
  config = json.loads(open(os.path.join(folder, 'adapter_config.json')).read())
  assert (config['peft_type'], config['task_type'], config['r']) == ('LORA', 'CAUSAL_LM', 3)
  assert config['lora_alpha'] == 6 and isinstance(config['lora_alpha'], int)
  assert config['base_model_name_or_path'] == base.name
  tokens, mask = padded(left=False)
  joined = lora.join(base.params, adapter, ON.alpha)
  ours = np.asarray(jax.jit(lambda p: decoder.forward(base.config, p, tokens, mask))(joined))
  alone = their_logits(theirs, tokens, mask)
  handles = add_adapter(theirs, folder)
  both = their_logits(theirs, tokens, mask)
  for handle in handles:
    handle.remove()
  assert np.abs(both - alone)[mask].max() > 0.1
  assert np.abs(ours - both)[mask].max() <= 3e-4


def test_a_merged_and_exported_adapter_gives_the_same_logits(written, tmp_path):
  _, base, adapter, _ = written
  merged = lora.merge(base.params, adapter, ON.alpha)
  to = export.save(str(tmp_path / 'merged'), base._replace(params=merged), dtype='float32')
  loaded = transformers.AutoModelForCausalLM.from_pretrained(
    to, dtype=torch.float32, attn_implementation='eager'
  ).eval()
  tokens, mask = padded(left=False)
  joined = lora.join(base.params, adapter, ON.alpha)
  ours = np.asarray(jax.jit(lambda p: decoder.forward(base.config, p, tokens, mask))(joined))
  assert np.abs(ours - their_logits(loaded, tokens, mask))[mask].max() <= 3e-4


def test_a_written_adapter_is_read_unchanged(written):
  _, base, adapter, folder = written
  read = peft.load(folder, base.config, ON)
  assert jax.tree.structure(read) == jax.tree.structure(adapter)
  jax.tree.map(np.testing.assert_array_equal, read, adapter)


@pytest.mark.parametrize(
  'changes, settings, message',
  [
    (dict(r=8), ON, 'has r=8; set config.lora.rank, which is 3, to that'),
    (dict(lora_alpha=1), ON, 'has lora_alpha=1; set config.lora.alpha, which is 6.0'),
    (dict(use_dora=True), ON, 'use_dora=true, which is not supported'),
    (dict(rank_pattern=dict(q_proj=4)), ON, 'rank_pattern=.* which is not supported'),
    (
      dict(),
      ON._replace(names=('q',)),
      "holds 'base_model.*which config.lora.targets does not select",
    ),
    (None, ON, 'holds no adapter_model.safetensors; name a folder'),
  ],
)
def test_another_adapter_is_refused(tmp_path, changes, settings, message):
  config = huggingface.read_config(_scratch(tmp_path))[0]
  base = decoder.init(config, 0)
  folder = str(tmp_path / 'adapter')
  if changes is not None:
    peft.save(folder, Model(config, adapter_of(base), None, 'scratch'), ON)
    path = os.path.join(folder, 'adapter_config.json')
    raw = json.loads(open(path).read()) | changes
    with open(path, 'w') as file:
      json.dump(raw, file)
  with pytest.raises(UserError, match=f'config.lora.init=.*{message}'):
    peft.load(folder, config, settings)


def test_missing_tensors_name_the_field(tmp_path):
  config = huggingface.read_config(_scratch(tmp_path))[0]
  attention_only = ON._replace(names=('q', 'v'))
  folder = str(tmp_path / 'adapter')
  peft.save(
    folder,
    Model(config, adapter_of(decoder.init(config, 0), attention_only), None, 's'),
    attention_only,
  )
  with pytest.raises(
    UserError, match=r'config.lora.init: tensor .*down_proj.lora_A.* cannot be read'
  ):
    peft.load(folder, config, ON)


def _scratch(tmp_path) -> str:
  """A folder with the config.json of a tiny model."""
  reference(*CASES['llama-biases']).config.save_pretrained(tmp_path / 'config')
  return str(tmp_path / 'config')


def test_the_command_writes_an_adapter_and_starts_from_it(tmp_path):
  on = dict(lora=dict(rank=2, alpha=4.0), sft=None)
  c = configs.load(tiny_job.config_file(tmp_path, **on))
  to = str(tmp_path / 'adapter')
  export_checkpoint(c, str(tmp_path / 'run'), to, 'float32', True, True)
  assert 'library_name: peft' in (tmp_path / 'adapter/README.md').read_text()
  path = os.path.join(to, 'adapter_model.safetensors')
  tensors = safetensors.numpy.load_file(path)
  assert not any(x.any() for n, x in tensors.items() if 'lora_B' in n)
  safetensors.numpy.save_file({n: x + np.float32(0.25) for n, x in tensors.items()}, path)
  on['lora'] |= dict(init=to)
  c = configs.load(tiny_job.config_file(tmp_path, **on))
  export_checkpoint(c, str(tmp_path / 'other'), str(tmp_path / 'again'), 'float32', True, True)
  again = safetensors.numpy.load_file(str(tmp_path / 'again/adapter_model.safetensors'))
  for name, x in tensors.items():
    np.testing.assert_array_equal(again[name], x + np.float32(0.25))
  with pytest.raises(UserError, match='config.lora.init=.* begins away from the base'):
    with c.ignore_type():
      c.objective.kl = dict(fn='k3', coef=0.1)
    export_checkpoint(c, str(tmp_path / 'third'), str(tmp_path / 'none'), 'float32', True, True)
  c = configs.load(tiny_job.config_file(tmp_path, sft=None))
  with pytest.raises(UserError, match='--adapter needs a run with an adapter'):
    export_checkpoint(c, str(tmp_path / 'plain'), str(tmp_path / 'none'), 'float32', True, True)
