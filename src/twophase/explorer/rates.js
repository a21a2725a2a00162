"use strict";
// The plots of one round and of one cycle: eigenvalues, and the rate against the restart period. Panels as in
// trajectories.js.

const rates = (() => {
  const { el, text, plot, path, fix, shapes } = draw;
  const { nearOne, NB } = store;
  const LN10 = Math.LN10;
  const DASH = "6 3";

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

  const TWO =
    "Every mode has two. A pair off the real axis turns the mode through zero again and again; outside the unit " +
    "circle it diverges.";
  const dashed = (radius) => `The dashed circle is that of the chosen mode, ρ${NB}=${NB}${radius}.`;

  const eigen = {
    title: () => "Eigenvalues of one round",
    text: (model) => {
      if (model.turn) return `${TWO} ${dashed(nearOne(model.turn.logRho))}`;
      return eigenSize(model.modes) === WIDEST ? `${TWO} Triangles at the frame point to those beyond it.` : TWO;
    },
    room: `Eigenvalues of one round. ${TWO} ${dashed(`1${NB}−${NB}1.234e−5`)}`,
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

  // ---------------------------------------------------------------------------------------------- d  rate and period

  const rate = {
    title: () => "Contraction a round against the restart period",
    room: "",
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
      const p = plot({ width, height: 320, axis, theme, legend, label, id: "rate" });
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
      if (Number.isFinite(without.rate))
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
        (-scores.loss[i] - Math.LN2) / LN10,
      ]),
    ],
  };

  return { eigen, rate };
})();

const panels = { ...trajectories, ...rates };
