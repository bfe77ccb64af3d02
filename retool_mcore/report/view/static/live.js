'use strict';
// A page from `retool view --serve` asks its server whether the run has gone on, and then loads itself anew.

const LIVE_EVERY_MS = 2000;

// What a reader has set and the address does not say. It is there again after the page has loaded itself.
function keepPlace() {
  const { sort, down, chosen, marked, all } = view;
  const search = document.getElementById('search').value;
  try {
    sessionStorage.setItem('retool-place', JSON.stringify({ hash: location.hash, search, scroll: window.scrollY, view: { sort, down, chosen, marked, all } }));
  } catch { /* a browser that keeps nothing: the page begins anew */ }
}

// Takes what was kept; the height at which to go on, or null.
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
  } catch { /* the server has ended: the page stays as it is */ }
  setTimeout(follow, LIVE_EVERY_MS);
}

if (document.body.dataset.live) setTimeout(follow, LIVE_EVERY_MS);
