"use strict";
// The table of the two forms of the rule, and the button that writes the rule in the other one.

const forms = (() => {
  const { plain, NB } = store;

  const EQUATIONS = {
    sum: {
      buffer: "m ← βm + g",
      heavy: "x ← x − lr·m",
      nesterov: "x ← x − lr·(g + βm)",
      who: "torch.optim.SGD, optax, DiLoCo engines",
    },
    ema: {
      buffer: "m ← βm + (1−β)g",
      heavy: "x ← x − lr·m",
      nesterov: "x ← x − lr·((1+β)m − βm_old)",
      who: "the restart paper’s equations",
    },
  };

  function build() {
    $("switch").addEventListener("click", () => {
      const form = app.state.form === "sum" ? "ema" : "sum";
      const share = 1 - app.state.momentum; // of the pseudo-gradient in the buffer of the EMA form
      const policy = simulation.scaled(app.state.policy, form === "ema" ? share : 1 / share);
      const next = { policy, lr: kernel.converted(app.model.rule, form).lr };
      for (const [name, value] of Object.entries(next)) {
        const { error } = store.read(name, String(value), app.given);
        if (error) return app.say(`In the other form, ${name} would be ${value}, which the page does not take. ${error}`);
      }
      app.change({ form, ...next });
    });
  }

  // Roles by name: on a narrow page the looks are those of cards, which would take the table's own away.
  const part = (kind, role, properties, ...inside) => {
    const node = html(kind, properties, ...inside);
    node.setAttribute("role", role);
    return node;
  };
  const cell = (words, head, colSpan = 1) => {
    const node = part("td", "cell", { colSpan }, html("span", { textContent: words }));
    node.dataset.head = head;
    return node;
  };

  function showForms() {
    const other = compute.swapped(app.model),
      kind = app.state.nesterov ? "nesterov" : "heavy",
      name = { sum: "sum form", ema: "EMA form" };
    const forms = ["sum", "ema"].map((form) => kernel.converted(app.model.rule, form)),
      swap = name[other.rule.form];
    const heads = [name.sum, name.ema, `the same numbers in ${swap}`];
    const row = (head, ...cells) => {
      const made = cells.length === 2 // one value for both forms of the same trajectory
        ? [cell(cells[0], "sum and EMA form", 2), cell(cells[1], heads[2])]
        : cells.map((words, i) => cell(words, heads[i]));
      return part("tr", "row", {}, part("th", "rowheader", { scope: "row", textContent: head }), ...made);
    };
    const column = (words) => part("th", "columnheader", { scope: "col", textContent: words });
    const regimes = (modes) => [...new Set(modes.map(kernel.regime))].map((r) => compute.REGIMES[r]).join("; ");
    const word = (one) => compute.periodWords(one.recommended);
    $("forms").setAttribute("role", "table");
    $("forms").replaceChildren(
      part("thead", "rowgroup", {}, part("tr", "row", {}, part("td", "cell", {}), ...heads.map(column))),
      part(
        "tbody",
        "rowgroup",
        {},
        row("Learning rate lr", ...forms.map(({ lr }) => plain(lr, 6)), plain(other.rule.lr, 6)),
        row("Momentum β", plain(app.state.momentum, 6), plain(app.state.momentum, 6)),
        row("Written by", EQUATIONS.sum.who, EQUATIONS.ema.who, "–"),
        row("Buffer", EQUATIONS.sum.buffer, EQUATIONS.ema.buffer, EQUATIONS[other.rule.form].buffer),
        row("Step", EQUATIONS.sum[kind], EQUATIONS.ema[kind], EQUATIONS[other.rule.form][kind]),
        row("Modes", regimes(app.model.modes), regimes(other.modes)),
        row("log₁₀ loss, no restart", plain(app.model.final.none), plain(other.final.none)),
        row(
          app.model.period ? `log₁₀ loss, K${NB}=${NB}${app.model.period}` : `log₁₀ loss, ${app.state.policy ? "policy" : "chosen K"}`,
          plain(app.model.final.restart), plain(other.final.restart),
        ),
        row("Recommended restart", word(app.model), word(other)),
        row("Mean outer gain, no restart", plain(app.model.gains.none), plain(other.gains.none)),
      ),
    );
    const target = app.state.form === "sum" ? "ema" : "sum";
    const { lr } = kernel.converted(app.model.rule, target);
    $("switch").textContent = `Write this rule in ${name[target]}: lr ${plain(lr)}, the same trajectory`;
  }

  return { build, show: showForms };
})();
