"use strict";
// Line plots over the rounds: residual, loss, outer gain. Each panel is {title, text(model), room, plot(model, width,
// theme), csv(model)}: a caption and the longest that it can be, a picture of a given width and the numbers in it. A
// model is what model.js makes of a state: rule, modes, tables, …

const trajectories = (() => {
  const { el, text, plot, path, fix, shapes } = draw;
  const { plain, roundsOf, NB } = store;
  const LN10 = Math.LN10;
  const DASH = "6 3";
  const MOST_FAINT = 8; // other modes that are drawn behind the chosen one

  const lines = (look) => ({
    restart: { stroke: look.restart, "stroke-width": 2, fill: "none" },
    none: { stroke: look.none, "stroke-width": 1.8, "stroke-dasharray": DASH, fill: "none" },
  });
  const every = ({ period, rounds, state }) => {
    if (state.policy) return state.policy.length > 26 ? `${state.policy.slice(0, 25)}…` : state.policy;
    if (!period) return "no restart";
    return period >= rounds ? "no restart within the horizon" : `restart ${compute.periodWords(period)}`;
  };

  /** The legend of both curves, which without any restart are one. */
  const both = (model, mark) => [
    [every(model), mark.restart],
    ...(model.restarts.length ? [["no restart", mark.none]] : []),
  ];

  /** Marks of the restarts: hairlines, and triangles on top where there is room for them. */
  function restartMarks(p, model) {
    const at = model.restarts,
      room = (p.box.right - p.box.left) / Math.max(at.length, 1);
    if (room < 3) return;
    const d = at.map((t) => `M${fix(p.x(t))},${p.box.top}V${p.box.bottom}`).join("");
    p.add(el("path", { d, stroke: p.look.restart, "stroke-width": 0.7, "stroke-opacity": 0.45 }));
    const tops = at.map((t) => shapes.down(p.x(t), p.box.top + 4, 3.5)).join("");
    if (room > 9) p.over(el("path", { d: tops, fill: p.look.restart }));
  }

  // ------------------------------------------------------------------------------------------------ a  the residual

  const SHARE = "The share of the mode that is left after each round, with and without restarts.";
  const band = (size) =>
    `Band: the true envelope ±${size} ρᵗ. Diamonds: where a mode without restarts passes through zero; a restart near ` +
    "the first one keeps it there.";
  const drift = ({ noise, seed, schedule }) =>
    (schedule === "constant" ? "" : `The learning rate falls to 0 (${schedule}). `) +
    (noise ? `Noise: one draw (seed ${seed}), the same in both.` : "");
  const drawnOf = (count) => `${MOST_FAINT} of the ${count} modes are drawn behind it.`;

  const residual = {
    title: (model) =>
      model.focus < 0 ? "Mean residual of all modes" : `Residual of the mode σ${NB}=${NB}${plain(model.chosen.sigma)}`,
    text: (model) => {
      const turn = model.bound,
        words = [SHARE];
      if (model.state.noise || model.state.schedule !== "constant") words.push(drift(model.state));
      else if (model.focus < 0) words[0] = "The mean of all modes (thick), and modes under the restart (thin).";
      else if (turn) words.push(band(plain(Math.exp(turn.logAmplitude))));
      else if (!(model.chosen.s[0] > 0)) words.push("Nothing moves this mode.");
      else if (model.diverges[model.focus]) words.push("This mode diverges, and does so under any restarts.");
      else
        words.push(
          "This mode does not oscillate: it has no envelope and no cancellation, and a restart only slows it down.",
        );
      if (model.modes.length > MOST_FAINT + 1) words.push(drawnOf(model.modes.length));
      return words.join(" ");
    },
    room: `Residual of the mode σ = 0.12345. ${SHARE} ${band("1.2345")} ${drawnOf(64)}`,
    plot(model, width, theme) {
      const { rounds, series, bound: turn, state } = model,
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
      const legend = both(model, mark);
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
        marked = new Set(model.restarts);
      const rows = [head.concat(model.bound ? ["envelope"] : [])];
      for (let t = 0; t <= model.rounds; t++) {
        const [a, b] = [model.series.none(t), model.series.restart(t)];
        const bound = model.bound ? [Math.exp(model.bound.logAmplitude + t * model.bound.logRho)] : [];
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
  function envelope(p, { bound: turn, rounds }, log) {
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
    room: "",
    text: () => "Half the mean square of the residuals; it begins at ½. Triangles: restarts.",
    plot(model, width, theme) {
      const { rounds, losses } = model,
        look = draw.THEMES[theme],
        mark = lines(look);
      const [low, high] = logRange([...losses.none, ...losses.restart]);
      const axis = { x: { from: 0, to: rounds, label: "round" }, y: { from: low, to: high, label: "log₁₀ loss" } };
      const legend = both(model, mark);
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

  // -------------------------------------------------------------------------------------------------- f  outer gain

  const gainWords = (some, all) =>
    "How far a constant pseudo-gradient of size 1 moves the parameters in each round. A restart empties the buffer, " +
    `so it is also a smaller step: a mean of ${some} a round against ${all} without (thin lines).`;

  const gain = {
    title: () => "Outer gain",
    text: ({ gains, state }) =>
      Number.isFinite(gains.restart)
        ? gainWords(plain(gains.restart), plain(gains.none))
        : `${state.policy.split(":")[0]} decides by what it measures: its gain is not known in advance.`,
    room: `Outer gain. ${gainWords("1.234e−5", "1.234e−5")}`,
    plot(model, width, theme) {
      const { rounds, gains, gainAt } = model,
        look = draw.THEMES[theme],
        mark = lines(look);
      const some = Math.min(rounds, 200),
        sizes = Array.from({ length: some }, (_, i) => [gainAt.none(i), gainAt.restart(i)]).flat().filter(Number.isFinite),
        top = 1.08 * Math.max(1e-9, gains.none, ...sizes),
        low = 1.08 * Math.min(0, ...sizes); // a soft restart may turn the buffer round
      const axis = {
        x: { from: 0, to: some, label: some < rounds ? `round (the first ${some})` : "round" },
        y: { from: low, to: top, label: "displacement a round" },
      };
      const label = `Outer gain: a mean of ${plain(gains.restart)} a round with restarts, ${plain(gains.none)} without`;
      const p = plot({
        width,
        height: 230,
        axis,
        theme,
        legend: both(model, mark),
        label,
        id: "gain",
      });
      const level = (value, look2) =>
        p.add(el("path", { d: `M${p.box.left},${fix(p.y(value))}H${p.box.right}`, ...look2, "stroke-width": 0.8 }));
      for (const name of ["none", "restart"]) {
        if (!Number.isFinite(gains[name])) continue;
        level(gains[name], mark[name]);
        p.add(
          el("path", {
            d: path(
              some,
              (i) => p.x(i + 1),
              (i) => p.y(gainAt[name](i)),
            ),
            ...mark[name],
          }),
        );
      }
      return p.svg;
    },
    csv: ({ rounds, gainAt }) => [
      ["round", "gain_no_restart", "gain_restart"],
      ...Array.from({ length: rounds }, (_, i) => [i + 1, gainAt.none(i), gainAt.restart(i)]),
    ],
  };

  return { residual, loss, gain, every };
})();
