'use strict';
// Decodes the data in the page: the index at start, chunks on demand.

const store = { index: null, chunks: new Map() };

async function unfold(element) {
  const bytes = Uint8Array.from(atob(element.textContent.trim()), (letter) => letter.charCodeAt(0));
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream('gzip'));
  return JSON.parse(await new Response(stream).text());
}

// While the browser is still loading the file, a chunk is complete once another element follows it.
async function chunkElement(number) {
  for (;;) {
    const element = document.getElementById(`chunk-${number}`);
    if (element && (element.nextElementSibling || document.readyState !== 'loading')) return element;
    if (document.readyState !== 'loading') throw new Error(`The page is damaged: part ${number} is missing.`);
    await new Promise((resolve) => setTimeout(resolve, 30));
  }
}

function chunk(number) {
  if (!store.chunks.has(number)) {
    if (store.chunks.size >= 8) store.chunks.delete(store.chunks.keys().next().value);
    store.chunks.set(number, chunkElement(number).then(unfold));
  }
  return store.chunks.get(number);
}

async function detail(row) {
  return (await chunk(row.chunk))[row.place];
}

function spread(runs) {
  return runs ? runs.flatMap(([value, count]) => Array(count).fill(value)) : null;
}

// Decodes page.py's millinats, one character per token: nats in steps of 1/1000, null if not finite.
function nats(letters) {
  return letters && Array.from({ length: letters.length }, (_, at) => {
    const code = letters.charCodeAt(at) - 0x5d;
    return code < 0 ? null : (code % 2 ? -(code + 1) / 2 : code / 2) / 1000;
  });
}

function stepsOf(source) {
  const seen = new Map();
  for (const row of store.index.rows) {
    if (row.source === source) seen.set(`${row.step}/${row.partition}`, { step: row.step, partition: row.partition });
  }
  return [...seen.values()].sort((a, b) => a.step - b.step || a.partition.localeCompare(b.partition));
}

function groupKey(row) {
  return `${row.source}/${row.step}/${row.partition}/${row.group}`;
}

function inGroups(rows) {
  const groups = new Map();
  for (const row of rows) {
    if (!groups.has(groupKey(row))) groups.set(groupKey(row), []);
    groups.get(groupKey(row)).push(row);
  }
  return groups;
}

// GRPO compares the rewards within a group: if they are all equal, there is nothing to learn.
function taughtNothing(rows) {
  return rows.length > 1 && rows[0].partition === 'train' && rows.every((row) => row.reward === rows[0].reward);
}
