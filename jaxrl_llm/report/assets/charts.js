// Charts as inline SVG, redrawn when the width changes. Each has a text description and a table of its numbers.
const PAD = { left: 50, right: 12, top: 10, bottom: 32 };
const HEIGHT = 210;
const redraws = [];
let lastWidth = window.innerWidth;
window.addEventListener('resize', () => {
  if (window.innerWidth === lastWidth) return; // phones fire resize events when the address bar appears
  lastWidth = window.innerWidth;
  redraws.forEach(draw => draw());
});

function ticks(low, high, count) {
  const raw = (high - low) / count || 1,
    power = 10 ** Math.floor(Math.log10(raw));
  const step = [1, 2, 5, 10].map(x => x * power).find(x => x >= raw * 0.999);
  const found = [];
  for (let at = Math.ceil(low / step - 1e-9); at * step <= high + step * 1e-6; at++) found.push(at * step);
  return found;
}

// A <figure> with scales and labeled axes; `draw` returns its content.
function figure({ title, note, x, y, unitX, unitY, description, draw, read, numbers, withoutTicks, integerTicks }) {
  const holder = el('div', { class: 'picture' }),
    readout = el('p', { class: 'readout', 'aria-hidden': 'true' });
  const render = () => {
    const width = Math.max(holder.clientWidth || 400, 240),
      inner = [width - PAD.left - PAD.right, HEIGHT - PAD.top - PAD.bottom];
    const sx = v => PAD.left + (inner[0] * (v - x[0])) / (x[1] - x[0] || 1);
    const sy = v => PAD.top + inner[1] * (1 - (v - y[0]) / (y[1] - y[0] || 1));
    const steps = unitX === 'step';
    const at = withoutTicks
      ? []
      : ticks(x[0], x[1], Math.max(2, Math.floor(width / 90))).filter(t => !steps || Number.isInteger(t));
    const picture = svg(
      'svg',
      { viewBox: `0 0 ${width} ${HEIGHT}`, height: HEIGHT, role: 'img', 'aria-label': `${title}. ${description}` },
      ticks(y[0], y[1], 6)
        .filter(t => !integerTicks || Number.isInteger(t))
        .map(t => [
          svg('line', { class: 'axis', x1: PAD.left, x2: width - PAD.right, y1: sy(t), y2: sy(t) }),
          svg('text', { x: PAD.left - 6, y: sy(t) + 4, 'text-anchor': 'end' }, num(t)),
        ]),
      at.map(t => svg('text', { x: sx(t), y: HEIGHT - 17, 'text-anchor': 'middle' }, num(t))),
      svg('text', { x: PAD.left + inner[0] / 2, y: HEIGHT - 3, 'text-anchor': 'middle' }, unitX),
      draw(sx, sy, width),
    );
    if (read) {
      const cross = svg('line', { class: 'cross', y1: PAD.top, y2: HEIGHT - PAD.bottom, visibility: 'hidden' });
      picture.append(cross);
      picture.addEventListener('pointermove', event => {
        const box = picture.getBoundingClientRect(),
          value = x[0] + ((event.clientX - box.left - PAD.left) / inner[0]) * (x[1] - x[0]);
        const point = read(Math.min(Math.max(value, x[0]), x[1]));
        if (!point) return;
        cross.setAttribute('x1', sx(point.x));
        cross.setAttribute('x2', sx(point.x));
        cross.setAttribute('visibility', 'visible');
        readout.textContent = point.text;
      });
      picture.addEventListener('pointerleave', () => {
        cross.setAttribute('visibility', 'hidden');
        readout.textContent = '';
      });
    }
    holder.replaceChildren(picture);
  };
  redraws.push(render);
  const node = el(
    'figure',
    null,
    el('figcaption', null, title, el('small', null, [unitY, note].filter(Boolean).join('; '))),
    holder,
    read && readout,
    numbers && later('Numbers', numbers),
  );
  requestAnimationFrame(render);
  return node;
}

const path = points => points.map(([x, y], i) => `${i ? 'L' : 'M'}${x.toFixed(1)} ${y.toFixed(1)}`).join('');

function extent(values, zero) {
  let low = Infinity,
    high = -Infinity;
  for (const v of values)
    if (Number.isFinite(v)) {
      low = Math.min(low, v);
      high = Math.max(high, v);
    }
  if (low > high) return [0, 1];
  if (zero && low > 0 && low < 0.5 * high) low = 0;
  const room = (high - low) * 0.05 || Math.abs(high) * 0.1 || 1;
  const step = ticks(low, high + room, 6)[1] - ticks(low, high + room, 6)[0] || room;
  return [low === 0 ? 0 : low - room, Math.max(Math.ceil(high / step - 0.25) * step, high + room)];
}

// One curve per run: the mean of nearby steps, with a band of one standard deviation.
// curves: [{ name, at, x, y, mid, lo, hi }]; `at` selects color and dashes.
function lineChart({ title, unit = '', curves, range, note, band = true }) {
  curves = curves.filter(c => c && c.x.length);
  if (!curves.length) return null;
  const y =
    range ||
    extent(
      curves.flatMap(c => (band ? [...c.lo, ...c.hi, ...c.y] : c.y)),
      true,
    );
  const x = extent(curves.flatMap(c => c.x));
  x[0] = Math.min(...curves.map(c => c.x[0]));
  x[1] = Math.max(...curves.map(c => c.x[c.x.length - 1]), x[0] + 1);
  const describe = c =>
    `${curves.length > 1 ? `${c.name}: ` : ''}from ${num(c.mid[0])} at step ${num(c.x[0])} to ` +
    `${num(c.mid[c.mid.length - 1])} at step ${num(c.x[c.x.length - 1])}, lowest ${num(Math.min(...c.y))}, highest ${num(Math.max(...c.y))}`;
  const draw = (sx, sy) =>
    curves.map(c => {
      const color = runColor(c.at),
        clamp = v => sy(Math.min(Math.max(v, y[0]), y[1]));
      const outline = [
        ...c.x.map((v, i) => [sx(v), clamp(c.hi[i])]),
        ...c.x.map((v, i) => [sx(v), clamp(c.lo[i])]).reverse(),
      ];
      return [
        band && c.x.length > 1 && svg('path', { d: `${path(outline)}Z`, fill: color, opacity: 0.15 }),
        c.x.length <= 160 &&
          band &&
          curves.length < 3 &&
          c.x.map((v, i) => svg('circle', { cx: sx(v), cy: clamp(c.y[i]), r: 1.6, fill: color, opacity: 0.75 })),
        svg('path', {
          d: path(c.x.map((v, i) => [sx(v), clamp(c.mid[i])])),
          fill: 'none',
          stroke: color,
          'stroke-width': 2,
          'stroke-dasharray': DASHES[c.at % 6],
        }),
        (!band || c.x.length === 1) &&
          c.x.map((v, i) => svg('circle', { cx: sx(v), cy: clamp(c.y[i]), r: 3.5, fill: color })),
      ].filter(Boolean);
    });
  const nearest = (c, v) => {
    let best = 0;
    c.x.forEach((p, i) => {
      if (Math.abs(p - v) < Math.abs(c.x[best] - v)) best = i;
    });
    return best;
  };
  const read = v => {
    const first = curves[0],
      step = first.x[nearest(first, v)];
    return {
      x: step,
      text:
        `step ${num(step)}: ` +
        curves
          .map(c => {
            const i = nearest(c, v);
            return `${curves.length > 1 ? `${c.name} ` : ''}${num(c.mid[i])}${band ? ` (± ${num(c.hi[i] - c.mid[i])})` : ''}`;
          })
          .join(' · '),
    };
  };
  const numbers = () =>
    table(
      `${title}${unit ? `, ${unit}` : ''}`,
      ['run', 'step', 'value', ...(band ? ['low', 'high'] : [])],
      curves.flatMap(c =>
        c.x.map((v, i) => [c.name, num(v), num(c.y[i]), ...(band ? [num(c.lo[i]), num(c.hi[i])] : [])]),
      ),
      [1, 2, 3, 4],
    );
  const legend =
    curves.length > 1 &&
    el(
      'p',
      { class: 'facts' },
      curves.map(c => el('span', null, runKey(c.at), ' ', c.name)),
    );
  const node = figure({
    title,
    note,
    x,
    y,
    unitX: 'step',
    unitY: unit,
    description: curves.map(describe).join('; '),
    draw,
    read,
    numbers,
  });
  if (legend) node.children[0].after(legend);
  return node;
}

// A distribution over time: a darker cell holds a larger share of the values in its range of steps; lines are quantiles.
function heatChart({ title, unit, data, noun = 'rollouts' }) {
  if (!data || !data.x.length) return null;
  const n = data.x.length,
    top = Math.max(...data.share.flat(), 1e-9);
  const x = [data.x[0][0], data.x[n - 1][1] + 1],
    y = [data.edges[0], data.edges[data.edges.length - 1]];
  const end = i => (i + 1 < n ? data.x[i + 1][0] : data.x[n - 1][1] + 1),
    middle = i => (data.x[i][0] + end(i)) / 2;
  // With few distinct values the median jumps; the mean does not.
  const few = data.edges.length < 6,
    lines = few
      ? [['mean', '']]
      : [
          ['p10', '2 3'],
          ['p50', ''],
          ['p90', '6 3'],
        ];
  const draw = (sx, sy) => [
    data.share
      .flatMap((bins, i) =>
        bins.map(
          (share, b) =>
            share > 0 &&
            svg('rect', {
              x: sx(data.x[i][0]),
              width: Math.max(sx(end(i)) - sx(data.x[i][0]) - (n < 80 ? 0.5 : 0), 1),
              y: sy(data.edges[b + 1]),
              height: Math.max(sy(data.edges[b]) - sy(data.edges[b + 1]) - 0.5, 1),
              fill: 'var(--run0)',
              opacity: 0.08 + (0.8 * share) / top,
            }),
        ),
      )
      .filter(Boolean),
    lines.map(([q, dash]) =>
      svg('path', {
        d: path(data[q].map((v, i) => [sx(middle(i)), sy(v)])),
        fill: 'none',
        stroke: 'var(--ink)',
        'stroke-width': dash ? 1.2 : 2,
        'stroke-dasharray': dash,
      }),
    ),
  ];
  const describe = i =>
    `${span(data.x[i])}: mean ${num(data.mean[i])}, median ${num(data.p50[i])}, 80 % from ${num(data.p10[i])} to ${num(data.p90[i])}, ${plural(data.count[i], noun.replace(/s$/, ''))}`;
  const read = v => {
    let i = 0;
    while (i + 1 < n && data.x[i + 1][0] <= v) i++;
    return { x: middle(i), text: describe(i) };
  };
  return figure({
    title,
    note: `${few ? 'line: mean' : 'solid line: median; dashed: the middle 80 %'}; darkest cell: ${percent(top)} of its steps' ${noun}`,
    x,
    y,
    unitX: 'step',
    unitY: unit,
    integerTicks: data.edges[0] % 1 === -0.5 || data.edges[0] % 1 === 0.5,
    description: `At first, ${describe(0)}. At the end, ${describe(n - 1)}.`,
    draw,
    read,
    numbers: () =>
      table(
        title,
        ['steps', 'mean', 'lowest tenth', 'median', 'highest tenth', noun],
        data.x.map((s, i) => [
          span(s),
          num(data.mean[i]),
          num(data.p10[i]),
          num(data.p50[i]),
          num(data.p90[i]),
          data.count[i],
        ]),
        [1, 2, 3, 4, 5],
      ),
  });
}

// A stacked column chart. parts: [{ name, values, color, dash }].
function columnChart({ title, unit, note, labels, parts, unitX, description }) {
  const n = labels.length,
    sums = labels.map((_, i) => parts.reduce((s, p) => s + p.values[i], 0));
  const y = [0, Math.max(...sums, 1e-9) * 1.05];
  const draw = (sx, sy, width) => {
    const wide = (sx(1) - sx(0)) * 0.84,
      each = Math.ceil(n / Math.max(2, Math.floor(width / 62)));
    return labels.map((label, i) => {
      let below = 0;
      return [
        parts
          .map(part => {
            const value = part.values[i],
              at = below;
            below += value;
            return (
              value > 0 &&
              svg('rect', {
                x: sx(i) + (sx(1) - sx(0)) * 0.08,
                width: wide,
                y: sy(below),
                height: Math.max(sy(at) - sy(below) - (parts.length > 1 ? 0.6 : 0), 0.5),
                fill: part.color,
              })
            );
          })
          .filter(Boolean),
        i % each === 0 && svg('text', { x: sx(i + 0.5), y: HEIGHT - 17, 'text-anchor': 'middle' }, label),
      ].filter(Boolean);
    });
  };
  return figure({
    title,
    note,
    x: [0, n],
    y,
    unitX,
    unitY: unit,
    description,
    draw,
    withoutTicks: true,
    numbers: () =>
      table(
        title,
        [unitX, ...parts.map(p => p.name)],
        labels.map((label, i) => [label, ...parts.map(p => num(p.values[i]))]),
        parts.map((_, i) => i + 1),
      ),
  });
}
