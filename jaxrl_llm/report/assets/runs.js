// The page of many runs: a table that can be filtered and sorted, curves and config difference of the chosen runs.
const MOST_CHOSEN = 6; // as many as there are colors
const HEALTH = { failing: '✗ failing', recovered: '! failed earlier', passing: '✓ healthy', not_recorded: '? not recorded' };
const minutes = m => (m < 90 ? `${num(m)} min` : `${num(m / 60)} h`);
const ends = run => run.evaluations.map(e => Object.entries(e.measures)[0] || null);
const accuracy = (run, at) => {
  const found = ends(run)[at];
  return found ? found[1][0] : null;
};
const accuracyText = (run, at) => {
  const found = ends(run)[at];
  return found ? `${share(found[1][0])} ${interval(found[1])}`.trim() : '–';
};

// [title, sort key, cell, whether it is a number]
const COLUMNS = [
  ['run', run => run.name, run => (run.link ? el('a', { href: run.link.split('/').map(encodeURIComponent).join('/') }, run.name) : run.name), false],
  ['model', run => run.model, run => run.model, false],
  ['steps', run => run.done, run => `${run.done.toLocaleString('en')} of ${run.steps.toLocaleString('en')}`, true],
  ['accuracy before', run => accuracy(run, 0), run => accuracyText(run, 0), true],
  ['after', run => accuracy(run, 1), run => accuracyText(run, 1), true],
  ['reward, last tenth', run => run.reward, run => num(run.reward), true],
  ['time', run => run.minutes, run => minutes(run.minutes), true],
  ['started', run => run.started, run => run.started.replace('T', ' ').replace('Z', ''), false],
  ['health', run => Object.keys(HEALTH).indexOf(run.state), run => healthCell(run), false],
];

function healthCell(run) {
  const kind = { failing: 'wrong', passing: 'right' }[run.state];
  return el('span', { class: kind, title: run.health }, HEALTH[run.state]);
}

// Words that must all occur in the name, the model or a field of the config, as 'field=value'.
function matches(run, words) {
  run.text = run.text || [run.name, run.model, ...Object.entries(run.config).map(([k, v]) => `${k}=${v.replace(/"/g, '')}`)].join('\n').toLowerCase();
  return words.every(word => run.text.includes(word));
}

function drawList(runs, state, onChoice) {
  const status = el('p', { id: 'count', role: 'status' }),
    body = el('tbody');
  const filter = el('input', { type: 'search', id: 'filter', placeholder: 'words, or field=value' });
  const heads = COLUMNS.map(([title, , , numeric], at) => {
    const head = el(
      'th',
      { scope: 'col', class: numeric ? 'num' : null },
      el('button', { type: 'button', class: 'sort', onclick: () => sortBy(at) }, title, el('span', { 'aria-hidden': 'true' })),
    );
    return head;
  });
  const sortBy = at => {
    state.descending = state.column === at ? !state.descending : COLUMNS[at][3];
    state.column = at;
    show();
  };
  const order = (a, b) => {
    const key = COLUMNS[state.column][1],
      [x, y] = [key(a), key(b)];
    if (x === y) return 0;
    if (x === null || x === undefined) return 1; // what is not known comes last in either order
    if (y === null || y === undefined) return -1;
    const before = typeof x === 'string' ? x.localeCompare(y, 'en', { numeric: true }) : x - y;
    return state.descending ? -before : before;
  };
  const rowOf = run =>
    el(
      'tr',
      null,
      el(
        'td',
        null,
        el('input', {
          type: 'checkbox',
          'aria-label': `Compare ${run.name}`,
          checked: state.chosen.includes(run),
          onchange: event => {
            state.chosen = event.target.checked ? [...state.chosen, run].slice(-MOST_CHOSEN) : state.chosen.filter(r => r !== run);
            show();
            onChoice();
          },
        }),
      ),
      COLUMNS.map(([, , cell, numeric]) => el('td', { class: numeric ? 'num' : null }, cell(run))),
    );
  const show = () => {
    const words = filter.value.toLowerCase().split(/\s+/).filter(Boolean),
      found = runs.filter(run => matches(run, words)).sort(order),
      focused = document.activeElement?.getAttribute('aria-label');
    heads.forEach((head, at) => {
      const sorted = at === state.column ? (state.descending ? 'descending' : 'ascending') : null;
      if (sorted) head.setAttribute('aria-sort', sorted);
      else head.removeAttribute('aria-sort');
      head.querySelector('span').textContent = { ascending: ' ▲', descending: ' ▼' }[sorted] || '';
    });
    body.replaceChildren(...found.map(rowOf));
    if (focused) [...body.querySelectorAll('input')].find(x => x.getAttribute('aria-label') === focused)?.focus();
    status.textContent = `${found.length.toLocaleString('en')} of ${plural(runs.length, 'run')}; ${plural(state.chosen.length, 'run')} chosen to compare, at most ${MOST_CHOSEN}.`;
  };
  filter.addEventListener('input', show);
  byId('list').append(
    el('form', { onsubmit: e => e.preventDefault() }, el('label', null, 'Filter', filter)),
    status,
    el(
      'div',
      { class: 'scroll wide', tabindex: 0, role: 'group', 'aria-label': 'Runs' },
      el(
        'table',
        null,
        el('caption', null, 'Accuracies are of the held-out prompts, with 95 % intervals'),
        el('thead', null, el('tr', null, el('th', { scope: 'col' }, 'compare'), heads)),
        body,
      ),
    ),
  );
  show();
}

const RUN_CURVES = [
  ['critic/score/mean', 'Reward', 'mean over the rollouts'],
  ['curriculum/observed_success', 'Success rate', 'share'],
  ['response_length/mean', 'Completion length', 'tokens'],
];
function drawCurves(chosen, box) {
  redraws.length = 0; // of charts that are replaced
  const drawn = RUN_CURVES.map(([name, title, unit]) =>
    lineChart({
      title,
      unit,
      note: name,
      curves: chosen.map((run, at) => run.curves[name] && { name: run.name, at, ...run.curves[name] }),
    }),
  ).filter(Boolean);
  box.replaceChildren(
    drawn.length ? el('div', { class: 'grid' }, drawn) : el('p', { class: 'soft' }, 'Choose runs in the table.'),
  );
}

function drawDifference(chosen, box) {
  const names = [...new Set(chosen.flatMap(run => Object.keys(run.config)))].sort(),
    differ = names.filter(n => n !== 'fingerprint' && new Set(chosen.map(run => run.config[n])).size > 1),
    text = chosen.length < 2 ? 'Choose at least two runs in the table.' : 'The configs of these runs are equal.';
  box.replaceChildren(
    differ.length
      ? table(
          'Fields in which the chosen runs differ',
          ['field', ...chosen.map(run => run.name)],
          differ.map(n => [n, ...chosen.map(run => run.config[n] ?? 'unset')]),
        )
      : el('p', { class: 'soft' }, text),
  );
}

async function start() {
  const { runs } = JSON.parse(await unpack('runs-data'));
  const state = { column: 7, descending: true, chosen: runs.slice(0, 2) },
    boxes = [el('div', { 'aria-live': 'polite' }), el('div', { 'aria-live': 'polite' })];
  byId('curves').append(boxes[0]);
  byId('difference').append(boxes[1]);
  const compare = () => {
    drawCurves(state.chosen, boxes[0]);
    drawDifference(state.chosen, boxes[1]);
  };
  drawList(runs, state, compare);
  compare();
  document.documentElement.dataset.ready = '1';
}
start().catch(error => {
  const box = byId('error');
  box.hidden = false;
  box.textContent = `The page could not be drawn: ${error.message}`;
  console.error(error);
});
