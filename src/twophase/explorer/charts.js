// Curves over the rounds and over the restart period, drawn by uPlot. A chart is made once and then given new columns;
// colours are read from the page's style whenever it draws.

const charts = (() => {
  const FONT = "12px system-ui, sans-serif";
  const MOST_FAINT = 8; // modes that are drawn behind the shown one
  const LARGEST = 4; // of a residual: what swings farther leaves the frame

  const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue(name);
  const WHOLE = [1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000]; // distances between rounds on an axis

  const axis = (label, more = {}) => ({
    label,
    font: FONT,
    labelFont: FONT,
    labelSize: 18,
    size: 24,
    stroke: () => colour("--muted"),
    grid: { stroke: () => colour("--line"), width: 1 },
    ticks: { show: false },
    values: (_, places) => places.map((place) => plain(place)),
    ...more,
  });
  const rounds = (label) => axis(label, { incrs: WHOLE, grid: { show: false } });

  /** A curve; one without a name is not in the legend. */
  const line = (name, paint, width, dash) => ({
    ...{ name, paint, width, dash },
    stroke: () => colour(paint),
    points: { show: false },
  });
  const NONE = line("no restart", "--none", 1.8, [6, 3]),
    RESTART = line("restarted", "--restart", 2.2),
    FAINT = line("", "--shade", 0.8);

  /** The legend: a sample and a name of each named curve, and its value under the pointer. */
  function legendOf(series) {
    const list = html("ul", { className: "legend" });
    const values = series.map(({ name, paint, width, dash }) => {
      const sample = html("i"),
        value = html("output");
      sample.style.borderTop = `${Math.round(width)}px ${dash ? "dashed" : "solid"} var(${paint})`;
      sample.setAttribute("aria-hidden", "true");
      if (name) list.append(html("li", {}, sample, name, " ", value));
      return value;
    });
    return [list, values];
  }

  /** A uPlot in a figure's element of class `plot`, as wide as that and redrawn when its width changes. */
  function plot(figure, options, columns) {
    const box = figure.querySelector(".plot");
    const whole = { width: box.clientWidth, height: box.clientHeight, legend: { show: false }, ...options };
    const u = new uPlot(whole, columns, box);
    new ResizeObserver(() => {
      if (box.clientWidth > 0) u.setSize({ width: box.clientWidth, height: box.clientHeight });
    }).observe(box);
    return u;
  }

  /**
   * A chart of curves in a figure.
   *
   * axes: [x, y]; series: curves as of `line`; range(data): ends of the y axis; marks(u, model): what else is drawn;
   * columns(model): x and a column a curve, null where there is none.
   */
  function chart(id, { axes, series, range, columns, marks = () => {}, bands = [] }) {
    const figure = $(id),
      [legend, values] = legendOf(series);
    figure.querySelector(".plot").before(legend);
    let model = null;
    const options = {
      axes,
      bands,
      series: [{}, ...series],
      scales: { x: { time: false, range: (u) => [0, u.data[0].at(-1)] }, y: { range: (u) => range(u.data) } },
      cursor: { y: false, drag: { x: false, y: false }, points: { show: false } },
      hooks: {
        draw: [(u) => model && clipped(u, () => marks(u, model))],
        setCursor: [
          ({ data, cursor: { idx } }) =>
            values.forEach((value, i) => write(value, idx === null ? "" : plain(data[i + 1][idx] ?? NaN, 3))),
        ],
      },
    };
    const u = plot(figure, options, [[0, 1], ...series.map(() => [null, null])]);
    return {
      u,
      show(next) {
        model = next;
        u.setData(columns(model));
      },
    };
  }

  /** Draw inside the frame only. */
  function clipped(u, draw) {
    const { left, top, width, height } = u.bbox;
    u.ctx.save();
    u.ctx.beginPath();
    u.ctx.rect(left, top, width, height);
    u.ctx.clip();
    u.ctx.setLineDash([]);
    draw();
    u.ctx.restore();
  }

  /** Vertical lines at the restarts, unless they would lie too densely to be told apart. */
  function restartLines(u, { restarts, state }) {
    const { left, top, width, height } = u.bbox;
    if (width / restarts < 3 * devicePixelRatio) return;
    u.ctx.beginPath();
    for (let i = 1; i <= restarts; i++) vertical(u, i * state.restart);
    u.ctx.strokeStyle = colour("--restart");
    u.ctx.globalAlpha = 0.4;
    u.ctx.lineWidth = devicePixelRatio;
    u.ctx.stroke();
    u.ctx.globalAlpha = 1;
  }

  function vertical(u, place) {
    const x = Math.round(u.valToPos(place, "x", true)) + 0.5;
    u.ctx.moveTo(x, u.bbox.top);
    u.ctx.lineTo(x, u.bbox.top + u.bbox.height);
  }

  /** Diamonds where the shown mode passes through zero without restarts. */
  function zeros(u, { turn, state }) {
    if (!turn) return;
    const apart = Math.PI / turn.phase,
      size = 4 * devicePixelRatio,
      y = u.valToPos(0, "y", true);
    if ((u.bbox.width * apart) / state.rounds < 3 * size) return;
    u.ctx.beginPath();
    for (let t = turn.cancellation; t < state.rounds; t += apart) {
      const x = u.valToPos(t, "x", true);
      u.ctx.moveTo(x, y - size);
      for (const [right, down] of [[1, 0], [0, 1], [-1, 0], [0, -1]]) u.ctx.lineTo(x + right * size, y + down * size);
    }
    u.ctx.fillStyle = colour("--paper");
    u.ctx.strokeStyle = colour("--none");
    u.ctx.lineWidth = 1.3 * devicePixelRatio;
    u.ctx.fill();
    u.ctx.stroke();
  }

  const inside = (values) => values.map((value) => (Math.abs(value) <= LARGEST ? value : null));
  const numbers = (count) => Float64Array.from({ length: count }, (_, t) => t);
  const finite = (value) => (Number.isFinite(value) ? value : null);
  const logs = (values) => Array.from(values, finite);

  /** Ends of an axis that shows all values, and a little more. */
  function around(columns) {
    let [low, high] = [Infinity, -Infinity];
    for (const column of columns) {
      for (const value of column) {
        if (value === null) continue;
        low = Math.min(low, value);
        high = Math.max(high, value);
      }
    }
    if (!(low <= high)) return [-1, 1];
    const room = 0.04 * Math.max(1, high - low);
    return [low - room, high + room];
  }

  function residuals() {
    const envelope = line("true envelope", "--shade", 1, [2, 2]),
      faint = Array(MOST_FAINT).fill(FAINT);
    return chart("residual", {
      axes: [rounds("round"), axis("what is left of the mode, x", { size: 44 })],
      series: [envelope, { ...envelope, name: "" }, ...faint, NONE, RESTART],
      bands: [{ series: [1, 2], fill: () => colour("--band") }],
      range: (data) => {
        const [low, high] = around(data.slice(1).map((column) => column.map((value) => value ?? 0)));
        return [Math.max(low, -LARGEST), Math.min(high, LARGEST)];
      },
      marks: (u, model) => {
        restartLines(u, model);
        zeros(u, model);
      },
      columns: ({ state, modes, turn, none, restarted }) => {
        const places = numbers(state.rounds + 1),
          real = ({ sign, log }) => Array.from(sign, (value, t) => value * Math.exp(Math.min(log[t], 6)));
        const bound = (way) =>
          Array.from(places, (t) => (turn ? way * Math.exp(turn.logAmplitude + t * turn.logRho) : null));
        const others = modes.map((_, j) => j).filter((j) => j !== state.mode),
          step = Math.max(1, others.length / MOST_FAINT);
        const behind = faint.map((_, i) => restarted[others[Math.floor(i * step)]]);
        return [
          places,
          bound(1),
          bound(-1),
          ...behind.map((one) => (one ? inside(real(one)) : Array(places.length).fill(null))),
          real(none[state.mode]),
          real(restarted[state.mode]),
        ];
      },
    });
  }

  const losses = () =>
    chart("loss", {
      axes: [rounds("round"), axis("log₁₀ loss of all modes", { size: 44 })],
      series: [NONE, RESTART],
      range: (data) => around(data.slice(1)),
      marks: restartLines,
      columns: ({ state, loss }) => [numbers(state.rounds + 1), logs(loss.none), logs(loss.restart)],
    });

  /** The restart factor over the period; pressing it chooses a period. */
  function factors(change) {
    const factor = line("factor |χ|", "--restart", 2),
      free = line("ρ to the power K", "--none", 1.8, [6, 3]);
    const made = chart("factor", {
      axes: [rounds("restart period K, rounds"), axis("log₁₀ of what a cycle leaves", { size: 44 })],
      series: [factor, free],
      range: (data) => around(data.slice(1)),
      marks: (u, { state }) => {
        if (!state.restart) return;
        u.ctx.beginPath();
        vertical(u, state.restart);
        u.ctx.strokeStyle = colour("--ink");
        u.ctx.lineWidth = 1.5 * devicePixelRatio;
        u.ctx.stroke();
      },
      columns: ({ state, none, turn }) => {
        const most = Math.max(2, Math.min(state.rounds, Math.max(60, 2 * state.restart)));
        const all = none[state.mode].log.slice(0, most + 1);
        return [
          numbers(all.length),
          logs(all.map((log) => log / Math.LN10)),
          Array.from(all, (_, k) => (turn ? (k * turn.logRho) / Math.LN10 : null)),
        ];
      },
    });
    made.u.over.addEventListener("click", () => change({ restart: made.u.cursor.idx ?? 0 }));
    return made;
  }

  const build = (change) => [residuals(), losses(), factors(change)];

  return { build, plot, axis, clipped, colour };
})();
