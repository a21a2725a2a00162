"use strict";
// From a state to everything that the panels show: computed once a change, the costly tables only when they must be.

const compute = (() => {
  const { plain, roundsOf, nearOne } = store;
  const REGIMES = {
    oscillatory: "oscillatory",
    critical: "critically damped",
    real_below: "real: no oscillation",
    real_above: "real: alternating sign",
    negative_determinant: "real, of both signs",
    nilpotent: "gone after two rounds",
  };
  const MANY = 2000; // cancellation times at most

  const cache = new Map(); // the latest tables, by mode

  /** The table of a mode, from the cache if it is there and long enough. */
  function tableOf(mode, rounds) {
    const key = `${mode.b},${mode.s[0]},${mode.s[1]},${mode.nesterov}`,
      known = cache.get(key);
    if (known && known.log.length > rounds) return known;
    if (cache.size > 400) cache.clear();
    const made = kernel.table(mode, rounds);
    cache.set(key, made);
    return made;
  }

  const ruleOf = ({ lr, momentum, nesterov, form }) => ({ lr, momentum, nesterov, form });

  /**
   * What each criterion chooses, the recommended one first: {name, words, period or null for never, rate, loss}. Where no
   * mode oscillates no restart gains anything, and all periods may tie: the recommended one is then never.
   */
  function judged(logs, modes, rounds, scores) {
    const without = -Math.max(...modes.map(kernel.logRadius)) + 0;
    const judge = (name, words, period) => ({
      name,
      words,
      period,
      rate: period === null ? without : kernel.slowestRate(logs, period),
      loss: kernel.logLoss(logs, rounds, period ?? rounds) / Math.LN10,
    });
    const NAMES = {
      loss: "exact final loss",
      minimax: "slowest mode’s rate",
      rate: "mean rate of a cycle",
      factor: "factor of a cycle (paper)",
    };
    const canHelp = modes.some((m) => kernel.oscillation(m));
    const found = Object.entries(NAMES).map(([name, words], i) => {
      const best = kernel.firstBest(scores[name]);
      const isIdle = best >= rounds || !(modes[0].s[0] > 0) || (i === 0 && !canHelp);
      return judge(name, words, isIdle ? null : best);
    });
    return { choices: found, without: judge("none", "no restart", null), judge };
  }

  /** Guesses from the mean sigma: the first cancellation, exact and in closed form. */
  function guesses(rule, sigmas, rounds, judge) {
    const mean = kernel.mode(rule, sigmas.reduce((a, b) => a + b, 0) / sigmas.length);
    const [first] = kernel.cancellations(mean, 1);
    const guess = (name, words, value) => {
      const usable = Number.isFinite(value) && value < 1e9,
        period = usable ? Math.max(1, Math.floor(value + 0.5)) : null;
      return { value: usable ? value : NaN, ...judge(name, words, period !== null && period < rounds ? period : null) };
    };
    return [
      guess("cancellation", "first cancellation at the mean σ", first ?? NaN),
      guess("corrected", "closed form, corrected", kernel.heuristic(mean, true)),
      guess("paper", "closed form, as in the paper", kernel.heuristic(mean, false)),
    ];
  }

  /** Sign and log|x_t| of a mode with a restart every `period` rounds. */
  function restarted({ sign, log }, t, period) {
    const k = Math.min(period, t);
    if (k === 0) return [1, 0];
    const times = Math.floor(t / k),
      odd = times % 2 === 1;
    return [(odd ? sign[k] : sign[k] * sign[k]) * sign[t % k], times * log[k] + log[t % k]];
  }

  /** Sign and log of the mean of numbers given so. */
  function meanOf(values) {
    let top = -Infinity,
      total = 0;
    for (const [, log] of values) top = Math.max(top, log);
    if (!Number.isFinite(top)) return [top > 0 ? 1 : 0, top];
    for (const [sign, log] of values) total += sign * Math.exp(log - top);
    total /= values.length;
    return [Math.sign(total), top + Math.log(Math.abs(total))];
  }

  /** Sign and log of what is left of the chosen mode in one arm, or of the mean of all. */
  function seriesOf({ at }, focus, count, rounds) {
    if (focus >= 0) return (t) => at(focus, t);
    const means = Array.from({ length: rounds + 1 }, (_, t) => meanOf(Array.from({ length: count }, (_, j) => at(j, t))));
    return (t) => means[t];
  }

  /** Both arms of a rule: {at(j, t): sign and log|x| of mode j, loss(t): log10 of the loss, restarts: their rounds}. */
  function armsOf(state, rule, sigmas, tables) {
    const { rounds } = state,
      cycle = state.restart || rounds;
    if (simulation.isPlain(state)) {
      const logs = tables.map(({ log }) => log),
        loss = (period) => (t) => kernel.logLoss(logs, t, period) / Math.LN10;
      return {
        none: { at: (j, t) => [tables[j].sign[t], tables[j].log[t]], loss: loss(rounds), restarts: [] },
        restart: {
          at: (j, t) => restarted(tables[j], t, cycle),
          loss: loss(cycle),
          restarts: state.restart ? Array.from({ length: Math.floor(rounds / cycle) }, (_, i) => (i + 1) * cycle) : [],
        },
      };
    }
    const { none, restart } = simulation.arms(state, rule, sigmas);
    const arm = ({ places, restarts }) => ({
      at: (j, t) => simulation.logOf(places[j][t]),
      loss: (t) => simulation.lossAt(places, t),
      restarts,
    });
    return { none: arm(none), restart: arm(restart) };
  }

  /** Outer gain of both arms, {mean, at(i): that of round i + 1}; without values where a policy measures first. */
  function gainsOf(state, rule) {
    const { rounds, restart: period } = state;
    if (!simulation.isPlain(state)) {
      const { none, restart } = simulation.gains(state, rule);
      return { none, restart: restart ?? { mean: NaN, at: () => NaN } };
    }
    const of = (cycle) => ({ mean: kernel.meanGain(rule, cycle, rounds), at: (i) => kernel.gain(rule, (i % cycle) + 1) });
    return { none: of(rounds), restart: of(period || rounds) };
  }

  /** Mean gains, and losses at the horizon, of both arms. */
  const ends = (arms, gains, rounds) => ({
    gains: { none: gains.none.mean, restart: gains.restart.mean },
    final: { none: arms.none.loss(rounds), restart: arms.restart.loss(rounds) },
  });

  /** What a reader must be told: modes that diverge, and restarts that cannot help or do harm. */
  function warnings({ state, rule, modes, logs, rounds, period, recommended, flat, diverges: unstable }) {
    const said = [],
      limit = kernel.stableStep(rule.momentum, rule.nesterov),
      largest = modes[0],
      count = unstable.filter(Boolean).length;
    if (!(largest.s[0] > 0)) return ["Nothing moves, with or without restarts: every σ is 0."];
    if (!simulation.isPlain(state)) said.push(BESIDE);
    if (flat) said.push(flatWords(flat));
    if (count) {
      const below = plain((rule.lr * limit) / largest.s[0]);
      said.push(divergeWords(count, modes.length, below, rule.form === "ema" ? "EMA" : "sum"));
    }
    if (period && period < rounds && logs.some((log, j) => !unstable[j] && log[period] > 0))
      said.push(growWords(period));
    if (recommended === 1) {
      const lr = kernel.converted(rule, "sum").lr * (rule.nesterov ? 1 + rule.momentum : 1);
      said.push(bareWords(plain(lr)));
    }
    if (rule.momentum === 0) said.push("Without momentum there is nothing to restart.");
    else if (!modes.some((m) => kernel.oscillation(m)) && count < modes.length)
      said.push(`No mode oscillates, so every restart slows every ${count ? "stable mode" : "mode"} down.`);
    if (period && period >= rounds)
      said.push(`A restart ${periodWords(period)} comes after the end of ${roundsOf(rounds)}: it is no restart.`);
    return said;
  }

  const divergeWords = (count, all, below, form) =>
      `${count} of ${all} modes ${count === 1 ? "diverges" : "diverge"}, and a restart cannot make ` +
      `${count === 1 ? "it" : "them"} stable: lower lr below ${below} (${form} form).`,
    flatWords = (count) =>
      count === 1
        ? "1 mode has σ 0 and is left out: nothing moves it."
        : `${count} modes have σ 0 and are left out: nothing moves them.`,
    growWords = (period) => `A restart ${periodWords(period)} makes a stable mode grow: avoid this period.`,
    BESIDE =
      "Schedule, noise and policies other than a period act in a, b, e and f; c, d and the recommended K are without them.",
    bareWords = (lr) =>
      `The recommended period 1 is no momentum at all: the same as momentum 0 with lr ${lr} (sum form).`;
  const longestWarning = () =>
    [BESIDE, flatWords(63), divergeWords(64, 64, LONG, "EMA"), growWords(100), bareWords(LONG)].join(" ");

  /**
   * Rates of the slowest mode without restarts that a gain by restarts must be held against, [words, rate]: no momentum
   * with the same step, or with the same mean gain, and the best momentum of a fine grid at the same EMA learning rate.
   */
  function controls({ rule, sigmas, gains }) {
    const slowest = (other) => -Math.max(...sigmas.map((sigma) => kernel.logRadius(kernel.mode(other, sigma)))) + 0;
    const bare = (lr) => slowest({ lr, momentum: 0, nesterov: false, form: "sum" });
    const ema = kernel.converted(rule, "ema"),
      same = kernel.converted(rule, "sum").lr;
    let best = { momentum: 0, rate: -Infinity };
    const momenta = Array.from({ length: 239 }, (_, i) => (i < 200 ? (i * 0.995) / 199 : 1 - 0.005 / 1.25 ** (i - 199)));
    for (const momentum of [...momenta, rule.momentum].sort((a, b) => a - b)) {
      const rate = slowest(momentum === rule.momentum ? rule : { ...ema, momentum }); // its lr is not rounded twice
      if (rate > best.rate) best = { momentum, rate };
    }
    const known = Number.isFinite(gains.restart); // not that of a policy that measures first
    return [
      [sameStep(plain(same)), bare(same)],
      ...(known ? [[sameGain(plain(gains.restart)), bare(gains.restart)]] : []),
      [tuned(plain(best.momentum, 6), plain(ema.lr)), best.rate],
    ];
  }

  const sameStep = (lr) => `no momentum, the same step (sum lr ${lr})`,
    sameGain = (lr) => `no momentum, the same mean gain (sum lr ${lr})`,
    tuned = (momentum, lr) => `momentum tuned to ${momentum} at EMA lr ${lr}`,
    LONG = "1.234e−5";
  const LONGEST_CONTROLS = [sameStep(LONG), sameGain(LONG), tuned("0.999123", LONG)].map((words) => `${LONG} ${words}`);

  /** The same numbers in the other form: another rule. */
  function swapped(model) {
    const rule = { ...model.rule, form: model.rule.form === "ema" ? "sum" : "ema" };
    const modes = model.sigmas.map((sigma) => kernel.mode(rule, sigma)),
      { rounds, state } = model;
    const tables = modes.map((m) => tableOf(m, rounds)),
      logs = tables.map(({ log }) => log);
    const { choices } = judged(logs, modes, rounds, kernel.scores(logs, rounds));
    return {
      rule,
      modes,
      recommended: choices[0].period,
      ...ends(armsOf(state, rule, model.sigmas, tables), gainsOf(state, rule), rounds),
    };
  }

  function compute(state, given) {
    const all = store.spectrum(state, given),
      moving = all.filter((sigma) => sigma > 0),
      sigmas = moving.length ? moving : [0];
    const rule = ruleOf(state),
      { rounds } = state,
      period = state.policy ? 0 : state.restart;
    const modes = sigmas.map((sigma) => kernel.mode(rule, sigma));
    const tables = modes.map((m) => tableOf(m, rounds)),
      logs = tables.map(({ log }) => log);
    const focus = Math.min(state.mode, modes.length - 1),
      chosen = focus < 0 ? null : modes[focus];
    const turn = chosen && kernel.oscillation(chosen);
    const scores = kernel.scores(logs, rounds);
    const { choices, without, judge } = judged(logs, modes, rounds, scores);
    const arms = armsOf(state, rule, sigmas, tables),
      gains = gainsOf(state, rule),
      { restart } = arms;
    const losses = {},
      series = {};
    for (const name in arms) {
      losses[name] = Float64Array.from({ length: rounds + 1 }, (_, t) => arms[name].loss(t));
      series[name] = seriesOf(arms[name], focus, modes.length, rounds);
    }
    const model = {
      state,
      rule,
      sigmas,
      rounds,
      period,
      modes,
      tables,
      logs,
      focus,
      chosen,
      turn,
      bound: state.noise || state.schedule !== "constant" ? null : turn, // the envelope is that of a rule at rest
      scores,
      choices,
      recommended: choices[0].period,
      without,
      losses,
      guesses: guesses(rule, sigmas, rounds, judge),
      current: judge("current", "chosen above", period && period < rounds ? period : null),
      restarts: restart.restarts.filter((t) => t < rounds), // the last round's would show nowhere
      cancellations: turn
        ? kernel.cancellations(chosen, Math.min(MANY, Math.ceil((rounds * turn.phase) / Math.PI) + 1))
        : [],
      residual: restart.at,
      series,
      gainAt: { none: gains.none.at, restart: gains.restart.at },
      ...ends(arms, gains, rounds),
    };
    if (!simulation.isPlain(state)) {
      Object.assign(model.current, { loss: model.final.restart, rate: NaN });
      if (state.policy) model.current.label = state.policy.split(":")[0];
    }
    model.flat = all.length - moving.length;
    model.diverges = modes.map((m) => m.s[0] >= kernel.stableStep(m.b, m.nesterov));
    model.warnings = warnings(model);
    model.words = inWords(model);
    return model;
  }

  const periodWords = (period) => (period === null ? "never" : period === 1 ? "every round" : `every ${period} rounds`);

  /** What a reader who does not see the pictures is told. */
  function inWords({ final, recommended, turn, cancellations, series, rounds, chosen, modes, without, gains }) {
    const end = ([sign, log]) => `${sign < 0 ? "minus " : ""}10 to the ${plain(log / Math.LN10, 3)}`;
    const best = periodWords(recommended),
      spot = chosen && REGIMES[kernel.regime(chosen)];
    const first = turn ? ` First cancellation after ${plain(cancellations[0])} rounds.` : "";
    return {
      residual:
        `without restarts it ends at ${end(series.none(rounds))}, ` +
        `with them at ${end(series.restart(rounds))}.${first}`,
      loss: `log10 loss ends at ${plain(final.none)} without restarts and at ${plain(final.restart)} with them.`,
      rate:
        `recommended by the exact final loss: restart ${best}; ` +
        `without restarts the slowest mode has rate ${plain(without.rate)}.`,
      eigen: chosen
        ? `the chosen mode is ${spot}, spectral radius ${nearOne(kernel.logRadius(chosen))}.`
        : `${modes.length} modes, largest spectral radius ${nearOne(-without.rate)}.`,
      live:
        `Recommended: restart ${best}. Log10 loss ${plain(final.restart)} with the chosen restarts, ` +
        `${plain(final.none)} without. Mean outer gain ${plain(gains.restart)}.`,
    };
  }

  /** The line of numbers: [name, value, the longest that it can be where that is long]. */
  function readouts(model) {
    const { chosen, turn, cancellations, recommended, final, gains, modes, logs, period, rounds, focus, without } = model;
    const long = "1.234e5 rounds";
    const turning = modes.filter((m) => kernel.oscillation(m)).length;
    const logRadius = chosen ? kernel.logRadius(chosen) : -without.rate;
    const diverges = chosen ? model.diverges[focus] : model.diverges.some(Boolean);
    const grown = period && period < rounds && (focus < 0 ? logs : [logs[focus]]).some((log) => log[period] > 0);
    return [
      [
        "Regime",
        chosen ? REGIMES[kernel.regime(chosen)] : `${turning} of ${modes.length} oscillate`,
        "real: alternating sign",
      ],
      ["Spectral radius, ρ", nearOne(logRadius)],
      ["Angle a round, φ", turn ? `${plain(turn.phase)} rad` : "–"],
      ["Cancellation, t₀", turn ? `${plain(cancellations[0])} rounds` : "–", long],
      ["Then every, π/φ", turn ? `${plain(Math.PI / turn.phase)} rounds` : "–", long],
      [
        "Stable",
        diverges ? "no: it diverges" : grown ? "not with this K" : logRadius < 0 ? "yes" : "at the edge",
        "not with this K",
      ],
      ["Recommended K", recommended === null ? "never" : String(recommended)],
      ["log₁₀ loss, no restart", plain(final.none)],
      ["log₁₀ loss, restart", plain(final.restart)],
      ["Mean gain, no restart", plain(gains.none)],
      ["Mean gain, restart", plain(gains.restart)],
      ["Same loss sooner by", saved(model), long],
    ];
  }

  /** How many rounds earlier a loss stays at or below what no restart has at the end. */
  function savedBy(loss, { rounds, final }) {
    let t = rounds;
    while (t > 0 && loss(t - 1) <= final.none) t--;
    return rounds - t;
  }

  const saved = (model) =>
    model.final.restart < model.final.none ? roundsOf(savedBy((t) => model.losses.restart[t], model)) : "–";

  return {
    of: compute,
    swapped,
    controls,
    readouts,
    savedBy,
    REGIMES,
    periodWords,
    LONGEST_CONTROLS,
    LONGEST_WARNING: longestWarning(),
  };
})();
