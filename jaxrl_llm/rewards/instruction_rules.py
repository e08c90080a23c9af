"""Verifiable instructions, arXiv:2311.07911 (IFEval): (text, arguments) → whether the text follows the instruction.

A row may name every public function. Names and arguments are those of the paper's data without the prefix before the
colon (`keywords:existence` is `existence`). Docstrings state the details that the paper's data leave open. Language
detection is left out; start_checker is additional.
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
_QUOTED = '" \t\n'  # characters around a quoted completion
_FENCED = re.compile(r'```[ \t]*[\w+-]*[^\n`]*\n(.*?)^[ \t]*```', re.M | re.S)
_SENTENCE_END = re.compile(r'[.!?]+["\')\]*]*(?=\s|$)')


def number_words(text: str, *, num_words: int, relation: str = 'at least') -> bool:
  """The number of words, runs of letters and digits, so that don't counts two."""
  return _holds(len(re.findall(r'\w+', text)), relation, num_words)


def number_sentences(text: str, *, num_sentences: int, relation: str = 'at least') -> bool:
  """The number of sentences, which end with . ! or ? before white space, except after initials and abbreviations."""
  ends = [m.end() for m in _SENTENCE_END.finditer(text)]
  ends = [end for end in ends if not _ABBREVIATION.search(text, max(end - 8, 0), end)]
  rest = text[ends[-1] :] if ends else text
  return _holds(len(ends) + bool(re.search(r'\w', rest)), relation, num_sentences)


def number_paragraphs(text: str, *, num_paragraphs: int) -> bool:
  """Exactly num_paragraphs nonempty paragraphs with *** between them."""
  parts = [part.strip() for part in re.split(r'(?<!\*)\*\*\*(?!\*)', text.strip())]
  return len(parts) == num_paragraphs and all(parts)


def nth_paragraph_first_word(
  text: str, *, num_paragraphs: int, nth_paragraph: int, first_word: str
) -> bool:
  """Exactly num_paragraphs paragraphs with an empty line between them; the nth, from 1, begins with the word."""
  parts = [part for part in re.split(r'\n\s*\n', text.strip()) if part.strip()]
  if len(parts) != num_paragraphs or not 1 <= nth_paragraph <= num_paragraphs:
    return False
  return bool(re.match(rf'[\W_]*{re.escape(first_word)}(?!\w)', parts[nth_paragraph - 1], re.I))


def existence(text: str, *, keywords: tuple[str, ...]) -> bool:
  """Contains every keyword as a whole word in any case."""
  return all(_count(text, word) for word in keywords)


def forbidden_words(text: str, *, forbidden_words: tuple[str, ...]) -> bool:
  """Contains none of the words as a whole word in any case."""
  return not any(_count(text, word) for word in forbidden_words)


def frequency(text: str, *, keyword: str, frequency: int, relation: str = 'at least') -> bool:
  """The number of occurrences of a keyword as a whole word in any case."""
  return _holds(_count(text, keyword), relation, frequency)


def letter_frequency(
  text: str, *, letter: str, let_frequency: int, let_relation: str = 'at least'
) -> bool:
  """The number of occurrences of a letter in any case."""
  return _holds(text.casefold().count(letter.casefold()), let_relation, let_frequency)


def capital_word_frequency(
  text: str, *, capital_frequency: int, capital_relation: str = 'at least'
) -> bool:
  """The number of words in capitals, including I and A."""
  capitals = sum(word.isupper() for word in re.findall(r'\w+', text))
  return _holds(capitals, capital_relation, capital_frequency)


def english_capital(text: str) -> bool:
  """No lower-case and at least one upper-case letter."""
  return text.isupper()


def english_lowercase(text: str) -> bool:
  """No upper-case and at least one lower-case letter."""
  return text.islower()


def no_comma(text: str) -> bool:
  """Contains no comma."""
  return ',' not in text


def start_checker(text: str, *, start_phrase: str) -> bool:
  """Begins with the phrase in any case."""
  return text.strip(_QUOTED).casefold().startswith(start_phrase.strip().casefold())


def end_checker(text: str, *, end_phrase: str) -> bool:
  """Ends with the phrase in any case, followed at most by quotation marks."""
  return text.strip(_QUOTED).casefold().endswith(end_phrase.strip().casefold())


def quotation(text: str) -> bool:
  """The whole text is in double quotation marks."""
  text = text.strip()
  return len(text) > 2 and text[0] == text[-1] == '"'


def repeat_prompt(text: str, *, prompt_to_repeat: str) -> bool:
  """Begins with the prompt, word by word in any case, and continues."""
  text, prompt = (' '.join(part.casefold().split()) for part in (text, prompt_to_repeat))
  return text.startswith(prompt) and len(text) > len(prompt)


def two_responses(text: str) -> bool:
  """Two different answers with ****** between them."""
  parts = [part.strip() for part in re.split(r'\*{6}', text.strip())]
  return len(parts) == 2 and all(parts) and parts[0] != parts[1]


def number_placeholders(text: str, *, num_placeholders: int) -> bool:
  """At least num_placeholders placeholders in brackets, such as [address]."""
  return len(re.findall(r'\[[^\[\]\n]+\]', text)) >= num_placeholders


def postscript(text: str, *, postscript_marker: str = 'P.S.') -> bool:
  """A nonempty line that begins with the marker, such as P.S. or P.P.S, in any case and spacing."""
  marker = r'\s?'.join(map(re.escape, postscript_marker.replace(' ', '').rstrip('.')))
  return bool(re.search(rf'^\W*{marker}\.?[^\w\n]*\w', text, re.I | re.M))


def title(text: str) -> bool:
  """A title in double angular brackets, such as <<poem of joy>>."""
  return bool(re.search(r'<<[^<>\n]*\w[^<>\n]*>>', text))


def number_bullet_lists(text: str, *, num_bullets: int) -> bool:
  """Exactly num_bullets lines that begin with * or - and continue after white space."""
  return len(re.findall(r'^[ \t]*[*-][ \t]+\S', text, re.M)) == num_bullets


def number_highlighted_sections(text: str, *, num_highlights: int) -> bool:
  """At least num_highlights parts that are *highlighted* or **highlighted** within a line."""
  parts = re.findall(r'(?<!\*)(\*{1,2})(?![\s*])[^*\n]*[^\s*]\1(?!\*)', text)
  return len(parts) >= num_highlights


def multiple_sections(text: str, *, section_spliter: str, num_sections: int) -> bool:
  """At least num_sections lines that begin with the splitter and a number, such as Section 1."""
  lines = re.findall(rf'^\W*{re.escape(section_spliter)}\s+\d+', text, re.I | re.M)
  return len(lines) >= num_sections


def json_format(text: str) -> bool:
  """The whole text is JSON, in one fenced block or without one."""
  text = text.strip()
  block = _FENCED.fullmatch(text)
  try:
    json.loads(block[1] if block else text)
  except (ValueError, RecursionError):
    return False
  return True


def constrained_response(text: str) -> bool:
  """Contains exactly one of: My answer is yes. My answer is no. My answer is maybe."""
  return len(set(re.findall(r'My answer is (yes|no|maybe)\.', text))) == 1


def _count(text: str, word: str) -> int:
  return len(re.findall(rf'(?<!\w){re.escape(word.strip())}(?!\w)', text, re.I))


def _holds(count: int, relation: str, bound: int) -> bool:
  if relation not in _RELATIONS:
    raise ValueError(f'relation={relation!r} must be one of: {", ".join(_RELATIONS)}')
  return _RELATIONS[relation](count, bound)
