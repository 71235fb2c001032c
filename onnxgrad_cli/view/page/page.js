
// The page of `onnxgrad view -o FILE.html`: a tree of modules that is folded, laid out by dagre a level at a time,
// and drawn as SVG. All text goes in as text, never as HTML.
'use strict';
const data = JSON.parse(document.getElementById('data').textContent);
const { kinds, items, edges } = data;
const at = (id) => document.getElementById(id);
const NS = 'http://www.w3.org/2000/svg';
const LETTER = 6.05, LINE = 13, PAD = 9, HEAD = 18, LONGEST = 44;
const BACK = new Set(['backward', 'gradient'].map((name) => kinds.findIndex((kind) => kind.name === name)));

// -- the tree: items stand before what lies in them -----------------------------------------------------------------

const parent = items.map(([above]) => above);
const kindOf = items.map(([, kind]) => kind); // -1: can be unfolded, -2: a row
const title = items.map(([, , text]) => text);
const inside = items.map(() => []);
const depth = new Int32Array(items.length);
const nodes = items.map(([, , , , , count]) => [0, count || 0]); // forward, backward
const mainKind = kindOf.map((kind) => (BACK.has(kind) || kind < 0 ? -1 : kind));
items.forEach((item, i) => {
  if (i) { inside[parent[i]].push(i); depth[i] = depth[parent[i]] + 1; }
  if (!BACK.has(kindOf[i])) nodes[i].reverse();
});
for (let i = items.length - 1; i > 0; i--) {
  nodes[parent[i]][0] += nodes[i][0];
  nodes[parent[i]][1] += nodes[i][1];
  if (nodes[i][0] && mainKind[i] >= 0) mainKind[parent[i]] = mainKind[i];
}
const isRow = (i) => kindOf[i] === -2;
const isGroup = (i) => kindOf[i] === -1;
const isBack = (i) => BACK.has(kindOf[i]);
const open = new Uint8Array(items.length);
kindOf.forEach((kind, i) => (open[i] = kind === -2));
open[0] = 1;
const into = items.map(() => []), outOf = items.map(() => []);
edges.forEach(([source, target], e) => { outOf[source].push(e); into[target].push(e); });

// The groups of the next level; gradients and bodies of nodes, which stand in rows, only where all is wanted.
const groupsUnder = (i) => inside[i].flatMap((child) => (isGroup(child) ? [child] : isRow(child) && data.limit === 0 ? groupsUnder(child) : []));
const boxesUnder = (i) => inside[i].reduce((sum, c) => sum + (isRow(c) ? boxesUnder(c) : isGroup(c) || nodes[c][0] + nodes[c][1] > 0), 0);

// Unfolds whole levels while they keep to the limit, or as many as were asked for.
function unfoldFirst({ limit, depth: levels }) {
  let level = groupsUnder(0), shown = boxesUnder(0);
  for (let n = 0; level.length && (levels === null || n < levels); n++) {
    shown += level.reduce((sum, i) => sum + boxesUnder(i) - 1, 0);
    if (levels === null && limit && shown > limit) break;
    for (const i of level) open[i] = 1;
    level = level.flatMap(groupsUnder);
  }
}

// -- what is shown: each item's box, and edges between boxes --------------------------------------------------------

let shownAs = new Int32Array(items.length);
function represent() {
  for (let i = 1; i < items.length; i++) {
    const above = shownAs[parent[i]];
    shownAs[i] = above === parent[i] && open[above] ? i : above;
  }
}

// Edges between the halves of shown boxes: { a, b, sides, home, ends, edges }.
function gather() {
  const found = new Map();
  edges.forEach(([source, target], e) => {
    const a = shownAs[source], b = shownAs[target];
    if (a === b) return;
    const from = isGroup(a) && isBack(source) ? 1 : 0, to = isGroup(b) && isBack(target) ? 1 : 0;
    const key = (2 * a + from) * 2 * items.length + 2 * b + to;
    if (!found.has(key)) found.set(key, { a, b, from, to, back: isBack(source) && isBack(target), edges: [], ...meeting(a, b) });
    found.get(key).edges.push(e);
  });
  return [...found.values()];
}

// The innermost item around both, and its children that hold them.
function meeting(a, b) {
  while (depth[a] > depth[b] && parent[a] !== parent[b]) a = parent[a];
  while (depth[b] > depth[a] && parent[a] !== parent[b]) b = parent[b];
  while (parent[a] !== parent[b]) { a = parent[a]; b = parent[b]; }
  return { home: parent[a], first: a, second: b };
}

// -- sizes and places -----------------------------------------------------------------------------------------------

const short = (text) => (text.length <= LONGEST ? text : `${text.slice(0, LONGEST / 2)}…${text.slice(1 - LONGEST / 2)}`);
const columns = (text) => [...text].reduce((sum, c) => sum + (/[\u1100-\u115f\u2e80-\ua4cf\uac00-\ud7a3\uf900-\ufaff\uff00-\uff60]/.test(c) ? 2 : 1), 0);
const plural = (count) => `${count} node${count === 1 ? '' : 's'}`;

// The halves of a box: [{ kind, rows }], one but for a folded module with a gradient.
function halves(i) {
  if (!isGroup(i)) return [{ kind: kindOf[i], rows: [short(title[i]), ...items[i][3]] }];
  const [forward, backward] = nodes[i];
  const name = short(title[i]);
  const found = [];
  if (forward || !backward) {
    const more = forward ? plural(forward) : `${inside[i].length} values`;
    found.push({ kind: mainKind[i] < 0 ? kinds.findIndex((kind) => kind.name === 'constant') : mainKind[i], rows: [`▸ ${name}`, more] });
  }
  if (backward) found.push({ kind: [...BACK][0], rows: [forward ? 'gradient' : `▸ ${name}`, plural(backward)] });
  return found;
}
const widthOf = ({ rows }) => LETTER * Math.max(...rows.map(columns)) + 2 * PAD + 6;

const kept = new Map(); // a level that did not change is not laid out again
let sizes, places, routes;

function measure(i, pairs) {
  if (!isRow(i) && !(isGroup(i) && open[i])) {
    const parts = halves(i);
    return (sizes[i] = { w: parts.reduce((sum, part) => sum + widthOf(part), 0), h: LINE * Math.max(...parts.map((p) => p.rows.length)) + 2 * PAD, parts });
  }
  const within = inside[i].map((child) => measure(child, pairs));
  if (isRow(i)) {
    let x = 0;
    const spots = within.map(({ w }) => { const spot = [x, 0]; x += w + 16; return spot; });
    return (sizes[i] = { w: x - 16, h: Math.max(...within.map(({ h }) => h)), spots, points: new Map() });
  }
  const links = [...(pairs.get(i)?.values() ?? [])];
  const sign = JSON.stringify([within.map(({ w, h }) => [w, h]), links]);
  if (kept.get(i)?.sign !== sign) kept.set(i, { sign, ...arrange(i, within, links) });
  return (sizes[i] = kept.get(i));
}

// One level: what is linked goes to dagre, the rest into a grid above it.
function arrange(i, within, links) {
  const numbers = new Map(inside[i].map((child, n) => [child, n]));
  const linked = new Set(links.flat());
  const alone = inside[i].filter((child) => !linked.has(child));
  const edge = i ? 10 : 0, top = i ? HEAD + 6 : 0;
  const spots = [];
  const across = Math.ceil(Math.sqrt(alone.length) * 1.3);
  let x = edge, y = top, high = 0, wide = 0;
  alone.forEach((child, n) => {
    if (n && n % across === 0) { x = edge; y += high + 12; high = 0; }
    const { w, h } = within[numbers.get(child)];
    spots[numbers.get(child)] = [x, y];
    x += w + 12; high = Math.max(high, h); wide = Math.max(wide, x - 12);
  });
  y += alone.length ? high + (linked.size ? 16 : 0) : 0;
  const points = new Map();
  if (linked.size) {
    const graph = new dagre.graphlib.Graph();
    graph.setGraph({ nodesep: 16, edgesep: 8, ranksep: 26 });
    graph.setDefaultEdgeLabel(() => ({}));
    for (const child of inside[i]) if (linked.has(child)) {
      const { w, h } = within[numbers.get(child)];
      graph.setNode(String(child), { width: w, height: h });
    }
    for (const [a, b] of links) graph.setEdge(String(a), String(b));
    dagre.layout(graph);
    for (const child of linked) {
      const node = graph.node(String(child));
      spots[numbers.get(child)] = [node.x - node.width / 2 + edge, node.y - node.height / 2 + y];
    }
    for (const [a, b] of links) points.set(`${a} ${b}`, graph.edge(String(a), String(b)).points.slice(1, -1).map((p) => [p.x + edge, p.y + y]));
    wide = Math.max(wide, graph.graph().width + edge);
    y += graph.graph().height;
  }
  return { w: Math.max(wide + edge, i ? LETTER * (columns(short(title[i])) + 4) + 2 * PAD : 0), h: y + edge, spots, points };
}

function place(i, x, y) {
  places[i] = { x, y, ...sizes[i] };
  sizes[i].spots?.forEach(([dx, dy], n) => place(inside[i][n], x + dx, y + dy));
}

// A point of a box where an edge leaves or reaches it: below, above, or at a side.
function port(i, side, where) {
  const { x, y, w, h, parts } = places[i];
  if (where === 'left') return [x, y + h / 2];
  if (where === 'right') return [x + w, y + h / 2];
  const two = parts?.length === 2, left = two ? widthOf(parts[0]) : 0;
  const middle = two ? (side ? x + left + (w - left) / 2 : x + left / 2) : x + w / 2;
  return [middle, where === 'top' ? y : y + h];
}

function pathOf(link) {
  const { a, b, from, to, home, first, second } = link;
  if (isRow(home)) {
    const forth = places[first].x < places[second].x;
    const [p, q] = [port(a, from, forth ? 'right' : 'left'), port(b, to, forth ? 'left' : 'right')];
    const x = (p[0] + q[0]) / 2;
    return `M${p}C${x},${p[1]} ${x},${q[1]} ${q}`;
  }
  const down = first < second;
  const middle = sizes[home].points.get(down ? `${first} ${second}` : `${second} ${first}`) ?? [];
  const { x, y } = places[home], shift = link.back ? 7 : 0;
  const bends = (middle.length > 1 ? middle : []).map(([px, py]) => [px + x + shift, py + y]);
  if (!down) bends.reverse();
  const all = [port(a, from, down ? 'bottom' : 'top'), ...bends, port(b, to, down ? 'top' : 'bottom')];
  let path = `M${all[0]}`;
  for (let n = 1; n < all.length; n++) {
    const [[ax, ay], [bx, by]] = [all[n - 1], all[n]];
    path += ax === bx ? `V${by}` : `C${ax},${(ay + by) / 2} ${bx},${(ay + by) / 2} ${bx},${by}`;
  }
  return path;
}

// -- drawing --------------------------------------------------------------------------------------------------------

function make(tag, attributes, ...children) {
  const element = document.createElementNS(NS, tag);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  element.append(...children);
  return element;
}

function shapeOf(kind, x, y, w, h) {
  const { fill, color, shape, border } = kinds[kind];
  const look = { class: 's', fill, stroke: color, ...(border === 'dashed' ? { 'stroke-dasharray': '5 3' } : {}) };
  const radius = { round: 8, stadium: Math.min(h / 2, 18), cylinder: 5 }[shape] ?? 0;
  const whole = shape === 'hexagon'
    ? make('path', { ...look, d: `M${x} ${y + h / 2}L${x + 8} ${y}H${x + w - 8}L${x + w} ${y + h / 2}L${x + w - 8} ${y + h}H${x + 8}z` })
    : make('rect', { ...look, x, y, width: w, height: h, rx: radius });
  const more = [];
  if (shape === 'cylinder') more.push(make('path', { d: `M${x} ${y + 4}H${x + w}`, fill: 'none', stroke: color }));
  if (border === 'double') more.push(make('rect', { x: x + 3, y: y + 3, width: Math.max(w - 6, 1), height: Math.max(h - 6, 1), rx: radius, fill: 'none', stroke: color }));
  return [whole, ...more];
}

let drawn = new Map(), links = [];
function draw() {
  represent();
  links = gather();
  const pairs = new Map();
  for (const { home, first, second } of links) {
    if (isRow(home)) continue;
    if (!pairs.has(home)) pairs.set(home, new Map());
    const ends = [Math.min(first, second), Math.max(first, second)];
    pairs.get(home).set(ends.join(' '), ends);
  }
  sizes = []; places = [];
  measure(0, pairs);
  place(0, 0, 0);
  const frames = [], boxes = [];
  drawn = new Map();
  for (let i = 1; i < items.length; i++) {
    if (shownAs[i] !== i || isRow(i)) continue;
    const unfolded = isGroup(i) && open[i];
    (unfolded ? frames : boxes).push(unfolded ? frame(i) : box(i));
  }
  const lines = links.map((link) => {
    link.element = make('path', { class: link.back ? 'e back' : 'e', d: pathOf(link), 'marker-end': 'url(#tip)' });
    const told = link.edges.slice(0, 12).flatMap((e) => edges[e].slice(2)).join('\n');
    link.element.append(make('title', {}, told));
    return link.element;
  });
  const tip = make('marker', { id: 'tip', viewBox: '0 0 8 8', refX: 8, refY: 4, markerWidth: 7, markerHeight: 7, orient: 'auto', markerUnits: 'userSpaceOnUse' },
    make('path', { d: 'M0 0L8 4L0 8z', fill: 'context-stroke' }));
  at('all').replaceChildren(make('defs', {}, tip), ...frames, ...lines, ...boxes);
  mark();
  const count = boxes.length;
  at('now').textContent = `${data.caption}; ${count} box${count === 1 ? '' : 'es'} shown`;
}

function frame(i) {
  const { x, y, w, h } = places[i];
  const group = make('g', { class: 'i', 'data-i': i, tabindex: 0, role: 'button', 'aria-expanded': 'true', 'aria-label': `${title[i]}, unfolded` },
    make('rect', { class: 's frame', x, y, width: w, height: h, rx: 6 }),
    make('rect', { class: 'head', x, y, width: w, height: HEAD }),
    make('text', { class: 'f', x: x + 6, y: y + 13 }, `▾ ${short(title[i])}`));
  drawn.set(i, group);
  return group;
}

function box(i) {
  const { y, w, h, parts } = places[i];
  let { x } = places[i];
  const said = parts.map(({ rows }) => rows.join(', ')).join('; ');
  const group = make('g', { class: 'i box', 'data-i': i, tabindex: 0, role: 'button', 'aria-label': said, ...(isGroup(i) ? { 'aria-expanded': 'false' } : {}) });
  for (const part of parts) {
    const width = parts.length > 1 ? widthOf(part) : w;
    group.append(...shapeOf(part.kind, x, y, width, h));
    const top = y + h / 2 - (LINE * part.rows.length) / 2 + 10;
    part.rows.forEach((row, n) => group.append(make('text', { class: n ? '' : 'b', x: x + width / 2, y: top + n * LINE, 'text-anchor': 'middle' }, row)));
    x += width;
  }
  drawn.set(i, group);
  return group;
}

// -- where the reader looks -----------------------------------------------------------------------------------------

const view = { x: 0, y: 0, k: 1 };
const picture = at('picture');
function look(x, y, k) {
  Object.assign(view, { x, y, k: Math.min(Math.max(k, 0.005), 6) });
  at('all').setAttribute('transform', `translate(${view.x} ${view.y}) scale(${view.k})`);
}
function zoom(factor, px = picture.clientWidth / 2, py = picture.clientHeight / 2) {
  const k = Math.min(Math.max(view.k * factor, 0.005), 6);
  look(px - ((px - view.x) * k) / view.k, py - ((py - view.y) * k) / view.k, k);
}
function fit(least = 0) {
  const { w, h } = sizes[0];
  const k = Math.max(Math.min((picture.clientWidth - 24) / w, (picture.clientHeight - 24) / h, 1.2), least);
  look((picture.clientWidth - w * k) / 2, Math.max((picture.clientHeight - h * k) / 2, 12), k);
}
function center(i) {
  const { x, y, w, h } = places[i];
  const k = Math.max(view.k, 0.8);
  look(picture.clientWidth / 2 - (x + w / 2) * k, picture.clientHeight / 2 - (y + Math.min(h, 200) / 2) * k, k);
}

// Folds or unfolds, while the item stays where it is on the screen.
function toggle(i) {
  const before = places[i];
  open[i] = !open[i];
  draw();
  const after = places[i];
  look(view.x + (before.x - after.x) * view.k, view.y + (before.y - after.y) * view.k, view.k);
  drawn.get(i)?.focus({ preventScroll: true });
}

function reveal(i) {
  for (let above = parent[i]; above >= 0; above = parent[above]) open[above] = 1;
  draw();
  select(i);
  center(isRow(i) ? inside[i][0] : i);
  drawn.get(i)?.focus({ preventScroll: true });
}

// -- one item, one value --------------------------------------------------------------------------------------------

let chosen = -1, way = { edges: new Set(), items: new Set() };
function mark() {
  const near = new Set([...way.items].map((i) => shownAs[i]));
  at('all').classList.toggle('way', way.edges.size > 0);
  for (const link of links) link.element.classList.toggle('hot', link.edges.some((e) => way.edges.has(e)));
  for (const [i, element] of drawn) {
    element.classList.toggle('on', i === chosen || (chosen >= 0 && i === shownAs[chosen]));
    element.classList.toggle('near', near.has(i));
  }
}
function follow(found) {
  way = { edges: new Set(found), items: new Set([...found].flatMap((e) => edges[e].slice(0, 2))) };
  mark();
}
// Every edge before or after an item.
function reach(i, next, end) {
  const seen = new Set([i]), found = [], queue = [i];
  for (const item of queue)
    for (const e of next[item]) {
      found.push(e);
      if (!seen.has(edges[e][end])) { seen.add(edges[e][end]); queue.push(edges[e][end]); }
    }
  return found;
}

function html(tag, text, more = {}) { return Object.assign(document.createElement(tag), { textContent: text, ...more }); }
function action(text, onclick) { return html('button', text, { onclick, type: 'button' }); }
function pathTo(i) {
  const names = [];
  for (let above = parent[i]; above > 0; above = parent[above]) if (isGroup(above)) names.unshift(title[above]);
  return names.join(' / ');
}

function select(i) {
  chosen = i;
  const about = at('about');
  about.hidden = i < 0;
  if (i < 0) return follow([]);
  const part = isGroup(i) ? [] : [html('p', items[i][4])];
  const said = [html('h2', title[i]), ...part];
  const head = (text) => said.push(html('h3', text));
  if (isGroup(i)) {
    said.push(html('p', `forward: ${plural(nodes[i][0])}\nbackward: ${plural(nodes[i][1])}`));
    said.push(action(open[i] ? 'Fold' : 'Unfold', () => { toggle(i); select(i); }));
  } else {
    said.push(html('p', kinds[kindOf[i]].meaning), ...items[i][3].map((line) => html('p', line)));
    const rule = data.rules[title[i]];
    if (rule && ['forward', 'loss'].includes(kinds[kindOf[i]].name)) { head('Rule'); said.push(html('p', rule)); }
  }
  if (pathTo(i)) { head('Module'); said.push(html('p', pathTo(i))); }
  if (!isGroup(i)) {
    values(i, into[i], 'Reads', said, 0);
    values(i, outOf[i], 'Read by', said, 1);
    const row = inside[parent[i]] ?? [];
    if (isRow(parent[i]) && row.length > 1) {
      head(isBack(i) ? 'Differentiates' : 'Gradient');
      for (const other of row) if (other !== i) said.push(action(title[other] || 'body', () => reveal(other)));
    } else if (isRow(parent[parent[i]] ?? -1)) {
      head('Differentiates');
      said.push(action(title[inside[parent[parent[i]]][0]], () => reveal(inside[parent[parent[i]]][0])));
    }
    head('Way');
    said.push(action('All that it depends on', () => follow(reach(i, into, 0))), action('All that depends on it', () => follow(reach(i, outOf, 1))));
  }
  about.replaceChildren(...said);
  follow(isGroup(i) ? [] : [...into[i], ...outOf[i]]);
}

// The values that come in or go out: one shows its way, and the box at its other end.
function values(i, found, heading, said, end) {
  if (!found.length) return;
  said.push(html('h3', heading));
  for (const e of found.slice(0, 40))
    for (const tensor of edges[e].slice(2)) {
      const source = edges[e][0], other = edges[e][end];
      said.push(action(`${tensor} · ${title[other]}`, () => { reveal(other); follow(outOf[source].filter((o) => edges[o].indexOf(tensor, 2) > 0)); }));
    }
  if (found.length > 40) said.push(html('p', `and ${found.length - 40} more`));
}

// -- search ---------------------------------------------------------------------------------------------------------

const texts = items.map((item) => [item[2], ...(item[3] ?? []), item[4] ?? ''].join('\n').toLowerCase());
function find(text) {
  const wanted = text.toLowerCase().trim(), found = [];
  if (wanted) for (let i = 1; i < items.length; i++) if (!isRow(i) && texts[i].includes(wanted)) found.push(i);
  const rank = (i) => (title[i].toLowerCase() === wanted ? 0 : isGroup(i) ? 2 : 1);
  return found.sort((a, b) => rank(a) - rank(b)).slice(0, 60);
}
function search() {
  const found = find(at('search').value);
  at('found').hidden = !at('search').value.trim();
  const rows = found.map((i) => {
    const row = document.createElement('li');
    const name = isGroup(i) ? 'module' : items[i][4].split('\n')[0];
    row.append(action(`${title[i]} · ${name}${pathTo(i) ? ` · ${pathTo(i)}` : ''}`, () => { at('found').hidden = true; reveal(i); }));
    return row;
  });
  at('found').replaceChildren(...(rows.length ? rows : [html('li', 'nothing found')]));
}
// The path of a module, however its exporter writes it: 'layers.0/mlp/mlp.0' is layers.0.mlp.0.
const dotted = (path) => path.split('/').filter(Boolean).reduce((found, part) => {
  if (found.length && part.startsWith(`${found.at(-1)}.`)) found.pop();
  return [...found, part];
}, []).join('.');
// The module of a path, the node that is all of it, or else the innermost module around it.
function moduleOf(wanted) {
  let best = -1, longest = 0;
  for (let i = 1; i < items.length; i++) {
    if (isRow(i)) continue;
    const path = isGroup(i) ? dotted(title[i]) : dotted((items[i][4] ?? '').split('\n')[0].split('/').slice(0, -1).join('/'));
    if (path === wanted) return i;
    if (isGroup(i) && path.length > longest && wanted.startsWith(`${path}.`)) { best = i; longest = path.length; }
  }
  return best;
}
// The box that a value comes from.
function maker(wanted) {
  const edge = edges.find(([, , ...tensors]) => tensors.some((tensor) => tensor === wanted || tensor.startsWith(`${wanted}: `)));
  return edge ? edge[0] : -1;
}
function visitHash() {
  let wanted = '';
  try { wanted = decodeURIComponent(location.hash.slice(1)); } catch { return; }
  const exact = wanted ? items.findIndex((item, i) => i && !isRow(i) && (item[2] === wanted || item[4]?.split('\n')[0] === wanted)) : -1;
  const i = [exact, maker(wanted), moduleOf(wanted), find(wanted)[0]].find((found) => found > 0);
  if (wanted && i) reveal(i);
}

// -- hands ----------------------------------------------------------------------------------------------------------

const itemAt = (target) => Number(target.closest?.('g.i')?.dataset.i ?? -1);
function act(i) {
  if (isGroup(i)) toggle(i);
  select(i);
}
const fingers = new Map();
let moved = 0;
picture.addEventListener('pointerdown', (event) => { if (!fingers.size) moved = 0; fingers.set(event.pointerId, event); });
picture.addEventListener('pointermove', (event) => {
  const last = fingers.get(event.pointerId);
  if (!last) return;
  const others = [...fingers.values()].filter((finger) => finger.pointerId !== event.pointerId);
  const { left, top } = picture.getBoundingClientRect();
  if (others.length) {
    const far = (p) => Math.hypot(p.clientX - others[0].clientX, p.clientY - others[0].clientY) || 1;
    zoom(far(event) / far(last), (event.clientX + others[0].clientX) / 2 - left, (event.clientY + others[0].clientY) / 2 - top);
    moved = 9;
  } else {
    moved += Math.abs(event.clientX - last.clientX) + Math.abs(event.clientY - last.clientY);
    if (moved > 4) {
      if (!picture.hasPointerCapture(event.pointerId)) picture.setPointerCapture(event.pointerId);
      look(view.x + event.clientX - last.clientX, view.y + event.clientY - last.clientY, view.k);
    }
  }
  fingers.set(event.pointerId, event);
});
for (const end of ['pointerup', 'pointercancel']) addEventListener(end, (event) => fingers.delete(event.pointerId));
picture.addEventListener('click', (event) => {
  if (moved > 4) return;
  const i = itemAt(event.target);
  if (i < 0) select(-1);
  else if (isGroup(i) && open[i] && !event.target.classList.contains('head')) select(-1);
  else act(i);
});
picture.addEventListener('wheel', (event) => {
  event.preventDefault();
  const { left, top } = picture.getBoundingClientRect();
  zoom(Math.exp(-event.deltaY * (event.deltaMode ? 0.05 : 0.0015)), event.clientX - left, event.clientY - top);
}, { passive: false });

const KEYS = {
  ArrowLeft: () => look(view.x + 60, view.y, view.k), ArrowRight: () => look(view.x - 60, view.y, view.k),
  ArrowUp: () => look(view.x, view.y + 60, view.k), ArrowDown: () => look(view.x, view.y - 60, view.k),
  '+': () => zoom(1.25), '=': () => zoom(1.25), '-': () => zoom(0.8), 0: () => fit(),
};
picture.addEventListener('keydown', (event) => {
  if (event.ctrlKey || event.metaKey || event.altKey) return;
  const i = itemAt(event.target);
  if ((event.key === 'Enter' || event.key === ' ') && i > 0) act(i);
  else if (KEYS[event.key]) KEYS[event.key]();
  else return;
  event.preventDefault();
});
picture.addEventListener('focusin', (event) => { // what the keyboard reached is brought into sight
  const i = itemAt(event.target);
  if (i < 0 || !event.target.matches(':focus-visible')) return;
  const { x, y } = places[i], [px, py] = [x * view.k + view.x, y * view.k + view.y];
  if (px < 0 || py < 0 || px > picture.clientWidth - 40 || py > picture.clientHeight - 20) center(i);
});
addEventListener('keydown', (event) => {
  if (event.key === '/' && event.target.tagName !== 'INPUT') { at('search').focus(); event.preventDefault(); }
  if (event.key === 'Escape') { at('found').hidden = true; select(-1); }
});
at('search').addEventListener('input', search);
at('search').addEventListener('keydown', (event) => {
  if (event.key === 'Enter') at('found').querySelector('button')?.click();
  if (event.key === 'ArrowDown') at('found').querySelector('button')?.focus();
});
at('found').addEventListener('keydown', (event) => {
  const step = { ArrowDown: 'nextElementSibling', ArrowUp: 'previousElementSibling' }[event.key];
  if (step) { event.target.parentElement[step]?.firstChild.focus?.(); event.preventDefault(); }
});
at('fit').onclick = () => fit();
at('in').onclick = () => zoom(1.25);
at('out').onclick = () => zoom(0.8);
at('fold').onclick = () => { kindOf.forEach((kind, i) => { if (kind === -1 && i) open[i] = 0; }); draw(); fit(0.3); };
at('unfold').onclick = () => {
  for (const i of items.keys()) if (isGroup(i) && shownAs[i] === i && !open[i]) open[i] = 1;
  draw();
  fit(0.3);
};

for (const kind of data.shown) {
  const entry = document.createElement('li');
  entry.append(make('svg', { viewBox: '0 0 18 12', 'aria-hidden': 'true' }, ...shapeOf(kind, 1, 1, 16, 10)), kinds[kind].meaning);
  at('legend').append(entry);
}
unfoldFirst(data);
draw();
fit(0.45);
visitHash();
addEventListener('hashchange', visitHash);
document.documentElement.dataset.ready = 'true';
