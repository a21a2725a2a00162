"use strict";
// The table beside the rate plot: what each criterion chooses, and what restarts are to be held against.

const choices = (() => {
  const { plain } = store;

  const listed = () => [...app.model.choices, app.model.without, ...app.model.guesses, app.model.current];
  const rows = [],
    BEST = "– recommended";
  /** The table of choices beside the rate plot: its buttons stay, so that a pressed one keeps the focus. */
  function buildRate({ plots: [plot] }) {
    const head = html(
      "tr",
      {},
      ...["Criterion", "K", "rate", "log₁₀ loss"].map((words, i) =>
        html("th", { scope: "col", className: i ? "number" : "", textContent: words }),
      ),
    );
    const body = html("tbody");
    for (let i = 0; i < 9; i++) {
      const name = html("th", { scope: "row" }),
        button = html("button", { type: "button" }),
        cells = [0, 1].map(() => html("td", { className: "number" }));
      button.addEventListener("click", () => i === 8 || app.change({ restart: listed()[i].period ?? 0 }));
      name.append(html("span"));
      const row = html("tr", {}, name, html("td", { className: "number" }, button), ...cells);
      rows.push({ row, name, button, cells });
      body.append(row);
    }
    const table = html(
      "table",
      { id: "choices" },
      html("caption", { className: "unseen", textContent: "What each criterion chooses" }),
      html("thead", {}, head),
      body,
    );
    const pair = html("div", { className: "pair" }),
      rest = html("p", { className: "hint", id: "controls" }, html("span"));
    plot.replaceWith(pair);
    pair.append(html("div", {}, plot, steady(rest, controlWords(compute.LONGEST_CONTROLS))), table);
    plot.classList.add("aim");
    plot.addEventListener("pointerdown", (event) => {
      const period = panels.rate.at(event.clientX - plot.getBoundingClientRect().left);
      if (period >= 1 && period <= app.model.rounds) app.change({ restart: period });
    });
  }

  function showChoices() {
    const { choices } = app.model;
    listed().forEach((choice, i) => {
      const { row, name, button, cells } = rows[i],
        words = choice.label ?? (choice.period === null ? "never" : String(choice.period));
      row.classList.toggle("chosen", i === 0);
      const value = "value" in choice ? ` (${Number.isFinite(choice.value) ? plain(choice.value) : "none"})` : "";
      if (!name.dataset.room) steady(name, `${choice.words} ${"value" in choice ? "(1.234e5)" : ""} ${i ? "" : BEST}`);
      name.classList.toggle("best", i === 0 || i === choices.length);
      write(name.firstChild, `${choice.words}${value} ${i ? "" : BEST}`.trim());
      write(button, words);
      button.setAttribute("aria-label", `Use: ${choice.label ?? `restart ${compute.periodWords(choice.period)}`}, ${choice.words}`);
      write(cells[0], plain(choice.rate));
      write(cells[1], plain(choice.loss));
    });
  }

  /** What restarts are to be compared with. */
  function showControlRates() {
    const found = compute.controls(app.model).map(([words, value]) => `${plain(value)} ${words}`);
    write($("controls").firstChild, controlWords(found));
  }

  const controlWords = (rates) =>
    `To be held against, rate of the slowest mode without restarts: ${rates.join("; ")}.`;

  return { build: buildRate, show: showChoices, showRest: showControlRates };
})();
