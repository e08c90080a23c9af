// The rollouts: filters over all of them, a list that only holds what is on the screen, and one of them in full.
const ROW = 56;

async function drawRollouts(runs) {
  const section = byId('rollouts'),
    body = el('div');
  const select = el(
    'select',
    { id: 'run' },
    runs.map((run, at) => el('option', { value: at }, run.name)),
  );
  if (runs.length > 1)
    section.append(el('form', { onsubmit: e => e.preventDefault() }, el('label', null, 'Run', select)));
  section.append(body);
  select.addEventListener('change', () => browse(Number(select.value), body));
  await browse(0, body);
}

// Texts by file, unpacked when they are wanted first; the oldest are forgotten.
function store(at, index) {
  const held = new Map(),
    start = [0];
  index.files.forEach(n => start.push(start[start.length - 1] + n));
  const fileOf = i => {
    let a = 0,
      b = index.files.length;
    while (b - a > 1) {
      const m = (a + b) >> 1;
      if (start[m] <= i) a = m;
      else b = m;
    }
    return a;
  };
  const read = async i => {
    const file = fileOf(i);
    if (!index.kept[file]) return null;
    if (!held.has(file)) {
      held.set(
        file,
        unpack(`file${at}-${file}`).then(text => text.split('\n')),
      );
      if (held.size > 40) held.delete(held.keys().next().value);
    }
    return JSON.parse((await held.get(file))[i - start[file]]);
  };
  read.kept = i => index.kept[fileOf(i)];
  return read;
}

async function browse(at, body) {
  const index = JSON.parse(await unpack(`index${at}`)),
    total = index.step.length;
  if (!total) return body.replaceChildren(empty('No rollout is written yet.'));
  const state = { at, index, row: store(at, index), found: [], current: -1, prompts: null, color: 'logp' };
  const view = list(state),
    detail = el(
      'div',
      { class: 'detail', id: 'detail', role: 'region', 'aria-label': 'The chosen rollout' },
      empty('Choose a rollout from the list.'),
    );
  state.open = i => show(state, i, detail);
  const lost = index.files.reduce((s, n, f) => s + (index.kept[f] ? 0 : n), 0);
  body.replaceChildren(
    filters(state, view),
    lost
      ? empty(
          `The texts of ${plural(lost, 'rollout')} are left out, so that this page opens fast: they lie in the run's rollouts folder.`,
        )
      : '',
    el('div', { class: 'browser' }, el('div', null, view.node), detail),
  );
  view.refresh();
}

function filters(state, view) {
  const { index } = state,
    first = index.step.reduce((a, b) => Math.min(a, b), Infinity),
    last = index.step.reduce((a, b) => Math.max(a, b), 0);
  const number = (id, attributes) => el('input', { type: 'number', id, inputmode: 'decimal', ...attributes });
  const field = {
    from: number('f-from', { min: first, max: last, placeholder: first }),
    to: number('f-to', { min: first, max: last, placeholder: last }),
    prompt: el('input', { type: 'search', id: 'f-prompt', placeholder: 'number or words' }),
    low: number('f-low', { step: 'any' }),
    high: number('f-high', { step: 'any' }),
    reason: el(
      'select',
      { id: 'f-reason' },
      el('option', { value: '' }, 'any'),
      index.reasons.map((r, i) => el('option', { value: i }, r || 'unknown')),
    ),
    right: el(
      'select',
      { id: 'f-right' },
      [
        ['', 'any'],
        ['1', 'right'],
        ['0', 'wrong'],
      ].map(([v, t]) => el('option', { value: v }, t)),
    ),
    order: el(
      'select',
      { id: 'f-order' },
      [
        ['', 'by step'],
        ['new', 'newest first'],
        ['high', 'highest reward'],
        ['low', 'lowest reward'],
        ['long', 'longest'],
      ].map(([v, t]) => el('option', { value: v }, t)),
    ),
  };
  const titles = {
    from: 'From step',
    to: 'To step',
    prompt: 'Prompt',
    low: 'Reward from',
    high: 'Reward to',
    reason: 'Stop reason',
    right: 'Answer',
    order: 'Order',
  };
  const status = el('p', { id: 'found', role: 'status' });
  const run = async () => {
    const wanted = await promptsLike(state, field.prompt.value.trim()),
      bound = (f, otherwise) => (f.value === '' || Number.isNaN(f.valueAsNumber) ? otherwise : f.valueAsNumber);
    const from = bound(field.from, -Infinity),
      to = bound(field.to, Infinity),
      low = bound(field.low, -Infinity),
      high = bound(field.high, Infinity);
    const reason = field.reason.value === '' ? -1 : Number(field.reason.value),
      right = field.right.value === '' ? -1 : Number(field.right.value),
      found = [];
    for (let i = 0; i < index.step.length; i++) {
      if (
        index.step[i] >= from &&
        index.step[i] <= to &&
        index.score[i] >= low &&
        index.score[i] <= high &&
        (reason < 0 || index.reason[i] === reason) &&
        (right < 0 || index.right[i] === right) &&
        (!wanted || wanted.has(index.prompt[i]))
      )
        found.push(i);
    }
    const by = {
      new: (a, b) => index.step[b] - index.step[a] || a - b,
      high: (a, b) => index.score[b] - index.score[a] || a - b,
      low: (a, b) => index.score[a] - index.score[b] || a - b,
      long: (a, b) => index.length[b] - index.length[a] || a - b,
    }[field.order.value];
    state.found = by ? found.sort(by) : found;
    status.textContent = `${found.length.toLocaleString('en')} of ${plural(index.step.length, 'rollout')}`;
    view.refresh(true);
  };
  let timer = 0;
  const form = el(
    'form',
    {
      id: 'filters',
      'aria-label': 'Filter rollouts',
      onsubmit: e => e.preventDefault(),
      oninput: () => {
        clearTimeout(timer);
        timer = setTimeout(run, 120);
      },
    },
    Object.entries(field).map(([name, input]) => el('label', null, titles[name], input)),
    el('button', { type: 'reset', onclick: () => setTimeout(run) }, 'Clear filters'),
  );
  state.found = index.step.map((_, i) => i);
  status.textContent = `${index.step.length.toLocaleString('en')} of ${plural(index.step.length, 'rollout')}`;
  return el('div', null, form, status);
}

async function told(state) {
  state.prompts = state.prompts || JSON.parse(await unpack(`prompts${state.at}`));
  return state.prompts;
}
const promptText = input =>
  typeof input === 'string' ? input : (input || []).map(m => `${m.role}: ${m.content}`).join('\n');

async function promptsLike(state, text) {
  if (!text) return null;
  if (/^\d+$/.test(text)) return new Set([Number(text)]);
  const words = text.toLowerCase();
  return new Set(
    Object.entries(await told(state))
      .filter(([, json]) => promptText(JSON.parse(json)[0]).toLowerCase().includes(words))
      .map(([id]) => Number(id)),
  );
}

function list(state) {
  const { index } = state,
    space = el('div', { 'aria-hidden': 'true' });
  const node = el(
    'div',
    {
      class: 'list',
      id: 'list',
      role: 'listbox',
      tabindex: 0,
      'aria-label': 'Rollouts; arrow keys move, the chosen one is shown beside',
    },
    space,
  );
  const shown = new Map();
  const item = at => {
    const i = state.found[at],
      right = index.right[i],
      preview = el('span', { class: 'preview' }, '…');
    const made = el(
      'div',
      {
        class: 'item',
        role: 'option',
        id: `option-${at}`,
        'aria-selected': at === state.current ? 'true' : 'false',
        'aria-setsize': state.found.length,
        'aria-posinset': at + 1,
        style: `top:${at * ROW}px`,
        onclick: () => choose(at),
      },
      el(
        'span',
        { class: 'head' },
        el('span', null, `step ${index.step[i]}`),
        el('span', null, `prompt ${index.prompt[i]}`),
        el(
          'span',
          { class: right ? 'right' : 'wrong' },
          `${num(index.score[i])} ${right ? '✓' : '✗'}`,
          el('span', { class: 'unseen' }, right ? ' right' : ' wrong'),
        ),
        el('span', { class: 'soft' }, `${index.reasons[index.reason[i]]} · ${index.length[i]} tok`),
      ),
      preview,
    );
    state.row(i).then(row => {
      preview.textContent = row ? row.output.slice(0, 160).replace(/\s+/g, ' ') || '(nothing)' : '(text left out)';
    });
    return made;
  };
  const draw = () => {
    const first = Math.max(0, Math.floor(node.scrollTop / ROW) - 4),
      last = Math.min(state.found.length, Math.ceil((node.scrollTop + node.clientHeight) / ROW) + 4);
    for (const [at, made] of shown)
      if (at < first || at >= last) {
        made.remove();
        shown.delete(at);
      }
    for (let at = first; at < last; at++)
      if (!shown.has(at)) {
        const made = item(at);
        shown.set(at, made);
        node.append(made);
      }
  };
  const choose = at => {
    if (at < 0 || at >= state.found.length) return;
    shown.get(state.current)?.setAttribute('aria-selected', 'false');
    state.current = at;
    const top = at * ROW;
    if (top < node.scrollTop) node.scrollTop = top;
    if (top + ROW > node.scrollTop + node.clientHeight) node.scrollTop = top + ROW - node.clientHeight;
    draw();
    shown.get(at)?.setAttribute('aria-selected', 'true');
    node.setAttribute('aria-activedescendant', `option-${at}`);
    state.open(state.found[at]);
  };
  const page = () => Math.max(1, Math.floor(node.clientHeight / ROW) - 1);
  const KEYS = {
    ArrowDown: c => c + 1,
    ArrowUp: c => Math.max(c - 1, 0),
    PageDown: c => Math.min(c + page(), state.found.length - 1),
    PageUp: c => Math.max(c - page(), 0),
    Home: () => 0,
    End: () => state.found.length - 1,
  };
  node.addEventListener('keydown', event => {
    const move = KEYS[event.key];
    if (move) {
      event.preventDefault();
      choose(move(state.current));
    }
  });
  node.addEventListener('scroll', draw, { passive: true });
  const refresh = top => {
    if (top) node.scrollTop = 0;
    state.current = -1;
    node.removeAttribute('aria-activedescendant');
    shown.forEach(made => made.remove());
    shown.clear();
    space.style.height = `${state.found.length * ROW}px`;
    draw();
  };
  return { node, refresh };
}
