// The three steps that the page begins with: what to move, and whether the state has got there, by the model's numbers.

const guide = (() => {
  const START = {
    ...{ lr: 0.3, momentum: 0, nesterov: false, form: "sum", restart: 0, retain: 0, inject: 0, rounds: 60 },
    ...{ sigmas: [0.95, 0.85, 0.75, 0.6, 0.45, 0.3], mode: 3 },
  };
  const loss = (log10) => plain(10 ** log10, 2);

  let step = -1, // -1 while the steps are folded away
    isDone = false,
    reached = Infinity, // log10 of the loss that step 2 ended with
    before = null; // the state to which skipping returns

  /** `see` says of a model whether the step is done, and what it comes to now. */
  const STEPS = [
    {
      title: "1 of 3: Make it oscillate",
      ask:
        "Without momentum the curve falls straight to 0, its goal. Move the momentum β up, until the curve swings " +
        "far past 0.",
      moves: "momentum",
      example: { ...START, momentum: 0.9 },
      see({ none, state }) {
        const { sign, log } = none[state.mode],
          low = Math.min(...Array.from(sign, (value, t) => value * Math.exp(log[t])));
        return [low < -0.2, low < 0 ? `It passes 0 and swings to ${plain(low, 2)}.` : "It does not pass 0."];
      },
    },
    {
      title: "2 of 3: Now restart it",
      ask: "A restart drops the momentum every K rounds. Move K: best is when the curve passes 0 (the first diamond).",
      moves: "restart",
      example: { ...START, momentum: 0.9, restart: 3 },
      see({ final, restarts }) {
        if (!restarts) return [false, "No restart yet: both curves are one."];
        const isThere = final.restart <= final.none - 1; // a tenth
        if (isThere) reached = final.restart;
        return [isThere, `Final loss ${loss(final.restart)} with restarts, ${loss(final.none)} without.`];
      },
    },
    {
      title: "3 of 3: Find a momentum that needs no restart",
      ask: "Leave K. Move β back, until the dashed curve, without restarts, ends lower than restarts did.",
      moves: "momentum",
      example: { ...START, momentum: 0.5, restart: 3 },
      see({ final, state }) {
        const isThere = state.momentum > 0 && final.none < reached;
        return [isThere, `Final loss ${loss(final.none)} without restarts; with them you had ${loss(reached)}.`];
      },
    },
    {
      title: "What you have seen",
      ask:
        "Too much momentum swings past the goal. A restart at the right moment repairs that; a smaller momentum does " +
        "not need it. So tune the momentum first, and restart where you cannot. The model is linear: it predicts no " +
        "perplexity.",
      moves: "",
      see: () => [true, "All settings are yours now."],
    },
  ];
  const LAST = STEPS.length - 1;

  function enter(next) {
    step = next;
    isDone = false;
    write($("guide-title"), STEPS[step].title);
    write($("guide-task"), STEPS[step].ask);
    $("guide-show").hidden = $("guide-next").hidden = step === LAST;
    write($("guide-close"), step === LAST ? "To all settings" : "Skip the steps");
  }

  /** Begin the steps, in a state of theirs. */
  function begin() {
    before = app.state;
    reached = Infinity;
    $("guide").open = true;
    enter(0);
    app.change(START);
  }

  function end() {
    step = -1;
    $("guide").open = false;
    app.later();
  }

  /** After every change: has the state got there? A step that was done stays done. */
  function show(model) {
    const { moves, see } = STEPS[step] ?? { moves: "", see: () => [false, ""] },
      [isThere, said] = see(model);
    isDone ||= isThere;
    write($("guide-said"), isThere && moves ? `✓ ${said}` : said);
    $("guide").classList.toggle("done", isDone);
    write($("guide-next"), isDone ? "Next step" : "Skip this step");
    for (const box of document.querySelectorAll(".knob")) box.classList.toggle("asked", box.dataset.name === moves);
  }

  /** Go on; a step that was left out is done for the reader, since the next one builds on it. */
  function next() {
    if (!isDone) app.change(STEPS[step].example);
    app.render(); // so that this step sees it
    enter(step + 1);
    app.later();
    app.announce(`${STEPS[step].title}. ${STEPS[step].ask}`);
    if (step === LAST) $("guide-close").focus();
  }

  function build() {
    $("guide-next").addEventListener("click", next);
    $("guide-show").addEventListener("click", () => app.change(STEPS[step].example));
    $("guide-close").addEventListener("click", () => {
      if (step < LAST) app.change(before);
      end();
      document.querySelector("#guide > summary").focus();
    });
    $("guide").addEventListener("toggle", () => {
      if ($("guide").open && step < 0) begin();
      if (!$("guide").open && step >= 0) end();
    });
    if (store.given.guided && !location.hash) begin();
  }

  return { build, show, words: () => $("guide-said").textContent };
})();
