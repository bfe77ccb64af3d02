'use strict';
// Shows the tokens of a response, coloured by one of their values; masked tokens are dimmed.

const TINTS = {
  logprob: { title: 'log-probability', of: (one) => nats(one.logprobs), tint: (value) => warm(Math.min(1, -value / 5)), sampledOnly: true },
  gap: { title: 'actor − engine', of: (one) => nats(one.gap), tint: (value) => both(value / 0.5), sampledOnly: true },
  advantage: { title: 'advantage', of: (one) => (Array.isArray(one.advantage) ? one.advantage
    : one.advantage === null || one.advantage === undefined ? null : one.ids.map(() => one.advantage)),
  tint: (value) => both(value / 2), sampledOnly: true },
  version: { title: 'weight version', of: (one) => spread(one.versions), tint: (value) => (value < 0 ? '' : `hsl(${(value * 67) % 360} 60% 50% / .3)`) },
};
const TOKENS_AT_ONCE = 20000;

function warm(share) {
  return share > 0.004 ? `hsl(28 90% 50% / ${(0.75 * share).toFixed(3)})` : '';
}

function both(share) {
  const size = Math.min(1, Math.abs(share));
  return size > 0.004 ? `hsl(${share > 0 ? 215 : 8} 85% 52% / ${(0.65 * size).toFixed(3)})` : '';
}

function tokenView(main, row, one, place) {
  if (!one.ids.length) {
    main.append(el('p', { class: 'warn' }, 'The file has no tokens and no log-probabilities of this trajectory, because an API returns only text.'));
    return;
  }
  const texts = store.index.sources[row.source].texts;
  const mask = spread(one.mask);
  const versions = spread(one.versions);
  const name = TINTS[place.by] ? place.by : 'logprob';
  const values = TINTS[name].of(one);
  const buttons = Object.entries(TINTS).map(([key, { title, of }]) => el('button', { type: 'button', 'data-by': key,
    'aria-pressed': String(key === name), disabled: of(one) ? null : '', title: of(one) ? '' : 'not in this file',
    onclick: () => go({ ...place, by: key }) }, title));
  const columns = { ...one, logprobs: nats(one.logprobs), gap: nats(one.gap) };
  const output = el('output', { class: 'hover' }, 'Point at a token, or press ] and [.');
  main.append(el('p', { class: 'tints' }, buttons, output), legendOf(name));
  if (!values) main.append(el('p', { class: 'warn' }, `The file has no ${TINTS[name].title} for this trajectory.`));
  if (!store.index.sources[row.source].tokenizer) main.append(el('p', { class: 'warn' }, 'No tokenizer was found: tokens are shown as their ids.'));
  const box = el('div', { class: 'tokens', dir: 'ltr', onmouseover: (event) => {
    const under = event.target.closest('[data-at]')?.dataset.at;
    if (under !== undefined) showFacts(Number(under));
  } });
  let at = -1;
  const showFacts = (next) => {
    at = next;
    output.replaceChildren(...tokenFacts(columns, texts, mask, versions, at));
  };
  view.token = (by) => {
    const next = box.querySelector(`[data-at="${Math.max(0, at + by)}"]`);
    if (!next) return;
    box.querySelector('.pointed')?.classList.remove('pointed');
    next.classList.add('pointed');
    next.scrollIntoView({ block: 'nearest' });
    showFacts(Math.max(0, at + by));
  };
  const add = (from) => {
    const to = Math.min(one.ids.length, from + TOKENS_AT_ONCE);
    for (let at = from; at < to; at += 1) box.append(token(one, texts, mask, versions, values, TINTS[name], at));
    if (to < one.ids.length) {
      const more = el('button', { type: 'button', class: 'more', onclick: () => { more.remove(); add(to); } }, `${num(one.ids.length - to)} more`);
      box.append(more);
    }
  };
  add(0);
  main.append(box, el('p', { class: 'faint' }, 'Underlined tokens are trained on; dimmed tokens are masked.'));
}

// The colour scale: the values at both ends of the ramp.
function legendOf(name) {
  const ramp = (from, to, low, high) => el('p', { class: 'key faint' }, low,
    el('i', { class: 'ramp', style: `background:linear-gradient(90deg,${from || 'transparent'},transparent 50%,${to || 'transparent'})` }), high);
  if (name === 'logprob') return el('p', { class: 'key faint' }, '0 nats, certain', el('i', { class: 'ramp', style: `background:linear-gradient(90deg,transparent,${warm(1)})` }), '−5 nats or less');
  if (name === 'gap') return ramp(both(-1), both(1), 'actor 0.5 nats lower', '0.5 nats higher');
  if (name === 'advantage') return ramp(both(-1), both(1), '−2', '+2');
  return el('p', { class: 'key faint' }, 'One colour per version of the weights');
}

function token(one, texts, mask, versions, values, { tint, sampledOnly }, at) {
  const text = texts[one.ids[at]];
  const sampled = versions ? versions[at] >= 0 : !mask || mask[at] === 1;
  const value = values && (sampled || !sampledOnly) ? values[at] : null;
  const node = el('span', { class: `token ${mask && !mask[at] ? 'off' : 'on'}`, 'data-at': at,
    style: value === null || value === undefined ? '' : `background:${tint(value)}` },
  text === undefined ? `${one.ids[at]} ` : shown(text.replaceAll('\n', '↵\n')));
  return node;
}

function tokenFacts(one, texts, mask, versions, at) {
  const text = texts[one.ids[at]];
  const advantage = Array.isArray(one.advantage) ? one.advantage[at] : one.advantage;
  const sampled = versions ? versions[at] >= 0 : !mask || mask[at] === 1;
  const facts = [`#${at}`, `id ${one.ids[at]}`, text === undefined ? null : JSON.stringify(text),
    sampled && one.logprobs ? `logp ${inNats(one.logprobs[at])} (p ${num(one.logprobs[at] === null ? null : Math.exp(one.logprobs[at]), 3)})` : null,
    sampled && one.gap ? `actor − engine ${inNats(one.gap[at])}` : null,
    mask?.[at] && advantage !== null && advantage !== undefined ? `advantage ${num(advantage, 3)}` : null,
    versions ? (sampled ? `weights ${versions[at]}` : 'not sampled') : null,
    mask ? (mask[at] ? 'trained on' : 'masked') : 'mask not recorded'];
  return shown(facts.filter(Boolean).join(' · '));
}

// The page's precision: steps of 1/1000 nat, clamped to 27 nats.
function inNats(value) {
  if (value === null) return 'not finite';
  if (value === 0) return 'within 0.0005 of 0';
  return `${Math.abs(value) >= 27 ? 'at or beyond ' : ''}${value.toFixed(3)}`;
}
