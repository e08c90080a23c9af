// Drives report.html in Chromium; see report_page.py.
// node report_page.mjs PAGE FOLDER-FOR-PICTURES NODE_MODULES CHROMIUM drive|look|runs
import { createRequire } from 'node:module';
import fs from 'node:fs';
import path from 'node:path';
import { pathToFileURL } from 'node:url';

const [page, folder, modules, chromium, how] = process.argv.slice(2);
const need = createRequire(path.join(path.resolve(modules), 'x.js'));
const puppeteer = need('puppeteer-core').default ?? need('puppeteer-core');
const axe = fs.readFileSync(need.resolve('axe-core/axe.min.js'), 'utf8');
const url = pathToFileURL(path.resolve(page)).href;
const told = { errors: [], requests: [], open_ms: [], axe: {}, drive: {} };
const check = (name, is) => {
  told.drive[name] = is;
};

const browser = await puppeteer.launch({
  executablePath: chromium,
  args: ['--no-sandbox', '--disable-gpu', '--force-color-profile=srgb'],
  protocolTimeout: 600000,
});

async function open(width, height, features = [], mobile = false) {
  const tab = await browser.newPage();
  tab.on('console', m => ['error', 'warning'].includes(m.type()) && told.errors.push(m.text()));
  tab.on('pageerror', e => told.errors.push(String(e)));
  tab.on('request', r => r.url() !== url && !r.url().startsWith('data:') && told.requests.push(r.url()));
  await tab.setViewport({ width, height, deviceScaleFactor: mobile ? 2 : 1, isMobile: mobile, hasTouch: mobile });
  await tab.emulateMediaFeatures(features);
  const began = Date.now();
  await tab.goto(url, { waitUntil: 'domcontentloaded', timeout: 120000 });
  await tab.waitForSelector('html[data-ready]', { timeout: 120000 });
  told.open_ms.push(Date.now() - began);
  return tab;
}

async function audit(tab, name) {
  await tab.evaluate(axe);
  const found = await tab.evaluate(() => axe.run(document, { resultTypes: ['violations'] }));
  told.axe[name] = found.violations.map(v => ({
    id: v.id,
    impact: v.impact,
    nodes: v.nodes.length,
    first: v.nodes[0].html.slice(0, 160),
    why: v.nodes[0].failureSummary.slice(0, 200),
  }));
}

const rest = ms => new Promise(done => setTimeout(done, ms));
const text = (tab, selector) => tab.$eval(selector, node => node.textContent);
const shoot = async (tab, name) => tab.screenshot({ path: path.join(folder, `${name}.png`) });
const section = async (tab, id, name) => {
  await tab.$eval(`#${id}`, n => n.scrollIntoView());
  await rest(250);
  await shoot(tab, name);
};
const count = async tab => Number((await text(tab, '#count')).split(' of ')[0].replace(/,/g, ''));

// Does it, and waits until the list has been filtered anew.
async function filtered(tab, act) {
  const before = await text(tab, '#count');
  await act();
  await tab.waitForFunction(old => document.querySelector('#count').textContent !== old, {}, before);
  await rest(300);
}

// By the keyboard: a click would have to wait for the page to come to rest.
async function reset(tab) {
  await tab.focus('#filters button[type=reset]');
  await tab.keyboard.press('Enter');
}

// The page of many runs: filter, order, choice, and the difference of the chosen runs.
async function driveRuns(tab) {
  const rows = () => tab.$$eval('#list tbody tr', n => n.map(x => x.cells[1].textContent));
  const all = await rows();
  check('runs', all.length);
  await filtered(tab, () => tab.type('#filter', 'seed=1'));
  check('runs with seed=1', (await rows()).length);
  await tab.$eval('#filter', n => {
    n.value = '';
    n.dispatchEvent(new Event('input', { bubbles: true }));
  });
  const head = 'th:nth-child(2) .sort';
  await tab.focus(head);
  await tab.keyboard.press('Enter');
  const up = await rows();
  await tab.keyboard.press('Enter');
  const sorted = await tab.$eval('th:nth-child(2)', n => n.getAttribute('aria-sort'));
  check('sorted both ways', up.join() === (await rows()).reverse().join() && sorted === 'descending');
  const boxes = 'tbody input[type=checkbox]';
  for (const box of await tab.$$(`${boxes}:checked`)) await box.evaluate(n => n.click());
  check('none chosen', await text(tab, '#difference'));
  for (let i = 0; i < 2; i++) await (await tab.$(`${boxes}:not(:checked)`)).evaluate(n => n.click());
  check('fields that differ', await tab.$$eval('#difference tbody td:first-child', n => n.map(x => x.textContent)));
  check('curves', await tab.$$eval('#curves svg[role=img]', n => n.length));
}

async function drive(tab) {
  const all = await count(tab);
  check('rollouts', all);
  check('preselected', await text(tab, '#detail h3'));
  check('prompt as read', await tab.$$eval('#detail .text', n => n[0].textContent.includes('<|assistant|>')));
  check('parts of the reward', await tab.$$eval('#detail table td:first-child', n => n.map(x => x.textContent)));
  check('accuracy', await text(tab, '#result .headline'));
  check('held-out charts', await tab.$$eval('#learning svg[role=img]', n => n.filter(x => x.getAttribute('aria-label').startsWith('Held-out')).length));
  check('questions of the choices', await tab.$$eval('#curriculum td', n => n.filter(x => x.textContent.startsWith('What is')).length > 0));
  check('texts left out', await tab.$$eval('#rollouts .soft', n => n.some(x => x.textContent.includes('omitted'))));
  check('items in the list', await tab.$$eval('.item', n => n.length));
  const reason = await tab.$eval('#f-reason', n => [...n.options].find(o => o.textContent === 'length').value);
  await filtered(tab, () => tab.select('#f-reason', reason));
  const cut = await count(tab);
  check('cut off at the length', cut);
  check(
    'all shown were cut off',
    await tab.$$eval('.item .head', n => n.every(x => x.textContent.includes('length'))),
  );
  await filtered(tab, () => tab.type('#f-low', '0.5'));
  check('and paid', await count(tab));
  await filtered(tab, () => reset(tab));
  check('cleared', (await count(tab)) === all && cut < all);
  await filtered(tab, () => tab.type('#f-prompt', 'What is 7 +', { delay: 5 }));
  check('with a prompt’s words', await count(tab));
  check(
    'all shown are of it',
    await tab.$$eval('.item .head', n => n.every(x => x.textContent.includes('prompt 7'))),
  );
  await tab.focus('#list');
  for (let i = 0; i < 3; i++) await tab.keyboard.press('ArrowDown');
  await tab.waitForSelector('#detail h3');
  await rest(300);
  check('keyboard chose', await text(tab, '#detail h3'));
  const others = await tab.$$eval('#other option', n => n.map(o => o.value));
  await tab.select('#other', others[others.length - 1]);
  await tab.waitForSelector('#detail ins, #detail del');
  check(
    'nothing said was run',
    (await tab.$$eval('img', n => n.length)) === 0 && (await tab.title()).startsWith('Report'),
  );
  check('differences', await tab.$$eval('#detail ins, #detail del', n => n.length));
  await tab.$eval('#other', n => n.scrollIntoView({ block: 'center' }));
  await shoot(tab, `difference-${tab.viewport().width}`);
  await filtered(tab, () => reset(tab));
  await tab.focus('#list');
  await tab.keyboard.press('Home'); // the first ones of a step are told token by token
  await tab.waitForFunction(() => document.querySelector('#detail input[value=logp]:enabled'));
  for (const by of ['logp', 'advantage', 'coefficient']) {
    await tab.$eval(`#detail input[value=${by}]`, n => n.click());
    check(`coloured by ${by}`, await tab.$$eval('.tok[title]', n => new Set(n.map(x => x.style.background)).size));
    if (by !== 'logp') await section(tab, 'detail', `tokens-${by}-${tab.viewport().width}`);
  }
  const began = Date.now();
  await tab.focus('#list');
  await tab.keyboard.press('End');
  await tab.waitForFunction(
    n => document.querySelector('#list').getAttribute('aria-activedescendant') === `option-${n - 1}`,
    {},
    all,
  );
  check('ms to the last rollout', Date.now() - began);
}

const SECTIONS = ['result', 'learning', 'distributions', 'policy', 'curriculum', 'time', 'device', 'health', 'config'];
const RUNS = ['list', 'curves', 'difference'];
for (const [name, width, height, features, mobile] of [
  ['wide', 1280, 900, [], false],
  ['phone', 390, 844, [{ name: 'prefers-reduced-motion', value: 'reduce' }], true],
  ['dark', 1280, 900, [{ name: 'prefers-color-scheme', value: 'dark' }], false],
  ['dark-phone', 390, 844, [{ name: 'prefers-color-scheme', value: 'dark' }], true],
]) {
  const tab = await open(width, height, features, mobile);
  await shoot(tab, `${name}-top`);
  for (const id of how === 'runs' ? RUNS : SECTIONS) await section(tab, id, `${name}-${id}`);
  if (!name.startsWith('dark') && how === 'drive') await drive(tab);
  if (name === 'wide' && how === 'runs') await driveRuns(tab);
  if (how !== 'runs') await section(tab, 'rollouts', `${name}-rollouts`);
  check(
    `${name}: wider than the screen by`,
    await tab.evaluate(() => document.documentElement.scrollWidth - document.documentElement.clientWidth),
  );
  for (const one of await tab.$$('details:not([open]) > summary')) await one.evaluate(n => n.click());
  await rest(300);
  await audit(tab, name);
  await tab.close();
}
for (let i = 0; i < 3; i++) await (await open(1280, 900)).close();
await browser.close();
console.log(JSON.stringify(told, null, 1));
