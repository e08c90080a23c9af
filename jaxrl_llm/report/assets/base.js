// Helpers: DOM elements (text is never parsed as markup), number formats, and lazily unpacked data blocks.
const SVG = 'http://www.w3.org/2000/svg';

function fill(node, attributes, children) {
  for (const [name, value] of Object.entries(attributes || {})) {
    if (name.startsWith('on')) node.addEventListener(name.slice(2), value);
    else if (value !== null && value !== undefined && value !== false)
      node.setAttribute(name, value === true ? '' : value);
  }
  for (const child of children.flat(3)) {
    if (child !== null && child !== undefined && child !== false && child !== '') node.append(child);
  }
  return node;
}
const el = (tag, attributes, ...children) => fill(document.createElement(tag), attributes, children);
const svg = (tag, attributes, ...children) => fill(document.createElementNS(SVG, tag), attributes, children);
const byId = id => document.getElementById(id);
const plural = (n, noun) => `${n.toLocaleString('en')} ${noun}${n === 1 ? '' : 's'}`;

function num(x) {
  if (x === null || x === undefined || !Number.isFinite(x)) return '–';
  const size = Math.abs(x);
  if (size !== 0 && (size < 1e-3 || size >= 1e6))
    return Number(x.toPrecision(3)).toExponential().replace('e+', 'e').replace(/-/g, '−');
  const text = size >= 1000 ? Math.round(x).toLocaleString('en') : String(Number(x.toPrecision(3)));
  return text.replace('-', '−');
}
const percent = x => (Number.isFinite(x) ? `${Math.round(100 * x)} %` : '–');
const span = ([a, b]) => (a === b ? `step ${a}` : `steps ${a}–${b}`);

// A data block is deflated JSON or JSON lines in base64, inside a script element of a type that browsers ignore.
async function unpack(id) {
  const node = byId(id);
  if (!node) return null;
  const text = atob(node.textContent);
  const bytes = new Uint8Array(text.length);
  for (let i = 0; i < text.length; i++) bytes[i] = text.charCodeAt(i);
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream('deflate'));
  return new Response(stream).text();
}

// A table in a scrollable box that can take the keyboard focus. `numeric`: indices of the columns of numbers.
function table(caption, head, rows, numeric = []) {
  const kind = at => (numeric.includes(at) ? 'num' : null);
  return el(
    'div',
    { class: 'scroll', tabindex: 0, role: 'group', 'aria-label': caption },
    el(
      'table',
      null,
      el('caption', null, caption),
      el(
        'thead',
        null,
        el(
          'tr',
          null,
          head.map((h, at) => el('th', { scope: 'col', class: kind(at) }, h)),
        ),
      ),
      el(
        'tbody',
        null,
        rows.map(row =>
          el(
            'tr',
            null,
            row.map((cell, at) => el('td', { class: kind(at) }, cell)),
          ),
        ),
      ),
    ),
  );
}

// A <details> element whose content is built when it is first opened: a page may have a hundred charts with tables.
function later(summary, make) {
  const node = el('details', null, el('summary', null, summary));
  node.addEventListener('toggle', () => {
    if (node.open && node.children.length === 1) node.append(make());
  });
  return node;
}

const runColor = at => `var(--run${at % 6})`;
const DASHES = ['', '7 3', '2 3', '9 3 2 3', '5 2', '1 2'];
function runKey(at) {
  return svg(
    'svg',
    { class: 'key', width: 28, height: 12, 'aria-hidden': 'true', style: 'width:28px' },
    svg('line', {
      x1: 1,
      x2: 27,
      y1: 6,
      y2: 6,
      stroke: runColor(at),
      'stroke-width': 3,
      'stroke-dasharray': DASHES[at % 6],
    }),
  );
}
