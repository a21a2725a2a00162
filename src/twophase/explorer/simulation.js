"use strict";
// Runs that no closed form gives, round by round in plain doubles as twophase.theory.rollout makes them: policies beside a
// fixed period, an outer learning rate with a schedule, noise. m is the buffer in the rule's own form, g the
// pseudo-gradient. A policy is a function of a round that answers null, or {retain, inject} for m <- retain m +
// inject g, with {step: [A, B]} for x <- x - A g - B m in the place of the rule's update and {mix: [c, d]} for m <- c m + d g.

const simulation = (() => {
  const HARD = { retain: 0, inject: 0 };
  const MOST = 1e30;

  // ------------------------------------------------------------------------------------------------------- policies

  const after = (isDue, answer = HARD) => ({ t }) => (isDue(t) ? answer : null);
  const every = (period) => after((t) => t % period === 0);
  const sum = (values) => values.reduce((a, b) => a + b, 0);

  function auto() {
    let older = 0,
      newer = 0;
    return ({ t, g, m }) => {
      const size = Math.hypot(...g),
        last = Math.hypot(...m);
      if ((t & (t - 1)) === 0) [older, newer] = [newer, 0]; // both together cover at least half of the rounds
      newer = Math.max(newer, size);
      const largest = Math.max(older, newer);
      const along = largest > 0 && last > 0 ? ((1 - size / largest) * size) / last : 0;
      return { step: [1, along], mix: [along, 1] };
    };
  }

  const isCount = (word) => /^\d+$/.test(word) && Number(word) >= 1 && Number(word) <= 1e9;

  /** What makes a policy from its text form, as on the command line, or null; `measures` if its gain is unknown before. */
  function read(text) {
    const [name, ...words] = text.trim().split(":"),
      lists = words.map((word) => word.split(","));
    const all = lists.flat(), // as the package reads them: counts are digits alone, and no number has a plus
      numbers = all.map((word) => (store.NUMBER.test(word) && word[0] !== "+" ? Number(word) : NaN)),
      [first, second, third] = numbers;
    const plan = (make, measures = false) => ({ make, measures });
    if (numbers.length > 64) return null;
    if (name === "auto" && !words.length) return plan(auto, true);
    if (name === "soft" && words.length === 3 && numbers.length === 3) {
      const fits = isCount(all[0]) && Math.abs(second) <= MOST && Math.abs(third) <= MOST;
      return fits ? plan(() => after((t) => t % first === 0, { retain: second, inject: third })) : null;
    }
    if (words.length !== 1 || !all.every(isCount)) return null;
    if (name === "at" && numbers.every((v, i) => !i || v > numbers[i - 1])) return plan(() => after((t) => numbers.includes(t)));
    if (name !== "cycle") return null;
    const ends = numbers.map((_, i) => sum(numbers.slice(0, i + 1))),
      whole = ends.at(-1);
    return plan(() => after((t) => ends.includes(((t - 1) % whole) + 1)));
  }

  /** A soft restart's text for a buffer that is `factor` times as large, as a change of form makes it; others stay. */
  function scaled(text, factor) {
    const [name, period, retain, inject] = text.split(":");
    return name === "soft" ? [name, period, retain, Number(inject) * factor].join(":") : text;
  }

  // ----------------------------------------------------------------------------------------- schedules and noise

  /** What the outer learning rate of round t of T is multiplied with. */
  const SCHEDULES = {
    constant: () => 1,
    linear: (t, T) => 1 - (t - 1) / T,
    cosine: (t, T) => (1 + Math.cos((Math.PI * (t - 1)) / T)) / 2,
  };

  /** A whole number of 32 bits that every bit of another one moves (the end of MurmurHash3). */
  function mixed(h) {
    h = Math.imul(h ^ (h >>> 16), 0x85ebca6b);
    h = Math.imul(h ^ (h >>> 13), 0xc2b2ae35);
    return (h ^ (h >>> 16)) >>> 0;
  }

  let latest = { key: "" };
  /** Standard normal numbers [t * count + j]: a seed gives the same for round t and mode j, whatever else there is. */
  function draws(seed, rounds, count) {
    const key = [seed, rounds, count].join();
    if (key === latest.key) return latest.values;
    const values = new Float64Array(rounds * count),
      unit = (h) => (mixed(h) + 0.5) / 2 ** 32;
    for (let t = 0; t < rounds; t++) {
      for (let j = 0; j < count; j++) {
        const h = mixed(mixed(mixed(seed + 0x9e3779b9) + t) + j);
        values[t * count + j] = Math.sqrt(-2 * Math.log(unit(h ^ 0x5bd1e995))) * Math.cos(2 * Math.PI * unit(h + 1));
      }
    }
    latest = { key, values };
    return values;
  }

  // ------------------------------------------------------------------------------------------------------------ runs

  /** x of every mode after each round, and the rounds that restart. */
  function run({ rule, sigmas, rounds, policy = null, schedule = "constant", size = 0, noise = null }) {
    const { momentum: b, nesterov } = rule,
      w = rule.form === "ema" ? 1 - b : 1,
      count = sigmas.length;
    const places = sigmas.map(() => new Float64Array(rounds + 1).fill(1)),
      restarts = [];
    const x = new Float64Array(count).fill(1),
      m = new Float64Array(count),
      g = new Float64Array(count);
    for (let t = 1; t <= rounds; t++) {
      for (let j = 0; j < count; j++) g[j] = sigmas[j] * x[j] + (noise ? size * noise[(t - 1) * count + j] : 0);
      const lr = rule.lr * SCHEDULES[schedule](t, rounds);
      const answer = policy && policy({ t, g, m });
      const restarted = answer?.retain !== undefined;
      for (let j = 0; j < count; j++) {
        const old = m[j];
        let next = b * old + w * g[j];
        if (answer?.step) x[j] -= answer.step[0] * g[j] + (answer.step[1] && answer.step[1] * old);
        else x[j] -= lr * (nesterov ? b * next + w * g[j] : next);
        // 0 times infinity would be no number
        if (answer?.mix) next = (answer.mix[0] && answer.mix[0] * old) + answer.mix[1] * g[j];
        if (restarted) next = (answer.retain && answer.retain * next) + (answer.inject && answer.inject * g[j]);
        m[j] = next;
        places[j][t] = x[j];
      }
      if (restarted) restarts.push(t);
    }
    return { places, restarts };
  }

  const policyOf = ({ policy, restart }) => (policy ? read(policy).make() : restart ? every(restart) : null);

  /** Both arms of a state under a rule: without restarts, and with the chosen policy; the same noise for both. */
  function arms(state, rule, sigmas) {
    const { rounds, schedule, noise: size, seed } = state;
    const setting = { rule, sigmas, rounds, schedule, size, noise: size ? draws(seed, rounds, sigmas.length) : null };
    return { none: run(setting), restart: run({ ...setting, policy: policyOf(state) }) };
  }

  /** Sign and log of a place; one that is no number any more has diverged. */
  const logOf = (x) => [Math.sign(x) || 0, Number.isNaN(x) ? Infinity : Math.log(Math.abs(x))];

  /** log10 of the loss after round t. */
  const lossAt = (places, t) => (kernel.logMeanSquare(places.map((x) => logOf(x[t])[1])) - Math.LN2) / Math.LN10;

  /** Where a constant pseudo-gradient of 1 leads: the outer gain of every round, or null where it is measured first. */
  function gains(state, rule) {
    const setting = { rule, sigmas: [0], rounds: state.rounds, schedule: state.schedule, size: 1 };
    const of = (policy) => {
      const [x] = run({ ...setting, noise: new Float64Array(state.rounds).fill(1), policy }).places;
      return { mean: (1 - x[state.rounds]) / state.rounds, at: (i) => x[i] - x[i + 1] };
    };
    const unknown = state.policy && read(state.policy).measures;
    return { none: of(null), restart: unknown ? null : of(policyOf(state)) };
  }

  const isPlain = (state) => !state.policy && !state.noise && state.schedule === "constant";

  return { read, scaled, draws, run, arms, gains, logOf, lossAt, isPlain };
})();
