// The map of final loss over learning rate and momentum, without and with restarts: two uPlots without curves, behind
// whose axes the cells are painted. Cells are computed a few milliseconds at a time, a coarse picture first, so that
// nothing waits for them; they begin anew only when something else than the chosen point changes.

const lossMap = (() => {
  const COLUMNS = 56,
    ROWS = 36,
    COARSE = 4,
    SLICE = 5; // milliseconds of work between two frames
  const START = Math.log10(0.5), // log10 loss before the first round
    DEEPEST = -16; // lower losses look alike
  const VIRIDIS = [
    [68, 1, 84],
    [59, 82, 139],
    [33, 145, 140],
    [94, 201, 98],
    [253, 231, 37],
  ];
  const WORSE = [140, 140, 140];
  const MOMENTA = [0, 0.5, 0.8, 0.9, 0.95, 0.98, 0.99, 0.999, 0.9999, 0.99999, 0.999999];

  const POWERS = Array.from({ length: 13 }, (_, i) => Number(`1e${i - 6}`));

  const near = (momentum) => -Math.log10(1 - momentum); // the vertical axis
  const momentumAt = (height) => +Math.max(0, 1 - 10 ** -height).toFixed(Math.max(3, Math.floor(height) + 2));

  /** Cells in the order in which they are computed: the corners of coarse blocks first. */
  const isCorner = (at) => Math.floor(at / COLUMNS) % COARSE === 0 && (at % COLUMNS) % COARSE === 0;
  const ALL = Array.from({ length: COLUMNS * ROWS }, (_, at) => at),
    ORDER = [...ALL.filter(isCorner), ...ALL.filter((at) => !isCorner(at))],
    CORNERS = ALL.filter(isCorner).length;

  let job = { key: "", next: Infinity, values: [[], []], ends: { x: [0.01, 10], y: [0, 2] } };
  const sides = [];

  /** Begin anew if anything but the chosen point has changed; the axes reach as far as that lies. */
  function prepare(state) {
    const { lr, momentum, ...rest } = state,
      ends = { x: [Math.min(0.01, lr), Math.max(10, lr)], y: [0, Math.max(2, near(momentum))] };
    const key = JSON.stringify([{ ...rest, mode: 0 }, ends]);
    if (key === job.key) return;
    const empty = () => new Float64Array(ALL.length).fill(NaN);
    job = { key, ends, state, next: 0, values: [empty(), empty()] };
  }

  /** The rule in the middle of a cell. */
  function ruleAt(at) {
    const { x, y } = job.ends,
      column = ((at % COLUMNS) + 0.5) / COLUMNS,
      row = 1 - (Math.floor(at / COLUMNS) + 0.5) / ROWS;
    return { ...job.state, lr: x[0] * (x[1] / x[0]) ** column, momentum: 1 - 10 ** -(y[1] * row) };
  }

  /** Compute cells for a few milliseconds; whether there are more to do. */
  function work(budget = SLICE) {
    const until = performance.now() + budget;
    while (job.next < ORDER.length && performance.now() < until) {
      const at = ORDER[job.next],
        wide = job.next < CORNERS ? COARSE : 1, // a coarse cell fills its block until better is known
        rule = ruleAt(at),
        { sigmas, rounds } = job.state;
      [theory.NEVER, job.state].forEach((restarts, side) => {
        const loss = theory.finalLoss(rule, sigmas, rounds, restarts);
        for (let row = 0; row < wide; row++) job.values[side].fill(loss, at + row * COLUMNS, at + row * COLUMNS + wide);
      });
      job.next++;
    }
    return job.next < ORDER.length;
  }

  /** The cell with the lowest loss of one side. */
  const lowest = (values) => values.reduce((best, value, at) => (value < values[best] ? at : best), 0);

  /** Paint one side's cells; those that are worse than the start are striped grey. */
  function paint(canvas, values, floor) {
    const image = new ImageData(COLUMNS, ROWS);
    values.forEach((value, at) => {
      if (Number.isNaN(value)) return;
      const share = (VIRIDIS.length - 1) * Math.min(1, Math.max(0, (value - START) / (floor - START))),
        i = Math.min(VIRIDIS.length - 2, Math.floor(share));
      const isWorse = value > START + 1e-12,
        stripe = isWorse && (at + Math.floor(at / COLUMNS)) % 3 === 0 ? 0.8 : 1;
      const rgb = VIRIDIS[i].map((low, c) => (isWorse ? WORSE[c] : low + (share - i) * (VIRIDIS[i + 1][c] - low)));
      image.data.set([...rgb.map((c) => c * stripe), 255], 4 * at);
    });
    canvas.getContext("2d").putImageData(image, 0, 0);
  }

  /** One side: its title, the plot with the axes, and the point on it under mouse, finger and arrow keys. */
  function side(id, name, change) {
    const canvas = Object.assign(document.createElement("canvas"), { width: COLUMNS, height: ROWS }),
      figure = $(id);
    const frame = (u) => {
      const { left, top, width, height } = u.bbox;
      u.ctx.imageSmoothingEnabled = false;
      u.ctx.drawImage(canvas, left, top, width, height);
    };
    const momenta = () => MOMENTA.filter((momentum) => near(momentum) <= job.ends.y[1] + 1e-9);
    const powers = (_, __, low, high) => POWERS.filter((lr) => low <= lr && lr <= high);
    const u = charts.plot(
      figure,
      {
        axes: [
          charts.axis("outer learning rate", { splits: powers, grid: { show: false } }),
          charts.axis("outer momentum β", {
            splits: () => momenta().map(near),
            values: () => momenta().map((momentum) => plain(momentum, 6)),
            grid: { show: false },
            size: 44,
          }),
        ],
        series: [{}, { stroke: "transparent", points: { show: false } }],
        scales: { x: { time: false, distr: 3, range: () => job.ends.x }, y: { range: () => job.ends.y } },
        cursor: { show: false },
        hooks: { drawClear: [frame], draw: [(u) => charts.clipped(u, () => cross(u))] },
      },
      [[1], [1]],
    );
    listen(u, name, change);
    return { u, canvas, name, title: figure.querySelector("span") };
  }

  /** A white and a black cross at the chosen point, to be seen on every colour. */
  function cross(u) {
    const x = u.valToPos(app.state.lr, "x", true),
      y = u.valToPos(near(app.state.momentum), "y", true),
      arm = 9 * devicePixelRatio;
    u.ctx.beginPath();
    u.ctx.moveTo(x - arm, y);
    u.ctx.lineTo(x + arm, y);
    u.ctx.moveTo(x, y - arm);
    u.ctx.lineTo(x, y + arm);
    for (const [paint, width] of [["#fff", 5], ["#111", 2]]) {
      u.ctx.strokeStyle = paint;
      u.ctx.lineWidth = width * devicePixelRatio;
      u.ctx.stroke();
    }
  }

  /** A mouse drags anywhere; a finger taps, since it must be able to scroll the page; arrow keys go by cells. */
  function listen({ over, posToVal }, name, change) {
    over.tabIndex = 0;
    over.setAttribute("role", "slider");
    over.setAttribute("aria-label", `${name}: chosen point. Left and right: learning rate; up and down: momentum`);
    over.setAttribute("aria-valuemin", "0");
    over.setAttribute("aria-valuemax", "1");
    const inside = (share) => Math.min(1, Math.max(0, share));
    const set = ({ clientX, clientY }) => {
      const { left, top, width, height } = over.getBoundingClientRect();
      change({
        lr: +posToVal(width * inside((clientX - left) / width), "x").toPrecision(3),
        momentum: momentumAt(posToVal(height * inside((clientY - top) / height), "y")),
      });
    };
    over.addEventListener("click", set);
    over.addEventListener("pointerdown", (event) => {
      if (event.pointerType !== "touch") over.setPointerCapture(event.pointerId);
    });
    over.addEventListener("pointermove", (event) => {
      if (event.pointerType !== "touch" && over.hasPointerCapture(event.pointerId)) set(event);
    });
    over.addEventListener("keydown", (event) => {
      const way = { ArrowLeft: [-1, 0], ArrowRight: [1, 0], ArrowUp: [0, 1], ArrowDown: [0, -1] }[event.key];
      if (!way) return;
      event.preventDefault();
      const { x, y } = job.ends,
        { lr, momentum } = app.state,
        [right, up] = way.map((cells) => cells * (event.shiftKey ? 4 : 1));
      change(
        right
          ? { lr: +(lr * (x[1] / x[0]) ** (right / COLUMNS)).toPrecision(3) }
          : { momentum: momentumAt(Math.max(0, near(momentum) + (up * y[1]) / ROWS)) },
      );
    });
  }

  function build(change) {
    sides.push(side("map-none", "No restart", change), side("map-restart", "With the restarts", change));
  }

  /** Draw both sides as far as they are computed; whether there is more to do. */
  function show(state, final) {
    prepare(state);
    const isBusy = work(),
      best = job.values.map(lowest),
      floor = Math.max(DEEPEST, Math.floor(Math.min(-1, ...job.values.map((values, i) => values[best[i]] || 0))));
    sides.forEach(({ u, canvas, name, title }, i) => {
      const loss = plain(i ? final.restart : final.none),
        values = job.values[i],
        { lr, momentum } = ruleAt(best[i]),
        lowestWords = `lowest ${plain(values[best[i]])} at lr ${plain(lr, 2)}, β ${plain(momentum, 2)}`,
        point = `learning rate ${plain(state.lr)}, momentum ${plain(state.momentum, 6)}, log10 loss ${loss}`;
      paint(canvas, values, floor);
      u.setData([[state.lr], [near(state.momentum)]]);
      write(title, `${name}: log₁₀ loss ${loss} at the cross; ${lowestWords}`);
      u.over.setAttribute("aria-valuenow", state.momentum);
      u.over.setAttribute("aria-valuetext", point);
    });
    write($("deepest"), `${floor === DEEPEST ? "≤ " : ""}${plain(floor)}`);
    return isBusy;
  }

  return { build, show, finish: () => work(Infinity) };
})();
