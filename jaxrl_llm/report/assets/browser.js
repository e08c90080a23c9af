// The rollout browser: filters, a list that only holds the visible items, and the selected rollout in full.
const ITEM_HEIGHT = 56; // as .item in page.css
let goTo = null; // (run, rollout) shows a rollout; null until the list is drawn

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
  let shown = 0,
    show = await browse(0, body, runs[0].examples.good, runs[0].weights);
  const change = async at => {
    shown = at;
    show = await browse(at, body, runs[at].examples.good, runs[at].weights);
  };
  select.addEventListener('change', () => change(Number(select.value)));
  goTo = async (at, i) => {
    if (at !== shown) {
      select.value = String(at);
      await change(at);
    }
    section.scrollIntoView();
    if (show) show(i);
    byId('list')?.focus({ preventScroll: true });
  };
}

// Reads rollouts by index; unpacked files are cached, at most 40.
function rolloutReader(at, index) {
  const cache = new Map(),
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
    if (!index.has_text[file]) return null;
    if (!cache.has(file)) {
      cache.set(
        file,
        unpack(`file${at}-${file}`).then(text => text.split('\n')),
      );
      if (cache.size > 40) cache.delete(cache.keys().next().value);
    }
    return JSON.parse((await cache.get(file))[i - start[file]]);
  };
  read.hasText = i => index.has_text[fileOf(i)];
  return read;
}

// Draws the browser of a run with the rollout `first`, if there is one; returns a function that shows a rollout.
async function browse(at, body, first, weights) {
  const index = JSON.parse(await unpack(`index${at}`)),
    total = index.step.length;
  if (!total) {
    body.replaceChildren(softText('No rollout has been recorded yet.'));
    return null;
  }
  const state = { at, index, row: rolloutReader(at, index), matches: [], current: -1, prompts: null, color: 'logp' };
  state.weights = weights;
  const view = list(state),
    detail = el(
      'div',
      { class: 'detail', id: 'detail', role: 'region', 'aria-label': 'Selected rollout' },
      softText('Select a rollout in the list.'),
    );
  state.open = i => showRollout(state, i, detail);
  const omitted = index.files.reduce((s, n, f) => s + (index.has_text[f] ? 0 : n), 0);
  body.replaceChildren(
    filters(state, view),
    omitted
      ? softText(
          `The texts of ${plural(omitted, 'rollout')} are omitted to keep this page small; they are in the run's rollouts folder.`,
        )
      : '',
    el('div', { class: 'browser' }, el('div', null, view.node), detail),
  );
  view.refresh(false, first ? first.index : 0);
  return view.show;
}

function filters(state, view) {
  const { index } = state,
    first = index.step.reduce((a, b) => Math.min(a, b), Infinity),
    last = index.step.reduce((a, b) => Math.max(a, b), 0);
  const number = (id, attributes) => el('input', { type: 'number', id, inputmode: 'decimal', ...attributes });
  const field = {
    from: number('f-from', { min: first, max: last, placeholder: first }),
    to: number('f-to', { min: first, max: last, placeholder: last }),
    prompt: el('input', { type: 'search', id: 'f-prompt', placeholder: 'number or text' }),
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
    right: 'Correctness',
    order: 'Order',
  };
  const status = el('p', { id: 'count', role: 'status' });
  const run = async () => {
    const prompts = await promptsMatching(state, field.prompt.value.trim()),
      bound = (f, fallback) => (f.value === '' || Number.isNaN(f.valueAsNumber) ? fallback : f.valueAsNumber);
    const from = bound(field.from, -Infinity),
      to = bound(field.to, Infinity),
      low = bound(field.low, -Infinity),
      high = bound(field.high, Infinity);
    const reason = field.reason.value === '' ? -1 : Number(field.reason.value),
      right = field.right.value === '' ? -1 : Number(field.right.value),
      matches = [];
    for (let i = 0; i < index.step.length; i++) {
      if (
        index.step[i] >= from &&
        index.step[i] <= to &&
        index.score[i] >= low &&
        index.score[i] <= high &&
        (reason < 0 || index.reason[i] === reason) &&
        (right < 0 || index.right[i] === right) &&
        (!prompts || prompts.has(index.prompt[i]))
      )
        matches.push(i);
    }
    const by = {
      new: (a, b) => index.step[b] - index.step[a] || a - b,
      high: (a, b) => index.score[b] - index.score[a] || a - b,
      low: (a, b) => index.score[a] - index.score[b] || a - b,
      long: (a, b) => index.length[b] - index.length[a] || a - b,
    }[field.order.value];
    state.matches = by ? matches.sort(by) : matches;
    status.textContent = `${matches.length.toLocaleString('en')} of ${plural(index.step.length, 'rollout')}`;
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
  state.matches = index.step.map((_, i) => i);
  status.textContent = `${index.step.length.toLocaleString('en')} of ${plural(index.step.length, 'rollout')}`;
  return el('div', null, form, status);
}

async function loadPrompts(state) {
  state.prompts = state.prompts || JSON.parse(await unpack(`prompts${state.at}`));
  return state.prompts;
}
const promptText = input =>
  typeof input === 'string' ? input : (input || []).map(m => `${m.role}: ${m.content}`).join('\n');

async function promptsMatching(state, text) {
  if (!text) return null;
  if (/^\d+$/.test(text)) return new Set([Number(text)]);
  const words = text.toLowerCase();
  return new Set(
    Object.entries(await loadPrompts(state))
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
      'aria-label': 'Rollouts; arrow keys move the selection, the selected rollout is shown next to the list',
    },
    space,
  );
  const visible = new Map();
  const item = at => {
    const i = state.matches[at],
      right = index.right[i],
      preview = el('span', { class: 'preview' }, '…');
    const node = el(
      'div',
      {
        class: 'item',
        role: 'option',
        id: `option-${at}`,
        'aria-selected': at === state.current ? 'true' : 'false',
        'aria-setsize': state.matches.length,
        'aria-posinset': at + 1,
        style: `top:${at * ITEM_HEIGHT}px`,
        onclick: () => select(at),
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
          el('span', { class: 'visually-hidden' }, right ? ' right' : ' wrong'),
        ),
        el('span', { class: 'soft' }, `${index.reasons[index.reason[i]]} · ${index.length[i]} tok`),
      ),
      preview,
    );
    state.row(i).then(row => {
      preview.textContent = row ? row.output.slice(0, 160).replace(/\s+/g, ' ') || '(empty)' : '(text omitted)';
    });
    return node;
  };
  const draw = () => {
    const first = Math.max(0, Math.floor(node.scrollTop / ITEM_HEIGHT) - 4),
      last = Math.min(state.matches.length, Math.ceil((node.scrollTop + node.clientHeight) / ITEM_HEIGHT) + 4);
    for (const [at, option] of visible)
      if (at < first || at >= last) {
        option.remove();
        visible.delete(at);
      }
    for (let at = first; at < last; at++)
      if (!visible.has(at)) {
        const option = item(at);
        visible.set(at, option);
        node.append(option);
      }
  };
  const select = at => {
    if (at < 0 || at >= state.matches.length) return;
    visible.get(state.current)?.setAttribute('aria-selected', 'false');
    state.current = at;
    const top = at * ITEM_HEIGHT;
    if (top < node.scrollTop) node.scrollTop = top;
    if (top + ITEM_HEIGHT > node.scrollTop + node.clientHeight) node.scrollTop = top + ITEM_HEIGHT - node.clientHeight;
    draw();
    visible.get(at)?.setAttribute('aria-selected', 'true');
    node.setAttribute('aria-activedescendant', `option-${at}`);
    state.open(state.matches[at]);
  };
  const page = () => Math.max(1, Math.floor(node.clientHeight / ITEM_HEIGHT) - 1);
  const KEYS = {
    ArrowDown: c => c + 1,
    ArrowUp: c => Math.max(c - 1, 0),
    PageDown: c => Math.min(c + page(), state.matches.length - 1),
    PageUp: c => Math.max(c - page(), 0),
    Home: () => 0,
    End: () => state.matches.length - 1,
  };
  node.addEventListener('keydown', event => {
    const move = KEYS[event.key];
    if (move) {
      event.preventDefault();
      select(move(state.current));
    }
  });
  node.addEventListener('scroll', draw, { passive: true });
  // Selects a rollout of the list, and opens one that the filters hide.
  const show = i => {
    const at = state.matches.indexOf(i);
    if (at >= 0) select(at);
    else state.open(i);
  };
  // The rollout `i` is selected, else the first one.
  const refresh = (top, i = -1) => {
    if (top) node.scrollTop = 0;
    state.current = -1;
    node.removeAttribute('aria-activedescendant');
    visible.forEach(option => option.remove());
    visible.clear();
    space.style.height = `${state.matches.length * ITEM_HEIGHT}px`;
    draw();
    select(Math.max(state.matches.indexOf(i), 0));
  };
  return { node, refresh, show };
}
