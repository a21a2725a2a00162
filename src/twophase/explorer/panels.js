"use strict";
// The line plots. Each panel is {title, text(model), plot(model, width, theme), csv(model)}: a caption, a picture of a
// given width and the numbers in it. A model is what model.js makes of a state: rule, modes, tables, …

const panels = (() => {
  const { el, text, plot, path, fix, shapes } = draw;
  const { plain, roundsOf, nearOne, NB } = store;
  const LN10 = Math.LN10;
  const DASH = "6 3";
  const MOST_FAINT = 8; // other modes that are drawn behind the chosen one

  const lines = (look) => ({
    restart: { stroke: look.restart, "stroke-width": 2, fill: "none" },
    none: { stroke: look.none, "stroke-width": 1.8, "stroke-dasharray": DASH, fill: "none" },
  });
  const every = ({ period, rounds }) =>
    period >= rounds
      ? "no restart within the horizon"
      : `restart${period ? "" : ":"} ${compute.periodWords(period || null)}`;

  /** Rounds at which the momentum is dropped, the last round excepted, where it would show nowhere. */
  function restarts({ period, rounds }) {
    const found = [];
    if (period) for (let t = period; t < rounds; t += period) found.push(t);
    return found;
  }

  /** Marks of the restarts: hairlines, and triangles on top where there is room for them. */
  function restartMarks(p, model) {
    const at = restarts(model),
      room = (p.box.right - p.box.left) / Math.max(at.length, 1);
    if (room < 3) return;
    const d = at.map((t) => `M${fix(p.x(t))},${p.box.top}V${p.box.bottom}`).join("");
    p.add(el("path", { d, stroke: p.look.restart, "stroke-width": 0.7, "stroke-opacity": 0.45 }));
    const tops = at.map((t) => shapes.down(p.x(t), p.box.top + 4, 3.5)).join("");
    if (room > 9) p.over(el("path", { d: tops, fill: p.look.restart }));
  }

  // ------------------------------------------------------------------------------------------------ a  the residual

  const residual = {
    title: (model) =>
      model.focus < 0 ? "Mean residual of all modes" : `Residual of the mode σ${NB}=${NB}${plain(model.chosen.sigma)}`,
    text: (model) => {
      const turn = model.turn,
        words = ["The share of the mode that is left after each round, with and without restarts."];
      if (model.focus < 0) words[0] = "The mean of all modes (thick), and modes under the restart (thin).";
      else if (turn) {
        words.push(
          `Band: the true envelope ±${plain(Math.exp(turn.logAmplitude))} ρᵗ. Diamonds: where a mode without restarts ` +
            "passes through zero; a restart near the first one keeps it there.",
        );
      } else if (!(model.chosen.s[0] > 0)) words.push("Nothing moves this mode.");
      else if (model.diverges[model.focus]) words.push("This mode diverges, and does so under any restarts.");
      else
        words.push(
          "This mode does not oscillate: it has no envelope and no cancellation, and a restart only slows it down.",
        );
      if (model.modes.length > MOST_FAINT + 1)
        words.push(`${MOST_FAINT} of the ${model.modes.length} modes are drawn behind it.`);
      return words.join(" ");
    },
    plot(model, width, theme) {
      const { rounds, series, turn, state } = model,
        log = state.view === "log";
      const look = draw.THEMES[theme],
        mark = lines(look);
      const value = log ? (v) => v[1] / LN10 : (v) => v[0] * Math.exp(v[1]);
      const heavy = [series.none, series.restart],
        finite = [];
      const others = behind(model),
        thin = others.map((j) => (t) => model.residual(j, t));
      for (const one of log ? heavy.concat(thin) : heavy) for (let t = 0; t <= rounds; t++) finite.push(value(one(t)));
      const [low, high, cutOff] = log ? logRange(finite) : linearRange(finite, turn);
      const legend = [
        [every(model), mark.restart],
        ["no restart", mark.none],
      ];
      if (turn) {
        legend.push([
          "true envelope",
          { fill: look.band, stroke: look.still, shape: (x, y) => `M${x - 12},${y - 5}h24v10h-24z` },
        ]);
        if (!log) legend.push(["zero passed", { fill: look.paper, stroke: look.none, shape: shapes.diamond }]);
      }
      if (model.modes.length > 1) legend.push(["other modes", { stroke: look.still, "stroke-width": 1 }]);
      const axis = {
        x: { from: 0, to: rounds, label: "round" },
        y: { from: low, to: high, label: log ? "log₁₀ |residual x|" : "residual x" },
      };
      const label = `${residual.title(model)} over ${roundsOf(rounds)}: ${model.words.residual}`;
      const p = plot({ width, height: 300, axis, theme, legend, label, id: "residual" });
      if (turn) envelope(p, model, log);
      if (!log)
        p.add(el("path", { d: `M${p.box.left},${fix(p.y(0))}H${p.box.right}`, stroke: look.ink, "stroke-width": 0.8 }));
      restartMarks(p, model);
      const shown = (one, more) =>
        curve(p, log ? rounds : lastShown((t) => value(one(t)), rounds, high), (t) => value(one(t)), more);
      for (const one of thin) shown(one, { stroke: look.still, "stroke-width": 0.9 });
      shown(series.none, mark.none);
      shown(series.restart, mark.restart);
      if (turn && !log) zeros(p, model);
      if (cutOff) noteAtEnd(p, cutOff);
      return p.svg;
    },
    csv(model) {
      const head = [
        "round",
        "restart_after",
        "residual_no_restart",
        "residual_restart",
        "log_abs_no_restart",
        "log_abs_restart",
      ];
      const real = ([sign, log]) => sign * Math.exp(log),
        marked = new Set(restarts(model));
      const rows = [head.concat(model.turn ? ["envelope"] : [])];
      for (let t = 0; t <= model.rounds; t++) {
        const [a, b] = [model.series.none(t), model.series.restart(t)];
        const bound = model.turn ? [Math.exp(model.turn.logAmplitude + t * model.turn.logRho)] : [];
        rows.push([t, marked.has(t) ? 1 : 0, real(a), real(b), a[1], b[1], ...bound]);
      }
      return rows;
    },
  };

  /** Ends of the axis, and a note where a curve leaves it; with an envelope as far down as up, to show all of it. */
  function linearRange(values, turn) {
    const bound = turn ? Math.min(2, Math.exp(turn.logAmplitude)) : 1;
    const size = Math.max(1, bound, ...values.map(Math.abs).filter(Number.isFinite));
    const most = values.some((v) => !Number.isFinite(v)) || size > 4 ? 4 : size;
    const lowest = Math.min(0, ...values.filter((v) => v >= -most));
    const low = turn || most === 4 ? -most : Math.max(-most, Math.min(lowest * 1.12, -0.15));
    return [low * 1.06, most * 1.06, most === 4 ? "it leaves the frame: see log\u00a0|x|" : ""];
  }

  /** The round up to which a curve is drawn: that of its first exit, unless it comes back to stay. */
  function lastShown(value, rounds, most) {
    const out = (t) => !(Math.abs(value(t)) <= most);
    let back = rounds;
    while (back >= 0 && !out(back)) back--;
    if (back < 0.9 * rounds && back < rounds - 1) return rounds;
    let t = 0;
    while (t < rounds && !out(t)) t++;
    return t;
  }

  /** A remark in the lower right corner, on a ground of its own. */
  function noteAtEnd(p, words) {
    const wide = draw.WIDE * words.length + 10,
      at = p.box.bottom - 24;
    p.over(
      el("rect", { x: p.box.right - wide - 3, y: at, width: wide, height: 20, fill: p.look.paper }),
      text(p.box.right - 8, at + 14, words, { "text-anchor": "end", fill: p.look.none }),
    );
  }

  function logRange(values) {
    const finite = values.filter(Number.isFinite),
      low = Math.min(...finite),
      high = Math.max(...finite);
    return [Math.min(low, high - 1) - 0.02 * (high - low + 1), high + 0.04 * (high - low + 1), ""];
  }

  const curve = (p, rounds, value, look) =>
    p.add(
      el("path", {
        d: path(
          rounds + 1,
          (t) => p.x(t),
          (t) => p.y(value(t)),
        ),
        "stroke-linejoin": "round",
        ...look,
      }),
    );

  /** Modes that are drawn behind the chosen one: all, or some evenly spread. */
  function behind({ modes, focus }) {
    const others = modes.map((_, j) => j).filter((j) => j !== focus);
    if (others.length <= MOST_FAINT) return others;
    return Array.from(
      { length: MOST_FAINT },
      (_, i) => others[Math.round((i * (others.length - 1)) / (MOST_FAINT - 1))],
    );
  }

  /** The true envelope as a band around zero, or as a line where the axis is logarithmic. */
  function envelope(p, { turn, rounds }, log) {
    const bound = (t) => turn.logAmplitude + t * turn.logRho,
      count = Math.min(rounds, 300),
      at = (i) => (i * rounds) / count;
    const up = path(
      count + 1,
      (i) => p.x(at(i)),
      (i) => p.y(log ? bound(at(i)) / LN10 : Math.exp(bound(at(i)))),
    );
    if (log) {
      p.add(el("path", { d: up, stroke: p.look.still, "stroke-width": 1.4 }));
      return;
    }
    const down = path(
      count + 1,
      (i) => p.x(at(count - i)),
      (i) => p.y(-Math.exp(bound(at(count - i)))),
    );
    p.add(el("path", { d: `${up}L${down.slice(1)}z`, fill: p.look.band, stroke: p.look.still, "stroke-width": 0.7 }));
  }

  /** Where the mode without restarts passes through zero. */
  function zeros(p, { cancellations, rounds }) {
    const within = cancellations.filter((t) => t <= rounds);
    if (!within.length || (p.box.right - p.box.left) / within.length < 10) return;
    const d = within.map((t) => shapes.diamond(p.x(t), p.y(0), 4)).join("");
    p.add(el("path", { d, fill: p.look.paper, stroke: p.look.none, "stroke-width": 1.3 }));
    const first = within[0],
      end = p.x(first) > p.box.right - 80;
    p.over(
      text(fix(p.x(first)) + (end ? -8 : 7), fix(p.y(0)) - 8, `t₀${NB}=${NB}${plain(first)}`, {
        "text-anchor": end ? "end" : "start",
        fill: p.look.none,
        stroke: p.look.paper,
        "stroke-width": 3,
        "paint-order": "stroke",
      }),
    );
  }

  // ------------------------------------------------------------------------------------------------------ b  the loss

  const loss = {
    title: () => "Loss of all modes",
    text: () => "Half the mean square of the residuals; it begins at ½. Triangles: restarts.",
    plot(model, width, theme) {
      const { rounds, losses } = model,
        look = draw.THEMES[theme],
        mark = lines(look);
      const [low, high] = logRange([...losses.none, ...losses.restart]);
      const axis = { x: { from: 0, to: rounds, label: "round" }, y: { from: low, to: high, label: "log₁₀ loss" } };
      const legend = [
        [every(model), mark.restart],
        ["no restart", mark.none],
      ];
      const label = `Loss over ${roundsOf(rounds)}: ${model.words.loss}`;
      const p = plot({ width, height: 300, axis, theme, legend, label, id: "loss" });
      restartMarks(p, model);
      curve(p, rounds, (t) => losses.none[t], mark.none);
      curve(p, rounds, (t) => losses.restart[t], mark.restart);
      return p.svg;
    },
    csv: ({ losses, rounds }) => [
      ["round", "log10_loss_no_restart", "log10_loss_restart"],
      ...Array.from({ length: rounds + 1 }, (_, t) => [t, losses.none[t], losses.restart[t]]),
    ],
  };

  // ---------------------------------------------------------------------------------------------- d  rate and period

  const rate = {
    title: () => "Contraction a round against the restart period",
    text: () =>
      "How fast the slowest mode shrinks, and the mean over modes, with a restart every K rounds. Beside it the K " +
      "that each criterion chooses: press one to use it, or press in the plot.",
    /** The longest period in the plot: enough for every choice, and for a look beyond. */
    reach: ({ choices, rounds, period, cancellations }) => {
      const periods = [period, ...choices.map((c) => c.period ?? 0), cancellations[0] ?? 0].filter((k) => k < rounds);
      return Math.max(2, Math.min(rounds, Math.ceil(Math.max(20, 1.35 * Math.max(0, ...periods)))));
    },
    plot(model, width, theme) {
      const look = draw.THEMES[theme],
        most = rate.reach(model),
        { scores, without } = model;
      const slow = scores.minimax.subarray(0, most),
        mean = scores.rate.subarray(0, most);
      const seen = [...slow, ...mean, without.rate].filter(Number.isFinite);
      const high = Math.max(0.01, ...seen),
        low = Math.min(0, ...seen);
      const legend = [
        ["slowest mode", { stroke: look.restart, "stroke-width": 2 }],
        ["mean of a cycle", { stroke: look.third, "stroke-width": 1.6, "stroke-dasharray": "2 2.5" }],
        ["no restart, slowest mode", { stroke: look.none, "stroke-width": 1.6, "stroke-dasharray": DASH }],
      ];
      const axis = {
        x: { from: 0, to: most, label: "restart period K, rounds" },
        y: { from: low * 1.05, to: high * 1.08, label: "rate, nats a round" },
      };
      const label = `Rate against the period: ${model.words.rate}`;
      const p = plot({ width, height: 300, axis, theme, legend, label, id: "rate" });
      if (low < 0)
        p.add(el("path", { d: `M${p.box.left},${fix(p.y(0))}H${p.box.right}`, stroke: look.ink, "stroke-width": 0.8 }));
      const line = (values, more) =>
        p.add(
          el("path", {
            d: path(
              most,
              (i) => p.x(i + 1),
              (i) => p.y(values[i]),
            ),
            ...more,
          }),
        );
      p.add(el("path", { d: `M${p.box.left},${fix(p.y(without.rate))}H${p.box.right}`, ...legend[2][1] }));
      line(mean, legend[1][1]);
      line(slow, legend[0][1]);
      if (most < 80)
        p.add(
          el("path", {
            d: Array.from(slow, (v, i) => (Number.isFinite(v) ? shapes.dot(p.x(i + 1), p.y(v), 2.4) : "")).join(""),
            fill: look.restart,
          }),
        );
      const gone = Array.from(slow, (v, i) => (v === Infinity ? shapes.down(p.x(i + 1), p.box.top + 6, 4) : "")).join(
        "",
      );
      if (gone)
        p.over(
          el("path", { d: gone, fill: look.restart }),
          text(p.box.right, p.box.top + 12, "▾ infinite: exactly zero", { "text-anchor": "end", fill: look.muted }),
        );
      if (model.period && model.period <= most) {
        const x = fix(p.x(model.period));
        p.add(el("path", { d: `M${x},${p.box.top}V${p.box.bottom}`, stroke: look.ink, "stroke-width": 1 }));
        p.over(
          text(x + (x > p.box.right - 50 ? -5 : 5), p.box.top + 12, `K${NB}=${NB}${model.period}`, {
            "text-anchor": x > p.box.right - 50 ? "end" : "start",
          }),
        );
      }
      rate.at = (px) => Math.round(((px - p.box.left) / (p.box.right - p.box.left)) * most);
      return p.svg;
    },
    csv: ({ scores, rounds }) => [
      ["period", "rate_slowest_mode", "mean_rate_of_a_cycle", "log_factor_of_a_cycle", "log10_loss_at_horizon"],
      ...Array.from({ length: rounds }, (_, i) => [
        i + 1,
        scores.minimax[i],
        scores.rate[i],
        -scores.factor[i],
        -scores.loss[i] / LN10,
      ]),
    ],
  };

  // ------------------------------------------------------------------------------------------------- c  eigenvalues

  const WIDEST = 4; // half the height of the plane at most, in radii of the unit circle, which must stay visible
  const eigenSize = (modes) =>
    Math.min(WIDEST, Math.max(1.08, ...modes.flatMap(kernel.eigenvalues).map(([a, b]) => 1.08 * Math.hypot(a, b))));

  /** A triangle at the frame, on the way from the middle to a point that lies beyond it. */
  function pointer(p, a, b, reach) {
    const dx = p.x(a) - p.x(0),
      dy = p.y(b) - p.y(0),
      size = Math.hypot(dx, dy),
      [ux, uy] = [dx / size, dy / size];
    const [x, y] = [p.x(a / reach), p.y(b / reach)];
    const corner = (along, across) => `${fix(x + along * ux - across * uy)},${fix(y + along * uy + across * ux)}`;
    return `M${corner(-2, 0)}L${corner(-13, 6)}L${corner(-13, -6)}z`;
  }

  const eigen = {
    title: () => "Eigenvalues of one round",
    text: (model) => {
      const radius = model.turn
        ? ` The dashed circle is that of the chosen mode, ρ${NB}=${NB}${nearOne(model.turn.logRho)}.`
        : eigenSize(model.modes) === WIDEST
          ? " Triangles at the frame point to those beyond it."
          : "";
      return (
        "Every mode has two. A pair off the real axis turns the mode through zero again and again; outside the unit " +
        `circle it diverges.${radius}`
      );
    },
    plot(model, width, theme) {
      const look = draw.THEMES[theme],
        values = model.modes.map(kernel.eigenvalues),
        height = 300;
      const size = eigenSize(model.modes);
      const tall = height - 40 - 8,
        ratio = Math.max(1, (width - 60) / tall);
      const axis = {
        x: { from: -size * ratio, to: size * ratio, label: "real part" },
        y: { from: -size, to: size, label: "imaginary part" },
      };
      const p = plot({
        width,
        height,
        axis,
        theme,
        label: `Eigenvalues in the complex plane: ${model.words.eigen}`,
        id: "eigen",
      });
      const unit = Math.abs(p.y(1) - p.y(0)),
        across = Math.abs(p.x(1) - p.x(0));
      const circle = (r, more) =>
        p.add(el("ellipse", { cx: fix(p.x(0)), cy: fix(p.y(0)), rx: fix(r * across), ry: fix(r * unit), ...more }));
      const cross = `M${p.box.left},${fix(p.y(0))}H${p.box.right}M${fix(p.x(0))},${p.box.top}V${p.box.bottom}`;
      p.add(el("path", { d: cross, stroke: look.line }));
      circle(1, { stroke: look.ink, "stroke-width": 1.3 });
      if (model.turn)
        circle(Math.exp(model.turn.logRho), { stroke: look.restart, "stroke-width": 1.2, "stroke-dasharray": DASH });
      const reach = ([a, b]) => Math.max(Math.abs(a) / (size * ratio), Math.abs(b) / size); // beyond 1: out of the frame
      const mark = (pair, r) =>
        reach(pair) > 1 ? pointer(p, ...pair, reach(pair)) : shapes.dot(p.x(pair[0]), p.y(pair[1]), r);
      const dots = (pairs, r) => pairs.map((pair) => mark(pair, r)).join("");
      p.add(el("path", { d: dots(values.flat(), 3), fill: look.still, stroke: look.paper, "stroke-width": 0.6 }));
      if (model.focus >= 0)
        p.add(el("path", { d: dots(values[model.focus], 5), fill: look.restart, stroke: look.paper }));
      p.over(text(fix(p.x(0.72)) + 4, fix(p.y(0.72)) - 4, "unit circle", { fill: look.muted }));
      return p.svg;
    },
    csv: ({ modes }) => [
      ["sigma", "real", "imaginary", "regime"],
      ...modes.flatMap((m) => kernel.eigenvalues(m).map(([a, b]) => [m.sigma, a, b, kernel.regime(m)])),
    ],
  };

  // -------------------------------------------------------------------------------------------------- f  outer gain

  const gain = {
    title: () => "Outer gain",
    text: (model) =>
      "How far a constant pseudo-gradient of size 1 moves the parameters in each round. A restart empties the buffer, " +
      `so it is also a smaller step: a mean of ${plain(model.gains.restart)} a round against ${plain(model.gains.none)} ` +
      "without (thin lines).",
    plot(model, width, theme) {
      const { rounds, rule, period, gains } = model,
        look = draw.THEMES[theme],
        mark = lines(look);
      const some = Math.min(rounds, 200),
        top = 1.08 * kernel.gain(rule, rounds);
      const axis = {
        x: { from: 0, to: some, label: some < rounds ? `round (the first ${some})` : "round" },
        y: { from: 0, to: top, label: "displacement a round" },
      };
      const label = `Outer gain: a mean of ${plain(gains.restart)} a round with restarts, ${plain(gains.none)} without`;
      const p = plot({
        width,
        height: 230,
        axis,
        theme,
        legend: [
          [every(model), mark.restart],
          ["no restart", mark.none],
        ],
        label,
        id: "gain",
      });
      const level = (value, look2) =>
        p.add(el("path", { d: `M${p.box.left},${fix(p.y(value))}H${p.box.right}`, ...look2, "stroke-width": 0.8 }));
      level(gains.none, mark.none);
      level(gains.restart, mark.restart);
      const line = (age, more) =>
        p.add(
          el("path", {
            d: path(
              some,
              (i) => p.x(i + 1),
              (i) => p.y(kernel.gain(rule, age(i))),
            ),
            ...more,
          }),
        );
      line((i) => i + 1, mark.none);
      line((i) => (period ? (i % period) + 1 : i + 1), mark.restart);
      return p.svg;
    },
    csv: ({ rounds, rule, period }) => [
      ["round", "gain_no_restart", "gain_restart"],
      ...Array.from({ length: rounds }, (_, i) => [
        i + 1,
        kernel.gain(rule, i + 1),
        kernel.gain(rule, period ? (i % period) + 1 : i + 1),
      ]),
    ],
  };

  return { residual, loss, rate, eigen, gain, every };
})();
