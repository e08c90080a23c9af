// What the run believed of its prompts, how right that was, and which it chose and why.
const BINS = ['0', ...Array.from({ length: 10 }, (_, i) => `${i / 10}–${(i + 1) / 10}`), '1'];
const WHY = {
  picked: 'picked for its worth',
  audit: 'drawn as an audit, whatever it is worth',
  reference: 'drawn for the reference set',
  continued: 'goes on from an earlier step',
  asked: 'lacks rollouts, so that its batch can be learned',
};

function drawCurriculum(runs) {
  byId('curriculum').append(
    ...runs.flatMap((run, at) => {
      const told = run.curriculum
        ? beliefs(run.curriculum)
        : [empty('The run has not written what its curriculum knows.')];
      return [heading(runs, run, at), ...told, ...choices(run)].filter(Boolean);
    }),
    ...[
      el(
        'div',
        { class: 'grid' },
        charts(runs, [
          ['curriculum/calibration_error', 'Calibration error', 'success rate'],
          ['curriculum/brier', 'Brier score of “mixed”', ''],
          ['curriculum/coverage', 'Prompts seen', 'share', [0, 1]],
        ]),
      ),
    ],
  );
}

function beliefs(c) {
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
        title: 'What is believed of all prompts now',
        unit: 'share of the prompts',
        note: 'posterior mean of the success rate',
        unitX: 'success rate',
        labels: BINS,
        parts: [{ name: 'share', values: c.prior_D, color: 'var(--run0)' }],
        words: `Mean about ${percent(mean)}; ${percent(c.prior_D[0])} at 0, ${percent(c.prior_D[11])} at 1.`,
      }),
      reliability(c),
    ),
    later('Success rates of the visited groups, by stretch of steps', () =>
      table(
        'Share of the groups by their success rate',
        ['steps', ...BINS],
        windows,
        BINS.map((_, i) => i + 1),
      ),
    ),
    later('Prompts likeliest, and least likely, to be answered both rightly and wrongly', () =>
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
    svg('text', { x: sx(0.74), y: sy(0.62), 'text-anchor': 'start' }, 'just right'),
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
    words:
      c.reliability
        .map(([p, o, n]) => `predicted ${percent(p)}, observed ${percent(o)} in ${plural(n, 'group')}`)
        .join('; ') || 'No group has come back.',
    numbers: () =>
      table(
        'Predicted and observed success of the latest groups',
        ['predicted', 'observed', 'groups'],
        c.reliability.map(([p, o, n]) => [num(p), num(o), n]),
        [0, 1, 2],
      ),
  });
}

function choices(run) {
  const told = run.choices,
    latest = told.latest,
    total = Object.values(told.why).reduce((s, n) => s + n, 0);
  if (!total) return [empty('The run has not written which prompts it chose.')];
  const rows = Object.entries(told.why)
    .filter(([, n]) => n > 0)
    .sort((a, b) => b[1] - a[1])
    .map(([why, n]) => [WHY[why] || why, n.toLocaleString('en'), percent(n / total)]);
  return [
    el('h3', null, 'Which prompts were chosen, and why'),
    el(
      'div',
      { class: 'pair' },
      el('div', null, table('Reasons of all choices', ['reason', 'times', 'share'], rows, [1, 2])),
      heatChart({
        title: 'How hard the chosen prompts were thought to be',
        unit: 'predicted success rate',
        data: told.success,
        what: 'prompts',
      }),
    ),
    chosen(latest, told.count),
  ].filter(Boolean);
}

function inWords(c, i) {
  const worth =
    c.worth[i] === null ? '' : `: worth ${num(c.worth[i])}, where the mean candidate has ${num(c.mean_worth[i])}`;
  const seen = c.visits[i] ? `seen ${plural(c.visits[i], 'time')} before` : 'never seen before';
  return `${WHY[c.why[i]] || c.why[i]}${worth}; expected to be right ${percent(c.success[i])} of the time, mixed with probability ${percent(c.mixed[i])}; ${seen}`;
}

function chosen(c, count) {
  const PAGE = 12,
    box = el('div'),
    status = el('p', { class: 'soft', 'aria-live': 'polite' });
  const prompt = el('input', { type: 'number', min: 0, inputmode: 'numeric' }),
    why = el(
      'select',
      null,
      el('option', { value: '' }, 'any'),
      [...new Set(c.why)].map(w => el('option', { value: w }, WHY[w] || w)),
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
  const show = () => {
    const found = c.step
      .map((_, i) => i)
      .reverse()
      .filter(
        i => (prompt.value === '' || c.prompt[i] === Number(prompt.value)) && (!why.value || c.why[i] === why.value),
      );
    page = Math.max(0, Math.min(page, Math.ceil(found.length / PAGE) - 1));
    box.replaceChildren(
      table(
        'Choices, the latest first',
        ['step', 'prompt', 'why'],
        found.slice(page * PAGE, (page + 1) * PAGE).map(i => [c.step[i], c.prompt[i], inWords(c, i)]),
        [0, 1],
      ),
    );
    status.textContent = `${plural(found.length, 'choice')} of the latest ${c.step.length.toLocaleString('en')} (${count.toLocaleString('en')} in all); page ${page + 1} of ${Math.max(1, Math.ceil(found.length / PAGE))}.`;
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
      el('label', null, 'Prompt number', prompt),
      el('label', null, 'Reason', why),
      newer,
      older,
    ),
    status,
    box,
  );
}
