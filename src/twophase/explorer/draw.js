"use strict";
// Plots as SVG elements. All looks are attributes (no style sheet), so that a downloaded figure is the one on the page.

const draw = (() => {
  const NS = "http://www.w3.org/2000/svg";
  // Blue and vermillion are told apart by every eye, and solid from dashed in grey.
  const THEMES = {
    light: {
      paper: "#ffffff",
      ink: "#1a1a1a",
      muted: "#545454",
      line: "#dcdcd8",
      restart: "#0b5394",
      none: "#b3400a",
      third: "#4d6b1f",
      band: "#e9e7df",
      still: "#8a8a86",
    },
    dark: {
      paper: "#14171a",
      ink: "#e9e9e6",
      muted: "#b4b8bc",
      line: "#353a40",
      restart: "#7dbdf5",
      none: "#f3a06a",
      third: "#b5d37e",
      band: "#2a2f33",
      still: "#80868b",
    },
  };
  const FONT = "system-ui, -apple-system, 'Segoe UI', Roboto, 'Helvetica Neue', Arial, 'DejaVu Sans', sans-serif";
  const SIZE = 12,
    WIDE = 6.4; // of the letters, and about how wide one is

  /** An SVG element. Text goes in as text, never as markup. */
  function el(name, attributes = {}, ...inside) {
    const node = document.createElementNS(NS, name);
    for (const key in attributes) if (attributes[key] !== undefined) node.setAttribute(key, attributes[key]);
    node.append(...inside);
    return node;
  }

  const text = (x, y, words, more = {}) => el("text", { x, y, "font-size": SIZE, ...more }, words);

  /** About `count` round numbers from low to high. */
  function ticks(low, high, count) {
    const rough = (high - low) / Math.max(count, 1),
      unit = 10 ** Math.floor(Math.log10(rough));
    const step = unit * [1, 2, 5, 10].find((factor) => factor * unit >= rough * 0.999);
    const found = [];
    for (let i = Math.ceil(low / step - 1e-9); i * step <= high + step * 1e-9; i++)
      found.push(+(i * step).toPrecision(12));
    return found;
  }

  /** The ticks of a logarithmic axis. */
  function logTicks(low, high) {
    const found = [];
    for (let e = Math.floor(Math.log10(low)); e <= Math.log10(high) + 1e-9; e++) {
      for (const digit of high / low > 200 ? [1] : [1, 2, 5]) found.push(+(digit * 10 ** e).toPrecision(3));
    }
    return found.filter((value) => value >= low * 0.999 && value <= high * 1.001);
  }

  /** From an axis's values to pixels between two ends. */
  function scale({ from, to, log }, low, high) {
    const read = log ? Math.log10 : (value) => value,
      a = read(from),
      b = read(to);
    return (value) => low + ((read(value) - a) / (b - a)) * (high - low);
  }

  /** Ticks whose words do not meet: each that is apart from all kept before it, so that the first matter most. */
  const thinned = (given, apart) =>
    given.reduce((kept, one) => (kept.every((other) => apart(one, other)) ? [...kept, one] : kept), []);

  /**
   * An empty plot with axes: {svg, x(value), y(value), box, look, add(...), over(...)}; what is added is cut at the frame.
   * `axis.x` and `axis.y` are {from, to, label, log, ticks: [[value, words]]}.
   */
  function plot({ width, height, axis, theme, legend = [], label, id, grid: lined = true }) {
    const look = THEMES[theme],
      rows = legendRows(legend, width - 8),
      top = 8 + 17 * rows.length;
    const given = { x: axis.x.ticks ?? named(axis.x, width / 80), y: axis.y.ticks ?? named(axis.y, height / 48) };
    const y = scale(axis.y, height - 40, top);
    given.y = thinned(given.y, (one, other) => Math.abs(y(one[0]) - y(other[0])) >= SIZE + 2);
    const left = 26 + WIDE * Math.max(...given.y.map(([, words]) => words.length));
    const box = { left, top, right: width - 10, bottom: height - 40 };
    const svg = el("svg", {
      viewBox: `0 0 ${width} ${height}`,
      height,
      role: "img",
      "aria-label": label,
      "font-family": FONT,
      fill: look.ink,
    });
    const x = scale(axis.x, box.left, box.right);
    const apart = (one, other) => Math.abs(x(one[0]) - x(other[0])) >= (WIDE * (one[1].length + other[1].length)) / 2 + 6;
    given.x = thinned(given.x, apart);
    const grid = el("g", { stroke: look.line, "stroke-width": 1, fill: "none" });
    const marks = el("g", { fill: look.muted });
    for (const [value, words] of given.y) {
      grid.append(
        el(
          "path",
          lined
            ? { d: `M${box.left},${fix(y(value))}H${box.right}` }
            : { d: `M${box.left},${fix(y(value))}h-4`, stroke: look.ink },
        ),
      );
      marks.append(text(box.left - 6, fix(y(value) + 4), words, { "text-anchor": "end" }));
    }
    for (const [value, words] of given.x) {
      grid.append(el("path", { d: `M${fix(x(value))},${box.bottom}v4`, stroke: look.ink }));
      marks.append(text(fix(x(value)), box.bottom + 17, words, { "text-anchor": "middle" }));
    }
    marks.append(
      text((box.left + box.right) / 2, height - 5, axis.x.label, { "text-anchor": "middle", fill: look.ink }),
    );
    const turned = `translate(11,${(box.top + box.bottom) / 2}) rotate(-90)`;
    marks.append(
      el("text", { transform: turned, "text-anchor": "middle", "font-size": SIZE, fill: look.ink }, axis.y.label),
    );
    const cut = `cut-${id}`;
    const inside = el("g", { "clip-path": `url(#${cut})`, fill: "none" });
    const frame = el("path", {
      d: `M${box.left},${box.top}V${box.bottom}H${box.right}`,
      stroke: look.ink,
      fill: "none",
    });
    const size = { x: box.left, y: box.top - 1, width: box.right - box.left + 1, height: box.bottom - box.top + 2 };
    svg.append(el("clipPath", { id: cut }, el("rect", size)), grid, inside, frame, marks, ...drawn(rows, look));
    return {
      svg,
      x,
      y,
      box,
      look,
      add: (...nodes) => inside.append(...nodes),
      over: (...nodes) => svg.append(...nodes),
    };
  }

  const named = (axis, count) =>
    (axis.log ? logTicks(axis.from, axis.to) : ticks(axis.from, axis.to, count)).map((v) => [v, store.plain(v)]);

  /** The legend's entries [words, line attributes], in as many rows as they need. */
  function legendRows(legend, width) {
    const rows = [[]];
    let at = 0;
    for (const entry of legend) {
      const wide = 44 + WIDE * entry[0].length;
      if (at && at + wide > width) {
        rows.push([]);
        at = 0;
      }
      rows.at(-1).push([at, ...entry]);
      at += wide;
    }
    return legend.length ? rows : [];
  }

  function drawn(rows, look) {
    return rows.flatMap((row, line) =>
      row.flatMap(([at, words, mark]) => {
        const y = 9 + 17 * line,
          { shape, ...rest } = mark;
        const sample = shape
          ? el("path", { d: shape(at + 18, y), ...rest })
          : el("path", { d: `M${at + 6},${y}h24`, fill: "none", ...rest });
        return [sample, text(at + 36, y + 4, words, { fill: look.ink })];
      }),
    );
  }

  const fix = (value) => Math.round(value * 100) / 100;

  /**
   * The path through points (x_i, y_i) of pixels; it breaks where a number is not finite. Where there are many points
   * in a pixel's column, the lowest and highest of each are kept, so that no spike is lost.
   */
  function path(count, x, y) {
    const thin = count > 1200;
    let d = "",
      open = false,
      column = NaN,
      low = 0,
      high = 0;
    const put = (px, py) => {
      d += `${open ? "L" : "M"}${fix(px)},${fix(py)}`;
      open = true;
    };
    for (let i = 0; i < count; i++) {
      const px = x(i),
        py = Math.max(-1e5, Math.min(1e5, y(i)));
      if (!Number.isFinite(py)) {
        open = false;
        continue;
      }
      if (!thin) {
        put(px, py);
        continue;
      }
      const here = Math.round(px);
      if (here !== column) {
        if (column === column) {
          put(column, low);
          put(column, high);
        }
        column = here;
        low = high = py;
      } else {
        low = Math.min(low, py);
        high = Math.max(high, py);
      }
    }
    if (thin && column === column) {
      put(column, low);
      put(column, high);
    }
    return d;
  }

  const shapes = {
    diamond: (x, y, r = 4.5) => `M${fix(x)},${fix(y - r)}l${r},${r}l${-r},${r}l${-r},${-r}z`,
    down: (x, y, r = 4.5) => `M${fix(x - r)},${fix(y - r)}h${2 * r}l${-r},${1.6 * r}z`,
    dot: (x, y, r = 3.5) => `M${fix(x - r)},${fix(y)}a${r},${r} 0 1 0 ${2 * r},0a${r},${r} 0 1 0 ${-2 * r},0z`,
  };

  return { THEMES, WIDE, el, text, plot, path, fix, shapes };
})();
