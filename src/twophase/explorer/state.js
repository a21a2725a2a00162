// Helpers that all scripts of the page share; the state that it shows; and that state's place in the address after #,
// where anything may stand: it becomes numbers within the limits of the fields and a few known words, or is refused.

const $ = (id) => document.getElementById(id);

/** An element with properties and contents; texts among them stay texts. */
const html = (name, properties = {}, ...inside) => {
  const node = Object.assign(document.createElement(name), properties);
  node.append(...inside);
  return node;
};

/** Text into an element, if it is another one: what does not change need not be laid out again. */
const write = (node, words) => {
  if (node.textContent !== words) node.textContent = words;
};

/** A number for people: at most `digits` figures, without trailing zeros. */
const plain = (value, digits = 4) => {
  if (!Number.isFinite(value)) return value > 0 ? "∞" : value < 0 ? "−∞" : "–";
  const size = Math.abs(value),
    isFar = size !== 0 && (size < 1e-4 || size >= 1e6);
  const [head, tail] = (isFar ? value.toExponential(digits - 1) : String(+value.toPrecision(digits))).split("e");
  const short = head.includes(".") ? head.replace(/\.?0+$/, "") : head;
  return (tail ? `${short}e${tail.replace("+", "")}` : short).replaceAll("-", "−");
};

const roundsOf = (count) => (count === 1 ? "1 round" : `${count} rounds`);

const store = (() => {
  const VERSION = "2";
  const NUMBER = /^[+-]?(\d+\.?\d*|\.\d+)(e[+-]?\d+)?$/i;
  const WHOLE = ["restart", "rounds", "mode"];
  const WORDS = { nesterov: { no: false, yes: true }, form: { sum: "sum", ema: "ema" } };
  const given = JSON.parse($("given").textContent),
    { limits } = given;

  /** The number that a text writes, or undefined if it is none that the field takes. */
  function readNumber(name, text) {
    const [low, high] = limits[name],
      value = NUMBER.test(text.trim()) ? Number(text) : NaN;
    return value >= low && value <= high && (!WHOLE.includes(name) || Number.isInteger(value)) ? value : undefined;
  }

  /** The modes that a text lists: numbers between commas or blanks, or LOW:HIGH:COUNT for a range of them. */
  function readModes(text) {
    const ends = text.split(":").map((word) => readNumber("sigma", word)),
      count = Number(text.split(":")[2]);
    const isRange = ends.length === 3 && ends[0] <= ends[1];
    if (isRange && Number.isInteger(count) && count >= 2 && count <= limits.count[1]) {
      return Array.from({ length: count }, (_, j) => +(ends[0] + ((ends[1] - ends[0]) * j) / (count - 1)).toFixed(6));
    }
    const values = text.split(/[\s,]+/).filter(Boolean).map((word) => readNumber("sigma", word));
    return values.length && values.length <= limits.count[1] && !values.includes(undefined) ? values : undefined;
  }

  /** A field's value from its text; undefined if the field does not take it. */
  const read = (name, text) =>
    name in WORDS ? WORDS[name][text] : name === "sigmas" ? readModes(text) : readNumber(name, text);

  /** What a field takes, in words. */
  function takes(name) {
    if (name === "sigmas") return `Write 1 to ${limits.count[1]} numbers from 0 to 1, such as 0.9, 0.5 or 0.1:0.9:5.`;
    const ends = limits[name].map((end) => plain(end, 6)).join(" to ");
    return `Write a ${WHOLE.includes(name) ? "whole " : ""}number from ${ends}.`;
  }

  /** Values moved into their limits; the shown mode is one of those that there are. */
  function within(state) {
    const inside = { ...state };
    for (const [name, [low, high]] of Object.entries(limits)) {
      if (name in inside) inside[name] = Math.min(high, Math.max(low, inside[name]));
    }
    inside.mode = Math.min(inside.mode, inside.sigmas.length - 1);
    return inside;
  }

  /** The state as the part of an address after #. */
  const toFragment = (state) =>
    [`v=${VERSION}`, ...Object.keys(given.state).map((name) => `${name}=${textOf(name, state[name])}`)].join("&");
  const textOf = (name, value) => (name === "nesterov" ? (value ? "yes" : "no") : String(value));

  /** The state of the part of an address after #, or null for any text that is none. */
  function fromFragment(text) {
    const parts = new Map(text.slice(0, 8000).split("&").map((piece) => piece.split("="))),
      state = {};
    if (parts.get("v") !== VERSION) return null;
    for (const name of Object.keys(given.state)) {
      state[name] = read(name, parts.get(name) ?? "");
      if (state[name] === undefined) return null;
    }
    return within(state);
  }

  return { given, read, takes, within, toFragment, fromFragment };
})();
