"use strict";
(() => {
  const content = JSON.parse(document.getElementById("data").textContent);
  const at = (id) => document.getElementById(id);
  const root = document.documentElement;
  const colors = ["#4477aa", "#ee6677", "#228833", "#b8a020", "#3aa6c9", "#aa3377", "#8a8f98", "#c2673d", "#7a6fd0", "#5d8a2a"];
  const symbols = ["circle", "square", "diamond", "triangle-up", "x", "star", "cross"];
  const dashes = ["solid", "dash", "dot", "dashdot"];
  const state = { group: 0, score: 0, a: 0, b: 0, filter: "", sort: { column: null, down: true }, curve: null };
  const group = () => content.groups[state.group];
  const labels = () => group().leaderboard.rows.map((row) => row.label);
  const metric = () => {
    const label = group().leaderboard.columns[state.score].metric;
    return group().metrics.find((one) => one.label === label);
  };
  const plain = (text) => text.replace(/&/g, "&amp;").replace(/</g, "&lt;");  // charts read markup
  const wrapped = (text, width) => {
    const lines = [""];
    for (const word of text.split(" ")) {
      if ((lines.at(-1) + " " + word).length > width && lines.at(-1)) lines.push("");
      lines.push((lines.pop() + " " + word).trim());
    }
    const kept = lines.slice(0, 3).map((line) => (line.length > width ? line.slice(0, width - 1) + "…" : line));
    return plain(kept.join("\n") + (lines.length > 3 ? " …" : "")).replace(/\n/g, "<br>");
  };
  const number = (value, digits = 2) => (value === null || value === undefined ? "–" : value.toFixed(digits));
  const signed = (value) => (value === null || value === undefined ? "–" : (value > 0 ? "+" : "") + value.toFixed(2));
  const make = (tag, text = "", attributes = {}) => {
    const made = document.createElement(tag);
    if (text !== "") made.textContent = text;
    for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
    return made;
  };
  const options = (select, texts, chosen, titles = []) => {  // a null text is no choice
    select.replaceChildren(...texts.flatMap((text, i) => (text === null ? [] : [make("option", text, { value: i, ...(titles[i] && { title: titles[i] }) })])));
    select.value = String(chosen);
    select.title = titles[chosen] ?? "";
  };
  const column = (one) => (one.kind ? `${one.kind} ${one.metric}` : one.metric);

  // Rows that the filter keeps: every word of it stands in the label.
  const kept = () => {
    const words = state.filter.toLowerCase().split(/\s+/).filter(Boolean);
    return group().leaderboard.rows.map((_, i) => i)
      .filter((i) => words.every((word) => labels()[i].toLowerCase().includes(word)));
  };
  const key = (value) => (value && typeof value === "object" ? value.mean : value);
  const order = (a, b, down) => {  // what is missing comes last, whatever the direction
    if (a === null || a === undefined || b === null || b === undefined) return (a ?? null) === (b ?? null) ? 0 : a === null || a === undefined ? 1 : -1;
    const sign = typeof a === "number" && typeof b === "number" ? a - b : String(a).localeCompare(String(b), "en", { numeric: true });
    return down ? -sign : sign;
  };
  const inOrder = () => {
    const { column: by, down } = state.sort;
    const rows = group().leaderboard.rows;
    const value = (i) => (by < 0 ? rows[i].label : key(rows[i].scores[by]));
    return by === null ? kept() : kept().sort((i, j) => order(value(i), value(j), down));
  };

  /** A table whose heads sort it; `rows` hold {text, value, class} by column. */
  const table = (element, heads, rows, sort, sorted) => {
    const head = make("tr");
    heads.forEach((text, i) => {
      const cell = make("th", "", { scope: "col" });
      const button = make("button", text, { type: "button" });
      const isBy = sort.column === i;
      cell.setAttribute("aria-sort", isBy ? (sort.down ? "descending" : "ascending") : "none");
      button.addEventListener("click", () => {
        sorted({ column: i, down: isBy ? !sort.down : i > 0 });
        element.querySelectorAll("th button")[i].focus();
      });
      cell.append(button);
      head.append(cell);
    });
    const top = make("thead");
    top.append(head);
    const body = make("tbody");
    for (const row of rows) {
      const line = make("tr", "", row.aside ? { class: "aside" } : {});
      for (const cell of row.cells) line.append(make("td", cell.text, cell.class ? { class: cell.class } : {}));
      body.append(line);
    }
    element.replaceChildren(top, body);
  };
  /** The same, which sorts itself. */
  const sorting = (element, heads, rows, sort = { column: null, down: true }) => {
    const lines = sort.column === null ? rows
      : [...rows].sort((a, b) => order(a.cells[sort.column].value, b.cells[sort.column].value, sort.down));
    table(element, heads, lines, sort, (next) => sorting(element, heads, rows, next));
  };
  const cell = (text, value = text, style = "") => ({ text: String(text), value, class: style });

  const drawScores = () => {
    const { columns, rows, notes } = group().leaderboard;
    const own = [...new Set(rows.map((row) => row.notes.join("; ")))].filter(Boolean);  // what holds for some rows alone
    const mark = (row) => (row.notes.length ? String.fromCharCode(97 + (own.indexOf(row.notes.join("; ")) % 26)) + "′".repeat(own.indexOf(row.notes.join("; ")) / 26) : "");
    const lines = inOrder().map((i) => ({
      aside: !rows[i].competes,
      cells: [cell(rows[i].label),
        ...rows[i].scores.map((score, c) => {
          if (score === null || typeof score !== "object") return cell(score ?? "–", score);
          return cell(score.text, score.mean, score.best ? "best" : "");
        }),
        ...(own.length ? [cell(mark(rows[i]))] : [])],
    }));
    const sort = { column: state.sort.column === null ? null : state.sort.column + 1, down: state.sort.down };
    table(at("leaderboard"), ["config", ...columns.map(column), ...(own.length ? ["note"] : [])], lines, sort, (next) => {
      state.sort = next.column > columns.length ? state.sort : { column: next.column - 1, down: next.down };
      drawScores();
      drawBars();
    });
    at("count").textContent = `${lines.length} of ${rows.length} rows`;
    at("notes").replaceChildren(make("li", "percent, mean ± population standard deviation; best of a column marked; grey rows are not ranked"),
      ...notes.map((note) => make("li", note)),
      ...own.map((note) => make("li", `${mark({ notes: [note] })}: ${note}`)));
  };

  const css = (name) => getComputedStyle(root).getPropertyValue(name).trim();
  const look = (more) => ({
    paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)", font: { color: css("--text"), size: 13 },
    hoverlabel: { bgcolor: css("--head"), bordercolor: css("--line"), font: { color: css("--text") } },
    modebar: { bgcolor: "rgba(0,0,0,0)", color: css("--faint"), activecolor: css("--accent") }, showlegend: false, margin: { l: 10, r: 20, t: 30, b: 45 }, ...more,
  });
  const axis = (more) => ({ gridcolor: css("--line"), zerolinecolor: css("--faint"), linecolor: css("--line"), automargin: true, ...more });
  const plot = (id, traces, layout) => Plotly.react(at(id), traces, look(layout), { displaylogo: false, responsive: true, modeBarButtons: [["toImage", "zoom2d", "pan2d", "resetScale2d"]] });
  const color = (i) => colors[i % colors.length];

  const drawBars = () => {
    const shown = inOrder().filter((i) => typeof group().leaderboard.rows[i].scores[state.score] === "object").reverse();
    const scores = shown.map((i) => group().leaderboard.rows[i].scores[state.score]);
    const named = (i, k) => `${wrapped(labels()[i], 44)}  <b>${scores[k] ? scores[k].text.split(" ")[0] : "–"}</b>`;
    const spread = shown.map((_, k) => k).filter((k) => scores[k] && scores[k].std !== null);  // one value has no deviation
    const aside = shown.filter((i) => !group().leaderboard.rows[i].competes).length;
    const without = scores.filter(Boolean).length - spread.length;
    plot("bars-chart", [{
      type: "bar", orientation: "h", y: shown.map(String), x: scores.map((score) => score && score.mean),
      marker: { color: shown.map(color), pattern: { shape: shown.map((i) => (group().leaderboard.rows[i].competes ? "" : "/")) } }, customdata: shown.map((i) => plain(labels()[i])),
      hovertemplate: "%{customdata}: %{x:.2f}<extra></extra>",
    }, {
      type: "scatter", mode: "markers", marker: { size: 1, color: css("--text") }, hoverinfo: "skip",
      y: spread.map((k) => String(shown[k])), x: spread.map((k) => scores[k].mean),
      error_x: { type: "data", array: spread.map((k) => scores[k].std), color: css("--text") },
    }], {
      height: 90 + 30 * Math.max(1, shown.length),
      xaxis: axis({ title: { text: plain(column(group().leaderboard.columns[state.score])) }, rangemode: "tozero" }),
      yaxis: axis({ type: "category", tickvals: shown.map(String), ticktext: shown.map(named) }),
    });
    at("bars-note").textContent = [aside ? `Hatched: ${aside} of ${shown.length} configs, which are not ranked (see the scores).` : "",
      without ? `${without} of ${shown.length} configs have a single value here and so no deviation.` : ""].join(" ");
  };

  /** The difference of config `other` from A, in whichever order it is stored. */
  const difference = (other, name) => {
    const low = Math.min(state.a, other);
    const found = group().differences.find((one) => one.a === low && one.b === Math.max(state.a, other) && (one.why || one.metric === name));
    if (!found || found.why || other > state.a) return found;
    const turned = (interval) => interval && [-interval[1], -interval[0]];
    return { ...found, difference: -found.difference, interval: turned(found.interval), joint: turned(found.joint) };
  };

  const drawDifferences = () => {
    const name = metric();
    const others = kept().filter((i) => i !== state.a);
    const lines = others.map((i) => ({ i, found: name && difference(i, name.name) }));
    const shown = lines.filter(({ found }) => found && !found.why).reverse();
    const bars = (part, width) => ({
      type: "data", symmetric: false, thickness: width, width: part === "joint" ? 0 : 5, color: css("--text"),
      array: shown.map(({ found }) => (found[part] ? found[part][1] - found.difference : 0)),
      arrayminus: shown.map(({ found }) => (found[part] ? found.difference - found[part][0] : 0)),
    });
    const points = (part, width) => ({
      type: "scatter", mode: "markers", y: shown.map(({ i }) => String(i)), x: shown.map(({ found }) => found.difference),
      marker: { size: 9, color: shown.map(({ i }) => color(i)), symbol: shown.map(({ i }) => symbols[i % symbols.length]) },
      error_x: bars(part, width), customdata: shown.map(({ i }) => plain(labels()[i])), hovertemplate: "%{customdata}: %{x:+.2f}<extra></extra>",
    });
    const several = labels().length > 2;  // comparisons with A
    const zero = { type: "scatter", mode: "markers", x: [0], y: [String(shown.at(0)?.i)], marker: { opacity: 0, size: 9 }, hoverinfo: "skip" };  // keeps 0 on the axis
    plot("differences-chart", [...(several ? [points("joint", 1)] : []), points("interval", 3), ...(shown.length ? [zero] : [])], {
      height: 90 + 30 * Math.max(1, shown.length),
      xaxis: axis({ title: { text: `${plain(name ? name.label : "")}: config − A` }, zeroline: true, zerolinewidth: 2 }),
      yaxis: axis({ type: "category", tickvals: shown.map(({ i }) => String(i)), ticktext: shown.map(({ i }) => wrapped(labels()[i], 44)) }),
    });
    const range = (interval) => (interval ? `[${signed(interval[0])}, ${signed(interval[1])}]` : "none: too few different pairs");
    sorting(at("differences-table"), ["config", "difference from A", "95 % interval", ...(several ? ["joint interval"] : []), "pairs of runs", "over"], lines.map(({ i, found }) => ({
      cells: [cell(labels()[i]), ...(!found || found.why
        ? [cell("–", null), cell(found ? found.why : "single runs do not have this score", null, "words"), ...(several ? [cell("–", null)] : []), cell("–", null), cell("")]
        : [cell(signed(found.difference), found.difference), cell(range(found.interval), found.interval && found.interval[0]),
          ...(several ? [cell(range(found.joint), found.joint && found.joint[0])] : []),
          cell(found.pairs === found.of ? found.pairs : `${found.pairs} of ${found.of}`, found.pairs), cell(found.over, found.over, "words")])],
    })));
    at("differences-note").textContent = "Single models, paired by fold, repeat and seed; 95 % t intervals."
      + (several ? ` Thick: uncorrected. Thin: joint, Bonferroni-corrected for ${labels().length - 1} comparisons with A.` : "");
  };

  const drawPapers = () => {
    const found = group().papers;
    at("papers-note").textContent = found.length
      ? "Rows of papers with the recipe, pooling, head, loss, miner and regularizer of a config. Rows that are not comparable give the reason; read them as context."
      : "No config of this table was trained with a paper's recipe and choices on that paper's data set and protocol.";
    at("papers-table").hidden = !found.length;
    const both = (mean, std) => (mean === null ? "–" : `${typeof mean === "number" ? number(mean) : mean}${std === null ? "" : ` ± ${typeof std === "number" ? number(std) : std}`}`);
    sorting(at("papers-table"), ["config", "paper's table", "its row", "column", "score", "ours", "paper", "difference", "verdict", "reason"], found.map((one) => ({
      cells: [cell(labels()[one.config]), cell(one.table, one.table, "words"), cell(one.row, one.row, "words"), cell(one.column, one.column, "words"), cell(one.metric),
        cell(both(one.ours, one.ours_std), one.ours), cell(both(one.paper, one.std), one.paper === null ? null : Number(one.paper)),
        cell(signed(one.difference), one.difference), cell(one.verdict, one.verdict, "words"), cell(one.note, one.note, "words")],
    })));
  };

  const drawCurves = () => {
    const names = Object.keys(group().curves);
    if (!names.includes(state.curve)) state.curve = names[0] ?? null;
    options(at("curve"), names.map((name) => group().curve_labels[name]), Math.max(0, names.indexOf(state.curve)), names);
    const own = state.curve === null ? [] : group().curves[state.curve];
    const traces = [];
    for (const i of kept().filter((j) => own[j])) {
      const { steps, mean, min, max, runs } = own[i];
      const hex = color(i);
      const faded = `rgba(${[1, 3, 5].map((k) => parseInt(hex.slice(k, k + 2), 16)).join(",")},0.13)`;
      if (runs > 1) traces.push({ type: "scatter", mode: "lines", x: [...steps, ...[...steps].reverse()], y: [...max, ...[...min].reverse()], fill: "toself", fillcolor: faded, line: { width: 0 }, hoverinfo: "skip", showlegend: false, legendgroup: String(i) });
      traces.push({ type: "scatter", mode: steps.length < 30 ? "lines+markers" : "lines", x: steps, y: mean, name: wrapped(labels()[i], 40), legendgroup: String(i), showlegend: true,
        line: { color: hex, dash: dashes[Math.floor(i / colors.length) % dashes.length], width: 2 }, marker: { symbol: symbols[i % symbols.length], size: 7 },
        customdata: steps.map(() => plain(labels()[i])), hovertemplate: "%{customdata}<br>step %{x}: %{y:.4g}<extra></extra>" });
    }
    plot("curves-chart", traces, { height: 440, showlegend: true, legend: { orientation: "h", y: -0.2 },
      xaxis: axis({ title: { text: "optimizer step" }, rangemode: "tozero" }), yaxis: axis({ title: { text: wrapped(group().curve_labels[state.curve] ?? "", 48) } }) });
    at("curves-note").textContent = names.length ? "Lines: means over a config's complete runs; bands: from the lowest to the highest run. Validation scores are in percent." : "No run has logged a curve.";
  };

  const pair = () => [...new Set([state.a, state.b])];
  const hide = (id, hidden) => { at(id).hidden = document.querySelector(`#sections a[href="#${id}"]`).parentElement.hidden = hidden; };
  const sides = (body, shown, part) => {
    const holder = make("div", "", { class: "sides" });
    for (const i of shown) {
      const side = make("div");
      side.append(make("h3", `${i === state.a ? "A" : "B"}: ${labels()[i]}`), ...part(i));
      holder.append(side);
    }
    body.replaceChildren(holder);
  };
  const picture = (source, text, style, mark) => {
    const item = make("li", "", { class: style });
    const image = make("img", "", { src: source, alt: text, loading: "lazy" });
    item.append(image, make("span", mark, { class: "mark" }), ` ${text}`);
    return item;
  };

  const strip = (pictures, size) => {
    const line = make("ul", "", { class: "retrieved", style: `--images: ${size}` });
    line.append(...pictures);
    return line;
  };
  const drawGallery = () => {
    const { gallery } = group();
    at("gallery-note").textContent = gallery.why ? `None: ${gallery.why}`
      : "The same queries for every config, searched with its first run. Plain frame: query; ✓: same class; ✗ with a dashed frame: another class.";
    if (gallery.why) return at("gallery-body").replaceChildren();
    const shown = (state.a === state.b ? [["A and B", state.a]] : [["A", state.a], ["B", state.b]]);
    const answer = ([name, i], q) => {
      const own = gallery.configs[i];
      const heading = make("p", `${name}: ${labels()[i]}`, { class: "note" });
      if (!own) return [heading, make("p", "No images: it was tested on other images or has kept no embeddings.", { class: "note" })];
      return [heading, strip(own.nearest[q].map(([row, isRight]) => picture(gallery.images[row], gallery.names[row], isRight ? "right" : "wrong", isRight ? "✓" : "✗")), own.nearest[q].length)];
    };
    const block = (q) => {
      const row = gallery.queries[q];
      const holder = make("div", "", { class: "retrieval", style: `grid-template-columns: minmax(0, 1fr) minmax(0, ${Object.values(gallery.configs)[0].nearest[q].length}fr)` });
      const answers = make("div");
      answers.append(...shown.flatMap((one) => answer(one, q)));
      const query = make("div");
      query.append(make("p", "query", { class: "note" }), strip([picture(gallery.images[row], gallery.names[row], "query", "")], 1));
      holder.append(query, answers);
      return holder;
    };
    const places = gallery.queries.map((_, q) => q);
    const [sample, failures] = [places.slice(0, gallery.random), places.slice(gallery.random)];
    const counts = shown.filter(([, i]) => gallery.configs[i]).map(([name, i]) => {
      const own = gallery.configs[i];
      return `${name} (${own.run}): ${sample.filter((q) => own.nearest[q][0][1]).length} of ${sample.length} right${own.score}`;
    });
    at("gallery-body").replaceChildren(
      make("h3", `${sample.length} queries drawn at random`), make("p", `Drawn with a fixed seed. ${counts.join("; ")}.`, { class: "note" }), ...sample.map(block),
      ...(failures.length ? [make("h3", `${failures.length} failures`),
        make("p", `Those of ${gallery.drawn - sample.length} other random queries that most configs get wrong: not representative.`, { class: "note" }), ...failures.map(block)] : []));
  };

  const drawOverlays = () => {
    const { configs, why, rows, most } = group().overlays;  // without those of equal weights
    const [note, isLeftOut] = [at("overlays-note"), typeof why === "string"];
    const shown = isLeftOut ? [] : pair().filter((i) => configs[i] || why[i]);
    note.textContent = isLeftOut ? `None: ${why}` : "";
    if (shown.some((i) => configs[i])) {
      note.append("Weight of each location relative to average pooling, 0 ", make("span", "", { class: "scale" }), ` ${most}; white: the same weight. `
        + "With prototypes, the color shows the nearest one. Configs with equal weights everywhere, such as average pooling, are left out.");
    }
    hide("overlays", !isLeftOut && !shown.length);
    sides(at("overlays-body"), shown, (i) => (!configs[i] ? [make("p", `None: ${why[i]}`, { class: "note" })] : configs[i].map((parts, q) => {
      const name = group().gallery.names[rows[q]];
      return strip(["image", "weights", "prototypes"].flatMap((what, k) => (parts[k] ? [picture(parts[k], k ? what : name, "", "")] : [])), 3);
    })));
  };

  const drawClasses = () => {
    const found = group().classes;
    const name = metric();
    const k = Math.max(0, found.metrics.findIndex((one) => name && one.name === name.name));
    at("classes-note").textContent = !found.metrics.length ? "No run has kept per-query scores of this metric."
      : `${found.metrics[k].label} in percent, means over the queries of a class and over a config's runs; `
        + (found.of > found.rows.length ? `the ${found.rows.length} hardest of ${found.of} classes.` : `all ${found.of} classes.`);
    at("classes-table").hidden = !found.metrics.length;
    if (!found.metrics.length) return;
    sorting(at("classes-table"), ["class", "queries", "A", "B", "B − A"], found.rows.map((row) => {
      const [a, b] = [row.scores[k][state.a], row.scores[k][state.b]];
      const less = a === null || b === null ? null : b - a;
      return { cells: [cell(row.name), cell(row.queries, row.queries), cell(number(a), a), cell(number(b), b), cell(signed(less), less)] };
    }));
  };

  const drawSettings = () => {
    const [a, b] = [group().settings[state.a], group().settings[state.b]];
    const keys = [...new Set([...Object.keys(a), ...Object.keys(b)])].sort().filter((name) => a[name] !== b[name]);
    at("settings-note").textContent = keys.length ? "A and B differ in:" : "A and B do not differ.";
    at("settings-table").hidden = !keys.length;
    sorting(at("settings-table"), ["setting", "A", "B"], keys.map((name) => ({
      cells: [cell(name), cell(a[name] ?? "–", a[name] ?? null, "words"), cell(b[name] ?? "–", b[name] ?? null, "words")],
    })));
  };

  /** Settings with one value in all configs that were made here; imported ones have none. */
  const drawShared = () => {
    at("shared").textContent = group().shared;
    const made = group().settings.filter((own) => "fit.max_steps" in own);
    const same = made.length ? Object.keys(made[0]).sort().filter((name) => made.every((own) => own[name] === made[0][name])) : [];
    at("shared-count").textContent = `${same.length} settings that all configs share`;
    at("shared-settings").replaceChildren(...same.flatMap((name) => [make("dt", name), make("dd", made[0][name])]));
  };

  const drawProvenance = () => at("provenance-body").replaceChildren(...labels().map((label, i) => {
    const part = make("details");
    const list = make("dl");
    for (const [name, value] of group().provenance[i]) list.append(make("dt", name), make("dd", value));
    part.append(make("summary", label), list);
    return part;
  }));

  const drawPair = () => [drawDifferences, drawGallery, drawOverlays, drawClasses, drawSettings].forEach((draw) => draw());
  const drawAll = () => {
    at("title").textContent = group().title;
    [drawShared, drawCurves, drawScores, drawBars, drawPair, drawPapers, drawProvenance].forEach((draw) => draw());
  };
  const choose = (g) => {
    const { columns, rows, main } = content.groups[g].leaderboard;
    const first = main ?? columns.findIndex((one) => one.kind);
    const value = (i) => key(rows[i].scores[first]) ?? -Infinity;
    const [best, next] = rows.map((_, i) => i).sort((i, j) => rows[j].competes - rows[i].competes || order(value(i), value(j), true));
    Object.assign(state, { group: g, score: first, a: next ?? best, b: best, filter: "", sort: { column: first, down: true } });
    at("filter").value = "";
    options(at("score"), columns.map((one) => (one.kind ? column(one) : null)), state.score);
    options(at("config-a"), rows.map((row) => row.label), state.a);
    options(at("config-b"), rows.map((row) => row.label), state.b);
    drawAll();
  };

  const dress = (theme) => {
    root.dataset.theme = theme;
    at("theme").setAttribute("aria-pressed", String(theme === "dark"));
  };
  const asked = matchMedia("(prefers-color-scheme: dark)");
  dress(asked.matches ? "dark" : "light");
  const redress = (theme) => { dress(theme); [drawBars, drawDifferences, drawCurves].forEach((draw) => draw()); };
  asked.addEventListener("change", () => redress(asked.matches ? "dark" : "light"));
  at("theme").addEventListener("click", () => redress(root.dataset.theme === "dark" ? "light" : "dark"));

  options(at("group"), content.groups.map((one) => one.title), 0);
  at("choose-group").hidden = content.groups.length < 2;
  at("group").addEventListener("change", () => choose(Number(at("group").value)));
  at("score").addEventListener("change", () => { state.score = Number(at("score").value); drawBars(); drawDifferences(); drawClasses(); });
  at("config-a").addEventListener("change", () => { state.a = Number(at("config-a").value); drawPair(); });
  at("config-b").addEventListener("change", () => { state.b = Number(at("config-b").value); drawPair(); });
  at("filter").addEventListener("input", () => { state.filter = at("filter").value; [drawScores, drawBars, drawDifferences, drawCurves].forEach((draw) => draw()); });
  at("curve").addEventListener("change", () => { state.curve = Object.keys(group().curves)[Number(at("curve").value)]; drawCurves(); });
  at("sections").append(...[...document.querySelectorAll("main section")].map((section) => {
    const item = make("li");
    item.append(make("a", section.querySelector("h2").textContent, { href: `#${section.id}` }));
    return item;
  }));
  at("made").textContent = content.made;
  choose(0);
})();
