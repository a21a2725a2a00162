"use strict";
// The right side of the page: numbers, panels with their downloads, the maps under the hand, and the two forms.

const stage = (() => {
  const { plain, NB } = store;
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
        title = html("span", { className: "title" }),
        words = html("span");
      const letter = "abcdef"[number];
      box.append(
        html(
          "figcaption",
          { id: `${name}-caption` },
          html("b", { textContent: letter }),
          html("strong", {}, title),
          " ",
          words,
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
    buildRate();
    buildMaps();
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
  }

  /** Widths are read here only: reading them between two drawings would lay out the page once for each. */
  function measure() {
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

  function stale() {
    for (const part of Object.values(parts)) part.stale = true;
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

  const rows = [];
  /** The table of choices under the rate plot: its buttons stay, so that a pressed one keeps the focus. */
  function buildRate() {
    const head = html(
      "tr",
      {},
      ...["Criterion", "K", "rate", "log₁₀ loss"].map((words, i) =>
        html("th", { scope: "col", className: i ? "number" : "", textContent: words }),
      ),
    );
    const body = html("tbody");
    for (let i = 0; i < 9; i++) {
      const name = html("th", { scope: "row" }),
        button = html("button", { type: "button" }),
        cells = [0, 1].map(() => html("td", { className: "number" }));
      button.addEventListener("click", () => app.change({ restart: rows[i].period ?? 0 }));
      const row = html("tr", {}, name, html("td", { className: "number" }, button), ...cells);
      rows.push({ row, name, button, cells, period: 0 });
      body.append(row);
    }
    const table = html(
      "table",
      { id: "choices" },
      html("caption", { className: "unseen", textContent: "What each criterion chooses" }),
      html("thead", {}, head),
      body,
    );
    const holder = html("div", { className: "scroll", tabIndex: 0 }, table);
    holder.setAttribute("role", "region");
    holder.setAttribute("aria-label", "Table of the choices");
    const [plot] = parts.rate.plots,
      pair = html("div", { className: "pair" });
    plot.replaceWith(pair);
    pair.append(plot, html("div", {}, holder, html("p", { className: "hint", id: "controls" })));
    plot.classList.add("aim");
    plot.addEventListener("pointerdown", (event) => {
      const period = panels.rate.at(event.clientX - plot.getBoundingClientRect().left);
      if (period >= 1 && period <= app.model.rounds) app.change({ restart: period });
    });
  }

  function showChoices() {
    const { recommended, choices } = app.model,
      best = recommended === choices[0].period ? 0 : choices.length; // that row is "no restart"
    [...app.model.choices, app.model.without, ...app.model.guesses, app.model.current].forEach((choice, i) => {
      const { row, name, button, cells } = rows[i],
        words = choice.period === null ? "never" : String(choice.period);
      rows[i].period = choice.period;
      row.classList.toggle("chosen", i === best);
      const value = "value" in choice ? ` (${Number.isFinite(choice.value) ? plain(choice.value) : "none"})` : "";
      write(name, choice.words + value + (i === 0 ? " – recommended" : ""));
      write(button, words);
      button.setAttribute("aria-label", `Use: restart ${compute.periodWords(choice.period)}, ${choice.words}`);
      write(cells[0], plain(choice.rate));
      write(cells[1], plain(choice.loss));
    });
  }

  /** What restarts are to be compared with. */
  function showControlRates() {
    const found = compute.controls(app.model).map(([words, value]) => `${plain(value)} ${words}`);
    write($("controls"), `To be held against, rate of the slowest mode without restarts: ${found.join("; ")}.`);
  }

  // ------------------------------------------------------------------------------------------------------------- map

  const maps = [];
  function buildMaps() {
    parts.map.plots.forEach((plot, side) => {
      const canvas = html("canvas"),
        holder = html("div"),
        handle = html("div", { className: "handle", tabIndex: 0 });
      canvas.setAttribute("aria-hidden", "true");
      handle.setAttribute("role", "slider");
      handle.setAttribute(
        "aria-label",
        `Chosen point, ${side ? "with" : "without"} restarts: left and right change the learning rate, ` +
          "up and down the momentum",
      );
      handle.setAttribute("aria-valuemin", "0");
      handle.setAttribute("aria-valuemax", "1");
      plot.append(canvas, holder, handle);
      maps.push({ plot, canvas, holder, handle, box: null });
      const set = (event) => {
        const at = plot.getBoundingClientRect();
        app.change(within(lossMap.pointAt(maps[side].box, event.clientX - at.left, event.clientY - at.top, app.state)));
      };
      // A mouse drags anywhere. A finger taps, or drags the handle: elsewhere it must be able to scroll the page.
      plot.addEventListener("click", set);
      plot.addEventListener("pointerdown", (event) => {
        if (event.pointerType === "touch" && event.target !== handle) return;
        plot.setPointerCapture(event.pointerId);
        set(event);
      });
      plot.addEventListener("pointermove", (event) => plot.hasPointerCapture(event.pointerId) && set(event));
      handle.addEventListener("keydown", (event) => {
        const way = { ArrowLeft: [-1, 0], ArrowRight: [1, 0], ArrowUp: [0, 1], ArrowDown: [0, -1] }[event.key];
        if (!way) return;
        event.preventDefault();
        const far = event.shiftKey ? 4 : 1;
        app.change(lossMap.moved(app.state, far * way[0], far * way[1], app.given.limits));
      });
    });
    parts.map.box.insertBefore(html("div", { id: "map-bar" }), parts.map.tools);
  }

  const within = ({ lr, momentum }) => ({
    lr: Math.max(app.given.limits.lr[0], lr),
    momentum: Math.min(app.given.limits.momentum[1], momentum),
  });

  let working = 0,
    painted = "";
  /** The cells and the colour bar, unless they are there already. */
  function paintMaps() {
    const key = `${lossMap.stage()} ${app.theme} ${parts.map.whole}`;
    if (key === painted) return;
    painted = key;
    maps.forEach(({ canvas }, side) => lossMap.paint(canvas, side, app.theme));
    $("map-bar").replaceChildren(lossMap.bar(parts.map.whole, app.theme));
  }

  function drawMaps() {
    lossMap.prepare(app.model);
    lossMap.work();
    maps.forEach(({ canvas, holder, handle }, side) => {
      const p = lossMap.plot(app.model, side, parts.map.width, app.theme),
        { left, right, top, bottom } = p.box;
      p.svg.style.position = "relative";
      holder.replaceChildren(p.svg);
      maps[side].box = p.box;
      Object.assign(canvas.style, {
        left: `${left}px`,
        top: `${top}px`,
        width: `${right - left}px`,
        height: `${bottom - top}px`,
      });
      Object.assign(handle.style, { left: `${p.at.x}px`, top: `${p.at.y}px` });
      const value = side ? app.model.final.restart : app.model.final.none;
      handle.setAttribute("aria-valuenow", String(app.state.momentum));
      handle.setAttribute(
        "aria-valuetext",
        `learning rate ${plain(app.state.lr)}, momentum ${plain(app.state.momentum, 6)}, log10 loss ${plain(value)}`,
      );
    });
    paintMaps();
    if (lossMap.busy() && !working) working = setTimeout(more, 0);
  }

  function more() {
    working = 0;
    if (!parts.map.seen) return;
    const busy = lossMap.work(8);
    paintMaps();
    if (busy) working = setTimeout(more, 0);
  }

  // ------------------------------------------------------------------------------------------------------------ forms

  const EQUATIONS = {
    sum: {
      buffer: "m ← βm + g",
      heavy: "x ← x − lr·m",
      nesterov: "x ← x − lr·(g + βm)",
      who: "torch.optim.SGD, optax, DiLoCo engines",
    },
    ema: {
      buffer: "m ← βm + (1−β)g",
      heavy: "x ← x − lr·m",
      nesterov: "x ← x − lr·((1+β)m − βm_old)",
      who: "the restart paper’s equations",
    },
  };
  const SWITCH = html("button", { type: "button", id: "switch" });
  SWITCH.addEventListener("click", () => {
    const form = app.state.form === "sum" ? "ema" : "sum";
    app.change({ form, lr: kernel.converted(app.model.rule, form).lr });
  });

  function showForms() {
    const other = compute.swapped(app.model),
      kind = app.state.nesterov ? "nesterov" : "heavy",
      name = { sum: "sum form", ema: "EMA form" };
    const forms = ["sum", "ema"].map((form) => kernel.converted(app.model.rule, form)),
      swap = name[other.rule.form];
    const row = (head, ...cells) =>
      html(
        "tr",
        {},
        html("th", { scope: "row", textContent: head }),
        ...cells.map((cell) =>
          Array.isArray(cell) ? html("td", { colSpan: 2, textContent: cell[0] }) : html("td", { textContent: cell }),
        ),
      );
    const column = (words) => html("th", { scope: "col", textContent: words });
    const same = (one, two) => [[one], two];
    const regimes = (modes) => [...new Set(modes.map(kernel.regime))].map((r) => compute.REGIMES[r]).join("; ");
    const word = (one) => compute.periodWords(one.recommended);
    $("forms").replaceChildren(
      html(
        "thead",
        {},
        html("tr", {}, html("td"), column("sum form"), column("EMA form"), column(`the same numbers in ${swap}`)),
      ),
      html(
        "tbody",
        {},
        row("Learning rate lr", ...forms.map(({ lr }) => plain(lr, 6)), plain(other.rule.lr, 6)),
        row("Momentum β", ...same(plain(app.state.momentum, 6), plain(app.state.momentum, 6))),
        row("Written by", EQUATIONS.sum.who, EQUATIONS.ema.who, ""),
        row("Buffer", EQUATIONS.sum.buffer, EQUATIONS.ema.buffer, EQUATIONS[other.rule.form].buffer),
        row("Step", EQUATIONS.sum[kind], EQUATIONS.ema[kind], EQUATIONS[other.rule.form][kind]),
        row("Modes", ...same(regimes(app.model.modes), regimes(other.modes))),
        row("log₁₀ loss, no restart", ...same(plain(app.model.final.none), plain(other.final.none))),
        row(
          app.state.restart ? `log₁₀ loss, K${NB}=${NB}${app.state.restart}` : "log₁₀ loss, chosen K",
          ...same(plain(app.model.final.restart), plain(other.final.restart)),
        ),
        row("Recommended restart", ...same(word(app.model), word(other))),
        row("Mean outer gain, no restart", ...same(plain(app.model.gains.none), plain(other.gains.none))),
      ),
    );
    const target = app.state.form === "sum" ? "ema" : "sum";
    const { lr } = kernel.converted(app.model.rule, target);
    SWITCH.textContent = `Write this rule in ${name[target]}: lr ${plain(lr)}, the same trajectory`;
  }

  // --------------------------------------------------------------------------------------------------------- numbers

  const values = [];
  function showReadouts() {
    const found = compute.readouts(app.model);
    if (!values.length) {
      for (const [name] of found) {
        const value = html("dd");
        values.push(value);
        $("readouts").append(html("div", {}, html("dt", { textContent: name }), value));
      }
    }
    found.forEach(([, value], i) => write(values[i], value));
    write($("warning"), app.model.warnings.join(" "));
  }

  const MAP = {
    title: lossMap.title,
    text: (m) =>
      "Brighter is lower. Move the cross: drag it, press in a map, or focus it and use the arrow keys (with Shift in " +
      `larger steps). Horizon ${store.roundsOf(m.rounds)}; striped grey: higher than at the start.`,
  };

  /** Draw every panel that is in sight and out of date. */
  function show() {
    showReadouts();
    if (parts.map.seen && lossMap.busy()) parts.map.stale = true; // its cells wait while it cannot be seen
    for (const [name, part] of Object.entries(parts)) {
      if (!part.stale || !(part.seen || part.due)) continue;
      part.stale = part.due = false;
      const panel = name === "map" ? MAP : panels[name];
      write(part.title, `${panel.title(app.model)}.`);
      write(part.words, panel.text(app.model));
      if (name === "map") drawMaps();
      else part.plots[0].replaceChildren(panel.plot(app.model, part.width, app.theme));
      if (name === "rate") showChoices();
    }
  }

  /** What can wait until the hand rests. */
  function showRest() {
    showForms();
    showControlRates();
  }

  function build() {
    buildPanels();
    $("forms").parentElement.after(SWITCH);
  }

  return { build, stale, show, showRest };
})();
