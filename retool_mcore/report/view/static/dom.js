'use strict';
// Builds elements. Text only becomes text nodes, so that a model's text is never parsed as markup.

function el(tag, props = {}, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(props)) {
    if (name === 'class') node.className = value;
    else if (name === 'style') node.style.cssText = value;
    else if (name.startsWith('on')) node.addEventListener(name.slice(2), value);
    else if (value !== null && value !== undefined && value !== false) node.setAttribute(name, value);
  }
  for (const child of children.flat(Infinity)) if (child !== null && child !== undefined) node.append(child);
  return node;
}

// Shows bidirectional marks and other invisible characters as code points.
const UNSEEN = /([\u0000-\u0008\u000b-\u001f\u007f-\u009f\u200b-\u200f\u2028-\u202e\u2060-\u2069\ufeff]+)/;

function shown(text) {
  return String(text).split(UNSEEN).filter(Boolean).map((part) => (UNSEEN.test(part)
    ? el('span', { class: 'unseen', title: 'an invisible character' },
      [...part].map((mark) => `U+${mark.codePointAt(0).toString(16).toUpperCase().padStart(4, '0')}`).join(' '))
    : part));
}

const LONG_CHARS = 20000;

// A block of text; a long one is truncated until the reader expands it.
function block(text, kind = '') {
  const whole = String(text);
  const node = el('pre', { class: `text ${kind}`, dir: 'ltr' }, shown(whole.slice(0, LONG_CHARS)));
  if (whole.length > LONG_CHARS) {
    const more = el('button', { type: 'button', class: 'more', onclick: () => {
      node.replaceChildren(...shown(whole));
    } }, `show all ${whole.length.toLocaleString('en')} characters`);
    node.append(el('span', { class: 'faint' }, ' … '), more);
  }
  return node;
}

function num(value, digits = 2) {
  if (value === null || value === undefined) return '–';
  if (Number.isInteger(value)) return value.toLocaleString('en');
  const size = Math.abs(value);
  return size !== 0 && (size < 0.001 || size >= 1e6) ? value.toExponential(digits) : value.toFixed(size < 1 ? 3 : digits);
}

function mark(right) {
  if (right === null) return el('span', { class: 'faint' }, '·');
  return el('span', { class: right ? 'right' : 'wrong' }, right ? '✓ right' : '✗ wrong');
}

function link(place) {
  const kept = Object.entries(place).filter(([, value]) => value !== null && value !== undefined && value !== '');
  return `#${new URLSearchParams(kept).toString()}`;
}

function placeOf(row, more = {}) {
  const { sources } = store.index;
  return { run: sources.length > 1 ? row.source : null, step: row.step,
    part: row.partition === 'train' ? null : row.partition, ...more };
}

function colour(name) {
  return getComputedStyle(document.documentElement).getPropertyValue(name).trim();
}
