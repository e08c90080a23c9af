"""Models written as Hugging Face folders: `transformers` loads them and says the same, and so do we."""

from __future__ import annotations

import json
import os

import jax
import numpy as np
import pytest

from jaxrl_llm import models
from jaxrl_llm.commands.export import export_checkpoint
from jaxrl_llm.config import loading as configs
from jaxrl_llm.models import decoder, export, huggingface
from jaxrl_llm.types import Model, UserError

torch = pytest.importorskip('torch')
transformers = pytest.importorskip('transformers')

from tests.models.test_parity import CASES, padded, reference, their_logits  # noqa: E402

WRITTEN = (
  'llama-biases', 'llama-llama3', 'mistral-window', 'qwen2-tied', 'qwen3-tied-biases', 'qwen3_moe', 'smollm3', 'olmo2',
  'gemma2', 'gemma3',
)  # fmt: skip
SCRATCH = dict(width=16, layers=2, heads=2, kv_heads=1, mlp=24, max_tokens=128)


@pytest.mark.parametrize('case', WRITTEN)
def test_what_is_written_is_what_was_read_and_transformers_says_the_same(case, tmp_path):
  theirs = reference(*CASES[case])
  theirs.save_pretrained(tmp_path / 'theirs')
  config, _ = huggingface.read_config(str(tmp_path / 'theirs'))
  params = huggingface.load_params(str(tmp_path / 'theirs'), config)
  moved = jax.tree.map(lambda x: x * 1.5, params)  # so that a copied file would show
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
  """The whole command on a model drawn at random, and what transformers makes of it."""
  c = configs.default()
  c.model, c.data.source, c.data.size, c.rewards.fn = 'scratch', 'digits', 32, 'exact'
  c.scratch.update(SCRATCH)
  to = str(tmp_path / 'ours')
  export_checkpoint(c, str(tmp_path / 'run'), to, 'float32', base=True)
  loaded = transformers.AutoModelForCausalLM.from_pretrained(to, dtype=torch.float32).eval()
  words = transformers.AutoTokenizer.from_pretrained(to)
  model = models.load('scratch', scratch=c.scratch, seed=c.seed)
  text = 'What is 2 + 2?\n'
  assert words(text)['input_ids'] == model.tokenizer.encode(text)
  assert words.decode(words(text)['input_ids']) == text
  asked = [dict(role='user', content='Hi')]
  told = words.apply_chat_template(asked, add_generation_prompt=True, tokenize=False)
  assert told == model.tokenizer.chat(asked)
  assert words.eos_token_id == 0 and loaded.generation_config.eos_token_id in (0, [0])
  tokens = np.array([model.tokenizer.encode(text)], np.int32)
  mask = np.ones_like(tokens, bool)
  ours = np.asarray(decoder.forward(model.config, model.params, tokens, mask))
  np.testing.assert_allclose(ours, their_logits(loaded, tokens, mask), atol=1e-4)
  card = (tmp_path / 'ours' / 'README.md').read_text()
  assert 'after 0 steps' in card and json.loads(card.split('```json')[1].split('```')[0])
  # Who may read one file may read all of them: a server is often another user.
  modes = {path.stat().st_mode for path in (tmp_path / 'ours').iterdir()}
  (tmp_path / 'plain').write_text('')
  assert modes == {(tmp_path / 'plain').stat().st_mode}


def test_a_folder_that_is_in_use_stays_as_it_is(tmp_path):
  (tmp_path / 'mine').write_text('precious')
  model = models.load('scratch', scratch=SCRATCH)
  with pytest.raises(UserError, match='--to=.*is not empty'):
    export.save(str(tmp_path), model)
  with pytest.raises(UserError, match="--dtype='int3' is unknown; choose one of: bfloat16"):
    export.save(str(tmp_path / 'new'), model, dtype='int3')
  assert os.listdir(tmp_path) == ['mine']


def test_what_config_json_cannot_say_is_refused_and_half_a_folder_is_none(tmp_path, monkeypatch):
  model = models.load('scratch', scratch=SCRATCH)
  odd = model._replace(config=model.config.__class__(**(vars(model.config) | dict(logit_cap=3.0))))
  with pytest.raises(UserError, match='load it from its folder'):
    export.save(str(tmp_path / 'odd'), odd)
  monkeypatch.setattr(export, '_write_tokenizer', lambda *_: 1 / 0)
  with pytest.raises(ZeroDivisionError):
    export.save(str(tmp_path / 'half'), model)
  assert not os.path.exists(tmp_path / 'half')
  monkeypatch.undo()
  assert os.path.exists(os.path.join(export.save(str(tmp_path / 'half'), model), 'config.json'))
