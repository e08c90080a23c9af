// The posterior over success rates, its calibration, and the selected prompts with the reasons.
const BINS = ['0', ...Array.from({ length: 10 }, (_, i) => `${i / 10}–${(i + 1) / 10}`), '1'];
const REASONS = {
  picked: 'selected by utility',
  audit: 'audit: drawn regardless of utility',
  reference: 'drawn for the reference set',
  continued: 'continues from an earlier step',
  asked: 'more rollouts needed to complete a batch',
};

function drawCurriculum(runs) {
  byId('curriculum').append(
    ...runs.flatMap((run, at) => {
      const figures = run.curriculum
        ? posterior(run.curriculum)
        : [softText('This run has no curriculum.json yet.')];
      return [heading(runs, run, at), ...figures, ...choices(run, at)].filter(Boolean);
    }),
    ...chartGrid(runs, [
      ['curriculum/calibration_error', 'Calibration error', 'success rate'],
      ['curriculum/brier', 'Brier score of “mixed”', ''],
      ['curriculum/coverage', 'Visited prompts', 'share', [0, 1]],
    ]),
  );
}

function posterior(c) {
  const mean = c.prior_D.reduce(
    (s, v, i) => s + v * [0, ...Array.from({ length: 10 }, (_, j) => (j + 0.5) / 10), 1][i],
    0,
  );
  const windows = c.windows.map((w, i) => [span(w), ...c.difficulty_WxD[i].map(percent)]);
  return [
    el(
      'div',
      { class: 'grid' },
      columnChart({
        title: 'Estimated success rate of all prompts',
        unit: 'share of the prompts',
        note: 'posterior means',
        unitX: 'success rate',
        labels: BINS,
        parts: [{ name: 'share', values: c.prior_D, color: 'var(--run0)' }],
        description: `Mean about ${percent(mean)}; ${percent(c.prior_D[0])} at 0, ${percent(c.prior_D[11])} at 1.`,
      }),
      reliability(c),
    ),
    later('Success rates of the visited groups over time', () =>
      table(
        'Share of the groups by their success rate',
        ['steps', ...BINS],
        windows,
        BINS.map((_, i) => i + 1),
      ),
    ),
    later('Most and least learnable prompts (probability of a mixed group)', () =>
      el('div', null, prompts('Most learnable prompts', c.most), prompts('Least learnable prompts', c.least)),
    ),
    c.suspects.length > 0 &&
      later(`${plural(c.suspects.length, 'label')} that rollouts contradict`, () =>
        table(
          'Suspect labels',
          ['prompt', 'label', 'majority', 'share', 'question'],
          c.suspects.map(s => [s.prompt, s.given, s.majority, percent(s.share), s.question]),
          [0, 3],
        ),
      ),
  ].filter(Boolean);
}

const prompts = (title, rows) =>
  table(
    title,
    ['prompt', 'P(mixed)', 'success', 'visits', 'question'],
    rows.map(r => [r.prompt, percent(r.mixed), percent(r.success), r.visits, r.question]),
    [0, 1, 2, 3],
  );

function reliability(c) {
  const most = Math.max(...c.reliability.map(r => r[2]), 1);
  const draw = (sx, sy) => [
    svg('line', { class: 'cross', x1: sx(0), y1: sy(0), x2: sx(1), y2: sy(1) }),
    svg('text', { x: sx(0.74), y: sy(0.62), 'text-anchor': 'start' }, 'calibrated'),
    c.reliability.map(([p, o, n]) =>
      svg('circle', {
        cx: sx(p),
        cy: sy(o),
        r: 2.5 + 7 * Math.sqrt(n / most),
        fill: 'var(--run0)',
        'fill-opacity': 0.55,
        stroke: 'var(--run0)',
      }),
    ),
  ];
  return figure({
    title: 'Reliability: predicted and observed success',
    note: `area: groups; calibration error ${num(c.error)}, Brier score of “mixed” ${num(c.brier)}`,
    x: [0, 1],
    y: [0, 1.04],
    unitX: 'predicted success rate',
    unitY: 'observed success rate',
    draw,
    description:
      c.reliability
        .map(([p, o, n]) => `predicted ${percent(p)}, observed ${percent(o)} in ${plural(n, 'group')}`)
        .join('; ') || 'No group has been graded yet.',
    numbers: () =>
      table(
        'Predicted and observed success of the latest groups',
        ['predicted', 'observed', 'groups'],
        c.reliability.map(([p, o, n]) => [num(p), num(o), n]),
        [0, 1, 2],
      ),
  });
}

function choices(run, at) {
  const summary = run.choices,
    latest = summary.latest,
    total = Object.values(summary.why).reduce((s, n) => s + n, 0);
  if (!total) return [softText('This run has no choices.jsonl yet.')];
  const rows = Object.entries(summary.why)
    .filter(([, n]) => n > 0)
    .sort((a, b) => b[1] - a[1])
    .map(([why, n]) => [REASONS[why] || why, n.toLocaleString('en'), percent(n / total)]);
  return [
    el('h3', null, 'Selected prompts'),
    el(
      'div',
      { class: 'pair' },
      el('div', null, table('Reasons of all selections', ['reason', 'times', 'share'], rows, [1, 2])),
      heatChart({
        title: 'Predicted success rate of the selected prompts',
        unit: 'predicted success rate',
        data: summary.success,
        noun: 'prompts',
      }),
    ),
    choiceTable(latest, summary.count, at),
  ].filter(Boolean);
}

function describeChoice(c, i) {
  const worth =
    c.worth[i] === null ? '' : `: utility ${num(c.worth[i])}, mean of the candidates ${num(c.mean_worth[i])}`;
  const visits = c.visits[i] ? `visited ${plural(c.visits[i], 'time')} before` : 'not visited before';
  return `${REASONS[c.why[i]] || c.why[i]}${worth}; predicted success rate ${percent(c.success[i])}, probability of a mixed group ${percent(c.mixed[i])}; ${visits}`;
}

// The latest selections by question; the texts are unpacked when the table is drawn.
function choiceTable(c, count, at) {
  const PAGE = 12,
    state = { at, prompts: null },
    box = el('div'),
    status = el('p', { class: 'soft', 'aria-live': 'polite' });
  const prompt = el('input', { type: 'search', placeholder: 'number or text' }),
    why = el(
      'select',
      null,
      el('option', { value: '' }, 'any'),
      [...new Set(c.why)].map(w => el('option', { value: w }, REASONS[w] || w)),
    );
  let page = 0;
  const button = (name, by) =>
    el(
      'button',
      {
        type: 'button',
        onclick: () => {
          page += by;
          show();
        },
      },
      name,
    );
  const newer = button('Newer', -1),
    older = button('Older', 1);
  const question = (texts, i) => {
    const known = texts[c.prompt[i]],
      text = known ? promptText(JSON.parse(known)[0]) : '(no rollout of it is recorded)';
    return [shortened(text, 240), el('span', { class: 'soft' }, ` (prompt ${c.prompt[i]})`)];
  };
  const show = async () => {
    const texts = await loadPrompts(state),
      wanted = await promptsMatching(state, prompt.value.trim());
    const found = c.step
      .map((_, i) => i)
      .reverse()
      .filter(i => (!wanted || wanted.has(c.prompt[i])) && (!why.value || c.why[i] === why.value));
    page = Math.max(0, Math.min(page, Math.ceil(found.length / PAGE) - 1));
    box.replaceChildren(
      table(
        'Selections, latest first',
        ['step', 'question', 'reason'],
        found.slice(page * PAGE, (page + 1) * PAGE).map(i => [c.step[i], question(texts, i), describeChoice(c, i)]),
        [0],
      ),
    );
    status.textContent = `${plural(found.length, 'selection')} of the latest ${c.step.length.toLocaleString('en')} (${count.toLocaleString('en')} in all); page ${page + 1} of ${Math.max(1, Math.ceil(found.length / PAGE))}.`;
    newer.disabled = page === 0;
    older.disabled = (page + 1) * PAGE >= found.length;
  };
  for (const field of [prompt, why])
    field.addEventListener('input', () => {
      page = 0;
      show();
    });
  show();
  return el(
    'div',
    null,
    el(
      'form',
      { onsubmit: e => e.preventDefault() },
      el('label', null, 'Question', prompt),
      el('label', null, 'Reason', why),
      newer,
      older,
    ),
    status,
    box,
  );
}
