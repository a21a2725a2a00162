"use strict";
// The map of final loss over learning rate and momentum, without and with restarts. Its cells are computed a few
// milliseconds at a time, a coarse picture first, so that nothing waits for it; it begins anew only when something else
// than the chosen point changes. The point is moved by mouse, by touch (tap, or drag its handle) and by arrow keys.

const lossMap = (() => {
  const COLUMNS = 56,
    ROWS = 36,
    COARSE = 4,
    SLICE = 5; // milliseconds of work between two frames
  const VIRIDIS = [
    [68, 1, 84],
    [59, 82, 139],
    [33, 145, 140],
    [94, 201, 98],
    [253, 231, 37],
  ];
  const WORSE = { light: [168, 168, 168], dark: [104, 104, 104] };
  const { plain } = store;

  let job = { key: "", values: [], next: Infinity };

  /** Ends of the axes: the usual ones, or as far as the chosen point lies. Momentum runs as -log10(1 - momentum). */
  function ends({ lr, momentum }) {
    const near = -Math.log10(1 - momentum);
    return { lr: [Math.min(0.01, lr), Math.max(10, lr)], near: [0, Math.max(2, near)] };
  }

  const place = ([low, high], share) => low + share * (high - low);
  const lrAt = (range, share) => 10 ** place(range.map(Math.log10), share);
  const momentumAt = (range, share) => 1 - 10 ** -place(range, share);

  const START = Math.log10(0.5),
    DEEPEST = -16;
  /** log10 loss of the brightest colour, a whole number: the lowest of all cells, or where lower ones look alike. */
  function floorOf() {
    let low = -1;
    for (const side of job.values) for (const value of side) if (value < low) low = value;
    return Math.max(DEEPEST, Math.floor(low));
  }

  /** Cells in the order in which they are computed: the corners of coarse blocks first. */
  const ORDER = (() => {
    const first = [],
      rest = [];
    for (let row = 0; row < ROWS; row++) {
      for (let column = 0; column < COLUMNS; column++) {
        (row % COARSE === 0 && column % COARSE === 0 ? first : rest).push(row * COLUMNS + column);
      }
    }
    return { all: [...first, ...rest], coarse: first.length };
  })();

  /** Begin anew if anything but the chosen point has changed. */
  function prepare(model) {
    const { state, sigmas, rounds, period } = model,
      range = ends(state);
    const { policy, schedule, noise, seed } = state,
      key = JSON.stringify([sigmas, state.nesterov, state.form, rounds, period, range, policy, schedule, noise, seed]);
    if (key === job.key) return;
    const empty = () => new Float64Array(COLUMNS * ROWS).fill(NaN);
    job = {
      key,
      range,
      state,
      sigmas,
      nesterov: state.nesterov,
      form: state.form,
      rounds,
      period: period || rounds,
      next: 0,
      values: [empty(), empty()],
    };
  }

  /** log10 loss of a rule without and with restarts. */
  function cell(rule) {
    const { state, sigmas, rounds, period } = job,
      size = rule.form === "ema" ? rule.lr * (1 - rule.momentum) : rule.lr;
    if (!simulation.isPlain(state)) {
      const { none, restart } = simulation.arms(state, rule, sigmas);
      return [none, restart].map(({ places }) => simulation.lossAt(places, rounds));
    }
    const steps = sigmas.map((sigma) => size * sigma);
    return kernel.cell(steps, rule.momentum, rule.nesterov, period, rounds);
  }

  /** Compute cells for a few milliseconds; whether there are more to do. */
  function work(budget = SLICE) {
    const until = performance.now() + budget,
      { nesterov, form, values, range } = job;
    while (job.next < ORDER.all.length && performance.now() < until) {
      const at = ORDER.all[job.next],
        row = Math.floor(at / COLUMNS),
        column = at % COLUMNS;
      const lr = lrAt(range.lr, (column + 0.5) / COLUMNS),
        momentum = momentumAt(range.near, 1 - (row + 0.5) / ROWS);
      const [a, b] = cell({ lr, momentum, nesterov, form });
      const wide = job.next < ORDER.coarse ? COARSE : 1; // a coarse cell fills its block until better is known
      for (let r = row; r < Math.min(ROWS, row + wide); r++) {
        for (let c = column; c < Math.min(COLUMNS, column + wide); c++) {
          values[0][r * COLUMNS + c] = a;
          values[1][r * COLUMNS + c] = b;
        }
      }
      job.next++;
    }
    return job.next < ORDER.all.length;
  }

  function colour(value, floor, theme) {
    if (!(value <= START + 1e-12)) return WORSE[theme];
    const share = Math.min(1, value / floor) * (VIRIDIS.length - 1),
      at = Math.min(VIRIDIS.length - 2, Math.floor(share));
    return VIRIDIS[at].map((low, i) => low + (share - at) * (VIRIDIS[at + 1][i] - low));
  }

  /** Paint one side's cells onto a canvas of COLUMNS x ROWS pixels. */
  function paint(canvas, side, theme) {
    canvas.width = COLUMNS;
    canvas.height = ROWS;
    const image = new ImageData(COLUMNS, ROWS),
      floor = floorOf();
    job.values[side].forEach((value, at) => {
      if (Number.isNaN(value)) return;
      const [r, g, b] = colour(value, floor, theme);
      const row = Math.floor(at / COLUMNS),
        column = at % COLUMNS;
      const hatch = value > START && (row + column) % 3 === 0 ? 0.82 : 1; // worse than at the start: striped
      image.data.set([r * hatch, g * hatch, b * hatch, 255], 4 * at);
    });
    canvas.getContext("2d").putImageData(image, 0, 0);
  }

  const title = () => "Loss after the last round, over learning rate and momentum";

  function axes(model) {
    const { lr, near } = ends(model.state);
    // The most telling first: where two would meet, the later one is left out.
    const momenta = [0, 0.9, 0.99, 0.999, 0.9999, 0.99999, 0.999999, 0.5, 0.8, 0.95, 0.98].filter(
      (b) => -Math.log10(1 - b) <= near[1] + 1e-9,
    );
    return {
      x: {
        from: lr[0],
        to: lr[1],
        log: true,
        label: `outer learning rate lr (${model.state.form === "ema" ? "EMA" : "sum"} form)`,
      },
      y: {
        from: near[0],
        to: near[1],
        label: "outer momentum β",
        ticks: momenta.map((b) => [-Math.log10(1 - b), plain(b, 6)]),
      },
    };
  }

  /** One side's axes and marker; the cells lie on a canvas behind it, or inside it when it is to be downloaded. */
  function plot(model, side, width, theme, picture) {
    const name = side ? trajectories.every(model) : "no restart",
      look = draw.THEMES[theme];
    const value = side ? model.final.restart : model.final.none;
    const { lr, momentum } = model.state;
    const point = `learning rate ${plain(lr)}, momentum ${plain(momentum, 6)}, log10 loss ${plain(value)}`;
    const label = `Map of log10 loss, ${name}. Chosen point: ${point}`;
    const cross = (x, y, r) => `M${x - r},${y}h${2 * r}M${x},${y - r}v${2 * r}`;
    const sample = { shape: (x, y) => cross(x, y, 5), stroke: look.ink, "stroke-width": 2 };
    const legend = [[`${name}: log₁₀ loss ${plain(value)}`, sample]];
    const p = draw.plot({
      width,
      height: Math.max(230, Math.min(330, width * 0.66)),
      axis: axes(model),
      theme,
      legend,
      label,
      id: `map-${side}`,
      grid: false,
    });
    const { left, right, top, bottom } = p.box;
    if (picture) {
      p.add(
        draw.el("image", {
          href: picture,
          x: left,
          y: top,
          width: right - left,
          height: bottom - top,
          preserveAspectRatio: "none",
          "image-rendering": "pixelated",
        }),
      );
    }
    const x = draw.fix(p.x(model.state.lr)),
      y = draw.fix(p.y(-Math.log10(1 - model.state.momentum)));
    const big = cross(x, y, 9);
    p.over(
      draw.el("path", { d: big, stroke: "#ffffff", "stroke-width": 5 }),
      draw.el("path", { d: big, stroke: "#111111", "stroke-width": 2 }),
    );
    p.at = { x, y };
    return p;
  }

  /** The colour bar, as a plot of its own. */
  function bar(width, theme) {
    const look = draw.THEMES[theme],
      floor = floorOf(),
      wide = Math.min(380, width - 150);
    const svg = draw.el("svg", {
      viewBox: `0 0 ${width} 34`,
      height: 34,
      "aria-hidden": "true",
      "font-family": "system-ui, sans-serif",
      fill: look.ink,
    });
    const count = 48,
      rgb = (value) => `rgb(${colour(value, floor, theme).map(Math.round).join(",")})`;
    for (let i = 0; i < count; i++) {
      const value = START + ((i + 0.5) / count) * (floor - START);
      svg.append(
        draw.el("rect", {
          x: draw.fix(4 + (i * wide) / count),
          y: 2,
          width: draw.fix(wide / count + 0.6),
          height: 11,
          fill: rgb(value),
        }),
      );
    }
    svg.append(draw.text(4, 28, "start: loss ½", { fill: look.muted }));
    for (const share of wide > 300 ? [0.25, 0.5, 0.75, 1] : [0.5, 1]) {
      const value = share * floor,
        along = (value - START) / (floor - START); // of the bar, which begins at the start
      if (along * wide < 95) continue; // the words there have the room
      const words = `${value === DEEPEST ? "≤ " : ""}${plain(value)}`;
      svg.append(draw.text(draw.fix(4 + along * wide), 28, words, { "text-anchor": "middle", fill: look.muted }));
    }
    svg.append(draw.el("rect", { x: wide + 30, y: 2, width: 18, height: 11, fill: `rgb(${WORSE[theme].join(",")})` }));
    svg.append(draw.text(wide + 52, 12, "above ½", { fill: look.muted }));
    return svg;
  }

  /** What pixel (x, y) of a plot stands for, with as many digits as a cell is wide. */
  function pointAt(box, x, y, state) {
    const range = ends(state),
      clip = (share) => Math.min(1, Math.max(0, share));
    const lr = lrAt(range.lr, clip((x - box.left) / (box.right - box.left)));
    const momentum = momentumAt(range.near, clip((box.bottom - y) / (box.bottom - box.top)));
    return { lr: +lr.toPrecision(3), momentum: roundMomentum(momentum) };
  }

  /** As many digits as a step on the map needs, however near to 1. */
  const roundMomentum = (b) => +Math.max(0, b).toFixed(Math.max(3, Math.floor(-Math.log10(1 - b)) + 2));

  /** The point some cells to the right and up. */
  function moved(state, right, up, limits) {
    const range = ends(state),
      step = (range.near[1] - range.near[0]) / ROWS;
    const lr = state.lr * 10 ** ((right * (Math.log10(range.lr[1]) - Math.log10(range.lr[0]))) / COLUMNS);
    const near = Math.max(0, -Math.log10(1 - state.momentum) + up * step);
    const momentum = up ? roundMomentum(1 - 10 ** -near) : state.momentum;
    return {
      lr: right ? Math.min(limits.lr[1], Math.max(limits.lr[0], +lr.toPrecision(3))) : state.lr,
      momentum: Math.min(limits.momentum[1], momentum),
    };
  }

  function csv() {
    const rows = [["lr", "momentum", "form", "log10_loss_no_restart", "log10_loss_restart"]];
    for (let at = 0; at < COLUMNS * ROWS; at++) {
      const lr = lrAt(job.range.lr, ((at % COLUMNS) + 0.5) / COLUMNS);
      const momentum = momentumAt(job.range.near, 1 - (Math.floor(at / COLUMNS) + 0.5) / ROWS);
      rows.push([lr, momentum, job.form, job.values[0][at], job.values[1][at]]);
    }
    return rows;
  }

  return {
    prepare,
    work,
    paint,
    plot,
    bar,
    title,
    pointAt,
    moved,
    csv,
    busy: () => job.next < ORDER.all.length,
    stage: () => `${job.key} ${job.next}`,
  };
})();
