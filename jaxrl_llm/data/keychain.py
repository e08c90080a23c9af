"""A question hidden behind a chain of keys in a long text: each key leads to the next, the last one to the question.

Other chains lead to other questions about the same facts, so that searching for a question or a fact is not enough. The
task is KeyChain of LoongRL (arXiv:2510.19363), with generated facts and text in place of documents and multi-hop
questions.
"""

from __future__ import annotations

import random
import uuid

SETTINGS = dict(
  min_links=2, max_links=4, distractors=2, facts=8, min_hops=1, max_hops=2, filler=20, key_letters=0
)
MINIMUM = dict(
  min_links=1, max_links=1, distractors=0, facts=2, min_hops=1, max_hops=1, filler=0, key_letters=0
)
_NAMES = (
  *('Ada', 'Bela', 'Carl', 'Dora', 'Emil', 'Fina', 'Gero', 'Hana', 'Ivo', 'Jana', 'Kuno', 'Lea'),
  *('Mika', 'Nora', 'Otto', 'Pia', 'Quim', 'Rosa', 'Sami', 'Tara', 'Ugo', 'Vera', 'Wim', 'Xenia'),
)
_THINGS = ('stamps', 'coins', 'shells', 'cards', 'books', 'marbles', 'plants', 'clocks')
_SUBJECTS = ('The ferry', 'A gray cat', 'The old mill', 'The north wind', 'A letter', 'The baker')
_VERBS = ('waited by', 'went past', 'was seen near', 'came back to', 'kept away from')
_PLACES = ('the harbor', 'the square', 'the long bridge', 'the school', 'the orchard', 'the tower')
_COUNTS = range(2, 100)  # each at most once in a text
Facts = dict[tuple[str, str], int]  # (who, what) → how many


def draw(
  rng: random.Random,
  *,
  min_links: int,
  max_links: int,
  distractors: int,
  facts: int,
  min_hops: int,
  max_hops: int,
  filler: int,
  key_letters: int,
) -> dict:
  """Draws a text with `facts` facts, `filler` sentences, and 1 + distractors chains of keys, arXiv:2510.19363.

  The question at the end of the chain is about the sum of `hops` facts, and its answer is a number; the questions of
  the other chains have other answers. Keys are UUIDs, or for tiny models `key_letters` hexadecimal digits. `extra` has
  links,
  hops, pairs (keys in the text) and words (of the question). Raises ValueError for more facts or hops than exist.
  """
  if not max_hops <= facts <= len(_COUNTS):
    raise ValueError(f'facts={facts} must be from max_hops={max_hops} to {len(_COUNTS)}')
  links, hops = rng.randint(min_links, max_links), rng.randint(min_hops, max_hops)
  counts = _facts(rng, facts)
  question_at_end, answer = _question(rng, counts, hops)
  ends = [
    question_at_end,
    *(_other_question(rng, counts, answer, max_hops) for _ in range(distractors)),
  ]
  keys = _keys(rng, len(ends) * links, key_letters)
  # The chain of end e is keys[e·links : (e + 1)·links].
  pairs = [
    (key, ends[i // links] if (i + 1) % links == 0 else keys[i + 1]) for i, key in enumerate(keys)
  ]
  sentences = [f'{who} has {count} {what}.' for (who, what), count in counts.items()]
  sentences += [_sentence(rng) for _ in range(filler)]
  sentences += [f'{{"{key}": "{value}"}}.' for key, value in pairs]
  rng.shuffle(sentences)
  question = (
    f'Read this text.\n{" ".join(sentences)}\nStart with the key {keys[0]}. Every key leads to the next one, the last '
    'to a question about the text. Answer that question with the number alone.'
  )
  words = len(question.split())
  extra = dict(links=links, hops=hops, pairs=len(pairs), words=words)
  return dict(question=question, answer=str(answer), extra=extra)


def _facts(rng: random.Random, count: int) -> Facts:
  owners = rng.sample([(who, what) for who in _NAMES for what in _THINGS], count)
  return dict(zip(owners, rng.sample(_COUNTS, count), strict=True))


def _question(rng: random.Random, counts: Facts, hops: int) -> tuple[str, int]:
  """A question about `hops` facts, and its answer."""
  chosen = rng.sample(list(counts), hops)
  answer = sum(counts[owner] for owner in chosen)
  if hops == 1:
    (who, what) = chosen[0]
    return f'How many {what} does {who} have?', answer
  terms = ' and '.join(f'the {what} of {who}' for who, what in chosen)
  return f'How many are {terms} together?', answer


def _other_question(rng: random.Random, counts: Facts, answer: int, max_hops: int) -> str:
  """A question with another answer."""
  question, other = _question(rng, counts, rng.randint(1, max_hops))
  if other == answer:
    question, _ = _question(rng, {k: n for k, n in counts.items() if n != answer}, 1)
  return question


def _keys(rng: random.Random, count: int, letters: int) -> list[str]:
  if letters and count > 16**letters // 2:
    raise ValueError(f'key_letters={letters} are too few for {count} keys')
  keys: dict[str, None] = {}
  while len(keys) < count:
    key = f'{rng.getrandbits(4 * letters):0{letters}x}' if letters else ''
    keys[key or str(uuid.UUID(int=rng.getrandbits(128), version=4))] = None
  return list(keys)


def _sentence(rng: random.Random) -> str:
  return f'{rng.choice(_SUBJECTS)} {rng.choice(_VERBS)} {rng.choice(_PLACES)}.'
