"""Hidden states of prompts: those of transformers, whatever the padding, stored before the curriculum observes them."""

from __future__ import annotations

import dataclasses
import types

import jax
import numpy as np
import pytest

from jaxrl_llm import data
from jaxrl_llm.config import loading
from jaxrl_llm.curriculum import answer_wording
from jaxrl_llm.curriculum.prompt_features import PromptFeatures
from jaxrl_llm.distributed import sharding
from jaxrl_llm.learner import compile as programs
from jaxrl_llm.learner import state as train_state
from jaxrl_llm.models import decoder, huggingface, shared_prompt_forward
from jaxrl_llm.runner import host_step, prompt_encoding, setup
from jaxrl_llm.runner.context import PendingStep
from jaxrl_llm.types import STOPPED, TRUNCATED, Batch, Prompts, Rollout, Row, UserError

P, L = 4, 12


def prompts_of(rows, width=L):
  tokens_PxL = np.zeros((len(rows), width), np.int32)
  for tokens_L, row in zip(tokens_PxL, rows, strict=True):
    tokens_L[: len(row)] = row
  length_P = np.array([len(row) for row in rows], np.int32)
  index_P = np.arange(len(rows), dtype=np.int32)
  return Prompts(tokens_PxL, length_P, index_P, index_P * 0, np.zeros(len(rows), np.float32))


def test_features_are_those_of_the_last_hidden_state_of_transformers(tmp_path):
  """After the final norm, from left-padded rows there and right-padded ones here."""
  torch, transformers = pytest.importorskip('torch'), pytest.importorskip('transformers')
  sizes = dict(vocab_size=97, hidden_size=48, intermediate_size=80, num_hidden_layers=3)
  heads = dict(num_attention_heads=4, num_key_value_heads=2, head_dim=16)
  torch.manual_seed(0)
  theirs = transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**sizes, **heads)).eval()
  with torch.no_grad():
    theirs.model.norm.weight.uniform_(0.5, 2.0)  # 1 would hide a state before the norm
  theirs.save_pretrained(tmp_path)
  config, _ = huggingface.read_config(str(tmp_path))
  params = huggingface.load_params(str(tmp_path), config)
  random = np.random.default_rng(0)
  rows = [random.integers(1, 97, n) for n in (3, 12, 7, 1, 9, 12, 5, 2)]
  right = prompts_of(rows)
  _, hidden = shared_prompt_forward.prefill(config, params, right, 'float32')
  left = torch.tensor(np.stack([np.roll(t, L - n) for t, n in zip(*right[:2], strict=True)]))
  mask = torch.arange(L)[None] >= L - torch.tensor(right.length_P)[:, None]
  with torch.no_grad():
    out = theirs(input_ids=left.long(), attention_mask=mask.long(), output_hidden_states=True)
  expected = out.hidden_states[-1][:, -1].numpy()
  np.testing.assert_allclose(hidden, expected, atol=2e-5)
  before_norm = out.hidden_states[-2][:, -1].numpy()
  assert np.abs(expected - before_norm).max() > 0.1
  features = PromptFeatures(len(rows), 3, 1, 0)
  features.fit(expected)
  features.put(right.index_P, np.asarray(hidden))
  projected = (expected - features.state['center']) @ features.state['basis']
  np.testing.assert_allclose(features.state['values'], projected, atol=5e-3)  # float16


def small(**changes):
  c = loading.load('dapo')
  c.curriculum.prior_pooling = loading.load('hidden_state').curriculum.prior_pooling
  c.model = 'scratch'
  c.scratch.update(width=16, layers=1, heads=2, kv_heads=1, mlp=32, max_tokens=64, experts=0)
  c.prompts, c.rollouts, c.prompt_tokens, c.completion_tokens = P, 4, L, 8
  c.learner.microbatch_tokens = c.sft.steps = c.evaluation.prompts = 0
  c.data.source, c.data.path, c.data.size, c.data.chat, c.data.template = (
    'digits',
    '',
    40,
    False,
    '{question}',
  )
  c.data.tasks = (dict(name='copy', min_length=1, max_length=3),)
  c.curriculum.prior_pooling.update(dimensions=3, multiple=2)
  c.update(changes)
  return c


def built(config):
  return setup.build_context(config, sharding.make_mesh(config.mesh, jax.devices()[:1]))


def groups(*texts):
  """Right completions of one prompt each, whose answer is a digit."""
  digit = lambda text: next(filter(str.isdigit, text))  # noqa: E731
  return [answer_wording.Group('', digit(text), [text]) for text in texts]


def started(config):
  """A context, its initial state and its program, of which every test makes curricula of its own."""
  context = built(config)
  state = train_state.init_state(context.spec, context.models.policy.params)
  return context, state, prompt_encoding.compile_call(context)


@pytest.fixture(scope='module')
def run():
  return started(small())


def test_a_step_encodes_its_own_prompts_and_others_each_as_if_alone(run):
  """The states of prompts do not depend on the other rows of their call, nor on its columns."""
  context, state, encode = run
  own = np.array([7, 3, 11, 0], np.int32)
  encoded = sharding.fetch(encode(0, state, own))
  assert len(encoded.index_M) == P + 40 and set(encoded.index_M) == set(range(40))
  hidden_MxD = np.concatenate(encoded.hidden)
  assert hidden_MxD.dtype == np.float32
  dtype, table = context.spec.model.dtype, context.tables.train
  for row in (0, 2, 17, 43):
    alone = table.prompts(encoded.index_M[row : row + 1])
    _, expected = shared_prompt_forward.prefill(
      context.spec.model.config, state.params, alone, dtype
    )
    np.testing.assert_allclose(hidden_MxD[row], np.float32(expected[0]), atol=3e-2)  # bfloat16


def test_a_call_has_few_columns_more_than_its_longest_row():
  """Rows go together by their tokens with their answers, in at most four programs."""
  sizes = np.array([9, 60, 30, 12, 40, 7, 25, 3])
  answers = np.zeros((8, 16), np.int32), np.array([1, 4, 16, 3, 2, 1, 0, 6], np.int32)
  table = data.PromptTable((None,) * 8, tuple(np.ones(n, np.int32) for n in sizes), 64, 0, '')
  calls = []

  def program(prompts, answers):
    calls.append((prompts.tokens_PxL.shape[1], prompts.index_P.tolist(), answers))
    return np.array([prompts.index_P, prompts.length_P]).T

  encoded = prompt_encoding.encoded(program, table, np.arange(8, dtype=np.int32), answers, 2)
  assert [width for width, *_ in calls] == [20, 20, 60, 80]
  assert encoded.index_M.tolist() == [5, 7, 0, 3, 6, 4, 2, 1]
  np.testing.assert_array_equal(
    np.concatenate(encoded.hidden), np.stack([encoded.index_M, sizes[encoded.index_M]], 1)
  )
  for _, index, (answer_PxT, length_P) in calls:
    assert answer_PxT.shape == (2, 16) and length_P.tolist() == answers[1][index].tolist()
  encoded = prompt_encoding.encoded(
    program, table, np.arange(8), (answers[0][:, :0], 0 * answers[1]), 4
  )
  assert calls[-2:][0][::2] == (16, None) and calls[-1][::2] == (64, None)


@pytest.mark.parametrize('longest', [1, 4, 10, 150, 176])
def test_widths_are_few_and_enough(longest):
  width = [prompt_encoding.column_count(n, longest) for n in range(1, longest + 1)]
  assert len(set(width)) <= 4 and width[-1] == longest
  assert all(0 <= w - n < -(-longest // 4) for n, w in enumerate(width, 1))


def test_prompts_that_the_last_step_encoded_are_not_encoded_again(run, monkeypatch):
  context, state, encode = run
  features = PromptFeatures(40, 3, 2, 0)
  monkeypatch.setattr(context.selection.curriculum, 'features', features)
  encode = prompt_encoding.compile_call(context)
  assert encode is not None
  own = np.arange(P)
  first = sharding.fetch(encode(0, state, own))
  prompt_encoding.store(features, first, own)
  chosen = np.array([20, 9, 31, 14])
  second = sharding.fetch(encode(1, state, chosen))
  assert len(second.index_M) == 2 * P
  prompt_encoding.store(features, second, chosen)
  assert set(features.state['newest']) == set(second.index_M) - set(chosen)
  stale = np.setdiff1d(np.arange(40), second.index_M)[:1]
  third = sharding.fetch(encode(2, state, np.append(features.state['newest'][:3], stale)))
  assert len(third.index_M) == 3 * P and stale[0] in third.index_M


@pytest.fixture(scope='module')
def odds():
  """The same where the prior reads answers."""
  config = small()
  config.curriculum.prior_pooling['answer_tokens'] = 6
  context, *others = started(config)
  context.selection.curriculum.features.observe(groups('7', '8'))
  return context, *others


def test_as_long_as_words_are_unknown_no_answer_has_odds(odds, monkeypatch):
  context, state, encode = odds
  features = context.selection.curriculum.features
  monkeypatch.setitem(features.state, 'wordings', answer_wording.none())
  hidden_MxD = np.concatenate(sharding.fetch(encode(0, state, np.arange(P))).hidden)
  assert np.isnan(hidden_MxD[:, -1]).all() and np.isfinite(hidden_MxD[:, :-1]).all()


def test_nothing_is_encoded_for_odds_alone_before_words_are_known():
  config = small()
  config.curriculum.prior_pooling.update(dimensions=0, answer_tokens=6, multiple=2, considered=3)
  context, state, encode = started(config)
  curriculum = context.selection.curriculum
  assert encode(0, state, np.arange(P)) is None
  curriculum.features.observe(groups('7', '8'))
  encoded = sharding.fetch(encode(1, state, np.arange(P)))
  assert set(encoded.index_M) == {*range(P), *curriculum.to_encode(1, P)}
  assert len(encoded.index_M) == 3 * P
  prompt_encoding.store(curriculum.features, encoded, np.arange(P))
  values = curriculum.features.state['values'][encoded.index_M]
  assert values.shape == (3 * P, 1) and np.isfinite(values).all()


def test_the_odds_are_those_of_the_answer_and_its_end(odds):
  """log π(y | x) − log(1 − π(y | x)), against the model run on each prompt and answer alone."""
  context, state, encode = odds
  encoded = sharding.fetch(encode(0, state, np.arange(P)))
  odds_M = np.concatenate(encoded.hidden)[:, -1]
  table, tokenizer = context.tables.train, context.models.policy.tokenizer
  dtype, config = context.spec.model.dtype, context.spec.model.config
  for row in (0, 1, 2, 9, 17, 43):
    index = encoded.index_M[row]
    answer = [*tokenizer.encode(table.rows[index].answer), list(tokenizer.end_ids)[0]]
    tokens = np.concatenate([table.tokens[index], answer]).astype(np.int32)[None]
    logits = decoder.forward(config, state.params, tokens, np.ones_like(tokens), dtype)[0]
    logp = jax.nn.log_softmax(np.asarray(logits, np.float32))[-len(answer) - 1 : -1]
    p = np.exp(sum(float(logp[i, token]) for i, token in enumerate(answer)))
    assert odds_M[row] == pytest.approx(np.log(p / (1 - p)), abs=0.05)  # bfloat16


def test_the_probabilities_of_all_answers_of_one_token_sum_to_one(odds):
  context, state, _ = odds
  encode, table = programs.compile_encode(context.spec), context.tables.train
  size = -(-context.spec.model.config.vocab // P) * P
  total = 0.0
  for first in range(0, size, P):
    answer_PxT = np.arange(first, first + P, dtype=np.int32)[:, None]
    real_P = answer_PxT[:, 0] < context.spec.model.config.vocab
    answers = (np.where(real_P[:, None], answer_PxT, 0), np.ones(P, np.int32))
    odds_P = np.asarray(encode(state._replace(carried=()), table.prompts([3] * P), answers))[:, -1]
    total += (real_P / (1 + np.exp(-odds_P))).sum()
  assert total == pytest.approx(1, abs=1e-4)


def test_the_states_beside_odds_are_those_of_the_prompts(odds, run):
  encoded = [sharding.fetch(encode(0, state, np.arange(P))) for _, state, encode in (odds, run)]
  # A prompt that occurs twice has the same state.
  hidden = [np.concatenate(x.hidden)[np.unique(x.index_M, return_index=True)[1]] for x in encoded]
  np.testing.assert_allclose(hidden[0][:, :-1], hidden[1], atol=3e-2)  # bfloat16


def test_the_odds_do_not_depend_on_columns_behind_the_answer(odds):
  context, state, _ = odds
  encode, table = programs.compile_encode(context.spec), context.tables.train
  answers = data.known_answers(table.rows[:P], context.models.policy.tokenizer, 6)
  ends = int((answers[1] + [len(table.tokens[i]) for i in range(P)]).max())
  found = [
    np.asarray(encode(state._replace(carried=()), table.prompts(range(P), width=width), answers))
    for width in (ends, ends + 5)
  ]
  np.testing.assert_allclose(*found, atol=3e-2)  # bfloat16


@pytest.fixture(scope='module')
def alike():
  """The policy, table and encoding programs, with and without a prefix, where all prompts begin alike."""
  config = small(prompt_tokens=24)
  config.data.template = 'Please repeat {question}'
  context = built(config)
  spec, state = context.spec, train_state.init_state(context.spec, context.models.policy.params)
  assert spec.layout.prefix_tokens >= 14
  whole = spec._replace(layout=spec.layout._replace(prefix_tokens=0))
  encode = [programs.compile_encode(x) for x in (spec, whole)]
  return context, state._replace(carried=()), encode


@pytest.mark.parametrize('has_answers', [False, True])
def test_a_common_beginning_of_prompts_is_encoded_once(alike, has_answers):
  """With the same states and odds, in fewer operations."""
  context, state, encode = alike
  table, answers = context.tables.train, None
  if has_answers:
    answers = data.known_answers(table.rows[:P], context.models.policy.tokenizer, 6)
  prompts = table.prompts(range(P))
  assert len(set(prompts.length_P)) > 1
  found, expected = (np.asarray(fn(state, prompts, answers)) for fn in encode)
  np.testing.assert_allclose(found, expected, atol=3e-2)  # bfloat16
  lowered = [fn.lower(state, prompts, answers) for fn in encode]
  flops = [x.compile().cost_analysis()['flops'] for x in lowered]
  assert flops[0] < 0.7 * flops[1]


def test_an_empty_answer_has_no_odds(odds):
  context, state, _ = odds
  encode, table = programs.compile_encode(context.spec), context.tables.train
  answer_PxT, length_P = data.known_answers(table.rows[:P], context.models.policy.tokenizer, 6)
  length_P[2] = 0
  found = np.asarray(
    encode(state._replace(carried=()), table.prompts(range(P)), (answer_PxT, length_P))
  )
  assert np.isnan(found[:, -1]).tolist() == [False, False, True, False]
  assert np.isfinite(found[:, :-1]).all()


def test_answers_are_cut_and_end():
  tokenizer = built(small()).models.policy.tokenizer
  rows = [Row('1', 'q', (), text, 's', {}) for text in ('123', '', '1234567')]
  tokens_PxT, length_P = data.known_answers(rows, tokenizer, 5)
  end = list(tokenizer.end_ids)[0]
  assert tokens_PxT[0].tolist() == [*tokenizer.encode('123'), end, 0] and length_P.tolist() == [
    4,
    0,
    5,
  ]
  assert tokens_PxT[2].tolist() == [*tokenizer.encode('12345')]


def test_answers_are_read_in_the_words_of_the_policy(odds, monkeypatch):
  """Each prompt's own question and answer in their words, and an end, cut at the six tokens that the prior reads."""
  context, state, _ = odds
  seen, features = [], context.selection.curriculum.features
  whole = programs.compile_encode(context.spec)

  def record(state, prompts, answers):
    seen.append((prompts, *answers))
    return whole(state, prompts, answers)

  monkeypatch.setattr(programs, 'compile_encode', lambda spec: record)
  monkeypatch.setitem(features.state, 'wordings', answer_wording.none())
  asked = [answer_wording.Group(x, '7', [f'{x[2:]}=7.']) for x in ('2, 3+4', '2, 1+6')]
  features.observe(asked)
  prompt_encoding.compile_call(context)(0, state, np.arange(P))
  tokenizer, rows = context.models.policy.tokenizer, context.tables.train.rows
  assert len(seen) > 1
  for prompts, tokens_PxT, length_P in seen:
    for index, tokens_T, length in zip(prompts.index_P, tokens_PxT, length_P, strict=True):
      text = f'{rows[index].question[2:]}={rows[index].answer}.'
      words = [*tokenizer.encode(text), list(tokenizer.end_ids)[0]]
      assert tokens_T.shape == (6,) and tokens_T[:length].tolist() == words[:6]


def test_answers_are_no_longer_than_completions(monkeypatch):
  """The prior would read 20 tokens; a completion has 8."""
  config, widths = small(), []
  config.curriculum.prior_pooling['answer_tokens'] = 20
  record = lambda state, prompts, answers: widths.append(answers[0].shape[1])  # noqa: E731
  monkeypatch.setattr(programs, 'compile_encode', lambda spec: record)
  context = built(config)
  state = types.SimpleNamespace(_replace=lambda carried: None)
  prompt_encoding.compile_call(context)(0, state, np.arange(P))
  assert set(widths) == {8}


def observed(context, questions=('q',) * 2, text='so 42', **changes):
  """Features after a step of groups of four right completions that end."""
  features, B = PromptFeatures(8, 2, 1, 0, answer_tokens=6), 4 * len(questions)
  rows = [Row(str(b), questions[b // 4], (), '42', 's', {}) for b in range(B)]
  values = dict(
    correct_B=np.ones(B, np.float32),
    reason_B=np.full(B, STOPPED, np.int8),
    length_B=np.full(B, 6, np.int32),
    hint_P=np.zeros(len(questions), np.int32),
  )
  values |= {name: np.asarray(value, values[name].dtype) for name, value in changes.items()}
  prompts = context.tables.train.prompts(range(len(questions)))
  prompts = prompts._replace(hint_P=values.pop('hint_P'))
  correct_B = values.pop('correct_B')
  empty = Rollout(*[None] * len(Rollout._fields))
  batch = Batch(prompts, empty._replace(**values), correct_B, correct_B)
  scores = types.SimpleNamespace(texts=[text.format(row.question[1:]) for row in rows])
  graded = types.SimpleNamespace(batch=batch, rows=rows, scores=scores)
  prompt_encoding.observe_wording(features, graded)
  return features


@pytest.mark.parametrize(
  'change',
  [
    {},
    dict(correct_B=[0] * 8),
    dict(reason_B=[TRUNCATED] * 8),
    dict(length_B=[7] * 8),
    dict(length_B=[0] * 8),
    dict(hint_P=[1, 1]),
  ],
  ids=['all', 'wrong', 'cut', 'longer than is read', 'absent', 'hinted'],
)
def test_words_are_those_of_whole_right_completions(odds, change):
  assert observed(odds[0], **change).phrase('q', '1') == ('' if change else 'so 1')


def test_words_repeat_the_question_of_their_row(odds):
  features = observed(odds[0], ['?cat', '?horse'], 'so {} 42')
  assert features.phrase('?cow', '7') == 'so cow 7'


def test_data_without_answers_is_refused():
  config = small()
  config.curriculum.prior_pooling['answer_tokens'] = 6
  context = built(config)
  rows = tuple(row._replace(answer='') for row in context.tables.train.rows)
  tables = context.tables._replace(train=dataclasses.replace(context.tables.train, rows=rows))
  with pytest.raises(UserError, match='answer_tokens=6 reads the answers of the data, and no row'):
    prompt_encoding.compile_call(context._replace(tables=tables))


def test_a_pending_step_carries_its_states_through_a_checkpoint(run):
  context, state, encode = run
  encoded = encode(0, state, np.arange(P, dtype=np.int32))
  prompts = context.tables.train.prompts(np.arange(P))
  rollout = Rollout(*[None] * len(Rollout._fields))
  pending = PendingStep(3, prompts, rollout, {}, encoded=encoded)
  back = host_step.unpacked(host_step.packed(pending)).encoded
  np.testing.assert_array_equal(back.index_M, encoded.index_M)
  np.testing.assert_array_equal(np.concatenate(back.hidden), np.concatenate(encoded.hidden))
  assert 'encoded' not in host_step.packed(pending._replace(encoded=None))


def test_the_first_states_fix_the_projection_and_later_ones_keep_it(run):
  context, state, encode = run
  features = PromptFeatures(40, 3, 2, 0)
  prompt_encoding.store(features, sharding.fetch(encode(0, state, np.arange(P))), np.arange(P))
  assert features.ready and features.state['known'].all()
  basis = features.state['basis'].copy()
  own = np.arange(P) + P
  prompt_encoding.store(features, sharding.fetch(encode(1, state, own)), own)
  np.testing.assert_array_equal(features.state['basis'], basis)
  newest = features.state['newest']
  assert len(newest) and not set(newest) & set(range(P, 2 * P))


def test_other_priors_compile_no_program():
  config = small()
  config.curriculum.prior_pooling = loading.load('dapo').curriculum.prior_pooling
  assert prompt_encoding.compile_call(built(config)) is None
