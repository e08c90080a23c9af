"""Instructions that a reply can be seen to follow: text, arguments → whether it does.

Every public function here is a rule that a row may name; names and arguments are those of the paper's data, less the
group in front of the colon (`keywords:existence` is `existence`). What the paper's data leave to its code is settled
here in words; language detection is left out. Source of all but start_checker: arXiv:2311.07911 (IFEval).
"""

from __future__ import annotations

import json
import operator
import re

_RELATIONS = {
  'at least': operator.ge,
  'less than': operator.lt,
  'at most': operator.le,
  'more than': operator.gt,
  'exactly': operator.eq,
}
_ABBREVIATION = re.compile(r'\b(?:Mr|Mrs|Ms|Dr|Prof|St|vs|etc|e\.g|i\.e|No|[A-Z])\.$')
_QUOTED = '" \t\n'  # what may stand around an answer that is in quotation marks
_FENCED = re.compile(r'```[ \t]*[\w+-]*[^\n`]*\n(.*?)^[ \t]*```', re.M | re.S)
_SENTENCE_END = re.compile(r'[.!?]+["\')\]*]*(?=\s|$)')


def number_words(text: str, *, num_words: int, relation: str = 'at least') -> bool:
  """So many words: runs of letters and digits, so that don't counts two."""
  return _holds(len(re.findall(r'\w+', text)), relation, num_words)


def number_sentences(text: str, *, num_sentences: int, relation: str = 'at least') -> bool:
  """So many sentences, which end with . ! or ? before space, not behind an initial or a usual abbreviation."""
  ends = [m.end() for m in _SENTENCE_END.finditer(text)]
  ends = [end for end in ends if not _ABBREVIATION.search(text, max(end - 8, 0), end)]
  rest = text[ends[-1] :] if ends else text
  return _holds(len(ends) + bool(re.search(r'\w', rest)), relation, num_sentences)


def number_paragraphs(text: str, *, num_paragraphs: int) -> bool:
  """Exactly so many paragraphs, with *** between them; none is empty."""
  parts = [part.strip() for part in re.split(r'(?<!\*)\*\*\*(?!\*)', text.strip())]
  return len(parts) == num_paragraphs and all(parts)


def nth_paragraph_first_word(
  text: str, *, num_paragraphs: int, nth_paragraph: int, first_word: str
) -> bool:
  """Exactly so many paragraphs, with an empty line between them; the nth, from 1, begins with the word."""
  parts = [part for part in re.split(r'\n\s*\n', text.strip()) if part.strip()]
  if len(parts) != num_paragraphs or not 1 <= nth_paragraph <= num_paragraphs:
    return False
  return bool(re.match(rf'[\W_]*{re.escape(first_word)}(?!\w)', parts[nth_paragraph - 1], re.I))


def existence(text: str, *, keywords: tuple[str, ...]) -> bool:
  """Every keyword, as a whole word in any case."""
  return all(_count(text, word) for word in keywords)


def forbidden_words(text: str, *, forbidden_words: tuple[str, ...]) -> bool:
  """None of the words, as a whole word in any case."""
  return not any(_count(text, word) for word in forbidden_words)


def frequency(text: str, *, keyword: str, frequency: int, relation: str = 'at least') -> bool:
  """A keyword so often, as a whole word in any case."""
  return _holds(_count(text, keyword), relation, frequency)


def letter_frequency(
  text: str, *, letter: str, let_frequency: int, let_relation: str = 'at least'
) -> bool:
  """A letter so often, in any case."""
  return _holds(text.casefold().count(letter.casefold()), let_relation, let_frequency)


def capital_word_frequency(
  text: str, *, capital_frequency: int, capital_relation: str = 'at least'
) -> bool:
  """So many words all in capitals; I and A are such words."""
  capitals = sum(word.isupper() for word in re.findall(r'\w+', text))
  return _holds(capitals, capital_relation, capital_frequency)


def english_capital(text: str) -> bool:
  """No small letters, and some capitals."""
  return text.isupper()


def english_lowercase(text: str) -> bool:
  """No capitals, and some small letters."""
  return text.islower()


def no_comma(text: str) -> bool:
  """No comma."""
  return ',' not in text


def start_checker(text: str, *, start_phrase: str) -> bool:
  """Begins with the phrase, in any case. Source: none."""
  return text.strip(_QUOTED).casefold().startswith(start_phrase.strip().casefold())


def end_checker(text: str, *, end_phrase: str) -> bool:
  """Ends with the phrase, in any case, and nothing behind it but quotation marks."""
  return text.strip(_QUOTED).casefold().endswith(end_phrase.strip().casefold())


def quotation(text: str) -> bool:
  """All of it in double quotation marks."""
  text = text.strip()
  return len(text) > 2 and text[0] == text[-1] == '"'


def repeat_prompt(text: str, *, prompt_to_repeat: str) -> bool:
  """Begins with the prompt, word by word in any case, and goes on."""
  said, asked = (' '.join(told.casefold().split()) for told in (text, prompt_to_repeat))
  return said.startswith(asked) and len(said) > len(asked)


def two_responses(text: str) -> bool:
  """Two different answers with ****** between them."""
  parts = [part.strip() for part in re.split(r'\*{6}', text.strip())]
  return len(parts) == 2 and all(parts) and parts[0] != parts[1]


def number_placeholders(text: str, *, num_placeholders: int) -> bool:
  """At least so many placeholders in brackets, such as [address]."""
  return len(re.findall(r'\[[^\[\]\n]+\]', text)) >= num_placeholders


def postscript(text: str, *, postscript_marker: str = 'P.S.') -> bool:
  """A line that begins with the marker, such as P.S. or P.P.S, in any case and spacing, and says something."""
  marker = r'\s?'.join(map(re.escape, postscript_marker.replace(' ', '').rstrip('.')))
  return bool(re.search(rf'^\W*{marker}\.?[^\w\n]*\w', text, re.I | re.M))


def title(text: str) -> bool:
  """A title in double angular brackets, such as <<poem of joy>>."""
  return bool(re.search(r'<<[^<>\n]*\w[^<>\n]*>>', text))


def number_bullet_lists(text: str, *, num_bullets: int) -> bool:
  """Exactly so many lines that begin with * or -, a space and something."""
  return len(re.findall(r'^[ \t]*[*-][ \t]+\S', text, re.M)) == num_bullets


def number_highlighted_sections(text: str, *, num_highlights: int) -> bool:
  """At least so many parts *highlighted* or **highlighted**, each within its line."""
  found = re.findall(r'(?<!\*)(\*{1,2})(?![\s*])[^*\n]*[^\s*]\1(?!\*)', text)
  return len(found) >= num_highlights


def multiple_sections(text: str, *, section_spliter: str, num_sections: int) -> bool:
  """At least so many lines that begin with the splitter and a number, such as Section 1."""
  found = re.findall(rf'^\W*{re.escape(section_spliter)}\s+\d+', text, re.I | re.M)
  return len(found) >= num_sections


def json_format(text: str) -> bool:
  """All of it is JSON, in one fenced block or in none."""
  text = text.strip()
  block = _FENCED.fullmatch(text)
  try:
    json.loads(block[1] if block else text)
  except (ValueError, RecursionError):
    return False
  return True


def constrained_response(text: str) -> bool:
  """Says one, and only one, of: My answer is yes. My answer is no. My answer is maybe."""
  return len(set(re.findall(r'My answer is (yes|no|maybe)\.', text))) == 1


def _count(text: str, word: str) -> int:
  return len(re.findall(rf'(?<!\w){re.escape(word.strip())}(?!\w)', text, re.I))


def _holds(count: int, relation: str, bound: int) -> bool:
  if relation not in _RELATIONS:
    raise ValueError(f'relation={relation!r} must be one of: {", ".join(_RELATIONS)}')
  return _RELATIONS[relation](count, bound)
