"""Whether the sentence around an answer asserts it: negations with their scope, views of others, and retractions.

A sentence is read as tokens from left to right. A negation opens a scope, which a conjunction, a comma or a new
predicate closes; the answer is denied where the scope is still open. 'Numbers that are not even are 5' asserts 5,
because the second verb is a new predicate, and 'nobody thinks that it is 5' denies it, because a verb of thinking
passes the negation on. All patterns read a bounded window, in time linear in it.
"""

from __future__ import annotations

import re

_NOT = r"(?:not|never|cannot|[a-z]+n['’]t|\bcant|\bwont|\bdont)"
_WRONG = (
  r'(?:wrong|incorrect|false|untrue|impossible|invalid|mistaken|inconsistent|excluded'
  r'|eliminated|rejected|discarded|dismissed|disproved|disproven'
  r'|ruled\sout|crossed\sout|off\sthe\stable|out\sof\s(?:range|the\squestion|the\srunning)'
  r'|out\b|nonsense|absurd|unlikely|implausible|unsuitable|bogus|extraneous|spurious'
  r'|inadmissible)'
)
_RIGHT = (
  r'(?:right|correct|true|it\b|so\b|valid|the\s(?:right|correct|best|final)?\s?(?:answer'
  r'|case|one|option|choice|solution|result|value)|what\b|acceptable)'
)
_PEOPLE = (
  r'(?:(?:some|many|most|several|a\sfew)\s(?:people|students|readers|others|solvers'
  r'|sources|of\s\w+)|some|many|others|people|students|someone|somebody|they|a\sstudent'
  r'|critics)'
)
_OPINION = r'(?:say|think|believe|claim|argue|guess|suspect|assume|conclude)'
_BAD = (
  r'(?:wrong|incorrect|false|untrue|inaccurate|worst|invalid|erroneous|bogus|rejected|excluded|eliminated|trap|tempting|naive|second-best|least\s(?:likely|plausible|probable|suitable|appropriate'
  r'|accurate|\w+able))'
)
_MAY = r'(?:may|might|would|could|will|can|often|sometimes|are\stempted\sto)'
# Kinds of tokens in lower case, where each word is a token, so that all alternatives begin at words. `clears`: a double
# negation, which asserts. `negates`, `excludes`, `quantifies`, `adjective`: open a scope. `denies`: opens one that all
# predicates stay in. `passes`: a verb or noun that hands a negation on to its clause.
_TOKEN = re.compile(
  rf"""(?:
  (?P<clears>no\s(?:doubt|question|other\s(?:than|option|choice)|surprise|wonder|less\sthan\s(?=exactly))
    |(?:nothing|none|no\s\w+|anything|anyone|{_NOT})\s(?:(?:possibly|really|be|have|been|help|it|by|equal)\s){{0,3}}
      (?:(?:anything|any|something|any\sother\s\w+|a\s\w+)\s)?(?:else\s)?(?<!\banything\s)(?:but|other\sthan|except|besides)\b
    |{_NOT}\s(?:(?:possibly|be|have|been)\s){{0,3}}anything\s(?:else\s)?(?:but|other\sthan|except|besides)\b
    |without\s(?:a\s|any\s)?(?:shadow\sof\sa\s)?(?:doubt|question)|beyond\s(?:any\s|a\s|all\s)?(?:\w+\s)?doubt|doubtless
    |not\s(?:only|just|merely|hard|difficult|surprising(?:ly)?|too\s(?:hard|difficult)|unreasonable|unlikely|wrong|incorrect)\b
    |{_NOT}\s(?:doubt|deny|question|disagree|dispute)\b)
  |(?P<denies>(?:at\sfirst|initially|originally),?\s(?:i|we|one)\s(?:\w+\s)?(?:thought|got|guessed|picked|considered|chose|believed|assumed|took|had)\b
    |first\s(?:guess|thought|instinct|impression|attempt)\b|(?:tempting|wrongly|mistakenly|erroneously|incorrectly|falsely|naively)\b
    |(?:easy|hard|difficult|tempting|mistake|wrong|false|incorrect|error|tempted|dangerous|absurd)\s(?:is|was|would\sbe)?\s?to\s\w+
    |(?:it|this|that)\s(?:looks|seems|appears)\sas\s(?:if|though)\b
    |{_PEOPLE}\s(?:{_MAY}\s(?:\w+ly\s)?(?:{_OPINION}|choose|pick|answer|select)|{_OPINION}s?)\b|(?:one|you|we)\s(?:may|might|could)\s(?:\w+ly\s)?(?:{_OPINION}|guess|pick|choose)\b
    |i\s(?:\w+ly\s)?(?:thought\s(?!about|of|over|through)|guessed|suspected|assumed|doubt)\b
    |(?:doubt|doubtful|deny|denied|denies|disproves?d?|refutes?d?)\b|refuses?\sto\b|(?:misconception|myth|fallacy|mistake|error|pitfall)\s(?:is\s)?(?:that|to)\b|hardly\b|far\sfrom\s(?!(?:zero|over)\b)
    |(?:initial|original|previous|first|earlier|preliminary)\s(?:answer|choice|guess|thought|pick)\b|used\sto\s\w+|(?:false|wrong|untrue|incorrect)\sthat\b
    |no\s(?:way|reason|evidence|chance|proof|grounds|basis|sign|indication|longer|expert|serious|sane)\b)
  |(?P<negates>{_NOT}\b|≠|!=|=/=|\\neq?(?![a-z])|\\not(?![a-z])\s?=)
  |(?P<quantifies>(?:nobody|no\sone|noone|none|nothing|neither|nor)\b)
  |(?P<excludes>\\setminus(?![a-z])|∖|(?:all|every\w*)\sbut\b|without\b|(?:rather|other|different)\s(?:than|from)\b|instead\sof\b|as\sopposed\sto\b|any(?:thing|one)\s(?:but|except)\b
    |except(?:\sfor|ing)?\b|excluding\b|but\snot\b|unlike\b|differs?\sfrom\b|rul(?:ed?s?|ing)\sout\b|cross(?:ed|ing)?\sout\b
    |(?:exclud|eliminat|reject|discard|dismiss|avoid)(?:es?|s|ed|ing)?\b|impossible\b|unlikely\b|fails?\sto\b)
  |(?P<adjective>(?:{_BAD}\s(?:\w+\s)?(?:answer|option|choice|value|result|statement|letter|number|solution|guess|one)\b|(?:that|which)\s(?:is|are)\s(?:\w+ly\s)?{_BAD})
    |(?:answer|option|choice|value|one|letter|number)\s(?:(?:that|which|we|i|you|one|can|could|should|must|would|will|to|be|\w+ly)\s){{1,5}}(?:eliminate|reject|rule\sout|exclude|discard|avoid|dismiss)d?\b)
  |(?P<passes>(?:{_OPINION}|sa(?:id|ys)|saying|thinks|believed|claim(?:ed|s|ing)?|concluded|true|clear|certain|sure|evident|obvious|right|correct|the\scase
    |means?|impl(?:y|ies)|suggests?|shows?|proves?|indicates?|supports?|see|know|agree|accept|convinced|mean|that)\b)
  |(?P<stops>[;]|(?:but|so|because|since|therefore|hence|thus|while|whereas|although|though|then|whereby|however|yet|as)\b|\s[-–—]{{1,3}}\s|—|⇒|→|=>|:(?=\s))
  |(?P<comma>,|(?:and|or)\b)
  |(?P<verb>(?:is|are|was|were|equals|gives|yields|becomes|has|have|makes|leaves|remains|comes)\b|(?:it|that|this|here|answer)['’]s\b)
  |(?P<word>[a-z]++)
  )""",
  re.X,
)
# A list of options or numbers, which a comma does not divide: 'not A, B, or C'.
_LIST = re.compile(
  r"""(?>(?:[\s,$*`"'“”‘’()\[\]{}]|(?i:or|and|nor|option|choice|answer|even|the|of)\b"
  r"|[A-Za-z](?![A-Za-z])|-?[0-9]++(?:[./][0-9]++)?)*)"""
)
_ITEM_END = re.compile(r'(?:[0-9]|(?<![A-Za-z])[A-Za-z])[\s$*`"\')\]},]*$')
_STRUCK = re.compile(r'~~[\s*$("]{0,3}$')
_MOST_ITEMS = 8  # of a list with one predicate

_CLOSERS = re.compile(r'[\s$*_"”’\')\]}`]*+(?:\\\))?')
_NEXT_ITEM = re.compile(
  r"""\s?(?:(?P<joins>,?\s?(?i:or|nor)\b)|,?\s?(?i:and)\b|[,/&])\s?[*`$(\[]*+(?i:option\s|choice\s)?
  (?:[A-Z](?![\w'’])|-?[0-9]++(?:[./][0-9]++)?)[)\]*`$]*+""",
  re.X,
)
_SINGULAR = re.compile(
  r"\s?(?i:is|was|isn['’]t|wasn['’]t|fails|does|doesn['’]t|has|hasn['’]t|seems|looks)\b"
)
_MARK = re.compile(r'\s?[:(–—-]?\s?[✗✘❌🚫❎]')
_LABEL = re.compile(rf'(?i:\s?[:(–—-]\s?(?:completely\s|clearly\s)?(?:not\s{_RIGHT}|{_WRONG}))')
# '5 apples are wrong', 'B alone is not right', but not 'B because it cannot be A'.
_NO_NOUN = (
  r'(?!(?i:[A-Z]|because|since|as|and|but|so|while|when|whereas|although|if|for|which|that|who|it|this|they|we|he|she'
  r'|or|nor|where|then|though|yet|given|until|unless|than)\b)'
)
_NOUN = re.compile(rf"\s?{_NO_NOUN}[A-Za-z'’]{{1,12}}(?:\s{_NO_NOUN}[a-z]{{1,12}})?(?=\s)")
_CHAIN = re.compile(
  r"""(?>(?i:\s?\b(?:(?:is|was|are|were|would|could|should|does|do|did|ca|wo|must|has|have|need)n['’]t|ca?nnot|is|was|are|were|be|been|being|would|will|could|can|must|should|may|might|does|do|did|has|have|had|to
  |seems?|looks?|appears?|gets?|sounds?|turns?|turned|not|never
  |both|all|also|just|still|then|now|likely|of\scourse|either|quite|almost|half|\w+ly)\b)+)""",
  re.X,
)
_NEGATIVE = re.compile(r"(?i:\b(?:not|never|cannot)\b(?!\s(?:only|just|merely|yet)\b)|n['’]t\b)")
_PREDICATE = re.compile(
  rf"""\s?(?i:(?:(?:the|a|an|my|far|in|only|common|typical|popular)\s){{0,3}}(?:{_WRONG}|off\b(?!\sby)|misconception\b|myth\b|fallacy\b|bad\b|tempting\b|worst\b|erroneous\b|least\b|error\b|mistakes?\b|traps?\b|distractors?\b|red\sherring)
  |too\s(?!good\b)\w+
  |no\s(?:answer|solution|option|longer|good)\b|what\sI\s(?:\w+\s)?(?:took|thought|picked|chose|had|got)\b)""",
  re.X,
)
_UNREAL = re.compile(
  r'(?i:would\s(?:\w+ly\s)?have\s|\b(?:almost|nearly|part(?:ial)?ly|half|hardly|barely|scarcely)\b)'
)
_FAILS = re.compile(r'\s?(?i:fails?|violates?|contradicts?|conflicts?|ignores?|overlooks?)\b')

# Where a clause or the sentence ends, and what takes it back there.
_BOUNDARY = re.compile(r'[.!?…\n,;–—-][\s.!?…,;–—*_$)\]}"”-]*')
_MOST_CHARS = 80  # of a sentence behind the answer
_INTERJECTION = re.compile(
  r'(?i:(?:no|nope|wait|hmm+|hm|actually|oops|sorry|but|well|ah|oh|and|hold on'
  r'|on (?:second thoughts?|reflection)|unfortunately|however|correction)\b)[\s,.:;!…–—-]*+'
)
_REFERENCE = re.compile(
  r"(?i:that|this|it|which|the above|my answer|what I (?:said|wrote))(?=['’]s\b|\b)"
)
_CONTRACTED = re.compile(r"['’]s\b")
_JUDGED = re.compile(
  rf'\s?(?i:(?:(?:a|an|the|my|all|quite)\s)?(?P<wrong>{_WRONG}|mistake|error|off)'
  rf'|(?P<right>{_RIGHT}|work|fit|make\ssense|add\sup))(?=\s*(?:[.,;!?…\n)—–]|$'
  rf'|because|since|as\s|either))'
)
_TAKEN_BACK = re.compile(
  r'(?i:scratch that|strike that|never\s?mind|(?:just )?kidding|not!|(?:please )?(?:disregard'
  r'|ignore|forget) (?:that|it)\b|I (?:must have |have )?(?:take|retract|withdraw)n? (?:that'
  r'|it|this)\b'
  r"|I (?:was|am|must be|must have been) (?:wrong|mistaken)|I['’]m (?:wrong|mistaken)"
  r"|I(?:['’]ve| have)? (?:made|see) (?:a|an|my|the) (?:\w+ )?(?:mistake|error"
  r'|slip)|(?:my (?:mistake|bad|error)|wrong|incorrect)(?=[.!]))'
)


def is_denied(left: str, right: str) -> bool:
  """Whether a sentence denies the answer between `left`, its text so far, and `right`, what follows."""
  return is_denied_before(left) or is_denied_behind(right)


def is_denied_before(left: str) -> bool:
  """Whether a negation in front of the answer reaches it: 'not', 'nobody says that it is', 'instead of'."""
  if _STRUCK.search(left[-6:]):
    return True
  left = left.lower()  # the pattern has no flag for the case, which would cost half of its speed
  # subject: the first verb belongs to the negation, 'nobody is'; lists: commas continue it, 'not 4, 5'.
  is_open = passes = subject = lists = False
  opened = 0  # end of the negation: 'never equals' has its own verb
  for token in _TOKEN.finditer(left):
    kind = token.lastgroup
    if kind in ('clears', 'stops'):
      is_open = False
    elif kind == 'comma':
      is_open = is_open and lists and _continues_list(left, token)
    elif kind in ('negates', 'denies', 'quantifies', 'excludes', 'adjective'):
      is_open, passes, opened = True, kind == 'denies', token.end()
      subject = kind in ('denies', 'quantifies', 'adjective')
      lists = kind in (
        'negates',
        'denies',
        'quantifies',
      )  # 'not 4, 5', but 'is wrong, 5' and 'without 4, 5'
    elif is_open and kind == 'passes':
      passes = True
    elif is_open and kind == 'verb' and not passes and (subject or token.start() > opened + 1):
      is_open, subject = subject, False
  return is_open


def _continues_list(left: str, comma: re.Match) -> bool:
  """Whether a comma, 'and' or 'or' separates items up to the answer: 'not 4, 5', but 'not red, and 5 are blue'."""
  if _LIST.match(left, comma.end()).end() < len(left):
    return False
  return _ITEM_END.search(left[max(0, comma.start() - 20) : comma.start()]) is not None


def is_denied_behind(right: str) -> bool:
  """Whether the text behind an answer denies it: '… is wrong', '… and C cannot be right', '…: incorrect'."""
  at, item = _CLOSERS.match(right).end(), None
  for _ in range(_MOST_ITEMS):
    following = _NEXT_ITEM.match(right, at)
    if following is None:
      break
    item, at = following, following.end()
  if item and not item['joins'] and _SINGULAR.match(right, at):
    return False  # 'B, and C is wrong' is about C
  if _MARK.match(right, at) or _LABEL.match(right, at):
    return True
  noun = _NOUN.match(right, at)
  return _is_denial(right, at) or (noun is not None and _is_denial(right, noun.end()))


def is_retracted(right: str) -> bool:
  """Whether the rest of the sentence or the next one takes the answer back: '. Wait, that is wrong'."""
  for boundary in _BOUNDARY.finditer(right, 0, _MOST_CHARS):
    if _takes_back(right[boundary.end() :]):
      return True
    if any(mark in boundary[0] for mark in '.!?…\n'):
      break
  return False


def _is_denial(right: str, at: int) -> bool:
  """Whether a predicate at right[at] denies its subject: 'is wrong', 'cannot be', 'fails', but not 'is not wrong'."""
  chain = _CHAIN.match(right, at)
  if chain is None:
    return _FAILS.match(right, at) is not None
  if _UNREAL.search(chain[0]):
    return True
  wrong = _PREDICATE.match(right, chain.end()) is not None
  return wrong != bool(_NEGATIVE.search(chain[0]))


def _takes_back(text: str) -> bool:
  at, words = 0, ''
  for _ in range(4):
    word = _INTERJECTION.match(text, at)
    if word is None:
      break
    at, words = word.end(), words + word[0].casefold()
  if at == len(text):
    return 'wait' in words or ('no' in words and words[-1] in '.!…')
  if _TAKEN_BACK.match(text, at):
    return True
  reference = _REFERENCE.match(text, at)
  if reference is None:
    return False
  at = reference.end()
  contracted = _CONTRACTED.match(text, at)
  chain = _CHAIN.match(text, contracted.end() if contracted else at)
  end = chain.end() if chain else contracted.end() if contracted else at
  if (
    chain
    and chain[0].endswith(' be')
    and _NEGATIVE.search(chain[0])
    and not text[end:].strip(' .!…')
  ):
    return True  # 'no, that cannot be.'
  judged = _JUDGED.match(text, end)
  if judged is None or end == at:
    return False
  return bool(judged['wrong']) != bool(chain and _NEGATIVE.search(chain[0]))
