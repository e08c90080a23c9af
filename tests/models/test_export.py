"""Models exported as Hugging Face folders, loaded by transformers and by this package: the same logits."""

from __future__ import annotations

import json
import os
from unittest import mock

import jax
import numpy as np
import pytest

from jaxrl_llm import models
from jaxrl_llm.commands.export import export_checkpoint
from jaxrl_llm.commands.generate import generate_text
from jaxrl_llm.config import loading as configs
from jaxrl_llm.data import pipeline
from jaxrl_llm.models import decoder, export, huggingface
from jaxrl_llm.types import Model, Row, UserError

torch = pytest.importorskip('torch')
transformers = pytest.importorskip('transformers')

from tests.models.test_parity import CASES, padded, reference, their_logits  # noqa: E402

WRITTEN = (
  'llama-biases', 'llama-llama3', 'mistral-window', 'qwen2-tied', 'qwen3-tied-biases', 'qwen3_moe', 'smollm3', 'olmo2',
  'gemma2', 'gemma3',
)  # fmt: skip
SCRATCH = dict(width=16, layers=2, heads=2, kv_heads=1, mlp=24, max_tokens=128)


@pytest.mark.parametrize('case', WRITTEN)
def test_an_exported_model_loads_with_the_same_weights_and_logits(case, tmp_path):
  theirs = reference(*CASES[case])
  theirs.save_pretrained(tmp_path / 'theirs')
  config, _ = huggingface.read_config(str(tmp_path / 'theirs'))
  params = huggingface.load_params(str(tmp_path / 'theirs'), config)
  moved = jax.tree.map(lambda x: x * 1.5, params)  # a mere copy of the files would fail
  to = str(tmp_path / 'ours')
  model = Model(config, moved, None, str(tmp_path / 'theirs'))
  export.save(to, model, dtype='float32', shard_bytes=60_000)
  assert len([f for f in os.listdir(to) if f.endswith('.safetensors')]) > 1
  again, _ = huggingface.read_config(to)
  assert again == config
  read = huggingface.load_params(to, again)
  for a, b in zip(jax.tree.leaves(moved), jax.tree.leaves(read), strict=True):
    np.testing.assert_allclose(a, b, rtol=1e-6, atol=1e-6)
  loaded = transformers.AutoModelForCausalLM.from_pretrained(
    to, dtype=torch.float32, attn_implementation='eager'
  ).eval()
  tokens, mask = padded(left=False)
  ours = np.asarray(jax.jit(lambda p: decoder.forward(config, p, tokens, mask))(moved))
  assert np.abs(ours - their_logits(loaded, tokens, mask))[mask].max() <= 2e-4


def test_a_model_without_a_folder_gets_a_config_a_tokenizer_and_a_card(tmp_path):
  """The export command on a randomly initialized model, loaded by transformers."""
  c = configs.default()
  c.model, c.data.source, c.data.size, c.rewards.fn = 'scratch', 'digits', 32, 'exact'
  c.scratch.update(SCRATCH)
  to = str(tmp_path / 'ours')
  export_checkpoint(c, str(tmp_path / 'run'), to, 'float32', base=True)
  loaded = transformers.AutoModelForCausalLM.from_pretrained(to, dtype=torch.float32).eval()
  loaded_tokenizer = transformers.AutoTokenizer.from_pretrained(to)
  model = models.load('scratch', scratch=c.scratch, seed=c.seed)
  text = 'What is 2 + 2?\n'
  assert loaded_tokenizer(text)['input_ids'] == model.tokenizer.encode(text)
  assert loaded_tokenizer.decode(loaded_tokenizer(text)['input_ids']) == text
  messages = [dict(role='user', content='Hi')]
  rendered = loaded_tokenizer.apply_chat_template(
    messages, add_generation_prompt=True, tokenize=False
  )
  assert rendered == model.tokenizer.chat(messages)
  assert loaded_tokenizer.eos_token_id == 0 and loaded.generation_config.eos_token_id in (0, [0])
  tokens = np.array([model.tokenizer.encode(text)], np.int32)
  mask = np.ones_like(tokens, bool)
  ours = np.asarray(decoder.forward(model.config, model.params, tokens, mask))
  np.testing.assert_allclose(ours, their_logits(loaded, tokens, mask), atol=1e-4)
  card = (tmp_path / 'ours' / 'README.md').read_text()
  assert 'after 0 steps' in card and json.loads(card.split('```json')[1].split('```')[0])
  # All files have the same permissions: a server often runs as another user.
  modes = {path.stat().st_mode for path in (tmp_path / 'ours').iterdir()}
  (tmp_path / 'plain').write_text('')
  assert modes == {(tmp_path / 'plain').stat().st_mode}


@pytest.mark.parametrize('chat', [True, False])
def test_the_code_of_the_card_answers_as_generation_does(chat, tmp_path, capsys):
  """In the template of the training, whose text differs from the question."""
  config, to = configs.default(), str(tmp_path / 'ours')
  config.model, config.data.source, config.data.size = 'scratch', 'digits', 32
  config.scratch.update(SCRATCH)
  config.data.update(chat=chat, template="Don't guess: {question}\n", system='Be "brief".')
  export_checkpoint(config, str(tmp_path / 'run'), to, 'float32', base=True)
  card = (tmp_path / 'ours/README.md').read_text()
  scope: dict = {}
  exec(card.split('```python')[1].split('```')[0].replace("'ours'", repr(to)), scope)
  capsys.readouterr()
  generate_text(config, str(tmp_path / 'run'), ['12'], base=True)
  (said,) = capsys.readouterr().out.split('> 12\n')[1:]
  with mock.patch.object(scope['model'], 'generate', wraps=scope['model'].generate) as theirs:
    assert said.strip('\n') == scope['answer']('12').strip('\n')
  ids = theirs.call_args.kwargs['input_ids'][0].tolist()
  tokenizer = models.load('scratch', scratch=config.scratch, seed=config.seed).tokenizer
  row = Row('', '12', (), '', '', {})
  assert ids == pipeline.encode(row, config.data, tokenizer).tolist()


def test_a_folder_in_use_is_left_unchanged(tmp_path):
  (tmp_path / 'mine').write_text('precious')
  model = models.load('scratch', scratch=SCRATCH)
  with pytest.raises(UserError, match='--to=.*is not empty'):
    export.save(str(tmp_path), model)
  with pytest.raises(UserError, match="--dtype='int3' is unknown; choose one of: bfloat16"):
    export.save(str(tmp_path / 'new'), model, dtype='int3')
  assert os.listdir(tmp_path) == ['mine']


def test_an_inexpressible_config_is_refused_and_a_failed_export_leaves_no_folder(
  tmp_path, monkeypatch
):
  model = models.load('scratch', scratch=SCRATCH)
  odd = model._replace(config=model.config.__class__(**(vars(model.config) | dict(logit_cap=3.0))))
  with pytest.raises(UserError, match='load it from its folder'):
    export.save(str(tmp_path / 'odd'), odd)
  monkeypatch.setattr(export, 'write_tokenizer', lambda *_: 1 / 0)
  with pytest.raises(ZeroDivisionError):
    export.save(str(tmp_path / 'half'), model)
  assert not os.path.exists(tmp_path / 'half')
  monkeypatch.undo()
  assert os.path.exists(os.path.join(export.save(str(tmp_path / 'half'), model), 'config.json'))
