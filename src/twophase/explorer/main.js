"use strict";
// The start of the page, its address, its theme, and what happens when the state has changed.

(() => {
  let themeChosen = false;
  function setTheme(name, chosen = false) {
    app.theme = name;
    themeChosen ||= chosen;
    document.documentElement.dataset.theme = name;
    $("theme").textContent = name === "dark" ? "Light" : "Dark";
    $("theme").setAttribute("aria-label", `${$("theme").textContent} theme`);
    if (app.model) {
      stage.stale();
      app.later();
    }
  }

  // --------------------------------------------------------------------------------------------------------- address

  let written = "",
    writing = 0;
  function writeAddress() {
    clearTimeout(writing);
    writing = setTimeout(() => {
      if (location.hash.slice(1) !== written) return; // another one has just come, and is about to be read
      written = store.toFragment(app.state);
      keepAddress();
    }, 250);
  }

  function keepAddress() {
    try {
      history.replaceState(null, "", `#${written}`);
    } catch {} // a frame whose page stands in another one has no address of its own
  }

  function readAddress() {
    const text = location.hash.slice(1);
    if (!text) return;
    written = text;
    const found = store.fromFragment(text, app.given);
    app.take(found.state ?? { ...app.given.state });
    app.say(found.error ? `${found.error} This is the default view.` : "");
  }

  async function copy() {
    clearTimeout(writing);
    written = store.toFragment(app.state);
    keepAddress();
    try {
      await navigator.clipboard.writeText(location.href);
    } catch {
      app.say("The link could not be copied. Copy the page’s address: it holds this view.");
      return;
    }
    $("copy").textContent = "Copied";
    $("live").textContent = "Link copied.";
    setTimeout(() => {
      $("copy").textContent = "Copy link";
    }, 2500);
  }

  // ---------------------------------------------------------------------------------------------------------- render

  let resting = 0,
    computed = "";

  /** What can wait until the hand rests: the other form, the address, and what is read out. */
  function whenAtRest(first) {
    clearTimeout(resting);
    const rest = () => {
      stage.showRest();
      if (!first) $("live").textContent = guide.words() + app.model.words.live;
    };
    if (first) setTimeout(rest, 0);
    else {
      resting = setTimeout(rest, 300);
      writeAddress();
    }
  }

  app.render = () => {
    const first = app.model === null,
      key = JSON.stringify(app.state);
    if (key !== computed) {
      app.model = compute.of(app.state, app.given);
      computed = key;
      stage.stale(true);
      whenAtRest(first);
    }
    controls.show(app.fresh);
    app.fresh = false;
    stage.show();
    guide.show();
    if (first) performance.mark("first-curve");
  };

  function listen() {
    $("reset").addEventListener("click", () => {
      app.change(app.given.state);
      app.say("");
    });
    $("copy").addEventListener("click", copy);
    $("theme").addEventListener("click", () => setTheme(app.theme === "dark" ? "light" : "dark", true));
    $("skip").addEventListener("click", (event) => {
      event.preventDefault();
      $("panels").focus();
    }); // # is the state's
    window.addEventListener("hashchange", () => {
      if (location.hash.slice(1) !== written) readAddress();
    });
    const dark = matchMedia("(prefers-color-scheme: dark)");
    dark.addEventListener("change", () => themeChosen || setTheme(dark.matches ? "dark" : "light"));
    setTheme(dark.matches ? "dark" : "light");
  }

  controls.listen();
  listen();
  forms.build();
  stage.build();
  readAddress();
  guide.build();
  app.render();
})();
