"use strict";
// The columns of code. A line has a chain of places, the innermost first; lines with a common place belong together.
(async () => {
  const packed = Uint8Array.from(atob(document.getElementById("data").textContent), c => c.charCodeAt(0));
  const stream = new Blob([packed]).stream().pipeThrough(new DecompressionStream("gzip"));
  const D = JSON.parse(await new Response(stream).text());
  const root = document.getElementById("panes");
  const escaped = t => t.replace(/&/g, "&amp;").replace(/</g, "&lt;").replace(/>/g, "&gt;");
  const key = (file, line) => file + ":" + line;
  const chainOf = row => row.chain < 0 ? [] : D.chains[row.chain];

  // --- colours of code
  const LEXERS = {
    python: /(#.*$)|("""|'''|"(?:[^"\\]|\\.)*"|'(?:[^'\\]|\\.)*')|(@[\w.]+)|\b(def|for|while|if|elif|else|in|return|with|as|not|and|or|is|None|True|False|range|class|import|from|lambda|yield|break|continue)\b|\b(\d[\w.]*)\b/g,
    ir: /(\/\/.*$)|("(?:[^"\\]|\\.)*")|([%^@#][\w$.-]+)|\b([a-z_]+\.[a-z_][\w.]*)\b|(?<![\w.])(-?\d[\w.+]*)/g,
    ptx: /(\/\/.*$)|("(?:[^"\\]|\\.)*")|([%$]\w+)|(?<=^\s*(?:@!?%\w+\s+)?)([a-z]\w*(?:[.:]+[\w]+)*)|(?<![\w$%])(-?\d[\w.]*)/g,
    sass: /(^ {2}[0-9a-f]{4,})|("(?:[^"\\]|\\.)*")|(\b(?:U?R|U?P|SR_)\w+\b)|(?<=^ {2}[0-9a-f]+ {2}(?:@!?U?P\w+\s+)?)([A-Z][\w.]*)|\b(-?0x[0-9a-f]+|\d+)\b/g,
  };
  const coloured = (text, language) => {
    let out = "", at = 0;
    for (const m of text.matchAll(LEXERS[language])) {
      const kind = "ctvkm"[m.slice(1).findIndex(g => g !== undefined)];
      out += escaped(text.slice(at, m.index)) + `<span class="${kind}">${escaped(m[0])}</span>`;
      at = m.index + m[0].length;
    }
    return out + escaped(text.slice(at));
  };

  // --- the rows of each column
  const stageRows = n => {
    while (n > 0 && D.stages[n].rows === null) n--;
    return D.stages.length ? D.stages[n].rows.map(([t, c], i) => ({ text: D.texts[t], chain: c, no: i + 1 })) : [];
  };
  const runsOf = new Map(Object.entries(D.runs).map(([n, r]) => [+n, r]));
  const hasRuns = runsOf.size > 0;
  const ptxRows = D.ptx.map(([text, chain, number], i) => ({ text, chain, number, no: i + 1, runs: runsOf.get(number) }));
  const sassRows = D.sass.map(([text, chain, number]) => ({ text, chain, number, no: "" }));
  const lineRuns = new Map();
  for (const row of ptxRows)
    if (row.runs && row.chain >= 0) {
      const [f, l] = D.chains[row.chain][0];
      lineRuns.set(key(f, l), (lineRuns.get(key(f, l)) || 0) + row.runs[0]);
    }
  const fileRows = n => !D.files.length ? [] : D.files[n].lines.map(line => line === null
    ? { gap: true, text: "⋯", chain: -1, no: "" }
    : { text: line[1], no: line[0], file: n, line: line[0], chain: -1, runs: lineRuns.has(key(n, line[0])) ? [lineRuns.get(key(n, line[0])), 0, 0] : undefined });

  const made = new Set();  // places that something was made from
  const callers = new Map();  // of a place, the innermost places that were reached through it
  for (const chain of D.chains)
    for (const [f, l] of chain) {
      made.add(key(f, l));
      if (!callers.has(key(f, l))) callers.set(key(f, l), new Set());
      callers.get(key(f, l)).add(key(...chain[0]));
    }

  const panes = [
    { id: "python", title: "Source", language: "python", rows: [], empty: D.noSource || "No source is known." },
    { id: "ir", title: "IR", language: "ir", rows: [], empty: D.noSource || "There is no IR." },
    { id: "ptx", title: "PTX", language: "ptx", rows: ptxRows, empty: "A kernel for host has no PTX." },
    { id: "sass", title: "SASS", language: "sass", rows: sassRows, empty: D.noSass },
  ];
  const [python, ir] = panes;
  let [file, stage] = D.opens, diff = false, at = null;  // at: {pane, row}

  for (const pane of panes) {
    const choose = pane === python && D.files.length > 1 || pane === ir;
    const box = document.createElement("div");
    box.className = "pane";
    box.innerHTML = `<div class="top"><button title="hide or show (${panes.indexOf(pane) + 1})">${pane.title}</button>`
      + (choose ? `<select aria-label="${pane === ir ? "after the pass" : "file"}"></select>` : "")
      + (pane === ir ? '<label><input type="checkbox"> diff</label>' : "")
      + `<span class="count"></span></div><div class="rows" tabindex="0" role="listbox" aria-label="${pane.title}"></div><div class="rail"></div>`;
    root.append(box);
    Object.assign(pane, { box, list: box.querySelector(".rows"), rail: box.querySelector(".rail"), count: box.querySelector(".count"), select: box.querySelector("select"), check: box.querySelector("input") });
    box.querySelector("button").onclick = () => box.classList.toggle("off");
    pane.list.onclick = e => {
      const div = e.target.closest(".rows > div");
      if (div && !getSelection().toString()) select(pane, [...pane.list.children].indexOf(div));
    };
  }
  if (python.select) {
    python.select.innerHTML = D.files.map((f, n) => `<option value="${n}" title="${escaped(f.path)}">${escaped(f.name)}</option>`).join("");
    python.select.onchange = () => { file = +python.select.value; drawPython(); mark(false); };
  } else if (D.files.length) python.box.querySelector("button").textContent = D.files[0].name;
  ir.select.innerHTML = D.stages.map((s, n) => `<option value="${n}">${escaped(s.name)}${n && s.rows === null ? " (unchanged)" : ""}</option>`).join("");
  ir.select.onchange = () => show(+ir.select.value, diff);
  ir.check.onchange = () => show(stage, ir.check.checked);

  const draw = pane => {
    pane.list.innerHTML = pane.rows.length ? pane.rows.map(row => {
      const goes = row.file !== undefined ? made.has(key(row.file, row.line)) : row.chain >= 0;
      const runs = hasRuns && pane.id !== "ir" && pane.id !== "sass"
        ? `<s title="${row.runs ? `${row.runs[0]} executions by warps` + (row.runs[1] ? `, ${row.runs[1]} sectors` : "") + (row.runs[2] ? `, ${row.runs[2]} bank conflicts` : "") : ""}">${row.runs ? row.runs[0].toLocaleString("en") : ""}</s>` : "";
      return row.gap ? `<div class="gap">${row.text}</div>`
        : `<div role="option" class="${goes ? "go" : ""} ${row.change || ""}"><b>${row.change === "del" ? "−" : row.change === "add" ? "+" + row.no : row.no}</b>${runs}<span>${coloured(row.text, pane.language)}</span></div>`;
    }).join("") : `<div class="empty">${escaped(pane.empty)}</div>`;
    pane.count.textContent = pane.rows.length ? pane.rows.filter(r => !r.gap && r.change !== "del").length.toLocaleString("en") + " lines" : "";
  };
  const drawPython = () => { python.rows = fileRows(file); if (python.select) python.select.value = file; draw(python); };

  function show(n, differences) {
    stage = Math.max(0, Math.min(n, D.stages.length - 1));
    diff = differences;
    ir.select.value = stage;
    ir.check.checked = diff;
    const before = at && at.pane === ir ? ir.rows[at.row] : null;
    ir.rows = diff && stage > 0 ? unified(stageRows(stage - 1), stageRows(stage)) : stageRows(stage);
    draw(ir);
    document.querySelectorAll("tr[data-stage]").forEach(tr => tr.setAttribute("aria-current", +tr.dataset.stage === stage));
    if (before) at = null, select(ir, Math.max(0, ir.rows.findIndex(r => r.chain >= 0 && r.chain === before.chain)), true);
    else mark(true);
    if (diff && !at) {
      const first = ir.rows.findIndex(r => r.change);
      if (first >= 0) ir.list.children[first].scrollIntoView({ block: "center" });
    }
  }

  // --- what a pass changed: the shortest edit of lines whose values' numbers do not count (Myers)
  const same = row => row.text.replace(/%[\w#]+/g, "%").replace(/\^bb\d+/g, "^bb");
  function unified(a, b) {
    const ka = a.map(same), kb = b.map(same);
    let head = 0, tail = 0;
    while (head < ka.length && head < kb.length && ka[head] === kb[head]) head++;
    while (tail < ka.length - head && tail < kb.length - head && ka[ka.length - 1 - tail] === kb[kb.length - 1 - tail]) tail++;
    const n = ka.length - head - tail, m = kb.length - head - tail, most = Math.min(n + m, 6000), trace = [];
    let v = new Int32Array(2 * most + 3).fill(0), found = -1;
    search: for (let d = 0; d <= most; d++) {
      for (let k = -d; k <= d; k += 2) {
        let x = k === -d || (k !== d && v[most + k] < v[most + k + 2]) ? v[most + k + 2] : v[most + k] + 1;
        while (x < n && x - k < m && ka[head + x] === kb[head + x - k]) x++;
        v[most + 1 + k] = x;
        if (x >= n && x - k >= m) { found = d; trace.push(v.slice(most + 1 - d, most + 2 + d)); break search; }
      }
      trace.push(v.slice(most + 1 - d, most + 2 + d));
    }
    const rows = [];
    if (found < 0) {  // too much: all went, all came
      for (let x = n - 1; x >= 0; x--) rows.push({ ...a[head + x], change: "del" });
      for (let y = m - 1; y >= 0; y--) rows.unshift({ ...b[head + y], change: "add" });
      rows.reverse();
    } else {
      let x = n, y = m;
      for (let d = found; d > 0; d--) {
        const of = k => { const i = k + d - 1; return i < 0 || i > 2 * d - 2 ? -1 : trace[d - 1][i]; };
        const k = x - y, down = k === -d || (k !== d && of(k - 1) < of(k + 1));
        const px = of(down ? k + 1 : k - 1), py = px - (down ? k + 1 : k - 1);
        while (x > (down ? px : px + 1) && y > (down ? py + 1 : py)) rows.push(b[head + --y]), x--;
        rows.push(down ? { ...b[head + --y], change: "add" } : { ...a[head + --x], change: "del" });
      }
      while (y > 0) rows.push(b[head + --y]);
      rows.reverse();
    }
    const all = [...b.slice(0, head), ...rows, ...b.slice(kb.length - tail)];
    const near = new Uint8Array(all.length);
    all.forEach((r, i) => { if (r.change) near.fill(1, Math.max(0, i - 3), i + 4); });
    const out = [];
    all.forEach((r, i) => { if (near[i]) out.push(r); else if (!out.length || !out[out.length - 1].gap) out.push({ gap: true, text: "⋯", chain: -1, no: "" }); });
    return out.some(r => r.change) ? out : [{ gap: true, text: "this pass changed nothing", chain: -1, no: "" }];
  }

  // --- what belongs together
  function places() {
    const row = at.pane.rows[at.row];
    if (row.file !== undefined) {
      const here = key(row.file, row.line);
      return { here: new Set([here]), through: callers.get(here) || new Set(), all: new Set([here]), number: 0, source: true };
    }
    const chain = chainOf(row).map(p => key(...p));
    return { here: new Set(chain.slice(0, 1)), through: new Set(), all: new Set(chain), number: row.number || 0, source: false };
  }
  function linkOf(pane, row, p) {
    if (row.file !== undefined) {
      const k = key(row.file, row.line);
      return p.here.has(k) ? "strong" : p.all.has(k) ? "weak" : "";
    }
    if (p.number && row.number === p.number && pane !== at.pane) return "exact";
    const chain = chainOf(row);
    if (!chain.length) return "";
    if (p.here.has(key(...chain[0]))) return "strong";
    if (p.source && (chain.some(q => p.here.has(key(...q))) || p.through.has(key(...chain[0])))) return "weak";
    return "";
  }
  function mark(scroll) {
    for (const pane of panes) {
      pane.linked = [];
      const p = at ? places() : null, divs = pane.list.children;
      let ticks = "";
      pane.rows.forEach((row, i) => {
        const div = divs[i], link = p ? linkOf(pane, row, p) : "", here = at && at.pane === pane && at.row === i;
        div.classList.remove("weak", "strong", "exact", "here");
        if (link) { div.classList.add(link); pane.linked.push([i, link]); ticks += `<i style="top:${100 * i / pane.rows.length}%"></i>`; }
        if (here) div.classList.add("here");
        div.setAttribute("aria-selected", String(Boolean(here)));
      });
      pane.rail.innerHTML = pane.linked.length < 2000 ? ticks : "";
      const first = (pane.linked.find(l => l[1] === "exact") || pane.linked.find(l => l[1] === "strong") || pane.linked[0] || [])[0];
      if (scroll && at && pane !== at.pane && first !== undefined) center(pane, first);
    }
  }
  function center(pane, i) {
    const list = pane.list, div = list.children[i].getBoundingClientRect(), box = list.getBoundingClientRect();
    list.scrollTop += div.top - box.top - box.height / 3;
  }
  function select(pane, i, quiet) {
    const row = pane.rows[i];
    if (!row || row.gap) return;
    at = { pane, row: i };
    const chain = chainOf(row);
    if (pane !== python && chain.length && chain[0][0] !== file) { file = chain[0][0]; drawPython(); }
    mark(true);
    const div = pane.list.children[i].getBoundingClientRect(), box = pane.list.getBoundingClientRect();
    if (div.top < box.top || div.bottom > box.bottom) center(pane, i);
    if (!quiet) pane.list.focus({ preventScroll: true });
  }
  function step(by) {
    const pane = at.pane;
    for (let i = at.row + by; i >= 0 && i < pane.rows.length; i += by) if (!pane.rows[i].gap) return select(pane, i);
  }
  function linked(by) {
    const rows = at.pane.linked.map(l => l[0]), next = by > 0 ? rows.find(i => i > at.row) : rows.filter(i => i < at.row).pop();
    if (next === undefined) return;
    // The same line stays chosen in the other columns: its links are the same.
    select(at.pane, next);
  }
  function column(by) {
    const open = panes.filter(p => !p.box.classList.contains("off") && p.rows.length);
    const pane = open[open.indexOf(at.pane) + by];
    if (!pane) return;
    const first = (pane.linked.find(l => l[1] === "exact") || pane.linked.find(l => l[1] === "strong") || pane.linked[0] || [pane.rows.findIndex(r => !r.gap)])[0];
    select(pane, first);
  }
  const keys = {
    ArrowDown: () => step(1), ArrowUp: () => step(-1), ArrowRight: () => column(1), ArrowLeft: () => column(-1),
    n: () => linked(1), p: () => linked(-1),
  };
  document.addEventListener("keydown", e => {
    if (e.ctrlKey || e.metaKey || e.altKey || /^(INPUT|SELECT|TEXTAREA)$/.test(e.target.tagName)) return;
    if (e.key === "[" || e.key === "]") show(stage + (e.key === "]" ? 1 : -1), diff);
    else if (e.key === "d") show(stage, !diff);
    else if (/^[1-4]$/.test(e.key)) panes[e.key - 1].box.classList.toggle("off");
    else if (e.key === "Escape") { at = null; mark(false); }
    else if (e.key === "Enter" && e.target.dataset.stage !== undefined) e.target.click();
    else if (keys[e.key] && root.contains(e.target)) {
      if (!at) { const pane = panes.find(p => p.list === e.target) || python; select(pane, pane.rows.findIndex(r => !r.gap)); }
      else keys[e.key]();
      e.preventDefault();
    }
  });
  document.querySelectorAll("tr[data-stage]").forEach(tr => tr.onclick = () => { root.scrollIntoView({ block: "nearest" }); show(+tr.dataset.stage, true); });
  document.querySelectorAll("a[data-place]").forEach(a => a.onclick = e => {
    const [f, l] = a.dataset.place.split(":").map(Number);
    e.preventDefault();
    file = f; drawPython();
    select(python, python.rows.findIndex(r => r.line === l));
    root.scrollIntoView({ block: "nearest" });
  });

  drawPython();
  for (const pane of panes.slice(2)) draw(pane);
  // A link may name a line and a pass: #line=12&file=kernels.py&pass=lower-kv-access&diff
  // A line without a file is of the file that is shown, or else of the first that has it.
  const follow = () => {
    const wish = new URLSearchParams(location.hash.slice(1)), line = +wish.get("line");
    const named_pass = D.stages.findIndex(s => s.name === wish.get("pass"));
    show(named_pass >= 0 ? named_pass : D.opens[1], wish.has("diff"));
    if (!wish.has("line")) return;
    const has = n => fileRows(n).some(r => r.line === line);
    const named = D.files.findIndex(f => f.name === wish.get("file"));
    const found = named >= 0 ? named : D.files.length && has(file) ? file : D.files.findIndex((_, n) => has(n));
    if (found >= 0) { file = found; drawPython(); }
    select(python, python.rows.findIndex(r => r.line === line), true);
  };
  follow();
  window.addEventListener("hashchange", follow);
  document.documentElement.dataset.ready = "yes";
})();
