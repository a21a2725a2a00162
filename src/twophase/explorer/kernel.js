"use strict";
// The numbers of the page: a mode of the loss under an outer rule, as twophase.theory computes it. No closed form is
// used for the restart factors: the recurrence itself is followed with twice a double's digits (every number an
// unevaluated sum hi + lo, a pair), with an exponent of its own, so that every regime is treated alike, exact zeros
// are exact and thousands of rounds neither underflow nor lose digits.
//
// Letters: b momentum, w = 1 - b, s the effective step (lr sigma in sum form, lr (1 - b) sigma in EMA form), x the
// residual, n = lr times the buffer: n <- b n + s x, then x <- x - n (heavy ball) or x - (b n + s x) (Nesterov).

const kernel = (() => {
  const SPLITTER = 134217729; // 2^27 + 1 halves a double's 53 bits
  const TIE = 1e-11; // relative difference below which two periods are equally good, and the smaller one is taken

  // ------------------------------------------------------------------------------------ pairs: hi + lo, 32 digits

  const R = new Float64Array(2); // where the two functions below leave their result: no memory is taken in loops

  function addTo(ah, al, bh, bl) {
    const t = ah + bh,
      back = t - ah,
      e = ah - (t - back) + (bh - back);
    const u = al + bl,
      under = u - al,
      f = al - (u - under) + (bl - under);
    const high = t + (e + u),
      low = e + u - (high - t);
    const hi = high + (low + f);
    R[0] = hi;
    R[1] = low + f - (hi - high);
  }

  function multiplyTo(ah, al, bh, bl) {
    const p = ah * bh;
    const wa = SPLITTER * ah,
      a1 = wa - (wa - ah),
      a2 = ah - a1;
    const wb = SPLITTER * bh,
      b1 = wb - (wb - bh),
      b2 = bh - b1;
    const low = a1 * b1 - p + a1 * b2 + a2 * b1 + a2 * b2 + (ah * bl + al * bh);
    const hi = p + low;
    R[0] = hi;
    R[1] = low - (hi - p);
  }

  const pair = (a) => (typeof a === "number" ? [a, 0] : a);
  const add = (a, b) => (([a, b] = [pair(a), pair(b)]), addTo(a[0], a[1], b[0], b[1]), [R[0], R[1]]);
  const mul = (a, b) => (([a, b] = [pair(a), pair(b)]), multiplyTo(a[0], a[1], b[0], b[1]), [R[0], R[1]]);
  const neg = (a) => (typeof a === "number" ? -a : [-a[0], -a[1]]);
  const sub = (a, b) => add(a, neg(b));

  // ------------------------------------------------------------------------------------------------------ one mode

  /** Share of a mode of curvature `eigenvalue` that S steps of gradient descent remove: 1 - (1 - eta lambda)^S. */
  function effectiveProgress(eigenvalue, innerLr, innerSteps) {
    return -Math.expm1(innerSteps * Math.log1p(-innerLr * eigenvalue)) + 0;
  }

  /** The rule {lr, momentum, nesterov, form} in the other form, the same trajectory: lr_sum = lr_ema (1 - momentum). */
  function converted(rule, form) {
    const w = 1 - rule.momentum;
    return form === rule.form ? rule : { ...rule, form, lr: form === "sum" ? rule.lr * w : rule.lr / w };
  }

  /** One mode of effective progress sigma under a rule, with w and s as pairs. */
  function mode(rule, sigma) {
    const w = add(1, -rule.momentum); // exactly 1 - b
    const s = mul(rule.form === "ema" ? mul(w, rule.lr) : rule.lr, sigma);
    return { b: rule.momentum, w, s, nesterov: rule.nesterov, sigma };
  }

  /** Disc = tr^2 - 4 D, tr, D and a - b of the one-round matrix, formed without cancellation (pairs). */
  function pieces({ b, w, s, nesterov }) {
    const wide = sub(2, w),
      f = sub(1, s),
      small = b < 0.5; // wide = 1 + b
    if (nesterov) {
      const gap = small ? sub(mul(mul(wide, wide), f), 4 * b) : sub(mul(w, w), mul(mul(wide, wide), s));
      const lead = small ? sub(mul(wide, f), 2 * b) : sub(w, mul(wide, s));
      return { disc: mul(f, gap), trace: mul(wide, f), det: mul(f, b), lead };
    }
    const sum = add(w, s);
    const disc = small ? sub(mul(f, f), mul(sub(mul(add(s, 1), 2), b), b)) : sub(mul(sum, sum), mul(4, s));
    return { disc, trace: add(f, b), det: [b, 0], lead: small ? sub(f, b) : sub(w, s) };
  }

  /** The regime's name, as twophase.theory.regime gives it. */
  function regime(m) {
    const { disc, trace } = pieces(m);
    const sign = Math.sign(m.b) * (m.nesterov ? Math.sign(sub(1, m.s)[0]) : 1); // of D, whose product may underflow
    if (trace[0] === 0 && sign === 0) return "nilpotent";
    if (disc[0] === 0) return "critical";
    if (disc[0] < 0) return "oscillatory";
    if (sign < 0) return "negative_determinant";
    return trace[0] > 0 ? "real_below" : "real_above";
  }

  /** log sqrt(D), for D > 0. */
  function logRho({ b, w, s, nesterov }) {
    const logB = b > 0.5 ? Math.log1p(-w[0]) : Math.log(b);
    const logFree = s[0] < 0.5 ? Math.log1p(-s[0]) : Math.log(sub(1, s)[0]);
    return (logB + (nesterov ? logFree : 0)) / 2;
  }

  /**
   * Of an oscillating mode: chi_K = A rho^K sin(delay - K phase), A = exp(logAmplitude); null for any other.
   * `shift` is theta and delay = theta + pi/2, so that the cancellations are at (delay + l pi) / phase.
   */
  function oscillation(m) {
    const { disc, trace, lead } = pieces(m);
    if (!(disc[0] < 0)) return null;
    const half = Math.sqrt(-disc[0]) / 2; // rho sin(phase)
    return {
      phase: Math.atan2(half, trace[0] / 2),
      shift: Math.atan2(lead[0] / 2, half),
      delay: Math.atan2(half, -lead[0] / 2),
      logRho: logRho(m),
      logAmplitude: Math.log(Math.hypot(half, lead[0] / 2) / half),
    };
  }

  /** Log of the spectral radius of the one-round matrix: minus the rate without restarts. */
  function logRadius(m) {
    const { disc, trace, det } = pieces(m);
    if (disc[0] < 0) return logRho(m);
    const positive = trace[0] > 0,
      size = positive ? trace : neg(trace),
      { w, s } = m;
    const half = Math.sqrt(Math.max(disc[0], 0)) / 2,
      radius = size[0] / 2 + half;
    if (!(radius > 0.5)) return Math.log(radius);
    // Near 1 by radius - 1 = half - u with u = 1 - |tr|/2, where (half - u)(half + u) = -(1 - |tr| + D).
    const u = positive ? (m.nesterov ? w[0] + (2 - w[0]) * s[0] : w[0] + s[0]) / 2 : sub(1, mul(size, 0.5))[0];
    const product = positive ? s[0] : add(sub(1, size), det)[0];
    return Math.log1p(u > 0 ? -product / (u + half) : half - u);
  }

  /** Both eigenvalues as [re, im]. */
  function eigenvalues(m) {
    const { disc, trace, det } = pieces(m);
    const half = Math.sqrt(Math.abs(disc[0])) / 2,
      middle = trace[0] / 2;
    if (disc[0] < 0)
      return [
        [middle, half],
        [middle, -half],
      ];
    const first = middle < 0 ? middle - half : middle + half; // the larger one: nothing cancels
    return [
      [first, 0],
      [first === 0 ? 0 : det[0] / first, 0],
    ];
  }

  /** The largest stable s without restarts; no schedule of restarts makes a mode beyond it stable. */
  const stableStep = (b, nesterov) => (2 * (1 + b)) / (nesterov ? 1 + 2 * b : 1);

  /** The first `count` times, in rounds, at which an oscillating mode passes through zero; [] for any other. */
  function cancellations(m, count) {
    const turn = oscillation(m);
    return turn ? Array.from({ length: count }, (_, l) => (turn.delay + l * Math.PI) / turn.phase) : [];
  }

  /** The first cancellation in closed form for momentum near 1: as in the paper, or with the terms that it drops. */
  function heuristic(m, corrected) {
    const step = m.s[0],
      period = Math.PI / (2 * Math.sqrt(step));
    return corrected ? period + m.w[0] / (2 * step) - (m.nesterov ? 1 : 0.5) : period;
  }

  // ---------------------------------------------------------------------------------------------- restart factors

  /** Sign and log|chi_K| of one mode for K = 0 ... rounds. */
  function table(m, rounds) {
    const sign = new Int8Array(rounds + 1),
      log = new Float64Array(rounds + 1).fill(-Infinity);
    const { b, nesterov } = m,
      [sh, sl] = m.s;
    let [xh, xl, nh, nl, exponent] = [1, 0, 0, 0, 0]; // a slow mode keeps what it lacks in xl, with all its digits
    sign[0] = 1;
    log[0] = 0;
    for (let k = 1; k <= rounds; k++) {
      multiplyTo(sh, sl, xh, xl);
      const ph = R[0],
        pl = R[1];
      multiplyTo(b, 0, nh, nl);
      addTo(R[0], R[1], ph, pl);
      let th = (nh = R[0]),
        tl = (nl = R[1]);
      if (nesterov) {
        multiplyTo(b, 0, nh, nl);
        addTo(R[0], R[1], ph, pl);
        th = R[0];
        tl = R[1];
      }
      addTo(xh, xl, -th, -tl);
      xh = R[0];
      xl = R[1];
      const size = Math.max(Math.abs(xh), Math.abs(nh));
      if (size === 0) break; // gone for good: the rest of the arrays says so
      if (size < 1e-60 || size > 1e60) {
        const shift = Math.floor(Math.log2(size)),
          unit = 2 ** -shift;
        xh *= unit;
        xl *= unit;
        nh *= unit;
        nl *= unit;
        exponent += shift;
      }
      sign[k] = Math.sign(xh);
      log[k] = logOf(xh, xl, exponent);
    }
    return { sign, log };
  }

  function logOf(hi, lo, exponent) {
    if (hi === 0) return -Infinity;
    if (exponent !== 0 && Math.abs(exponent) < 500) {
      const unit = 2 ** exponent;
      return logOf(hi * unit, lo * unit, 0);
    }
    const above = Math.abs(hi) - 1;
    if (exponent === 0 && Math.abs(above) < 0.5) return Math.log1p(above) + (Math.sign(hi) * lo) / (1 + above);
    return Math.log(Math.abs(hi)) + lo / hi + exponent * Math.LN2;
  }

  // ------------------------------------------------------------------------------------------- losses and periods
  // Below, `logs` is a list of arrays log|chi_0 ... chi_T|, one a mode of equal weight.

  /** log of the mean of exp(2 v) over the modes; next to 1 by what it lacks. */
  function logMeanSquare(values) {
    let top = -Infinity,
      total = 0;
    for (const v of values) top = Math.max(top, v);
    if (!Number.isFinite(top)) return 2 * top;
    for (const v of values) total += Math.exp(2 * (v - top));
    const log = 2 * top + Math.log(total / values.length);
    if (!(Math.abs(log) < 0.1)) return log;
    let lacks = 0;
    for (const v of values) lacks += Math.expm1(Math.min(2 * v, 700)) / values.length;
    return Math.log1p(lacks);
  }

  /** log|x_t| of one mode after t rounds with a restart every `period` rounds: chi_K^(t div K) chi_(t mod K). */
  function logResidual(log, t, period) {
    const k = Math.min(period, t);
    return k === 0 ? 0 : Math.floor(t / k) * log[k] + log[t % k];
  }

  /** Natural log of the share of the initial loss after t rounds; a period at or above t is no restart. */
  const logShare = (logs, t, period) => logMeanSquare(logs.map((log) => logResidual(log, t, period)));

  /** Natural log of the loss itself, which begins at 1/2. */
  const logLoss = (logs, t, period) => logShare(logs, t, period) - Math.LN2;

  /** Rate of the slowest mode with a restart every `period` rounds, nats a round. */
  const slowestRate = (logs, period) => Math.min(...logs.map((log) => -log[period] / period)) + 0;

  /** Scores of all periods 1 ... T by each criterion; the larger the better. Entry K - 1 belongs to period K. */
  function scores(logs, rounds) {
    const found = {};
    for (const name of ["loss", "minimax", "rate", "factor"]) found[name] = new Float64Array(rounds);
    for (let k = 1; k <= rounds; k++) {
      const cycle = logMeanSquare(logs.map((log) => log[k]));
      found.loss[k - 1] = -logShare(logs, rounds, k); // beside log 2 the differences of slow modes would count as ties
      found.minimax[k - 1] = slowestRate(logs, k);
      found.rate[k - 1] = -cycle / (2 * k);
      found.factor[k - 1] = -cycle;
    }
    return found;
  }

  /** The first period whose score is the best, ties forgiven. */
  function firstBest(score) {
    let best = -Infinity;
    for (const value of score) best = Math.max(best, value);
    const least = best - (Number.isFinite(best) ? TIE * Math.abs(best) : 0);
    return score.findIndex((value) => value >= least) + 1;
  }

  // --------------------------------------------------------------------------------------------------- outer gain

  /** Displacement that a constant unit pseudo-gradient causes in the `age`-th round (from 1) since a restart. */
  function gain(rule, age) {
    const { lr, momentum: b, nesterov } = converted(rule, "ema"),
      filled = -Math.expm1(age * Math.log(b)); // 1 - b^age
    return lr * (nesterov ? 1 - b + b * filled : filled);
  }

  /** Mean of it over `rounds` rounds with a restart every `period` rounds. */
  function meanGain(rule, period, rounds) {
    const b = rule.momentum,
      largest = converted(rule, "ema").lr,
      k = Math.min(period, rounds);
    const filling = (count) => {
      // the sum over ages 1 ... count of 1 - b^age, by halves, of positive terms only
      if (count === 0) return [0, 0];
      const middle = Math.floor(count / 2);
      let [half, full] = filling(middle);
      let total = half + middle * full + (1 - full) * half;
      full += (1 - full) * full;
      if (count % 2) total += full += (1 - full) * (1 - b);
      return [total, full];
    };
    const mean = (Math.floor(rounds / k) * filling(k)[0] + filling(rounds % k)[0]) / rounds;
    return largest * (rule.nesterov ? 1 - b + b * mean : mean);
  }

  // ------------------------------------------------------------------------------------------------------ the map

  /**
   * log10 of the loss at the horizon, without and with restarts, for one rule: what a cell of the map shows. In plain
   * doubles, for speed; next to a zero of every mode fewer digits are right, which no colour can show.
   */
  function cell(steps, b, nesterov, period, rounds) {
    const k = Math.min(period, rounds),
      rest = rounds % k,
      times = Math.floor(rounds / k);
    const without = new Array(steps.length),
      restarted = new Array(steps.length);
    for (let j = 0; j < steps.length; j++) {
      const s = steps[j];
      let x = 1,
        n = 0,
        scale = 0,
        atPeriod = 0,
        atRest = 0;
      for (let t = 1; t <= rounds; t++) {
        const push = s * x;
        n = b * n + push;
        x -= nesterov ? b * n + push : n;
        if ((t & 7) === 0) {
          const size = Math.max(Math.abs(x), Math.abs(n));
          if (size < 1e-60 || size > 1e60) {
            if (size === 0) {
              x = n = 0;
            } else {
              x /= size;
              n /= size;
              scale += Math.log(size);
            }
          }
        }
        if (t === k) atPeriod = Math.log(Math.abs(x)) + scale;
        if (t === rest) atRest = Math.log(Math.abs(x)) + scale;
      }
      without[j] = Math.log(Math.abs(x)) + scale;
      restarted[j] = times * atPeriod + atRest;
    }
    return [without, restarted].map((logs) => (logMeanSquare(logs) - Math.LN2) / Math.LN10);
  }

  return {
    effectiveProgress,
    converted,
    mode,
    regime,
    oscillation,
    logRadius,
    eigenvalues,
    stableStep,
    cancellations,
    heuristic,
    table,
    logMeanSquare,
    logLoss,
    slowestRate,
    scores,
    firstBest,
    gain,
    meanGain,
    cell,
  };
})();
