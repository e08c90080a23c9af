// What a trace says of the device: time by part and kind of operation, and how far each half is from what the chip can do.
const HALVES = { update: 'update', generate: 'generation', other: 'neither', all: 'either' };

function drawDevice(runs) {
  byId('device').append(
    ...runs.flatMap((run, at) =>
      [heading(runs, run, at), ...(run.device ? deviceOf(run.device) : [untraced()])].filter(Boolean),
    ),
  );
}

const untraced = () => empty('No step was traced; --config.monitoring.profile.steps=10:12 traces two of them, and then this is filled.');
const rate = (x, unit) => (x >= 1e12 ? `${num(x / 1e12)} T${unit}` : `${num(x / 1e9)} G${unit}`);

function deviceOf(told) {
  const parts = ['update', 'generate', 'other'].filter(p => told.parts[p]),
    kinds = [...new Set(parts.flatMap(p => Object.keys(told.parts[p])))],
    of = (p, k) => told.parts[p][k] || 0,
    sum = k => parts.reduce((s, p) => s + of(p, k), 0),
    whole = kinds.reduce((s, k) => s + sum(k), 0);
  kinds.sort((a, b) => sum(b) - sum(a));
  const bar = x =>
    el('span', { class: 'bar', style: `width:${((7 * x) / whole).toFixed(2)}rem;background:var(--run0)` });
  const row = (name, value) => [
    name,
    ...parts.map(p => seconds(value(p))),
    seconds(parts.reduce((s, p) => s + value(p), 0)),
    percent(parts.reduce((s, p) => s + value(p), 0) / whole),
  ];
  const rows = kinds.map(k => [...row(k, p => of(p, k)), bar(sum(k))]);
  rows.push([...row('all', p => kinds.reduce((s, k) => s + of(p, k), 0)), '']);
  const numeric = [...parts, 'all', 'share'].map((_, i) => i + 1);
  return [
    el(
      'p',
      null,
      `Traced: ${span(told.steps)}, on ${told.devices} × ${told.kind || 'a device'}. A step took ${seconds(told.span)}; ` +
        `an operation ran in ${percent(told.busy.all / told.span)} of it.`,
    ),
    table(
      'Time of one device and step, added up over its operations',
      ['kind of operation', ...parts.map(p => HALVES[p]), 'all', 'share', 'as a bar'],
      rows,
      numeric,
    ),
    ...floors(told),
    later('The operations that took most', () =>
      table(
        'Of one device and step',
        ['operation', 'kind', 'part', 'time', 'times'],
        told.top.map(([name, kind, part, s, times]) => [name, kind, HALVES[part], seconds(s), num(times)]),
        [3, 4],
      ),
    ),
  ].filter(Boolean);
}

const seconds = s =>
  s === 0 ? '–' : s < 0.95e-3 ? `${num(1e6 * s)} µs` : s < 0.95 ? `${num(1e3 * s)} ms` : `${num(s)} s`;

function floors(told) {
  if (!told.floors.length) return [];
  const known = told.floors.some(one => one.seconds !== null);
  const head = ['half of the step', 'took', 'arithmetic', 'memory read'],
    rows = told.floors.map(one => [
      HALVES[one.part],
      seconds(one.measured),
      rate(one.flops / one.measured, 'FLOP/s'),
      one.bytes === null ? '–' : rate(one.bytes / one.measured, 'B/s'),
      ...(known ? [seconds(one.seconds), `${num(one.measured / one.seconds)} ×`] : []),
    ]);
  return [
    table(
      'Distance to the roofline: of one device and step',
      known ? [...head, 'at best', 'that many times'] : head,
      rows,
      [1, 2, 3, 4, 5],
    ),
    empty(
      known
        ? 'At best: the operations of the update by the peak; of generation the weights and caches of every round by the bandwidth, or its operations by the peak, and the prompts’ by the peak. Links between devices are not in it.'
        : `Unknown chip: what “${told.kind}” can do at best is not known to this program, so that these are rates reached, and no distances.`,
    ),
  ];
}
