// Measures with intervals over the steps of a run, on one chart; and their texts.
const share = x => (Number.isFinite(x) ? `${(100 * x).toFixed(1)} %`.replace('-', '−') : '–');
const interval = ([, low, high]) =>
  Number.isFinite(low) && Number.isFinite(high) ? `[${(100 * low).toFixed(1)}, ${(100 * high).toFixed(1)}]` : '';
const points = x => `${x < 0 ? '−' : '+'}${Math.abs(100 * x).toFixed(1)} points`;

// greedy → 'greedy'; mean@4 → 'mean of 4 samples'.
const MEASURES = {
  mean: samples => `mean of ${samples}`,
  pass: samples => `at least one of ${samples} is right`,
  best: samples => `best of ${samples}`,
  maj: samples => `majority of ${samples}`,
  vote: samples => `weighted vote of ${samples}`,
};
function measureName(name) {
  const [kind, n] = name.split('@');
  return n && MEASURES[kind] ? MEASURES[kind](plural(Number(n), 'sample')) : name;
}

// series: [{ name, at, points: [{ step, value: [mean, low, high] }] }]; `at` selects color and dashes.
function intervalChart({ title, note, series }) {
  series = series.filter(s => s.points.length);
  if (!series.length) return null;
  const values = series.flatMap(s => s.points.flatMap(p => p.value)).filter(Number.isFinite),
    steps = series.flatMap(s => s.points.map(p => p.step));
  const y = extent(values, true);
  if (Math.max(...values) <= 1) y[1] = Math.min(y[1], 1.02);
  const first = Math.min(...steps),
    last = Math.max(...steps),
    room = (last - first) * 0.04 || 0.5;
  const draw = (sx, sy) =>
    series.map((s, k) => {
      const color = runColor(s.at),
        shift = 6 * (k - (series.length - 1) / 2), // intervals of one step stand beside each other
        at = p => sx(p.step) + shift;
      return [
        s.points.length > 1 &&
          svg('path', {
            d: path(s.points.map(p => [at(p), sy(p.value[0])])),
            fill: 'none',
            stroke: color,
            'stroke-width': 2,
            'stroke-dasharray': DASHES[s.at % 6],
          }),
        s.points.flatMap(p => {
          const [mean, low, high] = p.value;
          const bar = Number.isFinite(low) && Number.isFinite(high);
          return [
            bar && svg('line', { x1: at(p), x2: at(p), y1: sy(low), y2: sy(high), stroke: color, 'stroke-width': 1.5 }),
            bar &&
              [low, high].map(v =>
                svg('line', { x1: at(p) - 3, x2: at(p) + 3, y1: sy(v), y2: sy(v), stroke: color, 'stroke-width': 1.5 }),
              ),
            svg('circle', { cx: at(p), cy: sy(mean), r: 3.5, fill: color }),
          ];
        }),
      ];
    });
  const text = value => `${share(value[0])} ${interval(value)}`.trim();
  const describe = s => {
    const a = s.points[0],
      b = s.points[s.points.length - 1];
    return `${s.name}: ${text(a.value)} at step ${a.step}${b === a ? '' : `, ${text(b.value)} at step ${b.step}`}`;
  };
  const read = v => {
    const step = steps.reduce((best, s) => (Math.abs(s - v) < Math.abs(best - v) ? s : best), steps[0]);
    const found = series.flatMap(s => s.points.filter(p => p.step === step).map(p => `${s.name} ${text(p.value)}`));
    return { x: step, text: `step ${step}: ${found.join(' · ')}` };
  };
  const node = figure({
    title,
    note: [note, 'bars: 95 % intervals over the prompts'].filter(Boolean).join('; '),
    x: [first - room, last + room],
    y,
    unitX: 'step',
    unitY: 'share',
    description: series.map(describe).join('; '),
    draw,
    read,
    numbers: () =>
      table(
        title,
        ['curve', 'step', 'mean', 'low', 'high'],
        series.flatMap(s => s.points.map(p => [s.name, num(p.step), ...p.value.map(v => num(v))])),
        [1, 2, 3, 4],
      ),
  });
  const legend = el(
    'p',
    { class: 'facts' },
    series.map(s => el('span', null, runKey(s.at), ' ', s.name)),
  );
  node.children[0].after(legend);
  return node;
}
