// Device time of the traced steps by part and kind of operation, and the distance of each half to the roofline.
const PART_NAMES = { update: 'update', generate: 'generation', other: 'other', all: 'all' };

function drawDevice(runs) {
  byId('device').append(
    ...runs.flatMap((run, at) =>
      [heading(runs, run, at), ...(run.device ? deviceTables(run.device) : [untraced()])].filter(Boolean),
    ),
  );
}

const untraced = () =>
  softText('No step was traced. --config.monitoring.profile.steps=10:12 traces two steps for this section.');
const rate = (x, unit) => (x >= 1e12 ? `${num(x / 1e12)} T${unit}` : `${num(x / 1e9)} G${unit}`);

function deviceTables(device) {
  const parts = ['update', 'generate', 'other'].filter(p => device.parts[p]),
    kinds = [...new Set(parts.flatMap(p => Object.keys(device.parts[p])))],
    of = (p, k) => device.parts[p][k] || 0,
    sum = k => parts.reduce((s, p) => s + of(p, k), 0),
    totalSeconds = kinds.reduce((s, k) => s + sum(k), 0);
  kinds.sort((a, b) => sum(b) - sum(a));
  const bar = x =>
    el('span', { class: 'bar', style: `width:${((7 * x) / totalSeconds).toFixed(2)}rem;background:var(--run0)` });
  const row = (name, value) => [
    name,
    ...parts.map(p => seconds(value(p))),
    seconds(parts.reduce((s, p) => s + value(p), 0)),
    percent(parts.reduce((s, p) => s + value(p), 0) / totalSeconds),
  ];
  const rows = kinds.map(k => [...row(k, p => of(p, k)), bar(sum(k))]);
  rows.push([...row('all', p => kinds.reduce((s, k) => s + of(p, k), 0)), '']);
  const numeric = [...parts, 'all', 'share'].map((_, i) => i + 1);
  return [
    el(
      'p',
      null,
      `Traced: ${span(device.steps)}, on ${device.devices} × ${device.kind || 'a device'}. A step took ${seconds(device.span)}; ` +
        `the device was busy for ${percent(device.busy.all / device.span)} of it.`,
    ),
    table(
      'Total time of the operations of one device in one step',
      ['kind of operation', ...parts.map(p => PART_NAMES[p]), 'all', 'share', 'bar'],
      rows,
      numeric,
    ),
    ...rooflineTable(device),
    later('Longest operations', () =>
      table(
        'Operations of one device in one step',
        ['operation', 'kind', 'part', 'time', 'calls'],
        device.top.map(([name, kind, part, s, times]) => [name, kind, PART_NAMES[part], seconds(s), num(times)]),
        [3, 4],
      ),
    ),
  ].filter(Boolean);
}

const seconds = s =>
  s === 0 ? '–' : s < 0.95e-3 ? `${num(1e6 * s)} µs` : s < 0.95 ? `${num(1e3 * s)} ms` : `${num(s)} s`;

function rooflineTable(device) {
  if (!device.roofline.length) return [];
  const known = device.roofline.some(half => half.seconds !== null);
  const head = ['half of the step', 'measured', 'arithmetic', 'memory read'],
    rows = device.roofline.map(half => [
      PART_NAMES[half.part],
      seconds(half.measured),
      rate(half.flops / half.measured, 'FLOP/s'),
      half.bytes === null ? '–' : rate(half.bytes / half.measured, 'B/s'),
      ...(known ? [seconds(half.seconds), `${num(half.measured / half.seconds)} ×`] : []),
    ]);
  return [
    table(
      'Distance to the roofline, for one device and step',
      known ? [...head, 'roofline', 'measured / roofline'] : head,
      rows,
      [1, 2, 3, 4, 5],
    ),
    softText(
      known
        ? 'Roofline of the update: its operations at the peak rate. Roofline of generation: weights and caches read in every decode iteration at the memory bandwidth, or its operations at the peak rate, plus the prefill at the peak rate. Communication between devices is not included.'
        : `Unknown chip: no peak rates are known for “${device.kind}”, so this table shows measured rates without a roofline.`,
    ),
  ];
}
