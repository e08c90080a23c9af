"""DAPO of every family's tiny random model: on one device, on eight, and resumed on both."""

from __future__ import annotations

import json
import pathlib
import shutil

import faults
import jax
import numpy as np
import pytest
import tiny_job

from jaxrl_llm import train
from jaxrl_llm.config import loading as configs
from jaxrl_llm.distributed import sharding
from jaxrl_llm.models import decoder, families, huggingface, tokenizer

pytest.importorskip('torch')
pytest.importorskip('transformers')

from tests.models import test_families, test_parity  # noqa: E402

STEPS = 3
MESHES = dict(one=dict(fsdp=1), eight=dict(data=2, fsdp=2, tensor=2))
CHARACTERS = ''.join(chr(c) for c in range(32, 127)) + 'é'  # with 2 special tokens, an even number
_SLIDING = dict(layer_types=['sliding_attention', 'full_attention'])
_DELTA = dict(layer_types=['linear_attention', 'full_attention'])
# Two layers, or four, hold all kinds of layers of a family.
KINDS = dict(
  Gemma3=_SLIDING,
  Olmo3=_SLIDING,
  SmolLM3=dict(no_rope_layer_interval=2),
  Llama4=dict(no_rope_layer_interval=2),
  Qwen3Next=_DELTA,
  Qwen3_5=_DELTA,
  Qwen3_5Moe=_DELTA,
  Gemma4Readers=dict(
    num_hidden_layers=4,
    num_kv_shared_layers=2,
    layer_types=['sliding_attention', 'full_attention'] * 2,
  ),
)


def _cases() -> dict[str, tuple[str, dict]]:
  """Name → class and settings: the first case of each family in the tests of logits, with experts and without.

  And one whose layers attend to keys and values of others.
  """
  found: dict[str, tuple[str, dict]] = {}
  common = dict(num_hidden_layers=2, vocab_size=len(CHARACTERS) + 2, eos_token_id=0)
  for kind, changes in (test_parity.CASES | test_families.CASES).values():
    name = f'{kind}Moe' if changes.get('enable_moe_block') else kind
    name = f'{kind}Readers' if changes.get('num_kv_shared_layers') else name
    found.setdefault(name, (kind, changes | common | KINDS.get(name, {})))
  return found


CASES = _cases()


def save_model(name: str, folder: pathlib.Path) -> None:
  test_parity.reference(*CASES[name]).save_pretrained(folder)
  tokenizer.characters(CHARACTERS).backend.save(str(folder / 'tokenizer.json'))


def run(config: str, workdir: pathlib.Path, mesh: dict[str, int]) -> None:
  count = int(np.prod(list(mesh.values())))
  c = configs.load(config, [f'--config.mesh.{axis}={size}' for axis, size in mesh.items()])
  train.run(c, str(workdir), sharding.make_mesh(c.mesh, jax.devices()[:count]))


def outputs(workdir: pathlib.Path) -> list[list[str]]:
  """The completions of each step; every token is a character."""
  files = sorted((workdir / 'rollouts').glob('*.jsonl'))
  return [[json.loads(line)['output'] for line in f.read_text().splitlines()] for f in files]


def assert_learned(workdir: pathlib.Path) -> None:
  """Every update had a gradient, and found the probabilities with which its tokens were sampled."""
  updates = tiny_job.rows(workdir)[1:]
  assert len(updates) == STEPS - 1
  for row in updates:
    assert row['actor/grad_norm'] > 0
    assert row['training/rollout_probs_diff_max'] <= 1e-4


def assert_resumed_alike(config: str, workdir: pathlib.Path, mesh: dict[str, int]) -> None:
  """Without its last checkpoint, the run repeats the last step bit for bit."""
  again = workdir.with_name(f'{workdir.name}-resumed')
  shutil.copytree(workdir, again)
  shutil.rmtree(again / f'checkpoints/step_{STEPS:06d}')
  run(config, again, mesh)
  assert tiny_job.rows(again) == tiny_job.rows(workdir)
  assert outputs(again) == outputs(workdir)
  assert faults.saved_state(again) == faults.saved_state(workdir)


def test_every_family_has_a_case():
  classes = {f'{kind}ForCausalLM' for kind, _ in CASES.values()}
  assert classes == {family.architecture for family in families.FAMILIES.values()}


@pytest.mark.parametrize('name', CASES)
def test_every_matrix_is_sharded(name, tmp_path):
  """A matrix that no rule matches would be whole on every device, with its moments."""
  save_model(name, tmp_path)
  config, _ = huggingface.read_config(str(tmp_path))
  mesh = sharding.make_mesh(MESHES['eight'], jax.devices())
  params = decoder.abstract_params(config)
  for path, placed in jax.tree_util.tree_leaves_with_path(sharding.layout(params, mesh)):
    leaf = sharding.path_name(path)
    is_vector = leaf.endswith(('/scale', '/bias', '/value', '/score', '/gain', '/choice_bias'))
    if not is_vector and 'delta/' not in leaf:
      assert 'fsdp' in jax.tree.leaves(tuple(placed.spec)), leaf
      is_narrow = leaf.endswith(('router/kernel', '_a/kernel'))
      assert is_narrow or 'tensor' in placed.spec, leaf


@pytest.fixture
def shared_programs(monkeypatch):
  """A resumed run calls the program of the run before, so that it is traced once."""
  compile_step, programs = train.steps.compile_step, {}

  def shared(spec):
    devices = spec.layout.mesh.size
    if devices not in programs:
      programs[devices] = compile_step(spec)
    return programs[devices]

  monkeypatch.setattr(train.steps, 'compile_step', shared)


@pytest.mark.usefixtures('shared_programs')
@pytest.mark.parametrize('name', CASES)
def test_eight_devices_sample_the_tokens_of_one_and_both_resume(name, tmp_path):
  save_model(name, tmp_path / 'model')
  config = tiny_job.config_file(
    tmp_path,
    base='dapo',
    model=str(tmp_path / 'model'),
    scratch=None,
    steps=STEPS,
    prompt_tokens=80,
    # Gradients of a rarely chosen expert are as small as rounding errors.
    optimizer=dict(learning_rate=1e-3, eps=1e-4),
    evaluation=dict(every=0, prompts=0, samples=0),
    checkpoint=dict(every=1, keep=STEPS),
    **tiny_job.UNTAUGHT,
  )
  for mesh_name, mesh in MESHES.items():
    run(config, tmp_path / mesh_name, mesh)
    assert_learned(tmp_path / mesh_name)
    assert_resumed_alike(config, tmp_path / mesh_name, mesh)
  one, eight = (tiny_job.rows(tmp_path / mesh_name) for mesh_name in MESHES)
  assert outputs(tmp_path / 'one') == outputs(tmp_path / 'eight')
  for metric in ('actor/pg_loss', 'actor/grad_norm', 'actor/entropy'):
    np.testing.assert_allclose(
      [row[metric] for row in eight[1:]], [row[metric] for row in one[1:]], rtol=1e-3, atol=1e-4
    )
