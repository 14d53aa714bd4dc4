// The page of latchd: asks for the statistics each second and shows them. What clients say of
// themselves is text, and is only ever set as text.
"use strict";

const MINUTES = 5;
const KEYS_AT_ONCE = 200;
const PATIENCE_MS = 5000;
// Longer than the longest pause and the slowest answer.
const GAP_MS = 15000;

const byId = (id) => document.getElementById(id);
const history = [];
const rows = new Map();
const leases = new Map();
let keys = [];
let shownCount = KEYS_AT_ONCE;
let last = null;
let answeredAt = null;

function element(name, className, parent) {
  const made = document.createElement(name);
  made.className = className;
  if (parent) parent.append(made);
  return made;
}

// Shows characters that are invisible or change the direction of writing as escapes, as latch does.
const UNSEEN = /[\p{Cc}\p{Default_Ignorable_Code_Point}\p{Zl}\p{Zp}\u{fff9}-\u{fffb}]/gu;
function plain(text) {
  return text.replace(UNSEEN, (c) => `\\u{${c.codePointAt(0).toString(16)}}`);
}

// Text that clients have chosen. It may be written from right to left, and must not move the text
// beside it.
function sayOf(node, text) {
  say(element("bdi", "", node), plain(text));
}

// Changes nothing if the text is the same: the browser has less to do, and a selection stays.
function say(node, text) {
  if (node.textContent !== text) node.textContent = text;
}

function time(seconds) {
  if (seconds < 0.9995) return `${Math.round(seconds * 1000)} ms`;
  if (seconds < 9.95) return `${seconds.toFixed(1)} s`;
  if (seconds < 120) return `${Math.round(seconds)} s`;
  if (seconds < 7200) return `${Math.floor(seconds / 60)} min`;
  if (seconds < 172800) return `${Math.floor(seconds / 3600)} h`;
  return `${Math.floor(seconds / 86400)} d`;
}

function number(value) {
  if (value >= 10 || Number.isInteger(value)) return Math.round(value).toLocaleString("en");
  return value.toFixed(1);
}

// ---- figures and plots

function card(parent, className, name) {
  const made = element("div", `card ${className}`, parent);
  const head = element("div", "head", made);
  say(element("div", "name", head), name);
  const value = element("div", "value", head);
  return { made, value };
}

const figures = {};
for (const [id, name] of [
  ["keys", "Keys in use"], ["holders", "Holders"], ["waiters", "Waiting"],
  ["oldest", "Longest wait"], ["connections", "Connections"], ["expiries", "Expired leases"],
]) {
  const { made, value } = card(byId("figures"), "", name);
  figures[id] = { value, more: element("div", "more", made) };
}

const SVG = "http://www.w3.org/2000/svg";
function plot(name, unit, measure) {
  const { made, value } = card(byId("plots"), "plot", name);
  const svg = document.createElementNS(SVG, "svg");
  svg.setAttribute("viewBox", "0 0 300 100");
  svg.setAttribute("preserveAspectRatio", "none");
  svg.setAttribute("aria-hidden", "true");
  const paths = ["area", "base", "line"].map((className) => {
    const path = document.createElementNS(SVG, "path");
    path.setAttribute("class", className);
    svg.append(path);
    return path;
  });
  paths[1].setAttribute("d", "M0 100H300");
  made.append(svg);
  const foot = element("div", "foot", made);
  say(element("span", "", foot), `${MINUTES} min ago`);
  const peak = element("span", "", foot);
  return (now) => {
    const points = history.map((sample) => [sample.at, measure(sample)]);
    const values = points.map((point) => point[1]).filter((it) => it !== null);
    const highest = Math.max(0, ...values);
    const latest = values.length ? values[values.length - 1] : null;
    say(value, latest === null ? "–" : unit(latest));
    say(peak, highest > 0 ? `peak ${unit(highest)}` : "now");
    const x = (at) => (300 - (now - at) / (MINUTES * 200)).toFixed(1);
    const y = (it) => (100 - (highest > 0 ? it / highest : 0) * 94).toFixed(1);
    // A gap in what was seen is a gap in the line.
    let line = "", area = "", start = null, before = null;
    const close = () => {
      if (start !== null) area += `L${x(before)} 100L${x(start)} 100Z`;
      start = null;
    };
    for (const [at, it] of points) {
      if (it === null || (before !== null && at - before > GAP_MS)) close();
      if (it === null) continue;
      const step = `${start === null ? "M" : "L"}${x(at)} ${y(it)}`;
      if (start === null) start = at;
      line += step;
      area += step;
      before = at;
    }
    close();
    paths[0].setAttribute("d", area);
    paths[2].setAttribute("d", line);
  };
}

const plots = [
  plot("Grants a second", number, (sample) => sample.rate),
  plot("Clients waiting", number, (sample) => sample.waiters),
  plot("Wait for a grant", time, (sample) => sample.wait),
];

function note(counters, now) {
  const { counters: counts, grant_waits: waits, gauges } = counters;
  const sample = { at: now, rate: null, wait: null, waiters: gauges.waiters };
  // A server that has been started again counts from 0.
  if (last && now > last.at && counts.grants >= last.grants && waits.count >= last.count) {
    sample.rate = (counts.grants - last.grants) / ((now - last.at) / 1000);
    const count = waits.count - last.count;
    sample.wait = count > 0 ? Math.max(0, waits.sum_s - last.sum) / count : 0;
  }
  last = { at: now, grants: counts.grants, count: waits.count, sum: waits.sum_s };
  history.push(sample);
  while (history[0].at < now - MINUTES * 60000) history.shift();

  const inUse = gauges.keys.lock + gauges.keys.semaphore;
  const oldest = (kind) => (gauges.oldest_wait_s[kind] > 0 ? kind : null);
  const longer = gauges.oldest_wait_s.semaphore > gauges.oldest_wait_s.lock;
  const kind = longer ? oldest("semaphore") : oldest("lock");
  const show = (id, value, more) => {
    say(figures[id].value, value);
    say(figures[id].more, more);
  };
  show("keys", number(inUse), `${number(gauges.idle_keys)} idle`);
  show("holders", number(gauges.holders), `${number(counts.grants)} granted`);
  show("waiters", number(gauges.waiters), `${number(counts.wait_timeouts)} gave up`);
  show("oldest", kind ? time(gauges.oldest_wait_s[kind]) : "–",
    kind ? plain(counters.oldest_wait[kind]) : "nobody waits");
  show("connections", number(gauges.connections), `${number(counts.disconnects)} closed`);
  show("expiries", number(counts.expiries), `${number(counts.breaks)} broken`);
  for (const draw of plots) draw(now);
  say(byId("place"), `${location.host} · ${counters.version}`);
  const settling = gauges.settling_s > 0 ? `grants begin in ${time(gauges.settling_s)}` : "";
  const state = gauges.draining === 1 ? "draining" : settling;
  document.body.classList.toggle("draining", state !== "");
  say(byId("state"), state || "live");
}

// ---- keys

function waited(key) {
  return key.waiters.length ? key.waiters[0].age_s : -1;
}

function matches(key, words) {
  const text = [key.key];
  for (const place of [...key.holders, ...key.waiters]) text.push(place.tag, place.peer);
  const all = text.join("\n").toLowerCase();
  return words.every((word) => all.includes(word));
}

// The length of a lease is the most that has been seen of it.
function leaseLength(holder) {
  const left = holder.lease_expires_in_s;
  const known = leases.get(holder.fence);
  const length = Math.max(left, known ? known.length : Math.min(left + holder.age_s, left * 1.5));
  leases.set(holder.fence, { length, seen: answeredAt });
  return length;
}

function who(place, parent) {
  const peer = place.peer || (place.conn_id ? `connection ${place.conn_id}` : "no connection");
  const name = element("div", "who", parent);
  sayOf(name, place.tag || peer);
  // Each line has a direction of its own.
  name.title = `${plain(place.tag || "")}\n${plain(peer)}`.trim();
  return place.tag ? peer : "";
}

function showHolder(holder, parent) {
  const made = element("div", "place", parent);
  const peer = who(holder, made);
  say(element("div", "age", made), time(holder.age_s));
  const from = element("div", "peer", made);
  if (peer) sayOf(from, peer);
  from.append(peer ? ` · fence ${holder.fence}` : `fence ${holder.fence}`);
  const left = holder.lease_expires_in_s;
  say(element("div", "left", made), `${time(left)} left`);
  const share = Math.min(1, left / leaseLength(holder));
  const level = share < 0.1 ? " out" : share < 0.3 ? " low" : "";
  const lease = element("div", `lease${level}`, made);
  element("i", "", lease).style.width = `${(100 * share).toFixed(1)}%`;
}

function showWaiter(waiter, turn, parent) {
  const made = element("div", `waiter${waiter.age_s >= 60 ? " late" : ""}`, parent);
  say(element("span", "turn", made), String(turn));
  const claimed = element("div", "claimed", made);
  const peer = who(waiter, claimed);
  if (peer) sayOf(element("div", "peer", claimed), peer);
  say(element("div", "age", made), time(waiter.age_s));
}

function showRest(count, listed, name, parent) {
  if (count > listed) say(element("div", "rest", parent), `and ${number(count - listed)} more ${name}`);
}

function kind(key) {
  if (key.kind !== "lock") return `semaphore, ${key.taken} of ${key.limit} held`;
  // Who shares a lock has a part of its slots.
  const isShared = key.holder_count > 0 && key.taken < key.slots;
  return isShared ? `lock, shared by ${key.holder_count}` : "lock";
}

function showKey(key, row) {
  row.className = key.waiter_count > 0 ? "waits" : "";
  row.replaceChildren();
  const title = element("div", "title", row);
  sayOf(element("div", "key", title), key.key);
  const waiting = key.waiter_count > 0 ? `, ${number(key.waiter_count)} waiting` : "";
  say(element("div", "kind", title), kind(key) + waiting);
  const holders = element("div", "places", row);
  for (const holder of key.holders) showHolder(holder, holders);
  showRest(key.holder_count, key.holders.length, "holders", holders);
  const waiters = element("div", "places", row);
  key.waiters.forEach((waiter, at) => showWaiter(waiter, at + 1, waiters));
  showRest(key.waiter_count, key.waiters.length, "waiting", waiters);
}

function showKeys() {
  const words = byId("filter").value.toLowerCase().split(/\s+/).filter(Boolean);
  const found = words.length ? keys.filter((key) => matches(key, words)) : keys;
  const shown = found.slice(0, shownCount);
  const names = new Set(shown.map((key) => key.key));
  for (const [name, row] of rows) {
    if (names.has(name)) continue;
    row.remove();
    rows.delete(name);
  }
  const list = byId("keys");
  // What a person has selected stays until they let go of it.
  const selection = getSelection();
  const isSelecting = selection && !selection.isCollapsed && list.contains(selection.anchorNode);
  shown.forEach((key, at) => {
    let row = rows.get(key.key);
    if (!row) rows.set(key.key, row = document.createElement("li"));
    if (!isSelecting || !row.firstChild) showKey(key, row);
    if (list.children[at] !== row) list.insertBefore(row, list.children[at] || null);
  });
  const all = `${number(keys.length)} in use`;
  say(byId("count"), words.length ? `${number(found.length)} of ${all}` : all);
  byId("none").hidden = found.length > 0;
  say(byId("none"), keys.length ? "No key, tag or address is like that." : "No key is held or waited for.");
  byId("more").hidden = found.length <= shownCount;
  say(byId("more"), `${number(found.length - shownCount)} more`);
}

function take(answer) {
  keys = answer.keys;
  keys.sort((one, other) => waited(other) - waited(one)
    || other.waiter_count - one.waiter_count
    || (other.holders[0] ? other.holders[0].age_s : 0) - (one.holders[0] ? one.holders[0].age_s : 0));
  showKeys();
  for (const [fence, lease] of leases) if (lease.seen < answeredAt - 60000) leases.delete(fence);
}

// ---- asking

async function ask(path) {
  // The page's own URL may have a user and a password in it, with which nothing can be fetched.
  const signal = AbortSignal.timeout(PATIENCE_MS);
  const answer = await fetch(new URL(path, location.origin), { signal });
  if (!answer.ok) throw new Error((await answer.text()).trim() || `status ${answer.status}`);
  return answer.json();
}

function showGone(error) {
  document.body.className = "gone";
  const isAnswer = error instanceof Error && error.name === "Error";
  const since = answeredAt === null ? "" : ` for ${time((Date.now() - answeredAt) / 1000)}`;
  say(byId("state"), isAnswer ? error.message : `no answer${since}`);
}

async function refresh() {
  const began = Date.now();
  let pause = 1000;
  try {
    if (document.hidden) return;
    const [counters, holders] = await Promise.all([ask("/v1/stats/counters"), ask("/v1/stats/holders")]);
    answeredAt = Date.now();
    document.body.className = "live";
    note(counters, answeredAt);
    take(holders);
    // A long list takes its time. The page and the server have four times as much between two.
    const took = Date.now() - began;
    pause = Math.max(pause - took, 4 * took);
  } catch (error) {
    showGone(error);
    pause = 2000;
  } finally {
    setTimeout(refresh, Math.min(pause, 5000));
  }
}

byId("filter").addEventListener("input", () => {
  shownCount = KEYS_AT_ONCE;
  showKeys();
});
byId("more").addEventListener("click", () => {
  shownCount += KEYS_AT_ONCE;
  showKeys();
});
refresh();
