"""Reward models: the scores of transformers from the same files, and grading in a worker."""

from __future__ import annotations

import json

import numpy as np
import pytest

from jaxrl_llm import models, rewards
from jaxrl_llm.config import loading as configs
from jaxrl_llm.models import reward_model
from jaxrl_llm.runner import setup
from jaxrl_llm.types import Row, UserError

torch = pytest.importorskip('torch')
transformers = pytest.importorskip('transformers')

CASES = dict(Llama=dict(attention_bias=True), Qwen2=dict(), Qwen3=dict(head_dim=16))
SCRATCH = dict(width=16, layers=1, heads=2, kv_heads=1, mlp=32, max_tokens=64)


def folder(path, kind='Qwen2', **changes):
  """A random reward model with a character tokenizer, as transformers saves it; and the model."""
  letters = models.load('scratch', scratch=SCRATCH).tokenizer
  torch.manual_seed(0)
  sizes = dict(
    vocab_size=letters.vocab_size, hidden_size=48, intermediate_size=80, num_hidden_layers=3
  )
  sizes |= dict(num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=256)
  end = list(letters.end_ids)[0]
  settings = dict(num_labels=1, pad_token_id=letters.vocab_size - 1, eos_token_id=end)
  config = getattr(transformers, f'{kind}Config')(**(sizes | settings | CASES[kind] | changes))
  model = getattr(transformers, f'{kind}ForSequenceClassification')(config).eval()
  with torch.no_grad():
    for parameter in model.parameters():
      parameter.add_(0.1 * torch.randn_like(parameter))
  model.save_pretrained(path)
  letters.backend.save(str(path / 'tokenizer.json'))
  return str(path), model


def reference_score(model, ids) -> float:
  with torch.no_grad():
    return model(torch.tensor([ids])).logits[0, 0].item()


@pytest.mark.parametrize('kind', CASES)
def test_scores_equal_those_of_transformers(tmp_path, kind):
  """A batch of many lengths, against each row alone and unpadded."""
  path, other = folder(tmp_path, kind)
  ours = reward_model.load(path)
  r = np.random.default_rng(0)
  rows = [r.integers(0, 90, n).tolist() for n in (1, 5, 31, 32, 33, 70, 12, 3, 9, 2)]
  want = [reference_score(other, ids) for ids in rows]
  np.testing.assert_allclose(reward_model.score_token_ids(ours, rows), want, rtol=0, atol=1e-4)
  assert np.ptp(want) > 0.5
  with pytest.raises(ValueError, match='reads 1 to 256'):
    reward_model.score_token_ids(ours, [[1] * 257])


TEMPLATE = (
  "{% for m in messages %}<{{ m['role'] }}> {{ m['content'] }}\n{% endfor %}"
  '{% if add_generation_prompt %}<a>{% endif %}'
)


def test_it_grades_in_a_worker(tmp_path):
  """Through config.rewards: plain text, and messages rendered without a generation prompt."""
  path, other = folder(tmp_path)
  (tmp_path / 'tokenizer_config.json').write_text(json.dumps(dict(chat_template=TEMPLATE)))
  spec = dict(fn='jaxrl_llm.models.reward_model:score', folder=path, batched='step', workers=1)
  spec |= dict(deadline_s=120.0, cpu_s=120.0, memory_mb=8192)
  letters = models.load('scratch', scratch=SCRATCH).tokenizer
  question = (dict(role='user', content='2 + 3?'),)
  for row, conversation in (
    (Row('a', '2 + 3 = ', (), '', 'toy', {}), '2 + 3 = {}'),
    (Row('b', '', question, '', 'toy', {}), '<user> 2 + 3?\n<assistant> {}\n'),
  ):
    texts = ['5', 'six', 'It is five.']
    want = [reference_score(other, letters.encode(conversation.format(text))) for text in texts]
    # Special tokens spelled in a completion are removed, also those that the removal of another one forms.
    end = letters.backend.id_to_token(list(letters.end_ids)[0])
    texts[1] = f'si{end[:2]}{end}{end[2:]}x'
    scores = rewards.score([row] * 3, texts, spec)
    assert not any(scores.counts.values()), scores.message
    np.testing.assert_allclose(scores.parts_BxK[:, 0], want, rtol=0, atol=1e-4)


@pytest.mark.parametrize(
  'labels, message', [(1, 'no reward model'), (2, r'score.weight.* has shape \(2, 48\)')]
)
def test_other_models_are_refused(tmp_path, labels, message):
  path, _ = folder(tmp_path, num_labels=labels)
  if labels == 1:
    raw = json.loads((tmp_path / 'config.json').read_text())
    raw['architectures'] = ['Qwen2ForCausalLM']
    (tmp_path / 'config.json').write_text(json.dumps(raw))
  with pytest.raises(UserError, match=message):
    reward_model.load(path)
  spec = dict(fn='jaxrl_llm.models.reward_model:score', folder=path, batched='step')
  with pytest.raises(UserError, match=f'^config.rewards.folder: .*{message}'):
    rewards.resolve(spec)


def test_a_bad_folder_is_refused_before_the_policy_is_loaded(tmp_path, monkeypatch):
  """As the main reward function and as a part; only the weights are left to the worker."""
  path, _ = folder(tmp_path)
  spec = dict(
    fn='jaxrl_llm.models.reward_model:score', folder=str(tmp_path / 'none'), batched='step'
  )
  c = configs.default()
  c.rewards.update(spec)
  monkeypatch.setattr(models, 'load', lambda *_, **__: pytest.fail('the policy was loaded'))
  with pytest.raises(
    UserError, match=r"^config.rewards.folder: '.*none' is no reward model: no folder"
  ):
    setup.build_context(c)
  with pytest.raises(UserError, match=r'^config.rewards.parts\[0\].folder: .*none'):
    rewards.resolve_parts(dict(fn='exact', parts=(spec,)))
  for bad in ('', 7):
    with pytest.raises(UserError, match='folder=.* must name the folder of a reward model'):
      rewards.resolve(spec | dict(folder=bad))
  read = []
  monkeypatch.setattr(reward_model.huggingface, 'load_params', lambda *args: read.append(args))
  rewards.resolve(spec | dict(folder=path))
  assert not read
