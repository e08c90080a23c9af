"""--mode=reward_model: held-out accuracy, the exported folder in transformers and as a grader, resuming, bad input."""

from __future__ import annotations

import gc
import json
import os
import random
import signal

import jax
import numpy as np
import pytest
import safetensors.numpy
import tiny_job

from jaxrl_llm import main, models
from jaxrl_llm.checkpointing import metrics_log
from jaxrl_llm.config import loading, schema
from jaxrl_llm.learner import preference_update
from jaxrl_llm.models import reward_model
from jaxrl_llm.monitoring import trackers
from jaxrl_llm.runner import reward_training

LETTERS = 'abcdefgh'


def write_pairs(path, count=800):
  """The preferred word has more letters a; its last letter says nothing."""
  draw = random.Random(0)
  rows = []
  while len(rows) < count:
    words = [''.join(draw.choices(LETTERS, k=draw.randint(3, 5))) for _ in range(2)]
    rejected, chosen = sorted(words, key=lambda word: word.count('a'))
    if chosen.count('a') > rejected.count('a'):
      rows.append(dict(prompt=f'{len(rows)}=', chosen=chosen, rejected=rejected))
  path.write_text('\n'.join(map(json.dumps, rows)) + '\n')
  return str(path)


def config_file(tmp_path, **changes):
  path = tmp_path / 'pairs.jsonl'
  data = dict(source='jsonl', path=str(path) if path.exists() else write_pairs(path))
  settings = dict(sft=None, data=data, rollouts=None, prompts=16, evaluation=dict(prompts=100))
  return tiny_job.config_file(tmp_path, **(settings | changes))


def train(config, workdir, to, *more):
  flags = [f'--workdir={workdir}', f'--to={to}', '--dtype=float32', *more]
  return main.main([f'--config={config}', '--mode=reward_model', *flags])


def tensors(folder):
  return safetensors.numpy.load_file(folder / 'model.safetensors')


def accuracy(run, step):
  record = json.loads((run / f'eval/step_{step:06d}.json').read_text())
  assert record['pairs'] == 100
  return record['metrics']['val-core/all/acc/pairs']


def test_a_preference_is_learned_and_the_folder_has_it(tmp_path):
  """From chance to above 90 % of held-out pairs; the grader and transformers score as the run did."""
  torch = pytest.importorskip('torch')
  transformers = pytest.importorskip('transformers')
  optimizer = dict(learning_rate=5e-3, decay='cosine')
  config = config_file(tmp_path, steps=150, optimizer=optimizer, checkpoint=dict(every=150))
  run, to = tmp_path / 'run', tmp_path / 'model'
  assert train(config, run, to) == 0
  assert accuracy(run, 0) < 0.7 and accuracy(run, 150) > 0.9
  rows = metrics_log.read(str(run / 'metrics.jsonl'))
  losses = [row['reward_model/loss'] for row in rows]
  assert len(losses) == 150 and abs(losses[0] - np.log(2)) < 0.1 and np.mean(losses[-10:]) < 0.3
  words = ['abca', 'bcda', 'hgfe', 'aab']
  got = reward_model.score(['7='] * 4, words, folder=str(to))
  assert got[3] > got[1] > got[2] and got[0] > got[1]
  other = transformers.AutoModelForSequenceClassification.from_pretrained(to)
  letters = models.load('scratch', scratch=tiny_job.CONFIG['scratch']).tokenizer
  ids = [letters.encode(f'7={word}') for word in words]
  padded = torch.full((4, 9), letters.pad_id)
  for row, tokens in zip(padded, ids, strict=True):
    row[: len(tokens)] = torch.tensor(tokens)
  with torch.no_grad():
    want = other(padded, attention_mask=(padded != letters.pad_id).long()).logits
  assert want.shape == (4, 1)
  np.testing.assert_allclose(got, want[:, 0].numpy(), rtol=0, atol=1e-4)
  assert 'lm_head.weight' not in tensors(to)
  assert f'{accuracy(run, 150):.1%} of 100 held-out pairs' in (to / 'README.md').read_text()


TEMPLATE = (
  "{% for m in messages %}<{{ m['role'] }}> {{ m['content'] }}{{ eos_token }}{% endfor %}"
  '{% if add_generation_prompt %}<assistant>{% endif %}'
)


def chat_model(path, transformers):
  """A folder of a chat model whose turns end with its padding token."""
  letters = models.load('scratch', scratch=tiny_job.CONFIG['scratch']).tokenizer
  end = list(letters.end_ids)[0]
  other = transformers.Qwen3ForCausalLM(
    transformers.Qwen3Config(
      vocab_size=letters.vocab_size, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=2,
      num_key_value_heads=1, head_dim=16, max_position_embeddings=128, eos_token_id=end, pad_token_id=end,
    )
  )  # fmt: skip
  other.save_pretrained(path)
  letters.backend.save(str(path / 'tokenizer.json'))
  token = letters.backend.id_to_token(end)
  settings = dict(chat_template=TEMPLATE, eos_token=token, pad_token=token)
  (path / 'tokenizer_config.json').write_text(json.dumps(settings))
  return letters, token


def test_conversations_of_a_chat_model(tmp_path):
  """Scores equal those of transformers where conversations end with the padding token, on which it would not read."""
  torch = pytest.importorskip('torch')
  transformers = pytest.importorskip('transformers')
  letters, end = chat_model(tmp_path / 'chat', transformers)
  user = lambda text: [dict(role='user', content=text)]  # noqa: E731
  reply = lambda text: [dict(role='assistant', content=text)]  # noqa: E731
  rows = [dict(prompt=user(f'{n}?'), chosen=reply('aa'), rejected=reply('b')) for n in range(20)]
  (tmp_path / 'pairs.jsonl').write_text('\n'.join(map(json.dumps, rows)))
  sizes = dict(model=str(tmp_path / 'chat'), scratch=None, prompt_tokens=40, steps=3)
  config = config_file(tmp_path, **sizes, evaluation=dict(prompts=4), mesh=dict(fsdp=2))
  assert train(config, tmp_path / 'run', tmp_path / 'model') == 0
  got = reward_model.score(
    [user('7?')] * 2, [reply('aa'), reply('b')], folder=str(tmp_path / 'model')
  )
  other = transformers.AutoModelForSequenceClassification.from_pretrained(tmp_path / 'model')
  assert other.config.pad_token_id is None
  texts = [f'<user> 7?{end}<assistant> {text}{end}' for text in ('aa', 'b')]
  with torch.no_grad():
    want = [other(torch.tensor([letters.encode(text)])).logits[0, 0].item() for text in texts]
  assert want[0] > want[1]
  np.testing.assert_allclose(got, want, rtol=0, atol=1e-5)


class Killed(BaseException):
  """Handled nowhere."""


@pytest.mark.parametrize('how', ['killed', 'preempted'])
def test_a_resumed_run_equals_an_uninterrupted_one(tmp_path, monkeypatch, how):
  """Bit for bit, in weights and metrics, through an epoch's end; stopped between two checkpoints."""
  write_pairs(tmp_path / 'pairs.jsonl', 60)
  config = config_file(
    tmp_path, steps=8, evaluation=dict(prompts=5), checkpoint=dict(every=4, keep=1)
  )
  assert train(config, tmp_path / 'whole', tmp_path / 'a') == 0
  batch = reward_training.batch

  def interrupted(job, index):
    if index == 5 and how == 'killed':
      raise Killed
    if index == 5:
      os.kill(os.getpid(), signal.SIGTERM)
    return batch(job, index)

  monkeypatch.setattr(reward_training, 'batch', interrupted)
  if how == 'killed':
    with pytest.raises(Killed):
      train(config, tmp_path / 'parts', tmp_path / 'b')
    gc.collect()  # of the lock of the run directory
  else:
    assert train(config, tmp_path / 'parts', tmp_path / 'b') == 75
    assert (tmp_path / 'parts/checkpoints/step_000006').exists()
  assert not (tmp_path / 'b').exists()
  monkeypatch.setattr(reward_training, 'batch', batch)
  assert train(config, tmp_path / 'parts', tmp_path / 'b') == 0
  assert (tmp_path / 'parts/checkpoints/step_000008').exists()
  whole, parts = (tensors(tmp_path / name) for name in 'ab')
  assert whole.keys() == parts.keys() and 'score.weight' in whole
  for name, value in whole.items():
    np.testing.assert_array_equal(value, parts[name], err_msg=name)
  files = [str(tmp_path / name / 'metrics.jsonl') for name in ('whole', 'parts')]
  rows = [metrics_log.comparable(metrics_log.read(file)) for file in files]
  assert len(rows[0]) == 8 and rows[0] == rows[1]


def test_an_epoch_has_every_pair_once(tmp_path):
  write_pairs(tmp_path / 'pairs.jsonl', 40)
  config = loading.load(config_file(tmp_path, evaluation=dict(prompts=0), prompts=16))
  job = reward_training.load(schema.typed(config))
  batches = [reward_training.batch(job, index) for index in range(5)]
  words = [
    tuple(tokens_2xS[0, : length_2[0]])
    for pairs in batches
    for tokens_2xS, length_2 in zip(pairs.tokens_Nx2xS, pairs.length_Nx2, strict=True)
  ]
  first, second = words[:40], words[40:80]
  assert sorted(first) == sorted(second) == sorted(tuple(pair.chosen) for pair in job.train)
  assert first != second


@pytest.mark.parametrize(
  'flag, message',
  [
    ('--config.lora.rank=4', 'config.lora.rank=4 has no effect with --mode=reward_model'),
    ('--config.sft.steps=3', 'config.sft.steps=3 has no effect with --mode=reward_model'),
    ('--config.learner.passes=2', 'config.learner.passes=2 has no effect'),
    (
      '--config.optimizer.outer.fn=slow_fast',
      "config.optimizer.outer.fn='slow_fast' has no effect with --mode=reward_model, which trains all weights on "
      'pairs alone; set --config.optimizer.outer.fn=none.',
    ),
    ('--config.steps=0', 'config.steps=0 trains nothing'),
    (
      '--config.reward_model.center_rewards_coefficient=-1.0',
      'config.reward_model.center_rewards_coefficient=-1.0 must be a number from 0',
    ),
    ('--config.completion_tokens=80', 'are 92 together, and config.model='),
    ('--config.data.path=none.jsonl', "config.data.path='none.jsonl' is no file"),
    ('--config.data.source=digits', "config.data.source='digits' has no pairs"),
    ('--dtype=int3', "--dtype='int3' is unknown"),
    ('--to=gs://a/b', 'writes a local folder, not gs://a/b'),
  ],
)
def test_bad_input_is_one_sentence(tmp_path, capsys, flag, message):
  """Before anything is compiled or written."""
  config = config_file(tmp_path)
  flags = [f'--config={config}', '--mode=reward_model', f'--workdir={tmp_path}/run', flag]
  assert main.main(flags) == 2
  assert message in capsys.readouterr().err
  assert not (tmp_path / 'run').exists()


def test_pairs_longer_than_the_limit_are_left_out(tmp_path, capsys, caplog):
  path = tmp_path / 'pairs.jsonl'
  rows = [dict(prompt='1=', chosen='ab', rejected='b' * n) for n in (16, 17)]
  path.write_text('\n'.join(map(json.dumps, rows)) + '\n')
  config = config_file(tmp_path, evaluation=dict(prompts=0))
  job = reward_training.load(schema.typed(loading.load(config)))  # 12 + 6 tokens
  assert [len(pair.rejected) for pair in job.train] == [18]
  assert '1 of 2 pairs are left out: more than 18 tokens' in caplog.text
  flags = [f'--config={config}', '--mode=reward_model', f'--workdir={tmp_path}/run']
  assert main.main([*flags, '--config.completion_tokens=5']) == 2
  assert 'has no pair of at most 17 tokens' in capsys.readouterr().err


def test_a_run_that_diverges_ends_with_a_sentence(tmp_path, capsys):
  config = config_file(tmp_path, optimizer=dict(learning_rate=1e30, max_skipped=2))
  assert train(config, tmp_path / 'run', tmp_path / 'a') == 2
  assert 'config.optimizer.max_skipped=2 updates in a row' in capsys.readouterr().err
  assert not (tmp_path / 'a').exists()


def test_exhausted_memory_names_what_to_type(tmp_path, capsys, monkeypatch):
  def update(*_):
    raise jax.errors.JaxRuntimeError('RESOURCE_EXHAUSTED: Out of memory allocating 9 bytes.\nmore')

  monkeypatch.setattr(preference_update, 'compile_update', lambda spec: update)
  assert train(config_file(tmp_path), tmp_path / 'run', tmp_path / 'a') == 2
  text = capsys.readouterr().err
  assert 'training does not fit into the memory of a cpu (RESOURCE_EXHAUSTED' in text
  assert 'needs less with --config.learner.microbatch_tokens=18 --config.learner.remat=True' in text


def test_trackers_receive_steps_and_evaluations(tmp_path, monkeypatch):
  logged = []

  class Fake:
    def __init__(self, *_):
      pass

    def log(self, step, numbers):
      logged.append((step, set(numbers)))

    def close(self):
      logged.append('closed')

  requirement = trackers.TRACKERS['tensorboard'][1:]
  monkeypatch.setitem(trackers.TRACKERS, 'tensorboard', (Fake, *requirement))
  config = config_file(tmp_path, steps=2, monitoring=dict(trackers=('tensorboard',)))
  assert train(config, tmp_path / 'run', tmp_path / 'a') == 0
  assert [entry[0] for entry in logged] == [0, 0, 1, 2, 'c']
  assert 'val-core/all/acc/pairs' in logged[0][1] & logged[3][1]
  for _, names in logged[1:3]:
    assert {f'reward_model/{x}' for x in ('loss', 'accuracy', 'margin', 'mean_reward')} < names


def test_changed_pairs_and_other_modes_are_refused(tmp_path, capsys):
  config = config_file(tmp_path, steps=1, evaluation=dict(prompts=0))
  assert train(config, tmp_path / 'run', tmp_path / 'a') == 0
  write_pairs(tmp_path / 'pairs.jsonl', 50)
  assert train(config, tmp_path / 'run', tmp_path / 'b', '--config.steps=2') == 2
  assert 'changed since step 1 (config.data)' in capsys.readouterr().err
  export = [f'--workdir={tmp_path}/run', f'--to={tmp_path}/b', '--mode=export']
  assert main.main(export) == 2
  assert 'give the old config and the --mode that trained it' in capsys.readouterr().err
