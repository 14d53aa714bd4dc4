// The page of latchd: asks for the statistics each second and shows them. What clients say of
// themselves is text, and is only ever set as text.
"use strict";

const MINUTES = 5;
const KEYS_AT_ONCE = 200;
const PATIENCE_MS = 5000;
// Longer than the longest pause and the slowest answer.
const GAP_MS = 15000;

const byId = (id) => document.getElementById(id);
const samples = [];
const rows = new Map();
let keys = [];
let shownCount = KEYS_AT_ONCE;
let last = null;
let answeredAt = null;
// The key that the URL names, if it names one.
let only = null;

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

// An age, or what is left of a lease, written as latch does.
function age(time) {
  const seconds = Math.floor(time + 0.5);
  if (seconds < 120) return `${seconds} s`;
  if (seconds < 7200) return `${Math.floor(seconds / 60)} m`;
  if (seconds < 172800) return `${Math.floor(seconds / 3600)} h`;
  return `${Math.floor(seconds / 86400)} d`;
}

// The length of a wait, which may be short.
function time(seconds) {
  if (seconds < 0.9995) return `${Math.round(seconds * 1000)} ms`;
  return seconds < 9.95 ? `${seconds.toFixed(1)} s` : age(seconds);
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
function plot(name, unit, nothing, measure) {
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
  say(element("span", "", foot), `${MINUTES} m ago`);
  const peak = element("span", "", foot);
  return (now) => {
    const points = samples.map((sample) => [sample.at, measure(sample)]);
    const values = points.map((point) => point[1]).filter((it) => it !== null);
    const highest = Math.max(0, ...values);
    const latest = points.length ? points[points.length - 1][1] : null;
    say(value, latest === null ? nothing : unit(latest));
    say(peak, highest > 0 ? `peak ${unit(highest)}` : "now");
    const x = (at) => (300 - (now - at) / (MINUTES * 200)).toFixed(1);
    const y = (it) => (100 - (highest > 0 ? it / highest : 0) * 94).toFixed(1);
    // A gap in what was seen is a gap in the line. A point between two gaps is a dot.
    let line = "", area = "", start = null, before = null;
    const close = () => {
      if (start !== null) area += `L${x(before)} 100L${x(start)} 100Z`;
      if (start !== null && start === before) line += "h0.1";
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
  plot("Grants per second", number, "–", (sample) => sample.rate),
  plot("Clients waiting", number, "–", (sample) => sample.waiters),
  plot("Wait for a grant", time, "no grant", (sample) => sample.wait),
];

// Adds what has happened since the sample before.
function addSample(at, grants, count, sum, waiters) {
  const sample = { at, rate: null, wait: null, waiters };
  // A server that has been started again counts from 0.
  if (last && at > last.at && grants >= last.grants && count >= last.count) {
    sample.rate = (grants - last.grants) / ((at - last.at) / 1000);
    const waits = count - last.count;
    // A grant that nobody waited for took no time. Without any grant there is no wait to show.
    if (waits > 0) sample.wait = Math.max(0, sum - last.sum) / waits;
    else if (grants > last.grants) sample.wait = 0;
  }
  last = { at, grants, count, sum };
  samples.push(sample);
  while (samples[0].at < at - MINUTES * 60000) samples.shift();
}

// Takes over what the server has seen while this page did not look.
function restore(seen, now) {
  samples.length = 0;
  last = null;
  for (const it of seen) {
    addSample(now - it.age_s * 1000, it.grants, it.wait_count, it.wait_sum_s, it.waiters);
  }
}

function note(counters, now) {
  const { counters: counts, grant_waits: waits, gauges } = counters;
  addSample(now, counts.grants, waits.count, waits.sum_s, gauges.waiters);

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
  show("waiters", number(gauges.waiters), `${number(counts.wait_timeouts)} timed out`);
  show("oldest", kind ? age(gauges.oldest_wait_s[kind]) : "–",
    kind ? plain(counters.oldest_wait[kind]) : "nobody waits");
  show("connections", number(gauges.connections), `${number(counts.disconnects)} closed`);
  show("expiries", number(counts.expiries), `${number(counts.breaks)} broken`);
  for (const draw of plots) draw(now);
  say(byId("place"), `${location.host} · ${counters.version}`);
  const settling = gauges.settling_s > 0 ? `grants begin in ${age(gauges.settling_s)}` : "";
  const state = gauges.draining === 1 ? "draining" : settling;
  showState(state ? "draining" : "live", state || "live");
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

// The end of the tag of a grant that is kept after the work under it has ended.
const ENDED = "(ended)";

// What is special about a holder or a waiter.
function badges(place, parent) {
  const badge = (text) => say(element("span", "badge", parent), text);
  if (place.slot !== undefined) badge(`slot ${place.slot}`);
  else if (place.slot_numbers) badge(`slots ${place.slot_numbers.join(", ")}`);
  else if (place.slots > 1) badge(`${number(place.slots)} slots`);
  if (place.shared) badge("shared");
  if (place.kept) badge((place.tag || "").endsWith(ENDED) ? "kept" : "reserved");
}

// A word for the shell.
function quoted(word) {
  if (/^[\w./:@%+=,-]+$/.test(word) && !word.startsWith("-")) return word;
  const escapes = { "\\": "\\\\", "'": "\\'" };
  if (!/\p{Cc}/u.test(word)) return `'${word.replaceAll("'", "'\\''")}'`;
  const hex = (c) => `\\x${c.codePointAt(0).toString(16).padStart(2, "0")}`;
  const inside = word.replace(/[\\']/g, (c) => escapes[c]);
  return `$'${inside.replace(/[\x00-\x1f\x7f]/g, hex)}'`;
}

function offerBreak(key, holder) {
  say(byId("text"), `latch break ${quoted(key.key)} --fence ${holder.fence}`);
  say(byId("copied"), "");
  byId("command").hidden = false;
  byId("copy").focus();
}

async function copyCommand() {
  getSelection().selectAllChildren(byId("text"));
  let isCopied = false;
  try {
    // Only a page that came over TLS, or from this host, has the clipboard.
    if (navigator.clipboard) await navigator.clipboard.writeText(byId("text").textContent);
    isCopied = navigator.clipboard ? true : document.execCommand("copy");
  } catch {
    // It stays selected.
  }
  say(byId("copied"), isCopied ? "copied" : "selected");
}

function who(place, parent) {
  const peer = place.peer || (place.conn_id ? `connection ${place.conn_id}` : "no connection");
  const name = element("div", "who", parent);
  sayOf(name, place.tag || peer);
  // Each line has a direction of its own.
  name.title = `${plain(place.tag || "")}\n${plain(peer)}`.trim();
  return place.tag ? peer : "";
}

function showHolder(key, holder, parent) {
  const made = element("div", "place", parent);
  const claimed = element("div", "claimed", made);
  const peer = who(holder, claimed);
  badges(holder, claimed);
  const button = element("button", "break", claimed);
  button.type = "button";
  say(button, "break…");
  button.title = "Show the command that ends this grant";
  button.addEventListener("click", () => offerBreak(key, holder));
  say(element("div", "age", made), age(holder.age_s));
  const from = element("div", "peer", made);
  if (peer) sayOf(from, peer);
  if (peer) say(element("span", "dot", from), " ·");
  from.append(" ");
  say(element("span", "fence", from), `fence ${holder.fence}`);
  const left = holder.lease_expires_in_s;
  const ofLease = `${age(left)} left of a lease of ${age(holder.lease_s)}`;
  const rest = element("div", "left", made);
  say(rest, `${age(left)} left`);
  rest.title = ofLease;
  const share = Math.min(1, left / Math.max(1, holder.lease_s));
  const level = share < 0.1 ? " out" : share < 0.3 ? " low" : "";
  const lease = element("div", `lease${level}`, made);
  lease.title = ofLease;
  element("i", "", lease).style.width = `${(100 * share).toFixed(1)}%`;
}

function showWaiter(waiter, turn, parent) {
  const made = element("div", `waiter${waiter.age_s >= 60 ? " late" : ""}`, parent);
  say(element("span", "turn", made), String(turn));
  const claimed = element("div", "claimed", made);
  const peer = who(waiter, claimed);
  if (peer) sayOf(element("div", "peer", claimed), peer);
  badges(waiter, claimed);
  say(element("div", "age", made), age(waiter.age_s));
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

// Styles take the roles of a table away, so they are named.
function cell(name, role, className, row) {
  const made = element(name, className, row);
  made.setAttribute("role", role);
  return made;
}

function showKey(key, row) {
  row.className = key.waiter_count > 0 ? "waits" : "";
  row.replaceChildren();
  const title = cell("th", "rowheader", "title", row);
  title.scope = "row";
  const link = element("a", "key", title);
  link.href = `#key=${encodeURIComponent(key.key)}`;
  sayOf(link, key.key);
  const waiting = key.waiter_count > 0 ? `, ${number(key.waiter_count)} waiting` : "";
  say(element("div", "kind", title), kind(key) + waiting);
  const holders = cell("td", "cell", "places", row);
  for (const holder of key.holders) showHolder(key, holder, holders);
  showRest(key.holder_count, key.holders.length, "holders", holders);
  const waiters = cell("td", "cell", "places", row);
  key.waiters.forEach((waiter, at) => showWaiter(waiter, at + 1, waiters));
  showRest(key.waiter_count, key.waiters.length, "waiting", waiters);
}

function showKeys() {
  const words = byId("filter").value.toLowerCase().split(/\s+/).filter(Boolean);
  const isMeant = (key) => (only === null ? matches(key, words) : key.key === only);
  const isFiltered = only !== null || words.length > 0;
  const found = isFiltered ? keys.filter(isMeant) : keys;
  const shown = found.slice(0, shownCount);
  const names = new Set(shown.map((key) => key.key));
  for (const [name, row] of rows) {
    if (names.has(name)) continue;
    row.remove();
    rows.delete(name);
  }
  const list = byId("rows");
  // What a person has selected stays until they let go of it.
  const selection = getSelection();
  const isSelecting = selection && !selection.isCollapsed && list.contains(selection.anchorNode);
  shown.forEach((key, at) => {
    let row = rows.get(key.key);
    if (!row) {
      row = document.createElement("tr");
      row.setAttribute("role", "row");
      rows.set(key.key, row);
    }
    if (!isSelecting || !row.firstChild) showKey(key, row);
    if (list.children[at] !== row) list.insertBefore(row, list.children[at] || null);
  });
  const all = `${number(keys.length)} in use`;
  say(byId("count"), isFiltered ? `${number(found.length)} of ${all}` : all);
  byId("all").hidden = only === null;
  byId("keys").hidden = found.length === 0;
  byId("none").hidden = found.length > 0;
  const nothingLike = "No matches.";
  const missing = only === null ? nothingLike : `${plain(only)} is not in use.`;
  say(byId("none"), keys.length || only !== null ? missing : "No locks in use.");
  byId("more").hidden = found.length <= shownCount;
  say(byId("more"), `${number(found.length - shownCount)} more`);
}

function take(answer) {
  keys = answer.keys;
  keys.sort((one, other) => waited(other) - waited(one)
    || other.waiter_count - one.waiter_count
    || (other.holders[0] ? other.holders[0].age_s : 0) - (one.holders[0] ? one.holders[0].age_s : 0));
  byId("list").hidden = false;
  showKeys();
}

// ---- runs: the last holders of keys whose ends are remembered

const RUNS_MS = 10000;
const JOBS_AT_ONCE = 50;
let ranAt = 0;

function isLate(job) {
  return Boolean(job.expected && job.expected.overdue);
}

function showRun(run, parent) {
  const isBad = run.status === null ? run.end !== "released" : run.status !== 0;
  const level = isBad ? " bad" : run.status === 0 ? " good" : "";
  const made = element("i", `run${level}`, parent);
  const status = run.status === null ? "" : `, status ${run.status}`;
  const tag = run.tag ? `\n${plain(run.tag)}` : "";
  made.title = `${run.end} ${age(run.ended_ago_s)} ago${status}, held ${age(run.held_s)}${tag}`;
}

function standing({ history, expected, refused }) {
  const last = history.length ? [`last held ${age(history[0].ended_ago_s)} ago`] : [];
  if (expected) {
    const since = `${age(expected.success_age_s)} ago`;
    const success = expected.succeeded ? `last success ${since}` : "no success yet";
    last[0] = `${expected.state.replaceAll("-", " ")}: ${success}`;
  }
  if (refused) last.push(`refused ${age(refused[0].ended_ago_s)} ago`);
  return last.join(", ");
}

// Who was refused last, and who held the key.
function refusal(job) {
  if (!job.refused) return "";
  const { tag, end, holder } = job.refused[0];
  const held = holder ? `; held by ${plain(holder)}` : "";
  return `${end}: ${tag ? plain(tag) : "unknown"}${held}`;
}

function showRuns(jobs) {
  jobs.sort((one, other) => isLate(other) - isLate(one));
  byId("runs").hidden = jobs.length === 0;
  byId("jobs").replaceChildren();
  for (const job of jobs.slice(0, JOBS_AT_ONCE)) {
    const made = element("div", `job${isLate(job) ? " late" : ""}`, byId("jobs"));
    sayOf(element("div", "name", made), job.key);
    const strip = element("div", "strip", made);
    for (const run of [...job.history].reverse()) showRun(run, strip);
    const status = element("div", "standing", made);
    say(status, standing(job));
    status.title = refusal(job);
  }
  showRest(jobs.length, Math.min(jobs.length, JOBS_AT_ONCE), "keys", byId("jobs"));
}

// ---- the URL: #q=WORDS is a filter, #key=KEY one key

function readUrl() {
  const asked = new URLSearchParams(location.hash.slice(1));
  only = asked.get("key");
  const words = asked.get("q") || "";
  if (byId("filter").value !== words) byId("filter").value = words;
  shownCount = KEYS_AT_ONCE;
  showKeys();
}

function writeUrl() {
  const words = byId("filter").value;
  const hash = words ? `#q=${encodeURIComponent(words)}` : "#";
  // Each letter would be a page to go back to.
  window.history.replaceState(null, "", hash);
}

// ---- asking

// Where the page is: a proxy may have put it below a path. Its URL may have a user and a password
// in it, with which nothing can be fetched.
const base = new URL(".", location.origin + location.pathname);

async function ask(path) {
  const signal = AbortSignal.timeout(PATIENCE_MS);
  const answer = await fetch(new URL(path, base), { signal });
  if (!answer.ok) throw new Error((await answer.text()).trim() || `status ${answer.status}`);
  return answer.json();
}

// What was true is not what is: until the server answers, the figures are old.
function showGone(error) {
  const isAnswer = error instanceof Error && error.name === "Error";
  const past = answeredAt === null ? "" : age((Date.now() - answeredAt) / 1000);
  const since = past && ` for ${past}`;
  const old = past && ` What is shown is ${past} old.`;
  showState("gone", isAnswer ? error.message : `no answer${since}`);
  say(byId("gone"), isAnswer ? `${error.message}.${old}` : `The server does not answer.${old}`);
}

function showState(name, text) {
  document.body.className = name;
  say(byId("state"), text);
  byId("gone").hidden = name !== "gone";
  document.title = name === "live" ? "latchd" : `latchd: ${text}`;
}

async function refresh() {
  const began = Date.now();
  let pause = 1000;
  try {
    if (document.hidden) return;
    if (answeredAt === null || began - answeredAt > GAP_MS) {
      restore((await ask("v1/stats/history")).samples, Date.now());
    }
    const paths = ["v1/stats/counters", "v1/stats/holders"];
    const [counters, holders] = await Promise.all(paths.map(ask));
    answeredAt = Date.now();
    note(counters, answeredAt);
    take(holders);
    if (began - ranAt >= RUNS_MS) {
      showRuns((await ask("v1/stats/runs")).keys);
      ranAt = began;
    }
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
  only = null;
  shownCount = KEYS_AT_ONCE;
  writeUrl();
  showKeys();
});
addEventListener("hashchange", readUrl);
byId("copy").addEventListener("click", copyCommand);
byId("close").addEventListener("click", () => { byId("command").hidden = true; });
byId("more").addEventListener("click", () => {
  shownCount += KEYS_AT_ONCE;
  showKeys();
});
say(byId("state"), "connecting");
readUrl();
refresh();
