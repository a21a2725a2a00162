"use strict";
// The two maps on the page, and the cross on them under a mouse, a finger or the arrow keys.

const cross = (() => {
  const { plain } = store;

  const maps = [];
  let part = null;

  function buildMaps(given) {
    part = given;
    part.plots.forEach((plot, side) => {
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
    part.box.insertBefore(html("div", { id: "map-bar" }), part.tools);
  }

  const within = ({ lr, momentum }) => ({
    lr: Math.max(app.given.limits.lr[0], lr),
    momentum: Math.min(app.given.limits.momentum[1], momentum),
  });

  let working = 0,
    painted = "";
  /** The cells and the colour bar, unless they are there already. */
  function paintMaps() {
    const key = `${lossMap.stage()} ${app.theme} ${part.whole}`;
    if (key === painted) return;
    painted = key;
    maps.forEach(({ canvas }, side) => lossMap.paint(canvas, side, app.theme));
    $("map-bar").replaceChildren(lossMap.bar(part.whole, app.theme));
  }

  function drawMaps() {
    lossMap.prepare(app.model);
    lossMap.work();
    maps.forEach(({ canvas, holder, handle }, side) => {
      const p = lossMap.plot(app.model, side, part.width, app.theme),
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
    if (!part.seen && !part.rests) return;
    const busy = lossMap.work(8);
    paintMaps();
    if (busy) working = setTimeout(more, 0);
  }

  /** All cells at once, as for a print. */
  function finish() {
    while (lossMap.work(50));
    paintMaps();
  }

  return { build: buildMaps, draw: drawMaps, finish };
})();
