"use strict";
// The right side of the page: numbers, and panels with their downloads.

const stage = (() => {
  const ORDER = ["residual", "loss", "eigen", "rate", "map", "gain"],
    parts = {};

  function save(name, kind, text) {
    const url = URL.createObjectURL(new Blob([text], { type: kind === "csv" ? "text/csv" : "image/svg+xml" }));
    html("a", { href: url, download: `explore-${name}.${kind}` }).click();
    setTimeout(() => URL.revokeObjectURL(url), 10000);
  }

  const csvText = (rows) => rows.map((row) => row.join(",")).join("\n") + "\n";

  function svgText(nodes, width) {
    let y = 0;
    const look = draw.THEMES.light,
      whole = draw.el("svg");
    for (const node of nodes) {
      const height = Number(node.getAttribute("height"));
      Object.entries({ y, width, height }).forEach(([key, value]) => node.setAttribute(key, value));
      whole.append(node);
      y += height;
    }
    for (const [key, value] of Object.entries({ width, height: y, viewBox: `0 0 ${width} ${y}` }))
      whole.setAttribute(key, value);
    whole.prepend(draw.el("rect", { width, height: y, fill: look.paper }));
    return new XMLSerializer().serializeToString(whole);
  }

  function buildPanels() {
    ORDER.forEach((name, number) => {
      const box = $(name),
        title = html("strong"),
        words = html("span");
      const letter = "abcdef"[number];
      box.append(
        steady(
          html("figcaption", {}, html("span", {}, html("b", { textContent: letter }), title, " ", words)),
          `MMM ${panelOf(name).room}`, // bold letters are wider
        ),
      );
      const plots =
        name === "map" ? [0, 1].map(() => html("div", { className: "plot" })) : [html("div", { className: "plot" })];
      box.append(name === "map" ? html("div", { className: "maps" }, ...plots) : plots[0]);
      const tools = html("div", { className: "bar" });
      for (const kind of ["svg", "csv"]) {
        const button = html("button", { type: "button", textContent: `${kind.toUpperCase()} ↓` });
        button.setAttribute("aria-label", `Download panel ${letter} as ${kind.toUpperCase()}`);
        button.addEventListener("click", () => save(name, kind, kind === "csv" ? csvOf(name) : svgOf(name)));
        tools.append(button);
      }
      box.append(tools);
      parts[name] = { box, title, words, plots, tools, seen: true, stale: true };
    });
    buildView();
    choices.build(parts.rate);
    cross.build(parts.map);
    const watch = new IntersectionObserver(
      (entries) => {
        for (const { target, isIntersecting } of entries) {
          parts[target.id].seen = isIntersecting;
          if (isIntersecting && (parts[target.id].stale || target.id === "map")) app.later();
        }
      },
      { rootMargin: "200px" },
    );
    for (const { box } of Object.values(parts)) watch.observe(box);
    new ResizeObserver(() => {
      measure();
      app.later();
    }).observe($("panels"));
    measure();
    window.addEventListener("beforeprint", () => {
      showRest();
      cross.finish();
    });
  }

  /** Widths are read here only: reading them between two drawings would lay out the page once for each. */
  function measure() {
    if ($("panels").clientWidth < 100) return; // no window at all, as for a moment while the whole page is photographed
    // What is out of sight is drawn too: a picture of the old width would widen the page.
    for (const part of Object.values(parts)) Object.assign(part, { width: part.plots[0].clientWidth, due: true });
    parts.map.whole = parts.map.box.clientWidth;
    stale();
  }

  const csvOf = (name) => csvText(name === "map" ? lossMap.csv() : panels[name].csv(app.model));

  function svgOf(name) {
    if (name !== "map") return svgText([panels[name].plot(app.model, 640, "light")], 640);
    while (lossMap.work(50));
    const sides = [0, 1].map((side) => {
      const canvas = document.createElement("canvas");
      lossMap.paint(canvas, side, "light");
      return lossMap.plot(app.model, side, 640, "light", canvas.toDataURL()).svg;
    });
    return svgText([...sides, lossMap.bar(640, "light")], 640);
  }

  /** All panels are out of date; those out of sight wait for the hand only if it moves, not after a change of size. */
  function stale(moves = false) {
    for (const part of Object.values(parts)) Object.assign(part, { stale: true, rests: part.rests && !moves });
  }

  /** The choice between the residual and its logarithm. */
  function buildView() {
    const pick = html("span", { className: "pick" });
    pick.setAttribute("role", "radiogroup");
    pick.setAttribute("aria-label", "Vertical axis of panel a");
    for (const [value, words] of [
      ["linear", "x"],
      ["log", "log |x|"],
    ]) {
      const input = html("input", { type: "radio", name: "view", value });
      input.addEventListener("change", () => app.change({ view: value }, { own: false }));
      pick.append(html("label", {}, input, ` ${words}`));
    }
    parts.residual.tools.prepend(pick);
  }

  const values = [];
  function showReadouts() {
    const found = compute.readouts(app.model);
    if (!values.length) {
      for (const [name, , room = "−1.234e−5"] of found) {
        const value = html("span");
        values.push(value);
        $("readouts").append(html("div", {}, html("dt", { textContent: name }), steady(html("dd", {}, value), room)));
      }
      steady($("warning"), compute.LONGEST_WARNING);
    }
    found.forEach(([, value], i) => write(values[i], value));
    write($("warning").firstChild, app.model.warnings.join(" ") || "No warnings.");
    $("warning").classList.toggle("any", app.model.warnings.length > 0);
  }

  const mapWords = (horizon) =>
    "Brighter is lower. Move the cross: drag it, press in a map, or focus it and use the arrow keys (with Shift in " +
    `larger steps). Horizon ${horizon}; striped grey: higher than at the start.`;
  const MAP = {
    title: lossMap.title,
    text: ({ rounds }) => mapWords(store.roundsOf(rounds)),
    room: `${lossMap.title()}. ${mapWords("10000 rounds")}`,
  };
  const panelOf = (name) => (name === "map" ? MAP : panels[name]);

  /** Draw every panel that is out of date and in sight; the others, and cells of the map, wait until the hand rests. */
  function show() {
    showReadouts();
    if ((parts.map.seen || parts.map.rests) && lossMap.busy()) parts.map.stale = true;
    for (const [name, part] of Object.entries(parts)) {
      if (!part.stale || !(part.seen || part.due || part.rests)) continue;
      part.stale = part.due = false;
      const panel = panelOf(name);
      write(part.title, `${panel.title(app.model)}.`);
      write(part.words, panel.text(app.model));
      if (name === "map") cross.draw();
      else part.plots[0].replaceChildren(panel.plot(app.model, part.width, app.theme));
      if (name === "rate") choices.show();
    }
  }

  /** What can wait until the hand rests. */
  function showRest() {
    forms.show();
    choices.showRest();
    for (const part of Object.values(parts)) part.rests = true;
    show();
  }

  return { build: buildPanels, stale, show, showRest };
})();
