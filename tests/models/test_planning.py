"""Shapes for planning: the table's parameter counts are those listed here, and it serves planning alone."""

from __future__ import annotations

import dataclasses
import importlib
import json
import math

import jax
import pytest

from jaxrl_llm import main, models
from jaxrl_llm.models import decoder, families, planning
from jaxrl_llm.types import UserError

# models.load is its function of that name
loader = importlib.import_module('jaxrl_llm.models.load')

# The number of parameters of the published safetensors files, by the first name of an entry. Written down from memory,
# without the hub, but for OLMo-2 7B and 13B and SmolLM3-3B, which were looked up (OLMo-2 32B stands in one third-party
# file): agreement says that shape and count are consistent, not that both are the hub's. Qwen3-0.6B and 1.7B store
# their head twice, Gemma 3 of 4B and more a vision tower and projector; both are subtracted below.
PUBLISHED = {
  'meta-llama/Meta-Llama-3-8B': 8_030_261_248,
  'meta-llama/Llama-3.1-8B': 8_030_261_248,
  'meta-llama/Llama-3.1-70B': 70_553_706_496,
  'meta-llama/Llama-3.2-1B': 1_235_814_400,
  'meta-llama/Llama-3.2-3B': 3_212_749_824,
  'HuggingFaceTB/SmolLM2-135M': 134_515_008,
  'HuggingFaceTB/SmolLM2-360M': 361_821_120,
  'HuggingFaceTB/SmolLM2-1.7B': 1_711_376_384,
  'HuggingFaceTB/SmolLM3-3B': 3_075_098_624,
  'Qwen/Qwen2.5-0.5B': 494_032_768,
  'Qwen/Qwen2.5-1.5B': 1_543_714_304,
  'Qwen/Qwen2.5-1.5B-Instruct': 1_543_714_304,
  'Qwen/Qwen2.5-Math-1.5B': 1_543_714_304,
  'Qwen/Qwen2.5-3B': 3_085_938_688,
  'Qwen/Qwen2.5-7B': 7_615_616_512,
  'Qwen/Qwen2.5-7B-Instruct': 7_615_616_512,
  'Qwen/Qwen2.5-Math-7B': 7_615_616_512,
  'Qwen/Qwen2.5-14B': 14_770_033_664,
  'Qwen/Qwen2.5-14B-Instruct': 14_770_033_664,
  'Qwen/Qwen2.5-32B': 32_763_876_352,
  'Qwen/Qwen2.5-32B-Instruct': 32_763_876_352,
  'Qwen/Qwen2.5-72B': 72_706_203_648,
  'Qwen/Qwen2.5-72B-Instruct': 72_706_203_648,
  'deepseek-ai/DeepSeek-R1-Distill-Qwen-1.5B': 1_777_088_000,
  'deepseek-ai/DeepSeek-R1-Distill-Qwen-7B': 7_615_616_512,
  'Qwen/Qwen3-0.6B': 751_632_384 - 151_936 * 1024,
  'Qwen/Qwen3-0.6B-Base': 751_632_384 - 151_936 * 1024,
  'Qwen/Qwen3-1.7B': 2_031_739_904 - 151_936 * 2048,
  'Qwen/Qwen3-1.7B-Base': 2_031_739_904 - 151_936 * 2048,
  'Qwen/Qwen3-4B': 4_022_468_096,
  'Qwen/Qwen3-4B-Base': 4_022_468_096,
  'Qwen/Qwen3-8B': 8_190_735_360,
  'Qwen/Qwen3-8B-Base': 8_190_735_360,
  'Qwen/Qwen3-14B': 14_768_307_200,
  'Qwen/Qwen3-14B-Base': 14_768_307_200,
  'Qwen/Qwen3-32B': 32_762_123_264,
  'Qwen/Qwen3-30B-A3B': 30_532_122_624,
  'Qwen/Qwen3-30B-A3B-Base': 30_532_122_624,
  'google/gemma-2-2b': 2_614_341_888,
  'google/gemma-2-9b': 9_241_705_984,
  'google/gemma-2-27b': 27_227_128_320,
  'google/gemma-3-270m': 268_098_176,
  'google/gemma-3-1b-pt': 999_885_952,
  'google/gemma-3-4b-pt': 4_300_079_472 - 416_866_032 - 1152 * (2560 + 1),
  'google/gemma-3-12b-pt': 12_187_325_040 - 416_866_032 - 1152 * (3840 + 1),
  'google/gemma-3-27b-pt': 27_432_406_640 - 416_866_032 - 1152 * (5376 + 1),
  'allenai/OLMo-2-0425-1B': 1_484_916_736,
  'allenai/OLMo-2-1124-7B': 7_298_617_344,
  'allenai/OLMo-2-1124-13B': 13_716_198_400,
  'allenai/OLMo-2-0325-32B': 32_234_279_936,
  'mistralai/Mistral-7B-v0.1': 7_241_732_096,
  'mistralai/Mistral-7B-v0.3': 7_248_023_552,
  'mistralai/Mistral-Nemo-Base-2407': 12_247_782_400,
  'mistralai/Mistral-Small-24B-Base-2501': 23_572_403_200,
  'microsoft/Phi-3-mini-4k-instruct': 3_821_079_552,
  'mistralai/Mixtral-8x7B-v0.1': 46_702_792_704,
  'allenai/OLMoE-1B-7B-0924': 6_919_161_856,
  'Qwen/Qwen1.5-MoE-A2.7B': 14_315_784_192,
  'openai/gpt-oss-20b': 20_914_757_184,
  'openai/gpt-oss-120b': 116_829_156_672,
}


@pytest.fixture
def no_hub(monkeypatch):
  """The hub is out of reach, whether or not its package is installed."""

  def fail(name, *patterns):
    raise loader.HubError(f'config.model={name!r} cannot be fetched from the hub.')

  monkeypatch.setattr(loader, '_download_from_hub', fail)
  planning._hub_shape.cache_clear()
  yield
  planning._hub_shape.cache_clear()


def count(config) -> int:
  """Parameters of a decoder: those of all layers are as many, so that two layers are enough to know."""

  def of(layers):
    flags = {name: getattr(config, name)[:layers] for name in ('sliding', 'unrotated')}
    cut = dataclasses.replace(config, layers=layers, **flags)
    return sum(math.prod(x.shape) for x in jax.tree.leaves(decoder.abstract_params(cut)))

  return of(1) + (config.layers - 1) * (of(2) - of(1))


@pytest.mark.parametrize('name', PUBLISHED)
def test_parameters_are_as_many_as_published(name):
  config = families.read(planning.known_configs()[name], name)
  assert count(config) == PUBLISHED[name]


def test_every_entry_has_a_published_count():
  entries = {json.dumps(config) for config in planning.known_configs().values()}
  checked = {json.dumps(planning.known_configs()[name]) for name in PUBLISHED}
  assert entries == checked


def test_planning_takes_the_table_where_the_hub_is_out_of_reach(no_hub, capsys, caplog, tmp_path):
  report = tmp_path / 'layout.json'
  command = ['--mode=layout', '--config=dapo', '--config.model=Qwen/Qwen3-0.6B', '--topology=v5e-1']
  assert main.main([*command, '--config.prompts=8', f'--report={report}']) == 0
  assert 'Qwen/Qwen3-0.6B on 1 devices' in capsys.readouterr().out
  assert caplog.text.count('its shape is that of the table') == 1
  layout = json.loads(report.read_text())
  assert layout['state_bytes']['params'] == 4 * PUBLISHED['Qwen/Qwen3-0.6B']


def test_loading_never_takes_the_table(no_hub):
  for read in (models.load, models.read_config):
    with pytest.raises(UserError, match='cannot be fetched'):
      read('Qwen/Qwen3-0.6B')


def test_an_unknown_name_is_refused_with_the_nearest(no_hub, tmp_path):
  with pytest.raises(UserError, match=r'cannot be fetched.*such as Qwen/Qwen3-8B\.'):
    models.read_shape('Qwen/Qwen3-8')
  broken = tmp_path / 'Qwen' / 'Qwen3-8B'  # a folder that is there is never replaced
  broken.mkdir(parents=True)
  (broken / 'config.json').write_text('{')
  with pytest.raises(UserError, match='config.json is unreadable'):
    models.read_shape(str(broken))


def test_the_hub_comes_before_the_table(monkeypatch, tmp_path):
  changed = planning.known_configs()['Qwen/Qwen3-0.6B'] | dict(num_hidden_layers=3)
  (tmp_path / 'config.json').write_text(json.dumps(changed))
  monkeypatch.setattr(loader, '_download_from_hub', lambda name, *patterns: str(tmp_path))
  planning._hub_shape.cache_clear()
  assert models.read_shape('Qwen/Qwen3-0.6B').layers == 3
  planning._hub_shape.cache_clear()
