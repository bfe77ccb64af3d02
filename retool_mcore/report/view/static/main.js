'use strict';
// The address contains the current view. Keyboard shortcuts navigate.

function here() {
  const params = Object.fromEntries(new URLSearchParams(location.hash.slice(1)));
  const place = { ...params, run: Number(params.run ?? 0) };
  if (!store.index.sources[place.run]) place.run = 0;
  if (params.step !== undefined) {
    place.step = Number(params.step);
    const parts = stepsOf(place.run).filter(({ step }) => step === place.step).map(({ partition }) => partition);
    place.part = params.part ?? (parts.includes('train') || !parts.length ? 'train' : parts[0]);
  }
  return place;
}

function go(place) {
  const { run, part, ...rest } = place;
  const many = store.index.sources.length > 1;
  location.hash = link({ run: many && rest.step !== undefined ? run : null, ...rest, part: part === 'train' ? null : part });
}

let drawing = 0;

async function render() {
  const mine = ++drawing;
  view.run += 1;
  const place = here();
  const main = document.createElement('div');
  Object.assign(view, { refresh: null, token: null });
  crumbs(place);
  try {
    view.table = null;
    if (place.all !== undefined) allView(main);
    else if (place.step === undefined) { runView(main); view.chosen = 0; }
    else if (place.id !== undefined) await trajectoryView(main, place);
    else if (place.group !== undefined) await groupView(main, place);
    else stepView(main, place);
  } catch (error) {
    main.replaceChildren(el('p', { class: 'warn' }, `This cannot be shown: ${error.message}`));
  }
  if (mine !== drawing) return;
  document.getElementById('main').replaceChildren(...main.childNodes);
  drawRows();
  window.scrollTo(0, 0);
  drawRows();
  choose(view.chosen, view.chosen > 0);  // back from a trajectory to its row
  document.body.dataset.drawn = location.hash || '#';
}

function crumbs(place) {
  const source = store.index.sources[place.run];
  const many = store.index.sources.length > 1;
  const step = { run: many ? place.run : null, step: place.step, part: place.part === 'train' ? null : place.part };
  const parts = [el('a', { href: '#' }, many ? 'all' : shown(source.name))];
  if (place.all !== undefined) parts.push(el('span', {}, 'all steps'));
  if (place.step !== undefined) parts.push(el('a', { href: link(step) }, many ? shown(`${source.name} `) : '', source.kind === 'run' ? `step ${place.step}` : 'trajectories'));
  if (place.group !== undefined) parts.push(el('span', {}, 'group ', shown(place.group)));
  if (place.id !== undefined) parts.push(el('span', {}, shown(place.id)));
  document.getElementById('crumbs').replaceChildren(...parts.flatMap((part, at) => (at ? [el('span', { class: 'faint' }, '/'), part] : [part])));
}

function move(by) {
  const place = here();
  if (place.id !== undefined) {
    const next = view.rows[view.chosen + by];
    if (next) go({ ...placeOf(next), run: next.source, id: next.id, view: place.view, by: place.by });
  } else choose(view.chosen + by);
}

function otherStep(by) {
  const place = here();
  if (place.id !== undefined) { move(by); return; }
  const steps = stepsOf(place.run);
  const at = steps.findIndex(({ step, partition }) => step === place.step && partition === place.part);
  const next = place.step === undefined ? steps[0] : steps[at + by];
  view.chosen = 0;
  if (next) go({ run: place.run, step: next.step, part: next.partition });
}

function up() {
  const { id, group, view: shownAs, by, with: other, ...place } = here();
  if (other !== undefined || shownAs === 'across') go({ ...place, id });
  else if (id !== undefined && view.all) location.hash = '#all=1';
  else if (id !== undefined || group !== undefined) go(place);
  else location.hash = '';
}

const KEYS = {
  j: () => move(1), k: () => move(-1), ArrowDown: () => move(1), ArrowUp: () => move(-1),
  ArrowRight: () => otherStep(1), ArrowLeft: () => otherStep(-1), u: up,
  t: () => document.getElementById('switch')?.click(),
  '/': () => document.getElementById('search').focus(),
  Enter: () => document.querySelector('tr.chosen td.id a')?.click(),
  ']': () => view.token?.(1), '[': () => view.token?.(-1),
  a: () => { location.hash = '#all=1'; }, n: () => document.getElementById('note-box')?.focus(),
  m: () => { if (view.rows[view.chosen]) markForCompare(view.rows[view.chosen]); },
  c: () => { if (view.rows[view.chosen]) compareWithMarked(view.rows[view.chosen]); },
};

document.addEventListener('keydown', (event) => {
  const search = document.getElementById('search');
  if (event.target === search) {
    if (event.key === 'Enter' && !view.table && here().id === undefined) location.hash = '#all=1';  // from the curves
    if (event.key === 'Escape' || event.key === 'Enter') search.blur();
    return;
  }
  if (event.target.closest?.('textarea, input')) {
    if (event.key === 'Escape') event.target.blur();
    return;
  }
  if (event.ctrlKey || event.metaKey || event.altKey || !KEYS[event.key]) return;
  if ((event.key === 'Enter') && event.target.closest('a, button, summary')) return;
  const scrolls = event.key === 'ArrowDown' || event.key === 'ArrowUp';
  if (scrolls && !document.querySelector('table.rows')) return;
  event.preventDefault();
  KEYS[event.key]();
});

let typed = 0;

function listen() {
  document.getElementById('search').addEventListener('input', () => {
    clearTimeout(typed);
    typed = setTimeout(() => { view.chosen = 0; view.refresh?.(); }, 120);
  });
  document.getElementById('theme').addEventListener('click', () => {
    const root = document.documentElement;
    const dark = root.dataset.theme ? root.dataset.theme === 'dark' : matchMedia('(prefers-color-scheme: dark)').matches;
    root.dataset.theme = stored('retool-theme', dark ? 'light' : 'dark');
    render();
  });
  window.addEventListener('hashchange', render);
  let scheduled = false;
  const later = () => { if (!scheduled) { scheduled = true; requestAnimationFrame(() => { scheduled = false; drawRows(); }); } };
  window.addEventListener('scroll', later, { passive: true });
  window.addEventListener('resize', later);
}

async function start() {
  store.index = await unfold(document.getElementById('index'));
  const { shown: kept, found, steps } = store.index;
  const notes = [];
  if (kept < found) notes.push(`A sample: ${num(kept)} of ${num(found)} trajectories, in whole groups from every step, partition and outcome. --limit sets the number.`);
  if (steps.length) notes.push(`Only trajectories of step ${steps.join(', ')}.`);
  document.getElementById('note').textContent = notes.join(' ');
  for (const element of [document.getElementById('search'), document.querySelector('footer')]) element.hidden = !found;
  listen();
  const scroll = placeBefore();
  await render();
  if (scroll !== null) window.scrollTo(0, scroll);
  document.body.dataset.ready = String(Math.round(performance.now()));
}

start().catch((error) => {  // a browser without DecompressionStream, or a truncated page
  document.getElementById('main').replaceChildren(el('p', { class: 'warn' },
    `This browser cannot open the page (${error.message}). The page needs a browser from 2023 or later, and the file must be complete.`));
});
