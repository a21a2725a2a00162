"use strict";
// The guided steps that the page begins with: what to move, whether the state has got there, and what that means, in words
// that are made of the model's own numbers.

const guide = (() => {
  const { plain, roundsOf } = store;
  const START = {
    lr: 1,
    momentum: 0,
    nesterov: false,
    form: "ema",
    restart: 0,
    rounds: 60,
    spectrum: "list",
    sigmas: [0.95, 0.85, 0.75, 0.6, 0.45, 0.3],
    mode: 3,
    view: "linear",
    policy: "",
    schedule: "constant",
    noise: 0,
  };
  const loss = (log10) => plain(10 ** log10, 2);
  const times = (decades) =>
    decades < 6 ? `${Number((10 ** decades).toPrecision(2)).toLocaleString("en")} times` : `10^${Math.floor(decades)} times`;

  let step = -1,
    isDone = false,
    reached = null, // what step 2 ended with
    before = null, // the state to which skipping returns
    words = "";

  const STEPS = [
    {
      title: "Make it oscillate",
      ask:
        "Without momentum the curve falls straight to 0, its goal. Move the outer momentum β up, until the curve " +
        "swings past 0.",
      moves: "momentum",
      show: { ...START, momentum: 0.9 },
      see({ series, rounds }) {
        const values = Array.from({ length: rounds + 1 }, (_, t) => series.none(t)).map(([sign, log]) => sign * Math.exp(log));
        const low = Math.min(...values),
          first = values.findIndex((value) => value < 0);
        if (!(low < 0)) return [false, "It falls to 0 and does not pass it."];
        if (low > -0.2) return [false, `It passes 0, but only to ${plain(low, 2)}: more momentum.`];
        return [true, `It oscillates: it passes 0 in round ${first} and swings to ${plain(low, 2)}, far beyond its goal.`];
      },
    },
    {
      title: "Now restart it",
      ask:
        "A restart drops the momentum every K rounds. Move K: the best moment is when the curve passes 0 (the first " +
        "diamond), before it swings away.",
      moves: "restart",
      show: { ...START, momentum: 0.9, restart: 7 },
      see(model) {
        const { final, rounds, restarts, losses, period } = model;
        if (!restarts.length) return [false, "No restart yet: both curves are one."];
        const gain = final.none - final.restart,
          both = `loss ${loss(final.restart)} after ${roundsOf(rounds)}, and ${loss(final.none)} without`;
        const how = period ? `Restarted ${compute.periodWords(period)}` : "Restarted";
        if (!(gain >= 1)) return [false, `${how}: ${both}. Try another K.`];
        const sooner = compute.savedBy((t) => losses.restart[t], model);
        reached = { momentum: model.rule.momentum, loss: final.restart, gain };
        return [true, `${how}: ${both}. That is ${times(gain)} lower, or as low ${roundsOf(sooner)} sooner.`];
      },
    },
    {
      title: "Find a momentum that needs no restart",
      ask: "Leave K. Move β back, until the dashed curve (no restart) does as well without help.",
      moves: "momentum",
      show: { ...START, momentum: 0.3, restart: 7 },
      see(model) {
        const { rule, final, rounds, logs, choices } = model,
          [best] = choices;
        const here = `At β = ${plain(rule.momentum, 3)} the loss after ${roundsOf(rounds)} is ${loss(final.none)} without restarts`;
        if (rule.momentum === 0) return [false, `${here}: no momentum, nothing to restart. A little of it does better.`];
        const cycle = best.period ?? rounds;
        const saves = compute.savedBy((t) => kernel.logLoss(logs, t, cycle) / Math.LN10, model);
        if (saves > rounds / 10) return [false, `${here}; the best K would still save ${roundsOf(saves)}.`];
        if (reached && !(final.none < reached.loss)) return [false, `${here}: more than restarts reached.`];
        const than = reached ? ` Restarts at β = ${plain(reached.momentum, 3)} reached ${loss(reached.loss)}.` : "";
        return [true, `${here}; the best K would save ${saves ? roundsOf(saves) : "less than a round"}.${than}`];
      },
    },
    {
      title: "What you have seen",
      ask:
        "Too much momentum swings past the goal. A restart at the right moment repairs that; a smaller momentum does not " +
        "need it. So tune the momentum first, and restart where you cannot. The model is linear: it predicts no perplexity.",
      moves: "",
      see: () => [true, reached ? `Your restarts made the loss ${times(reached.gain)} lower.` : "All settings are yours now."],
    },
  ];
  const LONGEST =
    "Restarted every 10 rounds: loss 1.2e−10 after 60 rounds, and 1.2e−10 without. That is 100000 times lower, or as low " +
    "10 rounds sooner.";

  const isOpen = () => step >= 0;

  function enter(next) {
    step = next;
    isDone = false;
    const { title, ask } = STEPS[step],
      last = step === STEPS.length - 1;
    write($("guide-title"), last ? title : `${step + 1} of ${STEPS.length - 1}: ${title}`);
    write($("guide-task"), ask);
    $("guide-show").hidden = last;
    write($("guide-close"), last ? "To all settings" : "Skip the steps");
    $("guide-next").hidden = last;
    if (app.model) show();
  }

  /** Begin the steps, at a state of theirs. */
  function begin() {
    before = app.state;
    reached = null;
    $("guide").open = true;
    app.take({ ...app.state, ...START });
    enter(0);
  }

  function end() {
    step = -1;
    $("guide").open = false;
    for (const box of document.querySelectorAll(".asked")) box.classList.remove("asked");
  }

  /** After every change: has the state got there? A step that was done stays done. */
  function show() {
    if (!isOpen()) return;
    const { moves, see } = STEPS[step],
      [there, said] = see(app.model);
    isDone ||= there;
    words = `${there && moves ? "✓ " : ""}${said}`;
    write($("guide-said").firstChild, words);
    $("guide").classList.toggle("done", isDone);
    const follows = STEPS[step + 1];
    if (follows) write($("guide-next"), isDone ? `Next: ${follows.title}` : "Skip this step");
    for (const box of document.querySelectorAll(".knob")) box.classList.toggle("asked", box.dataset.name === moves);
  }

  /** Go on; a step that was left out is done for the reader, since the next one builds on it. */
  function next() {
    const { show: shown } = STEPS[step];
    if (!isDone) app.change(shown);
    app.render(); // what comes next is seen in the state that it begins with
    enter(step + 1);
    $("live").textContent = `${$("guide-title").textContent}. ${$("guide-task").textContent}`;
    if ($("guide-next").hidden) $("guide-close").focus();
  }

  function build() {
    const said = $("guide-said");
    said.append(html("span"));
    steady(said, LONGEST);
    $("guide-next").addEventListener("click", next);
    $("guide-show").addEventListener("click", () => app.change(STEPS[step].show));
    $("guide-close").addEventListener("click", () => {
      const skipped = step < STEPS.length - 1;
      end();
      if (skipped) app.take(before);
      document.querySelector("#guide > summary").focus();
    });
    $("guide").addEventListener("toggle", () => {
      if ($("guide").open && !isOpen()) begin();
      if (!$("guide").open && isOpen()) end();
    });
    if (app.given.guided && !location.hash) begin();
  }

  return { build, show, words: () => (isOpen() ? `${words} ` : "") };
})();
