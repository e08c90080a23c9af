"""The endpoint as clients see it: one server of a scripted model, OpenAI's own client and plain HTTP."""

from __future__ import annotations

import concurrent.futures
import http.client
import json
import re
import signal
import time

import forks
import jax
import numpy as np
import pytest
import scripted_model

from jaxrl_llm import models, rollout

pytest.importorskip('starlette')
pytest.importorskip('uvicorn')
openai = pytest.importorskip('openai')

TOKEN, NAME = 'sesame', 'scripted'
SLOTS, QUEUE = 4, 140
TOOLS = [
  dict(
    type='function',
    function=dict(name='add', parameters=dict(type='object', properties=dict(a={}, b={}))),
  )
]


class Server:
  def __init__(self, folder):
    self.folder = folder / NAME
    self.model = scripted_model.write(self.folder)
    sizes = [f'--slots={SLOTS}', f'--queue={QUEUE}', '--window=4', f'--token={TOKEN}']
    argv = [
      '--mode=serve',
      '--config=tiny',
      '--base',
      f'--config.model={self.folder}',
      '--port=0',
    ]
    argv += ['--config.mesh.fsdp=1', '--config.sft.steps=0']
    self.process = forks.start([*argv, *sizes], folder / 'run', JAX_PLATFORMS='cpu')
    while not (found := re.search(r'serving scripted .* at http://127.0.0.1:(\d+)/v1', self.log)):
      assert self.process.poll() is None, self.log
      time.sleep(0.02)
    self.port = int(found[1])
    self.client = openai.OpenAI(
      base_url=f'http://127.0.0.1:{self.port}/v1', api_key=TOKEN, max_retries=0, timeout=120
    )

  @property
  def log(self) -> str:
    return self.process.text()

  def request(self, path, body=None, **headers):
    """Status, headers and decoded body of a plain request."""
    connection = http.client.HTTPConnection('127.0.0.1', self.port, timeout=120)
    headers = {'content-type': 'application/json', 'authorization': f'Bearer {TOKEN}'} | headers
    data = body if body is None or isinstance(body, bytes) else json.dumps(body).encode()
    connection.request('GET' if body is None else 'POST', path, data, headers)
    response = connection.getresponse()
    result = response.status, response.headers, json.loads(response.read())
    connection.close()
    return result

  def complete(self, prompt, **options):
    return self.client.completions.create(model=NAME, prompt=prompt, **options)

  def chat(self, content, **options):
    messages = [dict(role='user', content=content)] if isinstance(content, str) else content
    return self.client.chat.completions.create(model=NAME, messages=messages, **options)

  def health(self):
    return self.request('/health')[2]


@pytest.fixture(scope='module')
def server(tmp_path_factory):
  server = Server(tmp_path_factory.mktemp('serving'))
  yield server
  server.process.kill()


def ids(choice) -> list[int]:
  return choice.model_extra['token_ids']


def test_completions_are_those_of_mode_generate(server):
  """`rollout.sample` is what --mode=generate prints; the noise of a seed is the same, too."""
  same = dict(max_tokens=24, chat=False)
  prompts = ['hello', 'STORY', 'Zwölf']
  for temperature in (0.0, 0.8):
    want = rollout.sample(server.model, prompts, n=2, temperature=temperature, seed=5, **same)
    answer = server.complete(prompts, n=2, max_tokens=24, temperature=temperature, seed=5)
    texts = [choice.text for choice in answer.choices]
    assert texts == [text for pair in want for text in pair]
  (want,) = rollout.sample(server.model, ['hello'], max_tokens=24, temperature=0.0)
  assert (
    server.chat('hello', max_completion_tokens=24, temperature=0).choices[0].message.content
    == want[0]
  )
  assert server.complete('STORY', max_tokens=24).choices[0].text == 'one two three four'


def test_a_stream_is_the_whole_answer_in_pieces(server):
  """Random bytes are often parts of characters, which no piece may cut."""
  options = dict(max_tokens=60, n=3, seed=11, logprobs=True, top_logprobs=2, stop=['q', '\x00\x01'])
  options |= dict(extra_body=dict(return_token_ids=True))
  whole = server.chat('hello', **options)
  chunks = list(
    server.chat('hello', stream=True, stream_options=dict(include_usage=True), **options)
  )
  assert chunks[-1].usage == whole.usage and chunks[-1].choices == []
  assert len(chunks) > 12 and '\ufffd' in whole.choices[0].message.content
  for choice in whole.choices:
    parts = [c for chunk in chunks for c in chunk.choices if c.index == choice.index]
    assert parts[0].delta.role == 'assistant' and parts[-1].finish_reason == choice.finish_reason
    assert ''.join(part.delta.content or '' for part in parts) == choice.message.content
    assert [t for part in parts for t in ids(part)] == ids(choice)
    assert [t for part in parts for t in part.logprobs.content] == choice.logprobs.content
    assert len(choice.logprobs.content) == len(ids(choice))
  texts = dict(max_tokens=40, seed=2, logprobs=1, echo=True)
  pieces = [chunk.choices[0] for chunk in server.complete('hello', stream=True, **texts)]
  whole = server.complete('hello', **texts).choices[0]
  assert ''.join(piece.text for piece in pieces) == whole.text and whole.text.startswith('hello')
  for name in ('text_offset', 'tokens', 'token_logprobs', 'top_logprobs'):
    joined = [x for piece in pieces for x in getattr(piece.logprobs, name)]
    assert joined == getattr(whole.logprobs, name)


def test_a_stop_string_ends_an_answer_between_tokens(server):
  for stream in (False, True):
    answer = server.complete('STORY', stop=['two t', 'never'], max_tokens=24, stream=stream)
    choices = [part.choices[0] for part in answer] if stream else answer.choices
    assert ''.join(choice.text for choice in choices) == 'one '
    assert choices[-1].finish_reason == 'stop'
  (choice,) = server.complete('STORY', stop='two t', extra_body=dict(return_token_ids=True)).choices
  # As sampled: up to the token with which the stop string is complete.
  assert server.model.tokenizer.decode(ids(choice)) == 'one two thr'


def test_tool_calls_are_read_from_the_models_own_template(server):
  question = [dict(role='user', content='CALL')]
  (choice,) = server.chat(question, tools=TOOLS, max_tokens=24).choices
  (call,) = choice.message.tool_calls
  assert choice.finish_reason == 'tool_calls' and choice.message.content == 'I add. '
  assert call.function.name == 'add' and json.loads(call.function.arguments) == dict(a=2)
  parts = [
    chunk.choices[0] for chunk in server.chat(question, tools=TOOLS, max_tokens=24, stream=True)
  ]
  (streamed,) = [call for part in parts for call in part.delta.tool_calls or []]
  assert streamed.function == type(streamed.function)(**call.function.model_dump())
  assert ''.join(part.delta.content or '' for part in parts) == 'I add. '
  assert parts[-1].finish_reason == 'tool_calls'
  # The client sends the message back, and the result: both are rendered for the next answer.
  result = dict(role='tool', tool_call_id=call.id, content='STORY')
  turns = [*question, choice.message.model_dump(), result]
  more = dict(max_tokens=8, temperature=0, extra_body=dict(return_token_ids=True))
  (choice,) = server.chat(turns, tools=TOOLS, **more).choices
  prompt = server.model.tokenizer.decode(choice.model_extra['prompt_token_ids'], False)
  assert prompt.endswith(
    'CALLI add. <tool_call>\n{"name": "add", "arguments": {"a": 2}}\n</tool_call><end><result>STORY</result>'
  )


@pytest.mark.parametrize(
  'prompt, want',
  [
    ('CUT', 'So: <tool_call>{"name": "add", "argu</tool_call>'),
    ('OTHER', '<tool_call>{"name": "remove", "arguments": {}}</tool_call>'),
  ],
)
def test_a_malformed_call_stays_text(server, prompt, want):
  whole = server.chat(prompt, tools=TOOLS, max_tokens=24).choices[0]
  parts = [c.choices[0] for c in server.chat(prompt, tools=TOOLS, max_tokens=24, stream=True)]
  assert whole.message.content == ''.join(part.delta.content or '' for part in parts) == want
  assert whole.finish_reason == parts[-1].finish_reason == 'stop' and not whole.message.tool_calls


def test_log_probs_are_those_of_the_forward_pass(server):
  """Of the model at temperature 1, and of the distribution that was sampled from."""
  temperature, top_p = 0.7, 0.8
  answer = server.complete(
    'hello', max_tokens=30, temperature=temperature, top_p=top_p, seed=1, logprobs=3, echo=True,
    extra_body=dict(return_token_ids=True),
  ).choices[0]  # fmt: skip
  model, logprobs, sampled = server.model, answer.logprobs, ids(answer)
  prompt = answer.model_extra['prompt_token_ids']
  assert prompt == model.tokenizer.encode('hello') and len(sampled) > 10
  tokens = np.array([[*prompt, *sampled]])
  logits = models.forward(model.config, model.params, tokens, np.ones_like(tokens))[0]
  logp = np.asarray(jax.nn.log_softmax(logits))[np.arange(tokens.size - 1), tokens[0, 1:]]
  assert logprobs.token_logprobs[0] is None and len(logprobs.tokens) == tokens.size
  np.testing.assert_allclose(logprobs.token_logprobs[1:], logp, atol=1e-4)
  likeliest = np.sort(np.asarray(jax.nn.log_softmax(logits)))[:-1, ::-1][:, :3]
  top = [sorted(pairs.values(), reverse=True)[:3] for pairs in logprobs.top_logprobs[1:]]
  np.testing.assert_allclose(top, likeliest, atol=1e-4)
  # Nucleus sampling by its definition: the fewest likeliest tokens whose probabilities reach top_p.
  for position, (token, behavior) in enumerate(
    zip(sampled, answer.model_extra['behavior_logprobs'], strict=True), len(prompt) - 1
  ):
    p = np.asarray(jax.nn.softmax(logits[position] / temperature))
    order = np.argsort(-p)
    inside = order[: int(np.searchsorted(np.cumsum(p[order]), top_p)) + 1]
    assert token in inside and abs(behavior - np.log(p[token] / p[inside].sum())) < 1e-4


def test_scores_of_prompts_are_those_of_transformers(server):
  """The request of lm-evaluation-harness: token ids in a batch, echoed, one token more, and which ones are greedy."""
  torch = pytest.importorskip('torch')
  transformers = pytest.importorskip('transformers')
  theirs = transformers.AutoModelForCausalLM.from_pretrained(server.folder, dtype=torch.float32)
  encode = server.model.tokenizer.encode
  prompts = [encode('hello, you'), encode('STORYone two three four'), encode('Zwölf x' * 9)]
  answer = server.complete(prompts, max_tokens=1, temperature=0, logprobs=1, echo=True, seed=1234)
  for prompt, choice in zip(prompts, answer.choices, strict=True):
    with torch.no_grad():
      logits = theirs(torch.tensor([prompt])).logits[0]
    want = torch.log_softmax(logits, -1)[range(len(prompt) - 1), prompt[1:]].numpy()
    scores, top = choice.logprobs.token_logprobs, choice.logprobs.top_logprobs
    assert len(scores) == len(top) == len(prompt) + 1 and scores[0] is top[0] is None
    np.testing.assert_allclose(scores[1:-1], want, atol=1e-4)
    greedy = (logits.argmax(-1)[:-1] == torch.tensor(prompt[1:])).tolist()
    pairs = zip(scores[1:-1], top[1:-1], strict=True)
    assert [score == max(best.values()) for score, best in pairs] == greedy
    assert any(greedy) == (prompt == prompts[1])
  alone = server.complete(prompts[1], max_tokens=0, logprobs=1, echo=True).choices[0].logprobs
  assert alone.token_logprobs == answer.choices[1].logprobs.token_logprobs[:-1]


def test_64_concurrent_requests_are_answered_as_each_alone(server):
  """Bit for bit: neither slots nor neighbors nor the time of admission enter the arithmetic of a row."""

  def ask(number):
    options = dict(max_tokens=(3, 17, 60)[number % 3], temperature=(1.0, 0.0, 0.6)[number % 3])
    options |= dict(seed=number, top_p=1 - 0.1 * (number % 2), logprobs=number % 4)
    answer = server.complete(
      'abc' * (1 + number % 30), **options, extra_body=dict(return_token_ids=True)
    )
    (choice,) = answer.choices
    return choice.model_dump()

  alone = [ask(number) for number in range(64)]
  with concurrent.futures.ThreadPoolExecutor(64) as pool:
    assert list(pool.map(ask, range(64))) == alone
  assert len({choice['text'] for choice in alone}) > 40


def test_a_seed_decides_and_without_one_answers_differ(server):
  texts = [server.complete('hello', max_tokens=30, seed=s).choices[0].text for s in (1, 2, 1)]
  assert texts[0] == texts[2] != texts[1]
  assert len({server.complete('hello', max_tokens=30).choices[0].text for _ in range(3)}) > 1


def test_a_client_that_leaves_frees_its_slots(server):
  """Until then the queue is full for others. `tokens` counts what was sampled: less than was asked for."""
  for stream in (True, False):
    before = server.health()['tokens']
    body = dict(model=NAME, prompt='LONG', n=128, max_tokens=250, stream=stream)
    connection = http.client.HTTPConnection('127.0.0.1', server.port, timeout=120)
    headers = {'content-type': 'application/json', 'authorization': f'Bearer {TOKEN}'}
    connection.request('POST', '/v1/completions', json.dumps(body), headers)
    while not server.health()['busy']:
      pass
    status, headers, error = server.request('/v1/completions', body | dict(n=100, stream=False))
    assert status == 429 and headers['retry-after'] == '1'
    assert error['error']['type'] == 'rate_limit_error'
    connection.close()
    while any(server.health()[name] for name in ('busy', 'waiting', 'completions')):
      pass
    assert server.health()['tokens'] - before < 128 * 250


def test_models_and_health(server):
  assert [model.id for model in server.client.models.list()] == [NAME]
  assert server.client.models.retrieve(NAME).model_extra['max_model_len'] == 256
  assert server.health()['status'] == 'ok' and server.health()['slots'] == SLOTS
  assert 'compiled 7 programs' in server.log


TEXT, CHAT = '/v1/completions', '/v1/chat/completions'
PROMPT = dict(model=NAME, prompt='hello')
TALK = dict(model=NAME, messages=[dict(role='user', content='hello')])
CALL = dict(function=dict(name='add', arguments='{"a": '))
# path, body, status, param, part of the message
MALFORMED = (
  (TEXT, b'{"model": ', 400, None, 'no JSON'),
  (TEXT, b'\xff\xfe', 400, None, 'no JSON'),
  (TEXT, b'[' * 100_000, 400, None, 'no JSON'),
  (TEXT, [PROMPT], 400, None, 'JSON object'),
  (TEXT, b' ' * (2**22 + 1), 413, None, 'larger'),
  (TEXT, dict(prompt='hello'), 400, 'model', 'required'),
  (TEXT, PROMPT | dict(model='gpt-4'), 404, 'model', "'gpt-4' does not exist"),
  (TEXT, dict(model=NAME), 400, 'prompt', 'text'),
  (TEXT, PROMPT | dict(prompt=''), 400, 'prompt', 'not empty'),
  (TEXT, PROMPT | dict(prompt=[1, 'a']), 400, 'prompt', 'token ids'),
  (TEXT, PROMPT | dict(prompt=[5, 10**6]), 400, 'prompt', 'token ids below'),
  (TEXT, PROMPT | dict(prompt='\ud800'), 400, None, 'Unicode'),
  (TEXT, PROMPT | dict(prompt='a' * 300), 400, 'prompt', '300 tokens'),
  (TEXT, PROMPT | dict(max_tokens=252), 400, 'max_tokens', 'exceed 256'),
  (TEXT, PROMPT | dict(max_tokens=0), 400, 'max_tokens', 'whole number from 1'),
  (TEXT, PROMPT | dict(max_tokens='9'), 400, 'max_tokens', 'whole number'),
  (TEXT, PROMPT | dict(temperature=True), 400, 'temperature', 'number from 0 to 2'),
  (TEXT, PROMPT | dict(temperature=float('nan')), 400, 'temperature', 'number from 0 to 2'),
  (TEXT, PROMPT | dict(top_p=0), 400, 'top_p', 'greater than 0'),
  (TEXT, PROMPT | dict(n=129), 400, 'n', 'from 1 to 128'),
  (TEXT, PROMPT | dict(prompt=['a', 'b'], n=73), 400, 'n', '146 completions'),
  (TEXT, PROMPT | dict(seed=-1), 400, 'seed', 'from 0'),
  (TEXT, PROMPT | dict(stop=['']), 400, 'stop', 'not empty'),
  (TEXT, PROMPT | dict(logprobs=6), 400, 'logprobs', 'from 0 to 5'),
  (TEXT, PROMPT | dict(stream='yes'), 400, 'stream', 'true or false'),
  (TEXT, PROMPT | dict(best_of=2), 400, 'best_of', 'not supported'),
  (TEXT, PROMPT | dict(top_k=5), 400, 'top_k', 'unsupported parameter'),
  (TEXT, PROMPT | dict(frequency_penalty=0.5), 400, 'frequency_penalty', 'unsupported value'),
  (TEXT, PROMPT | dict(stream_options=dict(include_usage=True)), 400, 'stream_options', 'needs'),
  (CHAT, TALK | dict(messages=[]), 400, 'messages', 'at least one'),
  (CHAT, TALK | dict(messages=[dict(role='king')]), 400, 'messages[0]', 'role of'),
  (CHAT, TALK | dict(messages=[dict(role='user')]), 400, 'messages[0].content', 'text'),
  (CHAT, TALK | dict(messages=[dict(role='user', content=[dict(type='file')])]), 400, 'messages[0].content', 'text'),
  (CHAT, TALK | dict(messages=[dict(role='user', content='a', audio='x')]), 400, 'messages[0].audio', 'unsupported'),
  (CHAT, TALK | dict(messages=[dict(role='assistant', tool_calls=[CALL])]), 400, 'messages[0].tool_calls[0]', 'JSON'),
  (CHAT, TALK | dict(tools=[dict(name='add')]), 400, 'tools[0]', 'function'),
  (CHAT, TALK | dict(tools=TOOLS, tool_choice='required'), 400, 'tool_choice', 'unsupported value'),
  (CHAT, TALK | dict(top_logprobs=2), 400, 'top_logprobs', 'needs'),
  (CHAT, TALK | dict(response_format=dict(type='json_object')), 400, 'response_format', 'unsupported'),
  ('/v1/embeddings', dict(model=NAME), 404, None, 'not a route'),
  (TEXT, None, 405, None, 'not a route'),
)  # fmt: skip


def test_malformed_requests_are_refused_with_a_sentence(server):
  for path, body, status, param, part in MALFORMED:
    found, _, answer = server.request(path, body)
    error = answer['error']
    assert (found, error['param']) == (status, param) and part in error['message'], (body, answer)
    assert set(error) == {'message', 'type', 'param', 'code'} and 'config.' not in error['message']
  with pytest.raises(openai.BadRequestError, match='unsupported parameter'):
    server.complete('hello', extra_body=dict(min_p=0.1))
  for headers in (
    dict(authorization='Bearer sesam'),
    dict(authorization=''),
    dict(authorization=TOKEN),
  ):
    for path, body in ((TEXT, PROMPT), ('/v1/models', None)):
      status, sent, answer = server.request(path, body, **headers)
      assert status == 401 and answer['error']['type'] == 'authentication_error', headers
  assert server.request(TEXT, PROMPT, **{'content-type': 'text/plain'})[0] == 415
  assert server.complete('hello', max_tokens=3).usage.completion_tokens == 3


def test_sigterm_ends_streams_and_the_server(server):
  stream = server.complete('LONG', max_tokens=250, n=128, stream=True)
  next(iter(stream))
  server.process.send_signal(signal.SIGTERM)
  with pytest.raises(openai.APIError, match='stopping'):
    list(stream)
  log, _ = server.process.communicate(timeout=60)
  assert server.process.returncode == 0 and 'Traceback' not in log
  assert not any(word in log for word in ('LONG', 'STORY', 'hello')), 'prompts are not logged'
