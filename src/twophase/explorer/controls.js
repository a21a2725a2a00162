"use strict";
// The controls: sliders and fields of one value each, choices, examples; from the hand to the state and back.

const controls = (() => {
  const { plain, NB } = store;
  const knobs = {};

  /** How far along its slider a value is, and back; values of sliders are rounded to what a hand can set. */
  const SCALES = {
    linear: (a, b) => ({ to: (v) => (v - a) / (b - a), from: (p) => +(a + p * (b - a)).toFixed(3) }),
    log: (a, b) => ({ to: (v) => Math.log(v / a) / Math.log(b / a), from: (p) => +(a * (b / a) ** p).toPrecision(3) }),
    steps: (a, b) => ({ to: (v) => (v - a) / (b - a), from: (p) => Math.round(a + p * (b - a)) }),
    near: (a, b) => ({
      // towards 1, as -log10(1 - v)
      to: (v) => Math.log10(1 - v) / Math.log10(1 - b),
      from: (p) => +(1 - (1 - b) ** p).toFixed(p > 0.87 ? 4 : 3),
    }),
  };

  function buildKnob(box) {
    const { name, scale } = box.dataset,
      label = box.querySelector("label"),
      id = `field-${name}`;
    const field = html("input", { type: "text", id, inputMode: "decimal", spellcheck: false });
    label.htmlFor = id;
    const wrong = html("p", { className: "wrong", id: `${id}-wrong`, hidden: true });
    field.addEventListener("input", () => take(name, field, wrong));
    field.addEventListener("change", () => take(name, field, wrong, true));
    let slider = null;
    if (box.className === "knob") {
      slider = html("input", { type: "range", min: 0, max: 1000, step: 1, id: `slider-${name}` });
      slider.setAttribute("aria-label", label.textContent);
      const ends = SCALES[scale](...app.given.sliders[name]),
        whole = store.FIELDS[name].whole;
      slider.addEventListener("input", () => {
        const value = ends.from(slider.value / 1000);
        app.change({ [name]: whole ? Math.round(value) : value });
      });
      slider.addEventListener("keydown", (event) => nudge(event, name, ends, whole));
      slider.place = (value) => {
        slider.value = Math.max(0, Math.round(1000 * ends.to(value))); // not -Infinity, which it would put in the middle
      };
      box.append(slider);
    }
    box.append(field, wrong);
    knobs[name] = { field, slider, wrong };
  }

  /** Arrow keys move a slider of whole numbers by one, any other by a hundredth of its length. */
  function nudge(event, name, ends, whole) {
    const way = { ArrowRight: 1, ArrowUp: 1, ArrowLeft: -1, ArrowDown: -1, PageUp: 10, PageDown: -10 }[event.key];
    if (!way) return;
    event.preventDefault();
    const [low, high] = app.given.sliders[name];
    const value = whole
      ? app.state[name] + way
      : ends.from(Math.min(1, Math.max(0, ends.to(app.state[name]) + way / 100)));
    app.change({ [name]: Math.min(high, Math.max(low, value)) });
  }

  function take(name, field, wrong, done = false) {
    const found = store.read(name, field.value, app.given),
      error = found.error ?? store.fault({ ...app.state, [name]: found.value }, app.given);
    if (!error && (!done || String(app.state[name]) !== String(found.value))) app.change({ [name]: found.value });
    if (!error || done) mark(field, wrong, error ?? "");
  }

  function mark(field, wrong, words) {
    wrong.textContent = words;
    wrong.hidden = !words;
    field.toggleAttribute("aria-invalid", Boolean(words));
    if (words) {
      field.setAttribute("aria-invalid", "true");
      field.setAttribute("aria-describedby", wrong.id);
    } else field.removeAttribute("aria-describedby");
  }

  /**
   * Show the state in the controls, except in the field that is being written in; what has not changed is left. A
   * mistake stays, with its message, until the state is a fresh one.
   */
  function showControls(fresh) {
    for (const [name, { field, slider, wrong }] of Object.entries(knobs)) {
      const words = Array.isArray(app.state[name]) ? app.state[name].join(", ") : String(app.state[name]);
      if (field !== document.activeElement && (fresh || wrong.hidden) && (field.value !== words || !wrong.hidden)) {
        field.value = words;
        mark(field, wrong, "");
      }
      if (slider && slider.getAttribute("aria-valuetext") !== words) {
        slider.place(app.state[name]);
        slider.setAttribute("aria-valuetext", words);
      }
    }
    const { spectrum, form, nesterov, policy, schedule } = app.state,
      key = [spectrum, form, nesterov, policy, schedule].join();
    if (key !== picked) showPicks();
    picked = key;
    showModes();
  }

  let picked = "";
  function showPicks() {
    const curved = app.state.spectrum === "curvature";
    for (const name of ["inner_lr", "inner_steps"]) knobs[name].field.disabled = knobs[name].slider.disabled = !curved;
    for (const input of document.querySelectorAll('input[type="radio"]')) {
      input.checked =
        input.value === (input.name === "nesterov" ? (app.state.nesterov ? "yes" : "no") : app.state[input.name]);
    }
    for (const part of document.querySelectorAll(".kind")) part.hidden = part.dataset.kind !== app.state.spectrum;
    $("spectrum").value = app.state.spectrum;
    $("schedule").value = app.state.schedule;
    const [name] = app.state.policy.split(":");
    for (const option of $("policy").options) option.selected = option.value.split(":")[0] === name;
    $("own-policy").hidden = !name;
  }

  let modesShown = "";
  function showModes() {
    const names = app.model.sigmas.map((sigma, j) => `mode ${j + 1}: σ${NB}=${NB}${plain(sigma)}`),
      key = names.join();
    if (key !== modesShown) {
      $("mode").replaceChildren(
        html("option", { value: -1, textContent: "mean of all modes" }),
        ...names.map((words, j) => html("option", { value: j, textContent: words })),
      );
      modesShown = key;
    }
    if (Number($("mode").value) !== app.model.focus) $("mode").value = app.model.focus;
    for (const input of document.getElementsByName("view")) input.checked = input.value === app.state.view;
  }

  const example = (lr, momentum, nesterov, form, restart, rounds, more) => ({
    ...{ lr, momentum, nesterov, form, restart, rounds, policy: "", schedule: "constant", noise: 0, mode: 0 },
    ...{ spectrum: "list", sigmas: [0.95, 0.85, 0.75, 0.6, 0.45, 0.3], ...more },
  });
  const EXAMPLES = {
    "DiLoCo’s usual rule": example(0.7, 0.9, true, "sum", 3, 60),
    "One mode, phase cancellation": example(1, 0.9, false, "ema", 5, 80, { spectrum: "one", sigma: 0.95 }),
    "The paper’s six modes": example(1, 0.9, false, "ema", 7, 120),
    "Slow modes, where restarts harm": example(1, 0.9, false, "ema", 5, 120, {
      ...{ spectrum: "range", low: 0.005, high: 0.3, count: 16, mode: 15 },
    }),
    "A restart that destabilises": example(0.78, 0.95, false, "sum", 3, 120, { spectrum: "one", sigma: 1 }),
    "Momentum tuned, nothing to restart": example(1, 0.3, false, "ema", 0, 120),
    "Noise, and a learning rate that falls": example(0.7, 0.9, true, "sum", 3, 60, { noise: 0.1, schedule: "linear" }),
    "From curvatures": example(0.7, 0.9, true, "sum", 4, 60, {
      ...{ spectrum: "curvature", curvatures: [10, 3, 1, 0.3, 0.1], inner_lr: 0.02, inner_steps: 50 },
    }),
  };

  function listen() {
    for (const box of document.querySelectorAll(".knob, .text")) buildKnob(box);
    for (const input of document.querySelectorAll('input[type="radio"]')) {
      input.addEventListener("change", () =>
        app.change({ [input.name]: input.name === "nesterov" ? input.value === "yes" : input.value }),
      );
    }
    for (const name of Object.keys(EXAMPLES)) $("example").append(html("option", { value: name, textContent: name }));
    $("example").addEventListener(
      "change",
      ({ target }) => target.value && app.change(EXAMPLES[target.value], { own: false }),
    );
    if (app.given.run) {
      $("spectrum").append(html("option", { value: "run", textContent: "estimated from a run" }));
      $("run").textContent = `${app.given.run.name}: ${app.given.run.note.replace(/ ([=±]) /g, `${NB}$1${NB}`)}`;
    }
    $("spectrum").addEventListener("change", ({ target }) => {
      if (!app.change({ spectrum: target.value, mode: 0 })) app.later();
    });
    for (const id of ["policy", "schedule"]) $(id).addEventListener("change", () => app.change({ [id]: $(id).value }));
    $("mode").addEventListener("change", ({ target }) => app.change({ mode: Number(target.value) }, { own: false }));
    fold(matchMedia("(max-width: 900px)"));
    document.querySelector("form").addEventListener("submit", (event) => event.preventDefault());
  }

  /** On a narrow page the less used settings are folded away, unless a hand is on them. */
  function fold(narrow) {
    const more = $("more");
    more.open = !narrow.matches;
    narrow.addEventListener("change", () => {
      more.open = !narrow.matches || more.contains(document.activeElement);
    });
  }

  return { listen, show: showControls };
})();
