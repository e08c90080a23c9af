"""The forms in which a text states the choice of an option: 'the answer is B', 'B is correct', 'which leaves B'.

`cleaned` removes the markup; every pattern of `STATEMENTS` matches one letter, and patterns read a bounded window.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

# Wrappers of LaTeX, Markdown, HTML and quotes. A letter in bold, code, braces or quotes equals one in brackets.
_WRAPPED = re.compile(
  r'\\(?:text|textbf|textit|textrm|mathrm|mathbf|bf|rm|boldsymbol)\s?\{([^{}]*)\}'
)
_MARKED = re.compile(
  r'(?<![\w*_`])(\*{1,3}|_{1,3}|`)[(\[]?([A-Za-z])[).:\]]*\1(?![\w*`])|(?<!\w)["\'“‘{«【<]([A-Za-z])[.]?["\'”’}»】>](?!\w)'
)
_EMPHASIS = re.compile(r'(?<!\w)_{1,3}([A-Za-z][^_\n]{0,60}?)_{1,3}(?!\w)')
_KEY = re.compile(r'["\'](\w[\w ]{0,20})["\'](?=\s?:)')
_HTML = re.compile(r'</?(?:b|strong|i|em|u|mark|span|p|code|h[1-6])>|~~[^~\n]{1,80}~~', re.I)
_BREAK = re.compile(r'</?think>|<br ?/?>', re.I)
_LEADER = re.compile(
  r'^[ \t]*+(?>(?:(?:#{1,6}|>|[-*+•])[ \t]+)+)|^[ \t]*[0-9]{1,2}[.)][ \t]+(?=[(\[]?[A-Z][)\].]?[ \t]*$)',
  re.M,
)
_QUOTE = re.compile(r"""[\"“‘'](?=[(\[]?[A-Z][).:\]]\s)""")
_NESTED = re.compile(r'(?<!\w)[\[(]([\[(][A-Za-z][\])])[\])]')
_FORMULA = re.compile(r'(?<!\\)\\[()\[\]]')
_DROPPED = {ord(mark): None for mark in '*`$🎉👉➡️'}

NOUN = (
  r'(?:(?:the|my|our|your)\s)?(?:(?:correct|right|best|final)\s)?(?:(?:(?:answer\s)?(?:option'
  r'|choice|letter)|answer)\b\s?:?\s?)?'
)
_ADVERB = (
  (
    r'(?:(?:(?!possibly|incorrectly|wrongly|falsely|supposedly|allegedly)\w+ly|for sure'
    r'|of course|in fact|indeed|hence|thus|just|still|then|now|in conclusion|after all'
    r'|only'
    r'|again|most likely|without (?:a |any )?doubt|no doubt|beyond (?:any |a )?doubt'
    r'|nothing (?:but|other than)|none other than|no other than|✅|✓|✔|→|:)\b,?\s?){0,3}'
  )
  .replace(' ', r'\s')
  .replace(r'\b,?', r',?')
)
_LETTER = r'(?P<open>[(\[]?)\s?(?P<letter>[A-Za-z])(?![\w\'’+^=°])'
_BE = r'(?:be|have\sbeen)'
_IS = (
  rf'(?:is|was|are|were|(?:must|should|would|will)\s(?:\w+\s)?(?:only\s)?{_BE}'
  rf'|(?:can|could)\sonly\s{_BE}|(?:has|have|had)\sto\s{_BE}'
  r'|(?:turns|turned|comes|came|works|worked)\sout\s(?:to\sbe|as)|(?:appears|seems'
  r'|looks|happens)\sto\sbe|can\sbe(?=\s(?:none|nothing|only))|becomes|remains|is\s(?:given|provided)\sby|is\sfound\sin'
  r'|ends?\sup\s(?:being|as)|would\shave\sto\sbe)'
)
REASON = r'because\b|since\b|as\b|for\b|due\b|given\b'
_ARROW = r'(?:→|⇒|➡|=>|->|∴)'
_END = (
  r'(?=[)\]]?[.!]?(?:\s*$|\s*\n|\s*<|[.!;]\s|[.!]?\s[✅✓✔(]|[,;]?\s(?:not\b|because|since)|:\s))'
)
_GOES = (
  rf'(?=[)\].,;:!?]|\s*$|\s*\n|\s(?:{REASON}|and\b|or\b|\(|-|–|—|&|if\b|✅|as\b|over\b'
  rf'|rather\b|instead\b|to\s[A-Z]\b))'
)
_LED_BEFORE = re.compile(
  r'(?:^|[.!?:;,(\n>]\s?|\b(?i:(?P<noun>option|choice|answer|letter|statement)'
  r'|so|thus|hence|therefore|that|think|believe|is|only|just|clearly|then|conclude'
  r'|and|or|nor|because|but|say|guess|while|although|as|how|since)\s)\s?$'
)
_JUDGED = (
  rf'(?i:(?:{_IS}|(?:seems|looks|appears|sounds)(?:\sto\sbe)?)\s(?:\w+ly\s|indeed\s'
  rf'|therefore\s|also\s|still\s)?(?:(?:the|my|our|a|an)\s)?(?:\w+ly\s)?'
  r'(?:only\s|most\s|single\s|final\s|remaining\s)?(?:(?:(?:valid|sensible|reasonable'
  r'|possible|consistent|logical)\s)?(?:option|choice|one|answer|statement|match'
  r'|fit|winner)\b(?!\sto\s(?:a\sdifferent|another|some\sother))|what\swe\s(?:need'
  r'|want)\b|(?:correct|right|best|better|true|appropriate|left|valid|accurate'
  r'|it(?=[.!]|\s*$))\b)|makes?\s(?:the\s)?(?:most\s)?sense|(?:must\s)?(?:fits?\sbest'
  r'|best\sfits|hold)\b)'
)
LEADS = 3  # in this form and later ones the letter leads
EXCEPTED = 7  # 'all but B are wrong', whose negation asserts the letter
# Statements of a choice. The last one counts.
STATEMENTS = (
  # 'the answer is B', 'Answer: B', 'Answer - B', 'my choice is B', 'the option that fits best is B'
  re.compile(
    rf'(?i:\b(?:answers?|ans|option|choice|letter|selection|pick|match|one|statement'
    rf'|conclusion|verdict|solution|result|final|correct|correction|choose|possibility|remains|left|guess|vote|response|output|key)\b\.?(?:\s\([^()\n]{{0,40}}\))?'
    rf'(?:,?\s(?:to|for|that|which|here|then|in|from|left|remaining|standing|available'
    rf'|among|matching|consistent|compatible|satisfying|I|we|out)\b[^.\n]{{0,60}}?)?(?:\s(?:choice|option|letter))?(?:,?\s(?:therefore'
    rf'|thus|hence|then|here|now|\w+ly))?,?\s?'
    rf'(?::|=|\||{_ARROW}|\s[-–—]\s|\b{_IS}\b),?\s?:?\s*{_ADVERB}{NOUN}){_LETTER}'
  ),
  # 'it must be B', 'I choose B', 'that leaves B'
  re.compile(
    rf"(?i:\b(?:(?:it|this|that|which|i\.e\.|namely)(?:['’]?s|,?\s{_IS})?|answer['’]s|(?:I|we"
    rf"|you|one)(?:['’]d|['’]ll|['’]m|['’]re|\sam|\sare|\swould|\swill|\sshould|\smust)?\s(?:\w+ly\s)?(?:choose"
    rf'|answer|guess|prefer|favou?r|mark|take|chose|choosing|pick|picked|picking'
    rf'|select|selected|selecting'
    rf'|go\swith|go\sfor|going\swith|going\sfor|believe\sthe\sanswer\sto\sbe|opt\sfor'
    rf"|vote|vote\sfor|say|think)|(?:going|left)\swith|let(?:['’]s|\sus)\s(?:choose"
    rf'|pick|select|go\swith)|(?:^|(?<=[.!?:,\n]\s)|(?<=\n)|(?<=so\s))(?:choose|pick'
    rf'|select|mark|go\swith)'
    rf'|(?:leaves?|leaving)(?:\sus)?(?:\sonly)?(?:\swith)?(?:\sonly)?|(?:match(?:es)?'
    rf'|corresponds?\sto|agrees?\swith|points?\sto|arrived?\sat|brings?\sus\sto|settled?\son|leads?(?:\sus)?\sto|gives?(?:\sus)?'
    rf'|(?:I|we)\sget(?=\s(?:answer|option|choice|\())|equals|equal\sto)|not\s(?:option\s)?[(\[]?[A-Z][)\]]?,?\s(?:but'
    rf'|so))\s'
    rf'{_ADVERB}{NOUN}){_LETTER}{_GOES}'
  ),
  # 'So B.', 'by elimination, B', 'No, B', 'Not A, not C: B', 'it cannot be anything but B'
  re.compile(
    rf'(?i:(?:^|(?<=[\s(\-–—]))(?:so|yes|right|ok(?:ay)?|definitely|surely|clearly'
    rf'|obviously|certainly|just|simply|undoubtedly|probably|(?:most\s)?likely|overall|finally|in\s(?:short|summary|conclusion|brief)|to\ssum\sup|sorry|I\smean|(?<!anything\s)(?<!all\s)but'
    rf'|thus|hence|therefore|ergo|{_ARROW}|by\s(?:the\s)?(?:process\sof\s)?elimination'
    rf'|i\.e\.|no|nope|wait|actually|correction|rather|rest|after\s[^,.\n]{{1,40}}'
    rf"|not\s(?:option\s)?[(\[]?[A-Z][)\]]?(?=:)|(?:can\s?not|can['’]t|could\snot"
    rf"|couldn['’]t)\sbe\s(?:any\w*\s)?(?:\w+\s)?(?:but|other\sthan|except))(?:[,:]\s?"
    rf'|\s)'
    rf'(?:wait,?\s|no,?\s|it\sis\s|it[’\']s\s)?{_ADVERB}{NOUN}){_LETTER}{_END}'
  ),
  # 'only B fits', 'B remains', 'B it is'
  re.compile(
    rf'(?i:\bonly\s(?:the\s)?(?:option\s|choice\s|answer\s|statement\s)?){_LETTER}[)\]]?\s(?:[a-z]+s\b'
    rf'|can\b|could\b|is\sleft|is\spossible)'
  ),
  re.compile(
    rf'(?:^|(?<=[.!?:;,\n]\s)|(?<=\n)|(?<=so\s)|(?i:\b(?:option|choice)\s)){_LETTER}[)\]]?\s(?:(?:alone\s)?remains\b(?!\s[a-z])'
    rf'|it\sis\b(?=[.!]|\s*$)|is\sleft\b|wins\b|(?:fits|works|holds)[;,.]\s(?:and\s|while\s|but\s)?(?:the|all)\s(?:\w+\s)?others?\b|alone\s(?:is|fits|works)\b)',
    re.M,
  ),
  # 'C: correct', 'C ✅', 'making C the answer'
  re.compile(
    rf'(?:(?:^\W{{0,6}}|(?<=[.;,]\s))(?i:option\s|choice\s)?{_LETTER}[)\].]?\s?(?::'
    rf'|[-–—]|\s|\()?\s?(?:✅|✓|✔|☑|(?i:correct|right|true|yes)\b(?=\)?[.!]?\s*$|[.,;:)]))'
    rf'|(?i:\bis\sit\s(?:option\s)?)?(?<![\w\'’])(?P<open3>[(\[]?)(?P<letter3>[B-Z])[)\]]?\?\s(?i:yes)\b'
    rf'|(?i:\bmak(?:es|ing)\s{NOUN})(?P<open2>[(\[]?)(?P<letter2>[A-Z])[)\]]?\s(?i:the\s)?(?i:only\s)?(?i:correct'
    rf'|right|best|answer)\b)',
    re.M,
  ),
  # 'x = 4 (B)', 'London, option B.'
  re.compile(
    r'(?:(?<!\bin)(?<!\bof)(?<!\bsee)(?<!\bfrom)(?<!\bcase)(?<!\bpart)(?<!\bby)(?<!\band)(?<!\bor)'
    r'(?<=[\w.%])[ ]\((?i:option\s'
    r'|choice\s|answer\s)?|,\s(?i:option|choice)\s[(]?|\.\s(?i:option|choice)\s[(]?)(?P<open>)(?P<letter>[A-Z])\)?[.!]?\s*\Z'
  ),
  # 'all but B are wrong', 'nothing but B fits', 'no option other than B works'
  re.compile(
    rf'(?i:(?:^|(?<=[.!?:;,]\s)|(?<=\n)|\b(?:so|thus|that|because|since)\s)(?P<none>nothing'
    rf'|none|no|all|every\w*|each|any\w*)\b[^.,\n]{{0,30}}?(?:but|except|besides'
    rf'|other\sthan|apart\sfrom)\s(?:for\s)?'
    rf'{NOUN}){_LETTER}[)\]]?(?=\s[a-z])',
    re.M,
  ),
)

# 'B is the answer', 'B) London is right', 'B and not C is the answer'; behind a noun also 'option B, London, is right'.
_TEXT = (
  r'[)\]:.]\s?[^.\n()\[\]]{0,40}?|\s?\([^()\n]{0,40}\)|[)\]]?,?\s(?:and\s)?not\s[(\[]?[A-Z][)\]]?,?'
)
_LED = re.compile(rf'{_LETTER}(?:{_TEXT}|)\s?\b{_JUDGED}')
_LED_BY_NOUN = re.compile(rf'{_LETTER}(?:{_TEXT}|[^.\n]{{0,30}}?)\s?\b{_JUDGED}')
_MORE = r'(?>(?:[\s(\[]|maybe|possibly|perhaps|probably|also|both|even|then|or|and|but|else|option|choice|letter)*)'
# A capital without neighbors, or a small letter in brackets or at the end of a line.
MENTION = re.compile(r"(?<![A-Za-z'’])(?:[A-Z](?![\w'’+^=°])|[a-z](?=[)\]]|[.!]?\s*$))", re.M)
_SENTENCE_END = re.compile(r'[.!?]\s+|\n')
_BEFORE_CHARS, _BEHIND_CHARS = 200, 120  # a statement reaches so far from its letter
TWO = re.compile(
  rf'[)\]]?(?:\.\.\.|…)?\s?(?:[,;/|&+∪\\\-–]|and/or\b|\(?or\b|and\b|to\b|but\b'
  rf'|versus\b|vs\b|plus\b|,?\s?(?:as\swell\sas|along\swith|together\swith|alternatively'
  rf'|otherwise|and\salso)\b|(?<=\s)|(?=[(\[]))'
  rf'\s?{_MORE}(?P<second>[A-Z])(?![\w\'’])'
)
# 'B. London and D. Oslo'
TWO_LABELS = re.compile(r'[).:]\s[^.\n]{1,40}?\s(?:and|or|&)\s[(\[]?(?P<second>[A-Z])[).:]\s')
TWO_IN_FRONT = re.compile(
  r'(?<![\w\'’])(?P<second>[A-Z])[)\]]?\s?(?:,|/|&|\bor\b|\band\b)\s?(?:or\s|and\s)?(?:(?:(?:the\s)?(?:correct\s)?(?:answer'
  r'|option|choice)\s)(?:is\s)?(?:also\s)?)?[(\[]?$'
)
# A verb behind the second letter makes a clause of its own of it: 'B, and C contradicts the text'.
OWN_CLAUSE = re.compile(
  r'[)\]]?\s(?!or\b|and\b|are\b|were\b|both\b|also\b|too\b|as\swell|equally|is\s(?:also'
  r'|equally|possible|acceptable|right|correct|fine)|would\b|could\b|may\b|might\b'
  r'|can\b|seems?\b|work\b|fit\b|together\b|in\b)[a-z]'
)
# A second option that is asserted beside the first: 'C is also correct', 'and so is C'.
ALSO = re.compile(
  r'(?:\b(?:so\s(?:is|does|would\sbe)|as\s(?:is|does)|likewise|equally|alternatively,?)\s(?i:option\s'
  r'|choice\s)?[(\[]?(?P<other>[A-Z])(?![\w\'’])'
  r'|(?<![\w\'’])(?P<second>[A-Z])[)\]]?\s(?:is|was|are|would\sbe|could\sbe|can\sbe'
  r'|may\sbe|might\sbe|works|fits|seems|looks)\s(?:[a-z]+\s){0,3}?(?:also|equally'
  r'|as\swell|acceptable|likewise|too(?=\s*(?:[.,;!)]|$)))(?!\w))'
)
GOES_ON = re.compile(
  rf'\s(?!{REASON}|and\b|or\b|which\b|by\b|if\b|but\b|is\b|was\b|to\b|with\b|not\b'
  rf'|rather\b|instead\b|along\b|together\b|plus\b)[a-z]'
)
_HEAD = r'(?>(?:[\s✅✓✔☑]|(?:→|⇒|➡|=>|->|∴))*)'
LONE = re.compile(
  r'(?i:(?:so|thus|hence|therefore|i say|i think|i choose|i pick|i vote),?\s)?'
  rf'{_HEAD}[:\s]*(?i:{NOUN})[(\[{{]?\s?([A-Za-z])\s?[)\]}}]?[.:!,]{{0,2}}(?:\s?[✅✓✔☑])?'
)
LONE_AT_END = re.compile(r'[a-z]{2}[.?!:]\s[(\[]?([A-Z])[)\]]?[.!]?$')
LABEL = re.compile(
  rf'(?i:(?:option|choice|answer)\s)?[(\[]?(?P<letter>[A-Za-z])(?:[)\]][.:]?|[.:](?!\w)'
  rf'|\s?[-–—](?=\s)|(?=,?\s(?:{REASON}))|(?=,\s(?:definitely|of\scourse|obviously'
  rf'|clearly|certainly|for\ssure|surely|I\s(?:think|believe|guess|say))\b)|(?=,?\s(?:and\s)?(?:not|rather\sthan'
  rf'|instead\sof)\s[(\[]?[A-Z]\b))\s*'
)
NEXT_LABEL = re.compile(r'(?:^|\s)[(\[]?[A-Z][)\]:.](?:\s|$)')
CELL = re.compile(r'(?<=\|)\s*[(\[]?([A-Z])[)\]]?\s*(?=\|)')
ANSWER_IS = re.compile(r'\b(?:answer|it)\s?(?::|is)\s?:?\s*([^\n]+)', re.I)
TAG = re.compile(
  r'<(answer|final_answer|choice)>((?:(?!</?(?:answer|final_answer|choice)>).){0,2000})</\1>',
  re.S | re.I,
)
TOKEN = re.compile(r'<\|[^|<>\n]{1,40}\|>')


def regions(text: str, mentions: Sequence[re.Match]) -> list[tuple[int, int]]:
  """(start, end) of the parts of a text that can hold a statement: those around its letters."""
  found: list[tuple[int, int]] = []
  for mention in mentions:
    if found and mention.end() + _BEHIND_CHARS <= found[-1][1]:
      continue
    start = max(0, mention.start() - _BEFORE_CHARS)
    end = _SENTENCE_END.search(text, mention.end() + _BEHIND_CHARS)
    stop = end.end() if end else len(text)
    if found and start <= found[-1][1]:
      found[-1] = (found[-1][0], stop)
    else:
      found.append((start, stop))
  return found


def judged(text: str, start: int) -> re.Match | None:
  """The statement that the letter at text[start] leads: 'B is the answer'."""
  at = start - 1 if start and text[start - 1] in '([' else start
  before = _LED_BEFORE.search(text[max(0, at - 24) : at])
  if before is None:
    return None
  return (_LED_BY_NOUN if before['noun'] else _LED).match(text, at)


def cleaned(text: str) -> str:
  """The text without wrappers; marked letters are in brackets."""
  text = _BREAK.sub('\n', _HTML.sub('', text))
  text = _WRAPPED.sub(r'\1', _WRAPPED.sub(r'\1', text))
  text = _MARKED.sub(lambda match: f'({match[2] or match[3]})', _FORMULA.sub('', text))
  text = _KEY.sub(r'\1', _QUOTE.sub('', text)).translate(_DROPPED)
  if '_' in text:
    text = _EMPHASIS.sub(r'\1', text)
  if '[[' in text or '[(' in text or '((' in text:
    text = _NESTED.sub(r'\1', text)
  return _LEADER.sub('', text)
