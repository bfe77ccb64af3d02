'use strict';
// The curves of all runs: one small chart per metric, with checkpoints, resumes and weight syncs.

const SECTIONS = [
  ['Learning', /^(accuracy|critic\/rewards\/mean|val\/accuracy|loss|val_loss)$/],
  ['Reward parts', /^reward\//],
  ['Behaviour', /^behavior\/(calls|code_ratio|turns|code_lines|executable_fraction|self_corrections|correct_code_fraction|first_call_position)$/],
  ['Lengths', /^(behavior\/(response_tokens|model_tokens|cut_tokens)|length\/finished\/(p50|p99)|response_length\/(mean|max))$/],
  ['KL and mismatch', /^(mismatch\/|.*ppo_kl$|.*kl_loss$|rollout_corr\/.*)/],
  ['Entropy and updates', /^(actor\/entropy|(actor\/)?(grad_norm|lr)|actor\/pg_clipfrac)$/],
  ['Seconds by phase', /^timing_s\/[^/]*$/],
  ['Throughput', /^(tokens_per_s|mfu|memory_gib)$/],
  ['Drops and groups without learning signal', /^(rollout\/|groups\/)/],
];
const LEAST_SPAN = 0.1;  // minimum range of an axis, as a share of the largest value
const FONT = '11px system-ui, sans-serif';
const RUN_COLOURS = ['--run0', '--run1', '--run2', '--run3', '--run4', '--run5'];
const EVENT_MARKS = { checkpoint: '--mark-checkpoint', resume: '--mark-resume', 'weight sync': '--mark-sync' };

function runView(main) {
  const { sources } = store.index;
  const names = [...new Set(sources.flatMap((source) => Object.keys(source.curves)))];
  main.append(sourceTable(), ...sources.filter((source) => source.why).map((source) =>
    el('p', { class: 'faint why' }, shown(`${source.name}: ${source.why}`))));
  if (store.index.rows.length) {
    main.append(el('p', { class: 'tools noprint' }, el('a', { id: 'all', href: '#all=1' }, 'search and filter all trajectories'),
      el('button', { type: 'button', class: 'more', onclick: exportNotes }, 'export notes')));
  }
  if (!names.length) {
    if (sources.some((source) => source.kind === 'run')) main.append(el('p', { class: 'warn' }, 'No curves: no step has finished yet.'));
    return;
  }
  // Metrics that are always 0 get no chart, except in "Learning": a reward or accuracy of 0 is a result.
  const zero = names.filter((name) => !SECTIONS[0][1].test(name) && sources.every((source) => (source.curves[name] ?? []).every((value) => !value)));
  const taken = new Set(zero);
  main.append(el('p', { class: 'legend' }, sources.filter((source) => source.steps.length).map((source) =>
    el('span', {}, el('i', { class: 'dot', style: `background:var(${runColour(source)})` }), source.name)),
  Object.entries(EVENT_MARKS).map(([what, tone]) =>
    el('span', { class: 'faint' }, el('i', { class: 'bar', style: `background:var(${tone})` }), what))));
  for (const [title, pattern] of SECTIONS) {
    const members = names.filter((name) => pattern.test(name) && !taken.has(name)).sort(byTitle);
    members.forEach((name) => taken.add(name));
    if (members.length) main.append(el('h2', {}, title), charts(members));
  }
  const rest = names.filter((name) => !taken.has(name));
  const folded = el('details', { ontoggle: () => {
    if (folded.open && folded.children.length === 1) folded.append(charts(rest));
  } }, el('summary', {}, `${rest.length} other metrics`));
  if (rest.length) main.append(folded);
  if (zero.length) main.append(el('p', { class: 'faint silent' }, `0 at every step: ${zero.join(', ')}`));
}

function byTitle(one, other) {
  const [a, b] = [one, other].map((name) => store.index.charts[name].title);
  return a.localeCompare(b);
}

function runColour(source) {
  return RUN_COLOURS[store.index.sources.indexOf(source) % RUN_COLOURS.length];
}

function sourceTable() {
  const { sources, rows } = store.index;
  const lines = sources.map((source, number) => {
    const own = rows.filter((row) => row.source === number);
    const anchors = stepsOf(number).map(({ step, partition }) => el('a', {
      class: 'chip', href: link(placeOf({ source: number, step, partition })) },
    source.kind === 'run' ? `${step}${partition === 'val' ? ' validation' : ''}` : 'all'));
    return el('tr', {}, el('td', {}, el('b', {}, shown(source.name)), el('div', { class: 'faint' }, shown(source.path))),
      el('td', {}, source.kind), el('td', { class: 'n' }, source.steps.length || '–'),
      rows.length ? [el('td', { class: 'n' }, num(own.length)), el('td', { class: 'steps' }, anchors)] : '');
  });
  const heads = [['Name and folder'], ['Kind'], ['Steps with metrics', 'n'], ...(rows.length ? [['Trajectories', 'n'], ['Trajectories by step']] : [])];
  return el('table', { class: 'sources' }, el('thead', {}, el('tr', {}, heads.map(([head, kind = '']) => el('th', { class: kind }, head)))),
    el('tbody', {}, lines));
}

function charts(names) {
  const grid = el('div', { class: 'charts' });
  for (const name of names) {
    const box = el('figure', { class: 'chart', 'data-metric': name, tabindex: 0 },
      el('figcaption', { title: [name, store.index.charts[name].meaning].filter(Boolean).join(': ') }, el('b', {}, store.index.charts[name].title), el('output', { class: 'faint' })));
    grid.append(box);
    waiting.set(box, name);
    seen.observe(box);
  }
  return grid;
}

// Draws a chart when it scrolls into view, so that hundreds of metrics do not slow down the start.
const waiting = new WeakMap();
const seen = new IntersectionObserver((entries) => entries.forEach((entry) => {
  if (!entry.isIntersecting) return;
  seen.unobserve(entry.target);
  draw(entry.target, waiting.get(entry.target));
}), { rootMargin: '300px' });

// The range of a value axis: wide enough that noise does not look like a trend.
function ends(chart, low, high) {
  if (low === null || low === undefined) return [0, 1];  // no values
  const bottom = chart.zero || (chart.zero === null && low >= 0) ? Math.min(0, low) : low;
  const least = Math.max(chart.least, LEAST_SPAN * Math.max(Math.abs(low), Math.abs(high))) || 1;
  const margin = Math.max(0, least - (high - bottom)) / 2;
  return bottom === 0 ? [0, Math.max(1.05 * high, least)] : [bottom - margin, high + margin];
}

function written(tick) {
  return tick !== 0 && Math.abs(tick) < 0.001 ? tick.toExponential() : String(tick);
}

function draw(box, name) {
  const chart = store.index.charts[name];
  const having = store.index.sources.filter((source) => source.curves[name]);
  const steps = [...new Set(having.flatMap((source) => source.steps))].sort((a, b) => a - b);
  const columns = having.map((source) => {
    const at = new Map(source.steps.map((step, place) => [step, source.curves[name][place]]));
    return steps.map((step) => at.get(step) ?? null);
  });
  const axis = { stroke: colour('--faint'), grid: { stroke: colour('--line'), width: 1 }, ticks: { show: false },
    font: FONT, labelFont: FONT, labelGap: 2, labelSize: 16 };
  const output = box.querySelector('output');
  const plot = new uPlot({
    width: box.clientWidth - 16, height: 180, legend: { show: false },
    cursor: { sync: { key: 'steps' }, drag: { x: true, y: false }, points: { size: 6 } },
    scales: { x: { time: false }, y: { range: (_, low, high) => ends(chart, low, high) } },
    axes: [{ ...axis, size: 24, label: 'step', incrs: [1, 2, 5].flatMap((by) => [1, 10, 100, 1e3, 1e4, 1e5].map((power) => by * power)).sort((a, b) => a - b) },
      { ...axis, size: 54, label: chart.unit || null, values: (_, ticks) => ticks.map((tick) => written(+tick.toPrecision(4))) }],
    series: [{}, ...having.map((source) => ({ label: source.name, stroke: colour(runColour(source)), width: 1.6,
      spanGaps: true, points: { show: steps.length < 40, size: 4 } }))],
    hooks: {
      setCursor: [(self) => {
        const at = self.cursor.idx;
        output.textContent = at === null || at === undefined ? ''
          : `step ${steps[at]}: ${columns.map((column) => num(column[at], 4)).join(' · ')}${eventsAt(having, steps[at])}`;
      }],
      drawAxes: [(self) => marks(self, having)],
    },
  }, [steps, ...columns], box);
  box.addEventListener('keydown', (event) => {
    const by = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
    if (!by) return;
    event.preventDefault();
    event.stopPropagation();  // elsewhere on the page, the arrow keys switch steps
    const at = Math.max(0, Math.min(steps.length - 1, (plot.cursor.idx ?? (by > 0 ? -1 : steps.length)) + by));
    plot.setCursor({ left: plot.valToPos(steps[at], 'x'), top: 0 });
  });
  plot.over.addEventListener('dblclick', () => { output.textContent = ''; });
}

function eventsAt(sources, step) {
  const what = new Set(sources.flatMap((source) => source.events.filter(([at]) => at === step).map(([, name]) => name)));
  return what.size ? ` (${[...what].join(', ')})` : '';
}

// Draws checkpoints and resumes as vertical lines, and weight syncs, often one per step, as ticks at the bottom.
function marks(self, sources) {
  const { ctx, bbox } = self;
  ctx.save();
  for (const [step, what] of sources.flatMap((source) => source.events)) {
    const x = Math.round(self.valToPos(step, 'x', true));
    if (x < bbox.left || x > bbox.left + bbox.width) continue;
    ctx.fillStyle = colour(EVENT_MARKS[what]);
    const height = what === 'weight sync' ? 5 : bbox.height;
    ctx.fillRect(x, bbox.top + bbox.height - height, 1, height);
  }
  ctx.restore();
}
