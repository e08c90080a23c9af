"""Corrected prompts: which groups wait for a correction, what is asked, the spliced row, and a restored provider."""

from __future__ import annotations

import jax
import numpy as np
import pytest
from runner.test_rewritten_prompts import G, L, Letters, texts

from jaxrl_llm import data
from jaxrl_llm.checkpointing import checkpoint
from jaxrl_llm.config.schema import DataConfig, RewardsConfig
from jaxrl_llm.curriculum import hint_rules
from jaxrl_llm.replay import group_batches
from jaxrl_llm.runner import corrected_prompts
from jaxrl_llm.runner.hints import Measures
from jaxrl_llm.types import STOPPED, Batch, Rollout, Row, UserError

T, K = 12, 2
SETTINGS = DataConfig(source='digits', template='{question}', chat=False)
PAIRS = ('2+2', 'four'), ('3+3', 'six'), ('1+1', '')
LAST = '2+2\n\nThe answer begins with: four'


def make(tokenizer=None, prompt_tokens=L, **settings):
  rows = [Row(str(i), q, (), a, 'made', {}) for i, (q, a) in enumerate(PAIRS)]
  tokenizer = tokenizer or Letters()
  table = data.make_table(rows, SETTINGS, prompt_tokens, tokenizer)
  rule = hint_rules.corrected(**settings)
  return corrected_prompts.CorrectedPrompts(rule, table, tokenizer, SETTINGS, 0, 1)


def graded(prompts, said, right, sound, seed=0):
  """(a graded batch whose rows say these texts, ended by a 0; its rewards); '' is a row that was dropped."""
  random, B = np.random.default_rng(seed), len(said)
  tokens_BxT = np.zeros((B, T), np.int32)
  for row, text in zip(tokens_BxT, said, strict=True):
    row[: len(text)] = Letters().encode(text)
  length_B = np.array([min(len(text) + 1, T) if text else 0 for text in said], np.int32)
  real = np.arange(T)[None] < length_B[:, None]
  rollout = Rollout(
    tokens_BxT,
    np.where(real, -random.random((B, T)), 0).astype(np.float32),
    length_B,
    np.full(B, STOPPED, np.int8),
    np.where(real, seed, 0).astype(np.int32),
    np.ones(B, np.float32),
    np.zeros((B, 0), np.float32),
    top_id_BxTxK=np.where(real[..., None], random.integers(0, 99, (B, T, K)), 0).astype(np.int32),
  )
  right_B = np.array(right, np.float32)
  part_BxK = np.stack([right_B, np.array(sound, np.float32)], 1)
  return Batch(prompts, rollout, right_B, right_B, success_B=right_B), part_BxK


def visited(own, index, said, right, sound, seed=0):
  """The sampled batch of a step, the one to learn from, and the metrics."""
  batch, part_BxK = graded(own.add_hints(own.table.prompts(index), 0), said, right, sound, seed)
  return batch, *own.update(batch, np.ones(len(index), bool), Measures(part_BxK))


WRONG = (['fixe', 'no', 'foul', 'fourth'], [0] * G, [0.25, 0, 0.5, 0.4])


def test_an_all_wrong_group_waits_and_its_last_error_is_where_the_next_step_begins():
  own = make()
  said = [*WRONG[0], 'six', 'x', 'x', 'x']
  batch, learned, metrics = visited(
    own, [0, 1], said, [0] * G + [1, 0, 0, 0], WRONG[2] + [1, 0.5, 0.5, 0.5]
  )
  assert learned.rollout.length_B.tolist() == [0] * G + [4, 2, 2, 2]
  assert metrics['hint/held'] == 1 and metrics['hint/corrected'] == 0
  assert own.waiting.tolist() == [0] and own.due(3).tolist() == [0] and not len(own.due(3))
  got = own.add_hints(own.table.prompts([1, 0]), 1)
  assert texts(got) == ['3+3', LAST + 'fo'] and got.hint_P.tolist() == [0, 1]
  assert [Letters().decode(x.tolist()) for x in own.prefixes(got)] == ['', 'fo']
  # Of the batch nothing is changed but the number of its rows.
  back = learned._replace(rollout=learned.rollout._replace(length_B=batch.rollout.length_B))
  jax.tree.map(np.testing.assert_array_equal, back, batch)


def test_the_corrected_row_takes_the_place_of_the_wrong_one_with_all_that_was_recorded():
  own = make()
  first, _, _ = visited(own, [0], *WRONG, seed=1)
  own.due(1)
  second, learned, metrics = visited(
    own, [0], ['x', 'ur', 'ur!', 'y'], [0, 1, 1, 0], [0.5] * G, seed=2
  )
  assert metrics['hint/corrected'] == 1 and metrics['hint/groups'] == 1
  assert texts(learned.prompts) == ['2+2'] and learned.prompts.hint_P.tolist() == [0]
  # As if the policy had sampled 'four' in place of 'foul': 'fo' in the first step and 'ur' in the second.
  want = jax.tree.map(np.array, first)
  want.rollout.tokens_BxT[2] = Letters().encode('four') + [0] * (T - 4)
  for name in ('logp_BxT', 'version_BxT', 'top_id_BxTxK'):
    x, rest = getattr(want.rollout, name)[2], getattr(second.rollout, name)[1]
    x[2:5], x[5:] = rest[:3], 0
  want.rollout.length_B[2] = 5
  for x in (want.reward_B, want.correct_B, want.success_B):
    x[2] = 1
  jax.tree.map(np.testing.assert_array_equal, learned, want)
  assert not own.held and not len(own.waiting)
  assert texts(own.add_hints(own.table.prompts([0]), 3)) == ['2+2']


def test_a_row_cut_in_two_and_spliced_is_the_row():
  own = make()
  batch, _ = graded(own.add_hints(own.table.prompts([0]), 0), *WRONG)
  row = group_batches.rows(batch, np.array([3]))

  def later(name, x):
    moves = isinstance(x, np.ndarray) and 'xT' in name.rsplit('_', 1)[-1]
    return np.concatenate([x[:, 2:], np.zeros_like(x[:, :2])], 1) if moves else x

  fields = {name: later(name, x) for name, x in row.rollout._asdict().items()}
  rest = row._replace(rollout=Rollout(**fields)._replace(length_B=row.rollout.length_B - 2))
  jax.tree.map(np.testing.assert_array_equal, group_batches.spliced(row, 2, rest), row)


@pytest.mark.parametrize(
  'said',
  [
    ['x', 'y', 'z', ''],  # none is right
    ['x' * 10, 'y', 'z', 'w'],  # the right one is too long behind the prefix
  ],
)
def test_without_a_right_continuation_that_fits_the_group_is_learned_as_it_was_sampled(said):
  own = make()
  first, _, _ = visited(own, [0], *WRONG, seed=1)
  own.due(1)
  _, learned, metrics = visited(
    own, [0], said, [float(len(said[0]) == 10), 0, 0, 0], [0.5] * G, seed=2
  )
  assert metrics['hint/corrected'] == 0
  jax.tree.map(np.testing.assert_array_equal, learned, first)
  assert not own.held


@pytest.mark.parametrize(
  'why, changes, right, sound',
  [
    ('one is right', {}, [0, 0, 0, 1], [0.5] * G),
    ('no error was found', {}, [0] * G, [1] * G),
    ('the first step is wrong', {}, [0] * G, [0] * G),
    ('too early an error', dict(least=0.5), [0] * G, [0.5] * G),
    ('no room in the prompt', dict(prompt_tokens=len(LAST)), [0] * G, [0.5] * G),
    ('less than a token is sound', {}, [0] * G, [0.1] * G),
  ],
)
def test_other_groups_are_learned_at_once(why, changes, right, sound):
  own = make(**changes)
  batch, learned, metrics = visited(own, [0], WRONG[0], right, sound)
  assert metrics['hint/held'] == 0 and not own.held and not len(own.waiting), why
  jax.tree.map(np.testing.assert_array_equal, learned, batch)


def test_an_unfinished_or_empty_group_does_not_wait():
  own = make()
  prompts, said = own.add_hints(own.table.prompts([0, 1]), 0), WRONG[0] + [''] * G
  batch, part_BxK = graded(prompts, said, [0] * 2 * G, [0.5] * 2 * G)
  own.update(batch, np.array([False, True]), Measures(part_BxK))
  assert not own.held


def test_the_data_corrects_only_where_it_is_asked_and_has_a_demonstration():
  for own, index, asked in ((make(guided=False), 0, '2+2'), (make(), 2, '1+1')):
    visited(own, [index], *WRONG)
    assert texts(own.add_hints(own.table.prompts([index]), 1)) == [asked + 'fo']


def test_a_token_that_the_first_wrong_step_begins_in_is_sampled_anew():
  class Pairs(Letters):
    """A token is two characters: 256·first + second."""

    def decode(self, ids):
      return ''.join(chr(i // 256) + chr(i % 256) for i in ids if i)

  own = make(tokenizer=Pairs())
  token_ids = np.array([ord(a) * 256 + ord(b) for a, b in ('fo', 'ur', 'te')] + [0], np.int32)
  assert [own._tokens_before(token_ids, n / 6) for n in range(7)] == [0, 0, 1, 1, 2, 2, 3]


def test_a_second_visit_in_flight_is_neither_held_nor_learned_as_a_correction():
  own = make()
  visited(own, [0], *WRONG, seed=1)
  requests = [own.add_hints(own.table.prompts([0]), 1) for _ in range(2)]
  plain = requests[0]._replace(hint_P=np.zeros(1, np.float32))
  lengths = []
  for prompts in (plain, *requests):
    batch, part_BxK = graded(prompts, ['ur', 'x', 'x', 'x'], [0] * G, [0.5] * G)
    learned, _ = own.update(batch, np.ones(1, bool), Measures(part_BxK))
    lengths.append(learned.rollout.length_B.tolist())
  # The plain group as it is, the held one at its first correction, and no rows at the other.
  assert lengths == [[3, 2, 2, 2], [5, 3, 5, 7], [0] * G]


def test_a_restored_provider_splices_the_same_row_bit_for_bit(tmp_path):
  own, other, device = make(), make(), {'x': np.zeros(1)}
  visited(own, [0, 1], WRONG[0] * 2, [0] * 2 * G, WRONG[2] * 2, seed=1)
  own.due(1)
  checkpoint.save(str(tmp_path), 1, device, dict(aid=own.state_dict()), keep=1)
  other.load_state_dict(checkpoint.restore(str(tmp_path), 1, device)[1]['aid'])
  assert own.waiting.tolist() == other.waiting.tolist() == [1]
  said, right = ['x', 'ur', 'ur!', 'y', 's', 't', 'u', 'xx'], [0, 1, 1, 0, 0, 0, 0, 1]
  results = [visited(x, [0, 1], said, right, [0.5] * 2 * G, seed=2) for x in (own, other)]
  jax.tree.map(np.testing.assert_array_equal, *(x[1] for x in results))
  assert results[0][2] == results[1][2] and results[0][2]['hint/corrected'] == 2


JUDGE = dict(fn='steps', base_url='http://localhost:1/v1', model='m')


@pytest.mark.parametrize(
  'parts, name, message',
  [
    ((), 'steps', "part='steps' is no name in config.rewards.parts: none; add dict"),
    ((dict(fn='number', name='n'),), 'exact', "part='exact' is no name in .*: n; add dict"),
    ((JUDGE,), 'steps', r"parts\[0\].combine='mean' names no place .* set it to 'before_error'"),
  ],
)
def test_a_reward_that_finds_no_error_is_refused(parts, name, message):
  with pytest.raises(UserError, match=message):
    corrected_prompts.part_column(RewardsConfig(parts=parts), name)


def test_the_column_is_that_of_the_named_reward():
  parts = (dict(fn='number', name='n'), JUDGE | dict(combine='before_error'))
  assert corrected_prompts.part_column(RewardsConfig(parts=parts), 'steps') == 2


@pytest.mark.parametrize(
  'settings, message',
  [
    (dict(part=''), "hint.part='' must be the name of one of config.rewards.parts"),
    (dict(least=1.5), 'hint.least=1.5 must be a number from 0 to 1'),
    (dict(guided=2), 'hint.guided=2 must be True or False'),
  ],
)
def test_bad_settings_are_one_sentence(settings, message):
  with pytest.raises(UserError, match=message):
    hint_rules.corrected(**settings)
