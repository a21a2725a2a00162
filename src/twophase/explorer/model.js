// The numbers of the page, as twophase.theory computes them: the optimizer's own recurrence in doubles, rescaled by
// powers of two so that thousands of rounds neither overflow nor underflow. Nothing here touches the page.
//
// b is the momentum, s the effective step of a mode (lr sigma in sum form, lr (1 - b) sigma in EMA form), x what is
// left of the mode, n = lr times the buffer: n <- b n + s x, then x <- x - n (heavy ball) or x <- x - (b n + s x)
// (Nesterov). After a restart n <- retain n + inject lr sigma x, with the x that the round began with.
// A rule is {lr, momentum, nesterov, form}; restarts are {restart: K or 0, retain, inject}.

const theory = (() => {
  const NEVER = { restart: 0, retain: 0, inject: 0 };
  const TIE = 1e-11; // relative difference below which two periods are equally good

  /** One mode of effective progress sigma; `push` is what it would add to n without the EMA's weight. */
  function modeOf({ lr, momentum, nesterov, form }, sigma) {
    const push = lr * sigma;
    return { sigma, b: momentum, nesterov, push, s: form === "ema" ? push * (1 - momentum) : push };
  }

  /** Of the matrix of one round: trace, determinant, trace^2 - 4 determinant, and the difference of its diagonal. */
  function matrix({ b, s, nesterov }) {
    const w = 1 - b,
      free = 1 - s;
    if (nesterov) {
      return {
        trace: (1 + b) * free,
        det: b * free,
        disc: free * (w * w - (1 + b) * (1 + b) * s),
        lead: w - (1 + b) * s,
      };
    }
    return { trace: 1 + b - s, det: b, disc: (w + s) * (w + s) - 4 * s, lead: w - s };
  }

  /** How a mode moves, in the words of theory.regime. */
  function regime(mode) {
    const { trace, det, disc } = matrix(mode);
    if (trace === 0 && det === 0) return "nilpotent";
    if (disc === 0) return "critical";
    if (disc < 0) return "oscillatory";
    if (det < 0) return "negative_determinant";
    return trace > 0 ? "real_below" : "real_above";
  }

  /**
   * An oscillating mode is x_t = A rho^t sin(delay - t phase): log rho, log A, phase in radians, and its first passage
   * through zero in rounds. null for any other mode.
   */
  function oscillation(mode) {
    const { trace, det, disc, lead } = matrix(mode);
    if (!(disc < 0)) return null;
    const half = Math.sqrt(-disc) / 2,
      phase = Math.atan2(half, trace / 2);
    return {
      phase,
      logRho: Math.log(det) / 2,
      logAmplitude: Math.log(Math.hypot(half, lead / 2) / half),
      cancellation: Math.atan2(half, -lead / 2) / phase,
    };
  }

  /** Contraction without restarts, in nats a round: minus the log of the spectral radius. */
  function rate(mode) {
    const { trace, det, disc } = matrix(mode);
    return -Math.log(disc < 0 ? Math.sqrt(det) : Math.abs(trace) / 2 + Math.sqrt(disc) / 2);
  }

  /** The largest stable s without restarts; no restarts make a mode beyond it stable. */
  const stableStep = ({ momentum, nesterov }) => (2 * (1 + momentum)) / (nesterov ? 1 + 2 * momentum : 1);

  /** Ends of the open interval of sigma in which a mode oscillates under a rule. */
  function oscillatory({ lr, momentum, nesterov, form }) {
    const root = Math.sqrt(momentum),
      unit = form === "ema" ? lr * (1 - momentum) : lr;
    const low = nesterov ? (1 - momentum) / (1 + momentum) : (1 - momentum) / (1 + root);
    return [(low * low) / unit, (nesterov ? 1 : (1 + root) ** 2) / unit];
  }

  /**
   * log|x_t| after `rounds` rounds of one mode under restarts. With `kept`, {sign, log} of every round from 0 on are
   * written into it. While x is near 1 its log is taken from what is lost, which has all its digits.
   */
  function follow({ b, s, push, nesterov }, rounds, { restart, retain, inject }, kept = null) {
    let [x, n, lost, exponent, isSlow] = [1, 0, 0, 0, true];
    const log = () => (isSlow ? Math.log1p(-lost) : Math.log(Math.abs(x)) + exponent * Math.LN2);
    for (let t = 1; t <= rounds; t++) {
      const gradient = x;
      n = b * n + s * gradient;
      const step = nesterov ? b * n + s * gradient : n;
      x -= step;
      lost += step;
      isSlow &&= Math.abs(lost) <= 0.5;
      if (restart && t % restart === 0) n = retain * n + inject * push * gradient;
      const size = Math.abs(x) + Math.abs(n);
      if (size > 1e60 || (size < 1e-60 && size > 0)) {
        const shift = Math.floor(Math.log2(size));
        x *= 2 ** -shift;
        n *= 2 ** -shift;
        exponent += shift;
      }
      if (kept) {
        kept.sign[t] = Math.sign(x);
        kept.log[t] = log();
      }
    }
    return rounds ? log() : 0;
  }

  /** Sign and log|x_t| of one mode, for t from 0 to `rounds`; without restarts these are the restart factors chi_t. */
  function table(mode, rounds, restarts = NEVER) {
    const kept = { sign: new Int8Array(rounds + 1).fill(1), log: new Float64Array(rounds + 1) };
    follow(mode, rounds, restarts, kept);
    return kept;
  }

  /** Log of the mean of exp(2 v) over modes of equal weight: the share of the initial loss. */
  function logShare(values) {
    let top = -Infinity,
      total = 0;
    for (const value of values) top = Math.max(top, value);
    if (!Number.isFinite(top)) return 2 * top;
    for (const value of values) total += Math.exp(2 * (value - top));
    return 2 * top + Math.log(total / values.length);
  }

  /** log10 of the loss, half the mean square of all modes, from log|x| of each. */
  const logLoss = (values) => (logShare(values) - Math.LN2) / Math.LN10;

  /** log10 of the loss after `rounds` rounds of a rule: what a cell of the map shows. */
  const finalLoss = (rule, sigmas, rounds, restarts) =>
    logLoss(sigmas.map((sigma) => follow(modeOf(rule, sigma), rounds, restarts)));

  /**
   * The period of hard restarts with the lowest loss after `rounds` rounds, the smaller one of equals, from a table
   * without restarts of each mode; null where no restart does better.
   */
  function bestPeriod(tables, rounds) {
    const share = (period) =>
      logShare(tables.map(({ log }) => Math.floor(rounds / period) * log[period] + log[rounds % period]));
    let [best, lowest] = [null, share(rounds)];
    for (let period = 1; period < rounds; period++) {
      const here = share(period);
      if (here < lowest - TIE * Math.abs(lowest)) [best, lowest] = [period, here];
    }
    return best;
  }

  /** Everything that the page shows of a state. */
  function of(state) {
    const { sigmas, rounds, mode: focus, restart } = state;
    const modes = sigmas.map((sigma) => modeOf(state, sigma)),
      chosen = modes[focus],
      turn = oscillation(chosen);
    const none = modes.map((mode) => table(mode, rounds)),
      restarted = modes.map((mode) => table(mode, rounds, state));
    const losses = (tables) =>
      Float64Array.from({ length: rounds + 1 }, (_, t) => logLoss(tables.map(({ log }) => log[t])));
    const loss = { none: losses(none), restart: losses(restarted) },
      best = bestPeriod(none, rounds);
    // A restart after the last round would show nowhere.
    const restarts = restart ? Math.ceil(rounds / restart) - 1 : 0;
    return {
      ...{ state, modes, chosen, turn, none, restarted, loss, best, restarts },
      regime: regime(chosen),
      rate: rate(chosen),
      interval: oscillatory(state),
      turning: modes.filter(oscillation).length,
      diverging: modes.filter(({ s }) => s >= stableStep(state)).length,
      bestLoss: best ? finalLoss(state, sigmas, rounds, { ...NEVER, restart: best }) : loss.none[rounds],
      final: { none: loss.none[rounds], restart: loss.restart[rounds] },
    };
  }

  /** How many rounds earlier the losses (log10, by round) are as low, for good, as `level`. */
  function roundsSaved(losses, level) {
    let t = losses.length - 1;
    while (t > 0 && losses[t - 1] <= level) t--;
    return losses.length - 1 - t;
  }

  return { NEVER, of, modeOf, regime, oscillation, rate, oscillatory, table, finalLoss, bestPeriod, roundsSaved };
})();
