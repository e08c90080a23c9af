"""Requests that go on from one another, by token ids; and what a group's rows have in common."""

from __future__ import annotations

import math

import numpy as np
import pytest
import scripted_model

from jaxrl_llm.runner import request_chains
from jaxrl_llm.serving import api
from jaxrl_llm.serving.episodes import Episode, Episodes, Recorded, Sampler
from jaxrl_llm.types import JsonValue

SAMPLER = Sampler((0, 1, 2), 0.7, 3)


def recorded(prompt, *sampled):
  return Recorded(tuple(prompt), sampled, tuple(-0.5 - i for i in sampled), 'stop', '')


def test_observations_lie_between_the_turns():
  chain = request_chains.final_chain([recorded([1, 2], 3, 4), recorded([1, 2, 3, 4, 9, 8], 5)])
  assert chain is not None
  assert chain.token_ids.tolist() == [1, 2, 3, 4, 9, 8, 5]
  assert chain.number_S.tolist() == [-1, -1, 0, 0, -1, -1, 1]
  np.testing.assert_allclose(chain.logp_S, [0, 0, -3.5, -4.5, 0, 0, -5.5])
  assert (chain.first, chain.requests) == (2, 2)


def test_a_request_aside_is_on_another_chain():
  """The third request goes on from the first; the second, a summary, does not lead to it."""
  first, aside = recorded([1, 2], 3), recorded([7], 7)
  chain = request_chains.final_chain([first, aside, recorded([1, 2, 3, 4], 5)])
  assert chain is not None and chain.requests == 2
  assert chain.token_ids.tolist() == [1, 2, 3, 4, 5]


def test_one_of_several_choices_goes_on():
  """Two completions of one prompt; the next request has the first of them."""
  chain = request_chains.final_chain([recorded([1], 3), recorded([1], 4), recorded([1, 3, 6], 5)])
  assert chain is not None and chain.token_ids.tolist() == [1, 3, 6, 5]


def test_other_ids_for_the_same_text_are_no_extension():
  chain = request_chains.final_chain([recorded([1], 3, 4), recorded([1, 34, 6], 5)])
  assert chain is not None and chain.requests == 1
  assert request_chains.final_chain([]) is None


@pytest.mark.parametrize(('limit', 'want'), [(9, 2), (1, 1)])
def test_the_prompt_of_a_group_is_what_its_rows_share(limit, want):
  chains = [request_chains.final_chain([recorded([1, 2, end], 3)]) for end in (5, 6)]
  assert request_chains.shared_tokens([x for x in chains if x is not None], limit) == want


def test_a_sampled_token_is_in_no_prompt():
  """Equal completions of equal prompts end the shared part all the same; so does the shorter prompt."""
  equal = [request_chains.final_chain([recorded([1, 2], 3)])] * 2
  assert request_chains.shared_tokens([x for x in equal if x is not None], 9) == 2
  longer = request_chains.final_chain([recorded([1, 2, 3, 4], 5)])
  both = [x for x in (*equal, longer) if x is not None]
  assert request_chains.shared_tokens(both, 9) == 2


@pytest.fixture(scope='module')
def tokenizer(tmp_path_factory):
  return scripted_model.write(tmp_path_factory.mktemp('model') / 'm').tokenizer


@pytest.mark.parametrize('end', ['', scripted_model.END])
def test_sampled_ids_stay_where_the_text_goes_on(tokenizer, end):
  """'one tw' is one token when it is encoded, and here it was sampled in six; the template may leave the end out."""
  spelled = tuple(tokenizer.encode(c)[0] for c in 'one tw')
  assert tuple(tokenizer.encode('one tw')) != spelled
  prompt = tuple(tokenizer.encode('STORY'))
  episode, ids = Episode(SAMPLER), (*prompt, *spelled, tokenizer.end_ids[0])
  episode.completions.append(
    Recorded(prompt, ids[len(prompt) :], (), 'stop', f'STORYone tw{scripted_model.END}')
  )
  got = tuple(episode.encode(f'STORYone tw{end}, and?', tokenizer))
  assert got == (*ids, *tokenizer.encode(', and?'))
  assert list(episode.encode('STORYone', tokenizer)) == tokenizer.encode('STORYone')


def request(**fields):
  body = b'{"model": "m", "prompt": "x", "temperature": 0.1, "seed": 5}'
  return api.parse(body, api.TEXT)._replace(**fields)


def test_noise_is_of_episode_and_request():
  """A client's own seed would make the rollouts of a group alike."""
  episode, again = Episode(SAMPLER), Episode(SAMPLER)
  samplings = [episode.begin(request()).sampling for _ in range(3)]
  assert len({x.seed for x in samplings}) == 3
  assert samplings == [again.begin(request()).sampling for _ in range(3)]
  assert samplings[0].temperature == 0.7 and episode.overridden == 3
  other = Episode(SAMPLER._replace(noise=(0, 1, 3)))
  assert other.begin(request()).sampling.seed != samplings[0].seed
  with pytest.raises(api.ApiError, match='may make 3 requests'):
    episode.begin(request())


def test_a_key_is_of_one_open_episode():
  episodes = Episodes()
  (key, episode), (other, _) = episodes.open(SAMPLER), episodes.open(SAMPLER)
  assert episodes.find(key) is episode is not episodes.find(other)
  episodes.close()
  with pytest.raises(api.ApiError, match='no open episode'):
    episodes.find(key)


@pytest.mark.parametrize('value', [math.nan, math.inf, True, 'much', [1]])
def test_a_reward_is_a_finite_number(value: JsonValue):
  episode = Episode(SAMPLER)
  episode.set_reward(2)
  with pytest.raises(api.ApiError, match='finite number'):
    episode.set_reward(value)
  assert episode.reward == 2.0
  episode.set_reward(None)
  assert episode.reward is None
