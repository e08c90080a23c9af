"""Every selection rule depends on seed, step and evidence alone, in any process, and resumes bit for bit."""

from __future__ import annotations

import hashlib
import io
import pathlib
import subprocess
import sys

import numpy as np
import pytest

if __name__ == '__main__':
  sys.path[:0] = [str(folder) for folder in pathlib.Path(__file__).parents[1:3]]

from curricula import RULES, G, make, observe, same  # noqa: E402

from jaxrl_llm.types import UserError  # noqa: E402

SIZE, SLOTS, STEPS = 60, 6, 14
KIND, RATE = np.arange(SIZE) % 3, np.linspace(0, 1, SIZE)


def lengths(index):
  return (index % 5 * 10.0).astype(np.float32)


def answer(index, step, shuffled=None):
  """The evidence of a step, in its order or another."""
  random = np.random.default_rng((99, step))
  k = random.binomial(G, RATE)[index]
  cut = random.integers(0, 3, SIZE)[index]
  order = np.arange(len(index)) if shuffled is None else shuffled.permutation(len(index))
  index, k, cut = index[order], k[order], cut[order]
  return (index, k, np.full(len(index), G), np.minimum(cut, G - k), 10 * k + index)


def propose(curriculum, step):
  return curriculum.propose(step, SLOTS, lengths).index


def run(curriculum, steps, staleness=0, shuffled=None):
  """Each step is proposed from the evidence of those up to step − 1 − staleness. Returns the choices."""
  chosen, waiting = [], []
  for step in steps:
    asked = curriculum.propose(step, SLOTS, lengths)
    curriculum.accept(asked)
    chosen.append(asked.index)
    waiting.append(answer(chosen[-1], step, shuffled))
    if len(waiting) > staleness:
      curriculum.observe(*waiting.pop(0))
  return np.array(chosen)


def digest(rule: str, shuffled) -> str:
  curriculum = make(SIZE, kind=KIND, **RULES[rule])
  digest = hashlib.sha256(run(curriculum, range(STEPS), shuffled=shuffled).tobytes())
  for name, array in sorted(curriculum.state_dict().items()):
    digest.update(name.encode() + array.tobytes())
  return digest.hexdigest()


@pytest.mark.parametrize('rule', RULES)
def test_a_proposal_changes_nothing_and_is_distinct(rule):
  busy, fresh = (make(SIZE, kind=KIND, **RULES[rule]) for _ in range(2))
  run(busy, range(3)), run(fresh, range(3))
  before = busy.state_dict()
  for step in (9, 4, 7, 7):
    propose(busy, step)
  assert same(busy.state_dict(), before)
  for step in (3, 4):
    ours = propose(busy, step)
    assert np.array_equal(ours, propose(fresh, step)) and len(set(ours.tolist())) == SLOTS
    assert 0 <= ours.min() and ours.max() < SIZE


@pytest.mark.parametrize('rule', RULES)
def test_a_rule_uses_its_evidence_and_its_seed(rule):
  one, other, seeded = (make(SIZE, kind=KIND, seed=s, **RULES[rule]) for s in (0, 0, 1))
  steps = range(40)  # some rules want to see a prompt twice
  chosen = run(one, steps)
  assert not np.array_equal(chosen, run(seeded, steps))
  assert not np.array_equal(chosen, [propose(other, step) for step in steps])


@pytest.mark.parametrize('rule', RULES)
def test_a_saved_rule_continues_to_the_bit(rule):
  whole = make(SIZE, kind=KIND, **RULES[rule])
  run(whole, range(7))
  file = io.BytesIO()
  np.savez(file, **whole.state_dict())
  file.seek(0)
  resumed = make(SIZE, kind=KIND, **RULES[rule])
  with np.load(file, allow_pickle=False) as saved:
    resumed.load_state_dict(dict(saved))
  assert same(whole.state_dict(), resumed.state_dict()) and whole.metrics() == resumed.metrics()
  assert np.array_equal(run(whole, range(7, STEPS)), run(resumed, range(7, STEPS)))
  assert same(whole.state_dict(), resumed.state_dict())


@pytest.mark.parametrize('staleness', [0, 1, 4])
@pytest.mark.parametrize('rule', RULES)
def test_stale_evidence_gives_what_that_evidence_gives(rule, staleness):
  """What is on its way is not seen: each choice is that of a curriculum which heard the earlier steps alone."""
  chosen = run(make(SIZE, kind=KIND, **RULES[rule]), range(9), staleness)
  other = make(SIZE, kind=KIND, **RULES[rule])
  for step in range(9):
    if step > staleness:
      past = step - 1 - staleness
      other.observe(*answer(chosen[past], past))
    asked = other.propose(step, SLOTS, lengths)
    other.accept(asked)
    assert np.array_equal(asked.index, chosen[step])


@pytest.mark.filterwarnings('error')
@pytest.mark.parametrize('rule', RULES)
def test_a_step_of_which_nothing_came_back_is_heard(rule):
  """By a fresh curriculum, and by one that knows something: no visit is counted, and choices go on."""
  curriculum, nothing = make(SIZE, kind=KIND, **RULES[rule]), np.zeros(0, int)
  for step in range(6):
    asked = curriculum.propose(step, SLOTS, lengths)
    curriculum.accept(asked)
    evidence = answer(asked.index, step)
    before = curriculum.state_dict()['visits'].sum()
    curriculum.observe(*(evidence if step % 3 == 1 else [nothing] * 5))
    curriculum.metrics()
    assert curriculum.state_dict()['visits'].sum() == before + SLOTS * (step % 3 == 1)


def test_processes_that_hear_the_rows_in_another_order_agree_to_the_bit():
  ours = [digest(rule, None) for rule in RULES]
  process = subprocess.run([sys.executable, __file__], capture_output=True, text=True, check=True)
  assert process.stdout.split() == ours


def test_states_of_other_stages_are_told():
  with pytest.raises(UserError, match=r'other stages \(.*share_capability'):
    make(8, **RULES['mopps']).load_state_dict(make(8, **RULES['bots']).state_dict())


@pytest.mark.parametrize('rule', RULES)
def test_state_is_small(rule):
  """At most a hundred bytes a prompt, so that a million prompts are 100 MB."""
  sizes = []
  for size in (1000, 2000):
    curriculum = make(size, kind=np.arange(size) % 3, **RULES[rule])
    observe(curriculum, [1, 2], [3, 4])
    sizes.append(sum(array.nbytes for array in curriculum.state_dict().values()))
  assert sizes[1] - sizes[0] <= 1000 * 100


@pytest.mark.parametrize('parts', [RULES[name] for name in sorted(RULES)], ids=sorted(RULES))
def test_every_set_of_stages_learns_of_real_masses_what_it_learns_of_whole_ones(parts):
  """A mass of 3 is a count of 3, to the bit; halves lie between; a resumed run goes on exactly, dtypes and all."""
  random = np.random.default_rng(1)
  whole, real, half = (make(40, kind=np.arange(40) % 3, **parts) for _ in range(3))
  for step in range(6):
    proposal = whole.propose(step, 8)
    index = proposal.index
    for one in (whole, real, half):
      one.accept(proposal)
    k = random.integers(0, G, 8)
    cut = np.minimum(random.integers(0, 3, 8), G - k)
    observe(whole, index, k, truncated=cut)
    observe(real, index, k.astype(float), truncated=cut, mixed=(k > 0) & (k < G))
    observe(half, index, k + 0.5, truncated=cut, truncated_k=np.minimum(0.5, cut))
    assert np.array_equal(real.propose(step + 1, 8).index, whole.propose(step + 1, 8).index)
  assert same(whole.state_dict(), real.state_dict()) and whole.metrics() == real.metrics()
  assert all(np.isfinite(x) for x in half.metrics().values())
  # An ability that is a rate of everyone's moves up with the masses.
  assert (
    half.metrics()['curriculum/observed_success'] >= whole.metrics()['curriculum/observed_success']
  )
  again = make(40, kind=np.arange(40) % 3, **parts)
  again.load_state_dict(half.state_dict())
  assert same(again.state_dict(), half.state_dict())
  assert {k: v.dtype for k, v in half.state_dict().items()} == {
    k: v.dtype for k, v in whole.state_dict().items()
  }


if __name__ == '__main__':
  print(*(digest(rule, np.random.default_rng(5)) for rule in RULES))
