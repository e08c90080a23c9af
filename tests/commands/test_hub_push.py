"""--push with the real huggingface_hub client against a stand-in of the hub on loopback: the same bytes arrive."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys

import hub_server
import pytest
import run_folder
import yaml

from jaxrl_llm.commands import export as command
from jaxrl_llm.commands import hub_push, model_card
from jaxrl_llm.config import loading as configs
from jaxrl_llm.config import schema
from jaxrl_llm.types import UserError

pytest.importorskip('huggingface_hub')
CONFIG = """
def get_config():
  return dict(
    model='scratch', scratch=dict(width=16, layers=1, heads=2, kv_heads=1, mlp=32, max_tokens=64),
    data=dict(source='digits', size=32, chat=False), rewards=dict(fn='exact'),
  )
"""


@pytest.fixture
def hub():
  with hub_server.serve() as hub:
    yield hub


def push(hub, tmp_path, *flags, token=hub_server.TOKEN, url=''):
  """(status, stdout, stderr) of the command: a process, since the client reads its environment at import."""
  (tmp_path / 'tiny.py').write_text(CONFIG)
  settings = dict(
    HF_ENDPOINT=url or hub.url, HF_HOME=str(tmp_path / 'hf'), HF_HUB_DISABLE_XET='1',
    JAX_PLATFORMS='cpu', HF_HUB_DISABLE_PROGRESS_BARS='1',
  )  # fmt: skip
  env = {k: v for k, v in os.environ.items() if not k.startswith('HF_')} | settings
  env |= dict(HF_TOKEN=token) if token else {}
  argv = (
    '-m', 'jaxrl_llm.main', f'--config={tmp_path}/tiny.py', f'--workdir={tmp_path}/run', '--mode=export', '--base',
    f'--to={tmp_path}/model', *flags,
  )  # fmt: skip
  done = subprocess.run([sys.executable, *argv], capture_output=True, text=True, env=env)
  return done.returncode, done.stdout, done.stderr


def contents(folder):
  return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob('*') if p.is_file()}


def test_the_files_arrive_and_are_replaced_by_a_later_push(hub, tmp_path):
  status, out, err = push(hub, tmp_path, '--push=me/tiny')
  assert status == 0, err
  assert f'is uploaded to {hub.url}/me/tiny' in out and hub.visibility == {'me/tiny': 'private'}
  folder = contents(tmp_path / 'model')
  assert hub.files['me/tiny'] == folder | {'.gitattributes': b''}
  assert 'model.safetensors' in folder and "from_pretrained('me/tiny')" in (
    folder['README.md'].decode()
  )
  assert any(call.startswith('PUT /lfs/') for call in hub.calls)
  # Again in another data type: files that the new export lacks are deleted.
  hub.files['me/tiny']['model-00001-of-00002.safetensors'] = b'an older shard'
  shutil.rmtree(tmp_path / 'model')
  status, _, err = push(hub, tmp_path, '--push=me/tiny', '--dtype=float32')
  assert status == 0, err
  assert contents(tmp_path / 'model') != folder
  assert hub.files['me/tiny'] == contents(tmp_path / 'model') | {'.gitattributes': b''}


def test_a_repository_of_someone_elses_work_is_left_unchanged(hub, tmp_path):
  hub.files['me/mine'] = {'.gitattributes': b'', 'README.md': b'precious'}
  hub.commits['me/mine'] = ['Edit the card', hub_push.COMMIT]
  status, _, err = push(hub, tmp_path, '--push=me/mine')
  assert status and 'holds files, and its newest commit is not of this command' in err
  assert hub.files['me/mine']['README.md'] == b'precious' and not (tmp_path / 'model').exists()
  # An empty repository, made by hand, is filled.
  hub.files['me/mine'] = {'.gitattributes': b''}
  status, _, err = push(hub, tmp_path, '--push=me/mine')
  assert status == 0 and hub.files['me/mine'].keys() > {'config.json'}, err


@pytest.mark.parametrize(
  'flags, settings, message',
  [
    (['--push=me/tiny'], dict(token=''), 'there is no token of the hub; log in with `hf auth'),
    (['--push=me/tiny'], dict(token='hf_old'), 'the hub does not accept the token'),
    (['--push=other/tiny'], {}, 'the token has no permission to write there'),
    (['--push=me/tiny'], dict(url='http://127.0.0.1:9'), 'the hub cannot be reached (ConnectE'),
    (['--push=tiny'], {}, "--push='tiny' must be owner/name"),
    (['--push=me/tiny', '--to=m.gguf'], {}, "--to='m.gguf' is a GGUF file; name a folder"),
    (['--public'], {}, '--public is a flag of --push; add --push=owner/name'),
  ],
)
def test_a_push_that_cannot_work_is_one_sentence_before_the_export(
  hub, tmp_path, flags, settings, message
):
  status, _, err = push(hub, tmp_path, *flags, **settings)
  assert status and message in err and 'Traceback' not in err and len(err.splitlines()) == 1, err
  assert not (tmp_path / 'model').exists() and not hub.files


def test_public_is_asked_for(hub, tmp_path):
  status, _, err = push(hub, tmp_path, '--push=me/open', '--public')
  assert status == 0 and hub.visibility == {'me/open': 'public'}, err


def test_a_missing_package_is_reported_with_the_extra(monkeypatch):
  monkeypatch.setitem(sys.modules, 'huggingface_hub', None)
  with pytest.raises(UserError, match=r'--push needs huggingface_hub: pip install .*\[hub\]'):
    hub_push.prepare('me/tiny', private=True)


@pytest.mark.parametrize('library', ['transformers', 'peft'])
def test_the_card_has_base_method_data_and_accuracy(library, tmp_path):
  root = run_folder.make(tmp_path / 'run', steps=6)
  config = configs.default()
  config.model, config.data.source = 'Qwen/Qwen3-0.6B', 'files'
  config.data.files = (dict(path='hub:openai/gsm8k'), dict(path='own.jsonl'))
  accuracy = command._accuracy(root, 6)
  card = model_card.model_card(schema.typed(config), 6, 'me/tiny', library, accuracy)
  head = yaml.safe_load(card.split('---')[1])
  assert head['base_model'] == 'Qwen/Qwen3-0.6B' and head['datasets'] == ['openai/gsm8k']
  assert head['library_name'] == library and f'from {library} import' in card
  assert '| measure | step 0 | step 6 |' in card and '200 held-out prompts' in card
  assert '| greedy | 20.0 [14.0, 27.0] | 70.0 [64.0, 77.0] |' in card
  assert 'Data: source `files`: `hub:openai/gsm8k`, `own.jsonl`' in card
  assert f'advantage `{config.objective.advantage.fn}`' in card and "pretrained('me/tiny')" in card
  assert '| step 0 |' in command._accuracy(root, 5) and 'step 6' not in command._accuracy(root, 5)
  assert command._accuracy(str(tmp_path), 6) == ''
