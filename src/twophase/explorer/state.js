"use strict";
// What the page shows is one plain object, the state. It goes into the address after # and comes back from there, where
// anything may stand: every value is checked against the same limits as a field's, and becomes a number or one of a few
// words. Nothing else of an address is used.

const store = (() => {
  const VERSION = "1";
  const NB = "\u00a0"; // a blank at which no line ends
  const NUMBER = /^[+-]?(\d+\.?\d*|\.\d+)(e[+-]?\d+)?$/i;

  /** How each value reads in an address: a number within its limits, a list of such numbers, or one of some words. */
  const FIELDS = {
    lr: { kind: "number" },
    momentum: { kind: "number" },
    nesterov: { kind: "word", words: ["yes", "no"] },
    form: { kind: "word", words: ["sum", "ema"] },
    restart: { kind: "number", whole: true },
    rounds: { kind: "number", whole: true },
    spectrum: { kind: "word", words: ["one", "list", "range", "curvature", "run"] },
    sigma: { kind: "number" },
    sigmas: { kind: "list", of: "sigma" },
    low: { kind: "number", of: "sigma" },
    high: { kind: "number", of: "sigma" },
    count: { kind: "number", whole: true },
    curvatures: { kind: "list", of: "curvature" },
    inner_lr: { kind: "number" },
    inner_steps: { kind: "number", whole: true },
    mode: { kind: "number", whole: true },
    view: { kind: "word", words: ["linear", "log"] },
    // Newer than the first addresses: one that lacks them means the value that is named here.
    policy: { kind: "policy", absent: "" },
    schedule: { kind: "word", words: ["constant", "linear", "cosine"], absent: "constant" },
    noise: { kind: "number", absent: 0 },
    seed: { kind: "number", whole: true, absent: 0 },
  };

  /** The number that a text writes, or a sentence about what is wrong with it. */
  function readNumber(text, limits, whole) {
    const [low, high] = limits,
      value = NUMBER.test(text.trim()) ? Number(text) : NaN;
    const what = whole ? "a whole number" : "a number";
    if (!(value >= low && value <= high) || (whole && !Number.isInteger(value))) {
      return { error: `Write ${what} from ${plain(low)} to ${plain(high)}.` };
    }
    return { value };
  }

  /** The numbers that a text lists, separated by commas or blanks. */
  function readList(text, limits, most) {
    const words = text.split(/[\s,;]+/).filter(Boolean),
      values = [];
    if (words.length < 1 || words.length > most) return { error: `Write 1 to ${most} numbers, separated by commas.` };
    for (const word of words) {
      const found = readNumber(word, limits, false);
      if (found.error) return { error: found.error.replace("Write a number", "Write numbers") };
      values.push(found.value);
    }
    return { value: values };
  }

  /** A field's value from its text. */
  function read(name, text, given) {
    const field = FIELDS[name],
      limits = given.limits[field.of ?? name];
    if (field.kind === "policy") {
      if (text === "" || simulation.read(text)) return { value: text.trim() };
      return { error: "Write auto, cycle:5,6,10, at:4,9 or soft:3:0.2:0.1." };
    }
    if (field.kind === "word") {
      return field.words.includes(text) ? { value: text } : { error: `Choose ${field.words.join(" or ")}.` };
    }
    return field.kind === "list"
      ? readList(text, limits, given.limits.count[1])
      : readNumber(text, limits, field.whole);
  }

  /** What is wrong with a state as a whole, or null. */
  function fault(state, given) {
    if (state.low > state.high) return "The low end of the range is above its high end.";
    if (state.spectrum === "run" && !given.run) return "It shows the spectrum of a run, which this file does not hold.";
    if (state.spectrum === "curvature" && state.inner_lr * Math.max(...state.curvatures) > 1) {
      return "Inner lr times the largest curvature exceeds 1, where gradient descent overshoots: lower the inner lr.";
    }
    return null;
  }

  const words = (name, value) =>
    FIELDS[name].kind === "list" ? value.join(",") : name === "nesterov" ? (value ? "yes" : "no") : String(value);

  /** The state as the part of an address after #. */
  function toFragment(state) {
    const names = Object.keys(FIELDS).filter((name) => state[name] !== FIELDS[name].absent);
    return [`v=${VERSION}`, ...names.map((name) => `${name}=${words(name, state[name])}`)].join("&");
  }

  /** {state} from the part of an address after #, or {error: a sentence}; only names of ours are repeated in it. */
  function fromFragment(text, given) {
    const parts = new Map(),
      state = {};
    for (const piece of text.slice(0, 8000).split("&")) {
      const at = piece.indexOf("=");
      if (at > 0) parts.set(piece.slice(0, at), piece.slice(at + 1));
    }
    if (parts.get("v") !== VERSION) return { error: "The link was made by another version, or is damaged." };
    for (const name of Object.keys(FIELDS)) {
      if (!parts.has(name) && "absent" in FIELDS[name]) parts.set(name, String(FIELDS[name].absent));
      if (!parts.has(name)) return { error: `The link is damaged: ${name} is missing.` };
      const found = read(name, parts.get(name), given);
      if (found.error) return { error: `The link is damaged: ${name} is not usable.` };
      state[name] = name === "nesterov" ? found.value === "yes" : found.value;
    }
    if (parts.size !== Object.keys(FIELDS).length + 1)
      return { error: "The link is damaged: it holds unknown values." };
    const wrong = fault(state, given);
    return wrong ? { error: `The link is damaged. ${wrong}` } : { state };
  }

  /** Effective progress of all modes of the chosen spectrum, largest first. */
  function spectrum(state, given) {
    const { low, high, count } = state;
    const values = {
      one: () => [state.sigma],
      list: () => state.sigmas,
      range: () =>
        Array.from({ length: count }, (_, j) => (count === 1 ? low : low + ((high - low) * j) / (count - 1))),
      curvature: () =>
        state.curvatures.map((value) => kernel.effectiveProgress(value, state.inner_lr, state.inner_steps)),
      run: () => given.run.sigma,
    }[state.spectrum]();
    return [...values].sort((a, b) => b - a);
  }

  /** A number for people: at most `digits` figures, without trailing zeros. */
  function plain(value, digits = 4) {
    if (value === Infinity) return "∞";
    if (value === -Infinity) return "−∞";
    if (!Number.isFinite(value)) return "–";
    const size = Math.abs(value);
    let text = value.toPrecision(digits);
    if (size !== 0 && (size < 1e-4 || size >= 1e6)) text = value.toExponential(digits - 1);
    else if (size >= 10 ** digits - 0.5) text = value.toFixed(0); // else 10,000 would be 1e4
    const [head, tail] = text.split("e");
    const short = head.includes(".") ? head.replace(/\.?0+$/, "") : head;
    return (tail ? `${short}e${tail.replace("+", "")}` : short).replace("-", "−").replace("e-", "e−");
  }

  const roundsOf = (n) => (n === 1 ? "1 round" : `${n} rounds`);

  /** A positive number from its log: as what it lacks or exceeds, where four figures of it would read 1. */
  function nearOne(log) {
    const short = plain(Math.exp(log));
    return short !== "1" || log === 0 ? short : `1${NB}${log < 0 ? "−" : "+"}${NB}${plain(Math.abs(Math.expm1(log)))}`;
  }

  return { NUMBER, FIELDS, read, fault, toFragment, fromFragment, spectrum, plain, roundsOf, nearOne, NB };
})();
