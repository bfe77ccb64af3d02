'use strict';
// A page from `retool view --serve` polls the version on its server and reloads itself when it changes.

const LIVE_EVERY_MS = 2000;

// Stores the reader's settings that are not in the address, to restore them after a reload.
function keepPlace() {
  const { sort, down, chosen, marked, all } = view;
  const search = document.getElementById('search').value;
  try {
    sessionStorage.setItem('retool-place', JSON.stringify({ hash: location.hash, search, scroll: window.scrollY, view: { sort, down, chosen, marked, all } }));
  } catch { /* no storage: the page starts with its defaults */ }
}

// Restores the settings; returns the scroll position, or null.
function placeBefore() {
  try {
    const before = JSON.parse(sessionStorage.getItem('retool-place'));
    sessionStorage.removeItem('retool-place');
    if (!before || before.hash !== location.hash) return null;
    document.getElementById('search').value = before.search;
    Object.assign(view, before.view);
    return before.scroll;
  } catch { return null; }
}

async function follow() {
  try {
    const answer = await fetch('version', { cache: 'no-store' });
    const newest = answer.ok ? await answer.text() : document.body.dataset.live;
    const writing = document.activeElement?.matches('textarea, input');
    if (newest !== document.body.dataset.live && !writing) { keepPlace(); location.reload(); return; }
  } catch { /* the server has stopped: keep the page as it is */ }
  setTimeout(follow, LIVE_EVERY_MS);
}

if (document.body.dataset.live) setTimeout(follow, LIVE_EVERY_MS);
