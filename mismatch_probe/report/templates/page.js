"use strict";
(() => {
  const root = document.documentElement;
  const plots = [...document.querySelectorAll(".plot")];
  const hidden = new Set();
  const linear = new Set();
  // A finger scrolls the page, a mouse zooms into a drawing.
  const isTouched = matchMedia("(pointer: coarse)").matches;
  const CONFIG = {
    responsive: true,
    displaylogo: false,
    typesetMath: false,
    displayModeBar: isTouched ? false : "hover",
    modeBarButtons: [["toImage", "zoom2d", "pan2d", "zoomIn2d", "zoomOut2d", "resetScale2d"]],
  };

  // An axis whose range is that of all pairs is fitted to those that are left when one is hidden.
  const BEFORE_THE_LEAST = 6; // times: what begins at the edge of a logarithmic axis
  const FITTED_ANEW = { autorange: true, range: null, dtick: null };

  // What draws is unpacked once, when the first drawing comes into view or onto paper.
  let drawings;
  function load() {
    drawings ??= JSON.parse(unpacked("figures"));
    if (window.Plotly) return;
    const script = document.createElement("script");
    script.textContent = unpacked("plotlyjs");
    document.head.append(script);
    if (!window.Plotly) throw new Error("plotly.js did not start");
  }

  // Colours and fonts are the page's CSS variables, as they are in the present theme.
  const probe = document.body.appendChild(document.createElement("span"));
  const variable = (name) => {
    if (!name.startsWith("--fig-")) return getComputedStyle(root).getPropertyValue(name).trim();
    probe.style.color = `var(${name})`;
    return getComputedStyle(probe).color;
  };
  function themed(value) {
    if (typeof value === "string") return value.replace(/^var\((--[\w-]+)\)$/, (_, name) => variable(name));
    if (Array.isArray(value)) return value.map(themed);
    if (value && typeof value === "object") {
      return Object.fromEntries(Object.entries(value).map(([name, inner]) => [name, themed(inner)]));
    }
    return value;
  }

  // For paper each drawing is drawn for its place there, and all are made smaller by one factor, so that their words are
  // of one size. The browser lays the page out for paper too late for that, so its rules for paper hold for a moment.
  const PAPER = 696; // pixels of an A4 sheet between its margins
  const FACTOR = 0.75;
  let sizesOnPaper;
  function measureOnPaper() {
    const rules = [...document.querySelector("style").sheet.cssRules]; // the page's own
    const ofPaper = rules.filter(({ media }) => media?.mediaText === "print");
    for (const { media } of ofPaper) media.mediaText = "all";
    document.body.style.width = `${PAPER}px`;
    const places = plots.map((plot) => [plot, plot.getBoundingClientRect().width / FACTOR]).filter(([, width]) => width);
    sizesOnPaper = new Map(places.map(([plot, width]) => [plot, { width, height: parseFloat(plot.style.height) }]));
    document.body.style.width = "";
    for (const { media } of ofPaper) media.mediaText = "print";
  }

  function draw(plot) {
    const { data, layout } = themed(drawings.figures[plot.parentElement.id]);
    Object.assign(layout, sizesOnPaper?.get(plot));
    layout.template = themed(drawings.theme);
    layout.dragmode = isTouched ? false : "zoom";
    const isHidden = ({ legendgroup, name }) => hidden.has(legendgroup ?? name);
    for (const trace of data) trace.visible = !isHidden(trace);
    layout.annotations = layout.annotations?.filter((label) => !isHidden(label));
    const isInPart = data.some(isHidden);
    if (isInPart) {
      const bars = data.filter(({ meta, visible }) => meta?.begins_at_edge && visible);
      const least = Math.min(...bars.map(({ x }) => x[1] ?? Infinity));
      if (Number.isFinite(least)) for (const bar of bars) bar.x[0] = least / BEFORE_THE_LEAST;
      for (const name of layout.meta?.fitted ?? []) Object.assign(layout[name], FITTED_ANEW);
    }
    if (linear.has(plot)) {
      for (const axis of [layout.xaxis, layout.yaxis]) {
        if (axis?.type === "log") Object.assign(axis, { type: "linear", tickfont: {}, ...FITTED_ANEW });
      }
    }
    const drawing = plot.querySelector(".drawing") ?? plot.appendChild(newDrawing());
    // Other axes make a new drawing, so that a double click leads back to them; so does a size that is given or not.
    const axes = `${isInPart ? "of some" : "of all"}, ${linear.has(plot) ? "linear" : "as drawn"}`;
    const how = sizesOnPaper ? `${axes}, on paper` : axes;
    const isNew = plot.dataset.drawn !== how;
    window.Plotly[isNew ? "newPlot" : "react"](drawing, data, layout, CONFIG);
    plot.dataset.drawn = how;
    oneStop([...drawing.querySelectorAll(".modebar-btn")]);
    if (isNew) drawing.on("plotly_click", ({ points }) => follow(points[0].customdata));
  }

  // The buttons of a drawing are one stop of the tab key; arrow keys lead from one to the next.
  function oneStop(buttons) {
    for (const [number, button] of buttons.entries()) button.tabIndex = number ? -1 : 0;
  }
  function stepThroughButtons(event) {
    const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
    const button = event.target.closest(".modebar-btn");
    if (!step || !button) return;
    const buttons = [...event.currentTarget.querySelectorAll(".modebar-btn")];
    buttons.at((buttons.indexOf(button) + step) % buttons.length).focus();
    event.preventDefault();
  }

  function newDrawing() {
    const drawing = document.createElement("div");
    drawing.className = "drawing";
    drawing.addEventListener("keydown", stepThroughButtons);
    return drawing;
  }

  function follow(anchor) {
    const row = typeof anchor === "string" && document.getElementById(anchor);
    if (!row) return;
    location.hash = anchor;
  }

  const drawn = () => plots.filter((plot) => plot.dataset.drawn);
  function drawAll(those) {
    if (!those.length || root.dataset.figures) return;
    try {
      load();
    } catch (error) {
      root.dataset.figures = "failed";
      console.error(error);
      return;
    }
    those.forEach(drawOrSay);
  }
  // One that cannot be drawn says so in its place, and the others are drawn.
  function drawOrSay(plot) {
    delete plot.dataset.failed; // or it is measured where it is not shown
    try {
      draw(plot);
    } catch (error) {
      plot.dataset.failed = "";
      console.error(error);
    }
  }
  const redraw = () => drawAll(drawn());

  const watcher = new IntersectionObserver(
    (entries) => {
      const seen = entries.filter((entry) => entry.isIntersecting).map((entry) => entry.target);
      if (!seen.length) return;
      seen.forEach((plot) => watcher.unobserve(plot));
      drawAll(seen);
    },
    { rootMargin: "600px" },
  );
  plots.forEach((plot) => watcher.observe(plot));

  // What is farther down is drawn while nothing else is to do, for a picture of the whole page or a search in it.
  const whenIdle = window.requestIdleCallback ?? ((task) => setTimeout(task, 50));
  function drawNext() {
    const plot = plots.find((each) => !each.dataset.drawn && !("failed" in each.dataset) && each.checkVisibility());
    if (!plot || root.dataset.figures) return;
    watcher.unobserve(plot);
    drawAll([plot]);
    whenIdle(drawNext);
  }
  addEventListener("load", () => whenIdle(drawNext));

  // What is folded or not drawn yet is there on paper, in light colours.
  addEventListener("beforeprint", () => {
    root.dataset.printed = root.dataset.theme ?? "";
    root.dataset.theme = "light";
    for (const fold of document.querySelectorAll(".whole, .finding")) fold.open = true;
    measureOnPaper();
    drawAll(plots);
    for (const [plot, { width, height }] of sizesOnPaper) {
      const container = plot.querySelector(".svg-container");
      if (container) container.style.aspectRatio = `${width} / ${height}`;
      for (const svg of plot.querySelectorAll(".main-svg")) svg.setAttribute("viewBox", `0 0 ${width} ${height}`);
    }
  });
  addEventListener("afterprint", () => {
    document.querySelectorAll(".svg-container").forEach((container) => (container.style.aspectRatio = ""));
    document.querySelectorAll(".main-svg").forEach((svg) => svg.removeAttribute("viewBox"));
    sizesOnPaper = undefined;
    setTheme(root.dataset.printed);
    delete root.dataset.printed;
  });

  // The key hides and shows one style in every drawing of the page.
  const keys = [...document.querySelectorAll(".key button")];
  for (const key of keys) {
    key.addEventListener("click", () => {
      const group = key.dataset.group;
      hidden.has(group) ? hidden.delete(group) : hidden.add(group);
      for (const other of keys) other.setAttribute("aria-pressed", String(!hidden.has(other.dataset.group)));
      redraw();
    });
  }

  for (const button of document.querySelectorAll(".scale")) {
    const plot = button.closest(".panel").querySelector(".plot");
    button.hidden = false;
    button.addEventListener("click", () => {
      linear.has(plot) ? linear.delete(plot) : linear.add(plot);
      plot.parentElement.dataset.scale = linear.has(plot) ? "linear" : "log";
      button.setAttribute("aria-pressed", String(linear.has(plot)));
      if (plot.dataset.drawn) drawOrSay(plot);
    });
  }

  // Light, dark, or as the system is.
  const dark = matchMedia("(prefers-color-scheme: dark)");
  const isDark = () => (root.dataset.theme ? root.dataset.theme === "dark" : dark.matches);
  const theme = document.querySelector("button.theme");
  function setTheme(name) {
    if (name) root.dataset.theme = name;
    else delete root.dataset.theme;
    theme.textContent = isDark() ? "Light" : "Dark";
    redraw();
  }
  theme.hidden = false;
  // A page inside another one may remember nothing.
  const CHOICE = "mismatch-probe-theme";
  function remembered() {
    try {
      return localStorage.getItem(CHOICE);
    } catch {
      return null;
    }
  }
  function remember(name) {
    try {
      if (name === (dark.matches ? "dark" : "light")) localStorage.removeItem(CHOICE);
      else localStorage.setItem(CHOICE, name);
    } catch {
      // The choice holds until the page is closed.
    }
  }
  theme.addEventListener("click", () => {
    setTheme(isDark() ? "light" : "dark");
    remember(root.dataset.theme);
  });
  dark.addEventListener("change", () => setTheme(root.dataset.theme));
  setTheme(["light", "dark"].find((name) => name === remembered()));

  // Commands are copied, tables are sorted.
  for (const command of document.querySelectorAll("pre.block, .advice li:has(code)")) {
    const code = command.matches("li") ? command.lastChild : command.querySelector("code");
    if (code.nodeName !== "CODE") continue; // a name in a sentence is no command
    const button = document.createElement("button");
    button.type = "button";
    button.className = "copy";
    button.textContent = "Copy";
    button.addEventListener("click", async () => {
      const range = document.createRange();
      range.selectNodeContents(code);
      getSelection().removeAllRanges();
      getSelection().addRange(range);
      await navigator.clipboard?.writeText(range.toString()).then(() => (button.textContent = "Copied"), () => {});
    });
    command.append(button);
  }

  // "13k* [3,000, 37k]" is 13,000 and "2 min 5 s" is 125; what leads with no number is NaN.
  const SCALES = { k: 1e3, M: 1e6, B: 1e9, T: 1e12, bytes: 1, KiB: 2 ** 10, MiB: 2 ** 20, GiB: 2 ** 30, s: 1, min: 60, h: 3600 };
  const number = (text) => {
    const times = [...text.matchAll(/(\d[\d.]*) (h|min|s)\b ?/gy)];
    if (times.length) return times.reduce((sum, [, value, unit]) => sum + value * SCALES[unit], 0);
    const leading = text.match(/^[<>~]?\s*([-+]?\d[\d.]*(?:e[-+]?\d+)?)(?: ?([kMBT]|bytes|[KMG]iB)(?!\w))?/);
    return leading ? leading[1] * (SCALES[leading[2]] ?? 1) : NaN;
  };
  function sort(table, column, heading) {
    const direction = heading.getAttribute("aria-sort") === "ascending" ? -1 : 1;
    const body = table.tBodies[0];
    const rows = [...body.rows].map((row) => {
      const text = row.cells[column].textContent.trim();
      return { row, text, value: number(text.replaceAll(",", "").replaceAll("−", "-")) };
    });
    const hasValue = ({ value }) => !Number.isNaN(value);
    const isNumeric = rows.filter(hasValue).length * 2 > rows.filter(({ text }) => text !== "n/a").length;
    rows.sort((a, b) => {
      if (!isNumeric) return direction * a.text.localeCompare(b.text);
      return hasValue(a) && hasValue(b) ? direction * (a.value - b.value) : hasValue(b) - hasValue(a);
    });
    body.append(...rows.map(({ row }) => row));
    for (const other of table.tHead.rows[0].cells) other.removeAttribute("aria-sort");
    heading.setAttribute("aria-sort", direction > 0 ? "ascending" : "descending");
  }
  for (const table of document.querySelectorAll("table")) {
    if (table.tBodies[0]?.rows.length < 3) continue;
    [...table.tHead.rows[0].cells].forEach((heading, column) => {
      if (!heading.textContent.trim()) return;
      const button = document.createElement("button");
      button.type = "button";
      button.append(...heading.childNodes);
      heading.append(button);
      button.addEventListener("click", () => sort(table, column, heading));
    });
  }

  // On a narrow screen a row of these is a card, each of whose cells bears the name of its column.
  for (const table of document.querySelectorAll("table.stacked")) {
    const names = [...table.tHead.rows[0].cells].map((heading) => heading.textContent);
    for (const row of table.tBodies[0].rows) {
      [...row.cells].forEach((cell, column) => column && (cell.dataset.label = names[column]));
    }
    table.classList.add("labelled");
  }

  // The section in view is marked in the contents: the one that the address names while it begins in view, at the end
  // of the page the last one, else the first one that begins in the upper quarter of the screen, or the one above it.
  const links = new Map([...document.querySelectorAll("nav a")].map((link) => [link.hash.slice(1), link]));
  const sections = [...links.keys()].map((id) => document.getElementById(id)).filter(Boolean);
  const top = (section) => section.getBoundingClientRect().top;
  function current() {
    const isAtEnd = scrollY > 0 && Math.ceil(scrollY + innerHeight) >= root.scrollHeight;
    const named = sections.find((section) => `#${section.id}` === location.hash);
    if (named && top(named) > -1 && top(named) < (isAtEnd ? innerHeight : innerHeight / 4)) return named;
    if (isAtEnd) return sections.at(-1);
    const begins = (section) => top(section) > -1 && top(section) <= innerHeight / 4;
    return sections.find(begins) ?? sections.findLast((section) => top(section) <= -1) ?? sections[0];
  }
  function markCurrent() {
    const marked = current();
    for (const [id, link] of links) {
      if (id === marked?.id) link.setAttribute("aria-current", "true");
      else link.removeAttribute("aria-current");
    }
  }
  for (const event of ["scroll", "resize", "hashchange"]) {
    addEventListener(event, () => requestAnimationFrame(markCurrent), { passive: true });
  }
  markCurrent();
})();
