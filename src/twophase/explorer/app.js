"use strict";
// What the parts of the page share: the state and what follows from it, and small helpers. Data reach the page as text
// only, never as markup.

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

/**
 * An element that always takes as many lines as a long text would, so that what follows does not move when its own text
 * changes: a control that moves away from under a pointer is missed.
 */
const steady = (node, longest) => {
  node.classList.add("steady");
  node.dataset.room = longest;
  return node;
};

const app = (() => {
  const given = JSON.parse($("given").textContent);
  let frame = 0;

  /** Show the state before the next frame; many changes between two frames are one. */
  function later() {
    if (!frame)
      frame = requestAnimationFrame(() => {
        frame = 0;
        app.render();
      });
  }

  /** Take over some new values, unless they do not go together; whether they did. */
  function change(values, { own = true } = {}) {
    const next = { ...app.state, ...("restart" in values ? { policy: "" } : {}), ...values },
      wrong = store.fault(next, given);
    say(wrong ?? "");
    if (wrong) return false;
    take(next);
    if (own) $("example").value = "";
    return true;
  }

  /** Another state, from which the next frame is made; what was wrongly written in a field is forgotten. */
  function take(state) {
    app.state = state;
    app.fresh = true;
    later();
  }

  function say(words) {
    $("notice").textContent = words;
    $("notice").hidden = !words;
  }

  return { given, state: { ...given.state }, model: null, theme: "light", fresh: true, render: () => {}, later, change, take, say };
})();
