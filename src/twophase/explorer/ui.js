// The page's controls, its numbers, its address and its theme; and what happens when the state has changed: before the
// next frame everything is computed and drawn once, however many changes there were.

const app = (() => {
  const { given } = store;
  const knobs = {};
  let frame = 0,
    resting = 0,
    shown = null, // the state that the model is of
    first = null, // the state that the page begins with
    model = null,
    parts = [];

  // --------------------------------------------------------------------------------------------- from hand to state

  /** The shown mode's own sigma is one of a list; every other knob is a value of the state. */
  const valueOf = (name) => (name === "sigma" ? app.state.sigmas[app.state.mode] : app.state[name]);
  const valuesOf = (name, value) =>
    name === "sigma"
      ? { sigmas: app.state.sigmas.map((old, j) => (j === app.state.mode ? value : old)) }
      : { [name]: value };

  function later() {
    frame ||= requestAnimationFrame(() => {
      frame = 0;
      app.render();
    });
  }

  /** Take over some new values; the fields then show them. */
  function change(values) {
    app.state = store.within({ ...app.state, ...values });
    $("notice").hidden = true;
    later();
  }

  /** How far along its slider a value is, and back; values of sliders are rounded to what a hand can set. */
  const SCALES = {
    linear: (a, b) => ({ to: (v) => (v - a) / (b - a), from: (p) => +(a + p * (b - a)).toFixed(3) }),
    log: (a, b) => ({ to: (v) => Math.log(v / a) / Math.log(b / a), from: (p) => +(a * (b / a) ** p).toPrecision(3) }),
    whole: (a, b) => ({ to: (v) => (v - a) / (b - a), from: (p) => Math.round(a + p * (b - a)) }),
    wholelog: (a, b) => ({ to: (v) => Math.log(v / a) / Math.log(b / a), from: (p) => Math.round(a * (b / a) ** p) }),
    near: (_, b) => ({
      to: (v) => Math.log1p(-v) / Math.log1p(-b),
      from: (p) => +(1 - (1 - b) ** p).toFixed(p > 0.87 ? 4 : 3),
    }),
  };

  function buildKnob(box) {
    const { name, scale, low, high } = box.dataset,
      id = `field-${name}`,
      label = box.querySelector("label"),
      field = html("input", { type: "text", id, spellcheck: false }),
      wrong = html("p", { className: "wrong", id: `${id}-wrong`, hidden: true });
    label.htmlFor = id;
    field.setAttribute("aria-describedby", wrong.id);
    const mark = (words) => {
      write(wrong, words);
      wrong.hidden = !words;
      field.setAttribute("aria-invalid", String(Boolean(words)));
    };
    field.addEventListener("input", () => {
      const value = store.read(name, field.value);
      if (value === undefined) return;
      mark("");
      change(valuesOf(name, value));
    });
    field.addEventListener("change", () => {
      mark(store.read(name, field.value) === undefined ? store.takes(name) : "");
      later();
    });
    let slider = null;
    if (scale) {
      slider = html("input", { type: "range", min: 0, max: 1000, id: `slider-${name}` });
      slider.setAttribute("aria-label", label.textContent);
      const ends = [Number(low), Number(high)],
        { to, from } = SCALES[scale](...ends);
      slider.addEventListener("input", () => {
        mark("");
        change(valuesOf(name, from(slider.value / 1000)));
      });
      slider.place = (value) => {
        slider.value = Math.round(1000 * Math.min(1, Math.max(0, to(value))));
      };
      slider.addEventListener("keydown", (event) => {
        const way = { ArrowRight: 1, ArrowUp: 1, ArrowLeft: -1, ArrowDown: -1, PageUp: 10, PageDown: -10 }[event.key];
        if (!way) return;
        event.preventDefault(); // by one, or by a hundredth of the slider
        const value = valueOf(name),
          next = scale.startsWith("whole") ? value + way : from(Math.min(1, Math.max(0, to(value) + way / 100)));
        change(valuesOf(name, Math.min(ends[1], Math.max(ends[0], next))));
      });
      box.append(slider);
    }
    box.append(field, wrong);
    knobs[name] = { field, slider, wrong };
  }

  const SIX = [0.95, 0.85, 0.75, 0.6, 0.45, 0.3];
  const example = (lr, momentum, nesterov, form, restart, rounds, sigmas = SIX, mode = 0) => ({
    ...{ lr, momentum, nesterov, form, restart, rounds, sigmas, mode, retain: 0, inject: 0 },
  });
  const EXAMPLES = {
    "DiLoCo’s usual rule": example(0.7, 0.9, true, "sum", 3, 60),
    "One mode, phase cancellation": example(1, 0.9, false, "ema", 5, 80, [0.95]),
    "The paper’s six modes": example(1, 0.9, false, "ema", 7, 120),
    "Slow modes, where restarts harm": example(1, 0.9, false, "ema", 5, 120, [0.3, 0.2, 0.1, 0.05, 0.02, 0.005], 5),
    "A restart that destabilises": example(0.78, 0.95, false, "sum", 3, 120, [1]),
    "A soft restart": { ...example(1, 0.9, false, "ema", 3, 60, [0.95]), retain: -0.24, inject: 0.253 },
    "Momentum tuned, nothing to restart": example(1, 0.3, false, "ema", 0, 120),
  };

  // --------------------------------------------------------------------------------------------- from state to page

  /** Show the state in the controls, except in the field that is being written in. */
  function showControls() {
    for (const [name, { field, slider, wrong }] of Object.entries(knobs)) {
      const value = valueOf(name),
        words = Array.isArray(value) ? value.join(", ") : String(value);
      if (field !== document.activeElement && wrong.hidden && field.value !== words) field.value = words;
      if (slider && slider.getAttribute("aria-valuetext") !== words) {
        slider.place(value);
        slider.setAttribute("aria-valuetext", words);
      }
    }
    const { nesterov, form, sigmas, mode } = app.state;
    for (const input of document.querySelectorAll('input[type="radio"]')) {
      input.checked = input.value === (input.name === "form" ? form : nesterov ? "yes" : "no");
    }
    const names = sigmas.map((sigma, j) => `mode ${j + 1}: σ = ${plain(sigma)}`);
    if ($("mode").dataset.names !== String(names)) {
      $("mode").replaceChildren(...names.map((words, j) => html("option", { value: j, textContent: words })));
      $("mode").dataset.names = String(names);
    }
    $("mode").value = mode;
    const found = Object.keys(EXAMPLES).find((name) => isSame({ ...EXAMPLES[name], mode }, app.state));
    $("example").value = found ?? "";
  }

  const isSame = (a, b) => store.toFragment(a) === store.toFragment(b);

  const REGIMES = {
    oscillatory: "oscillates",
    critical: "critically damped",
    real_below: "does not oscillate",
    real_above: "alternates in sign",
    negative_determinant: "does not oscillate",
    nilpotent: "gone after two rounds",
  };

  /** The numbers below the first figure: names and values. */
  function readouts(model) {
    const { chosen, turn, regime, rate, interval, turning, diverging, modes, best, bestLoss, final, loss } = model;
    const saved = final.restart < final.none ? roundsOf(theory.roundsSaved(loss.restart, final.none)) : "–";
    return [
      [`Mode σ = ${plain(chosen.sigma)}`, REGIMES[regime]],
      ["Rate, nats a round", plain(rate)],
      ["First cancellation, t₀", turn ? `${plain(turn.cancellation)} rounds` : "–"],
      ["Then every, π/φ", turn ? `${plain(Math.PI / turn.phase)} rounds` : "–"],
      ["Oscillates from σ", interval[0] < 1 ? plain(interval[0]) : "–"],
      ["Modes that oscillate", `${turning} of ${modes.length}`],
      ["Modes that diverge", `${diverging} of ${modes.length}`],
      ["log₁₀ loss, no restart", plain(final.none)],
      ["log₁₀ loss, restarted", plain(final.restart)],
      ["As low sooner by", saved],
      ["Best K by final loss", best === null ? "never" : `${best}`],
      ["log₁₀ loss, best K", plain(bestLoss)],
    ];
  }

  /** What a reader must be told, by when it holds. */
  const WARNINGS = [
    [({ diverging }) => diverging > 0, "A mode diverges, and no restart can make it stable: lower the learning rate."],
    [
      ({ none, state, modes, diverging }) =>
        state.restart && !diverging && modes.some((_, j) => none[j].log[Math.min(state.restart, state.rounds)] > 0),
      "A restart every K rounds makes a stable mode grow: avoid this K.",
    ],
    [
      ({ turning, state }) => state.momentum > 0 && !turning,
      "No mode oscillates: every restart slows every mode down.",
    ],
    [({ best }) => best === 1, "The best K is 1, a restart every round: that is no momentum at all."],
    [({ state }) => state.momentum === 0, "Without momentum there is nothing to restart."],
    [({ state }) => state.restart >= state.rounds, "The first restart comes after the last round: it is no restart."],
    [
      ({ state }) => state.restart && (state.retain || state.inject),
      "These restarts are soft; the best K is that of hard ones.",
    ],
  ];

  const values = [];
  function showNumbers() {
    readouts(model).forEach(([name, value], i) => {
      if (!values[i]) {
        values[i] = [html("dt"), html("dd")];
        $("readouts").append(html("div", {}, ...values[i]));
      }
      write(values[i][0], name);
      write(values[i][1], value);
    });
    const said = WARNINGS.filter(([holds]) => holds(model)).map(([, words]) => words);
    write($("warning"), said.join(" ") || "No warnings.");
    $("warning").classList.toggle("any", said.length > 0);
  }

  // -------------------------------------------------------------------------------------------------------- address

  let written = "";
  function writeAddress() {
    written = store.toFragment(app.state);
    try {
      history.replaceState(null, "", `#${written}`);
    } catch {} // a frame whose page stands in another one has no address of its own
  }

  function readAddress() {
    const text = location.hash.slice(1);
    if (!text || text === written) return;
    const found = store.fromFragment(text);
    change(found ?? given.state);
    if (!found) say("The link is damaged or of another version. This is the default view.");
  }

  function say(words) {
    write($("notice"), words);
    $("notice").hidden = false;
  }

  async function copy() {
    writeAddress();
    try {
      await navigator.clipboard.writeText(location.href);
      write($("copy"), "Copied");
      announce("Link copied.");
      setTimeout(() => write($("copy"), "Copy link"), 2500);
    } catch {
      say("The link could not be copied. Copy the page’s address: it holds this view.");
    }
  }

  const announce = (words) => write($("live"), words);

  // --------------------------------------------------------------------------------------------------------- render

  /** When the hand rests: the address, what the pictures show in words, and what is read out. */
  function rest() {
    const { final, best } = model,
      words = `Log10 loss ${plain(final.restart)} with the chosen restarts, ${plain(final.none)} without. `;
    for (const box of document.querySelectorAll(".plot[role=img]")) {
      box.setAttribute("aria-label", `${box.dataset.label}. ${words}`);
    }
    if (shown === first) return; // nothing has been done yet
    first = null;
    announce(`${guide.words()} ${words} Best K: ${best ?? "never"}.`);
    writeAddress();
  }

  function render() {
    const isFirst = model === null;
    if (shown !== app.state) {
      shown = app.state;
      model = theory.of(shown);
      for (const part of parts) part.show(model);
      showNumbers();
      clearTimeout(resting);
      resting = setTimeout(rest, 300);
    }
    showControls();
    guide.show(model);
    if (lossMap.show(shown, model.final)) later();
    if (isFirst) performance.mark("first-curve");
  }

  let isChosen = false; // the theme, by hand
  function setTheme(name) {
    document.documentElement.dataset.theme = name;
    write($("theme"), name === "dark" ? "Light" : "Dark");
    $("theme").setAttribute("aria-label", `${$("theme").textContent} theme`);
    shown = null; // the charts are drawn in other colours
    later();
  }

  function listen() {
    for (const box of document.querySelectorAll(".knob")) buildKnob(box);
    for (const input of document.querySelectorAll('input[type="radio"]')) {
      input.addEventListener("change", () => change({ [input.name]: store.read(input.name, input.value) }));
    }
    $("example").append(...Object.keys(EXAMPLES).map((name) => html("option", { textContent: name })));
    $("example").addEventListener("change", () => change(EXAMPLES[$("example").value] ?? {}));
    $("mode").addEventListener("change", () => change({ mode: Number($("mode").value) }));
    $("reset").addEventListener("click", () => change(given.state));
    $("copy").addEventListener("click", copy);
    $("skip").addEventListener("click", (event) => {
      event.preventDefault(); // # is the state's
      $("panels").focus();
    });
    $("settings").addEventListener("submit", (event) => event.preventDefault());
    const dark = matchMedia("(prefers-color-scheme: dark)"),
      narrow = matchMedia("(max-width: 900px)");
    $("theme").addEventListener("click", () => {
      isChosen = true;
      setTheme(document.documentElement.dataset.theme === "dark" ? "light" : "dark");
    });
    dark.addEventListener("change", () => isChosen || setTheme(dark.matches ? "dark" : "light"));
    setTheme(dark.matches ? "dark" : "light");
    narrow.addEventListener("change", () => {
      $("more").open ||= !narrow.matches;
    });
    $("more").open = !narrow.matches;
    window.addEventListener("hashchange", readAddress);
    window.addEventListener("beforeprint", lossMap.finish);
  }

  function start() {
    listen();
    parts = charts.build(change);
    lossMap.build(change);
    readAddress();
    guide.build();
    first = app.state;
    app.render();
  }

  return { state: given.state, change, later, render, announce, start };
})();

app.start();
